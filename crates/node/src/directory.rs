//! The files with which a data directory identifies its node: `cluster.json` and `stamp.json`.
//!
//! `cluster.json` names the cluster and the node that the directory belongs to. It is written by
//! every start. `conversion.json` exists while a single node becomes the first node of a cluster.
//! `stamp.json` is the [`Stamp`] of the ownership protocol. All are files of
//! [`crate::json_file`].
//!
//! `crash.json` is written by the handler of a fatal signal, without a checksum. The start does not
//! depend on it.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use fulmar_cluster::Error;
use fulmar_cluster::directory::{CrashReport, DataDirectory, Stamp};
use fulmar_engine::record_crashes;
use serde::{Deserialize, Serialize};

use crate::json_file::{read, remove, write};

/// The file that binds a data directory to a node of a cluster.
pub const CLUSTER_FILE: &str = "cluster.json";
/// The file that marks the data directory of a single node that becomes a node of a cluster.
pub const CONVERSION_FILE: &str = "conversion.json";
/// The file with the [`Stamp`].
pub(crate) const STAMP_FILE: &str = "stamp.json";
/// The file with a [`CrashReport`], which the handler of a fatal signal writes.
pub const CRASH_FILE: &str = "crash.json";

/// The node that a data directory belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryOwner {
    /// The cluster, 32 hexadecimal digits.
    pub cluster: String,
    /// The node's name.
    pub name: String,
}

impl DirectoryOwner {
    /// The owner of a directory.
    pub fn new(cluster: u128, name: &str) -> Self {
        DirectoryOwner { cluster: format!("{cluster:032x}"), name: name.to_owned() }
    }

    /// Reads the owner of a data directory; `None` if it does not belong to a cluster.
    pub fn read(data: &Path) -> Result<Option<Self>, Error> {
        read(&data.join(CLUSTER_FILE))
    }

    /// Binds a data directory to its owner.
    pub fn write(&self, data: &Path) -> Result<(), Error> {
        write(&data.join(CLUSTER_FILE), self)
    }
}

/// Records the partition of a statement that kills this process in the data directory.
pub(crate) fn record_deaths(data: &Path, incarnation: u64) {
    if let Err(error) = record_crashes(&data.join(CRASH_FILE), incarnation) {
        tracing::warn!(%error, "cannot record which database a crash was in");
    }
}

/// The conversion of a single node to the first node of a cluster, from the time when it can no
/// longer run as a single node until it has joined the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conversion {
    /// The cluster, 32 hexadecimal digits: the id of the node's store.
    pub cluster: String,
    /// The node's name.
    pub name: String,
    /// The cluster's metadata store.
    pub meta: String,
    /// The number of the process in the node's first record ([`Stamp`]).
    pub run: u64,
}

impl Conversion {
    /// A conversion that begins.
    pub fn new(cluster: u128, name: &str, meta: String, run: u64) -> Self {
        Conversion { cluster: format!("{cluster:032x}"), name: name.to_owned(), meta, run }
    }

    /// The conversion that was begun in a data directory.
    pub fn read(data: &Path) -> Result<Option<Self>, Error> {
        read(&data.join(CONVERSION_FILE))
    }

    /// Marks a data directory, and gives it the stamp of the node's first record.
    pub fn write(&self, data: &Path) -> Result<(), Error> {
        write(&data.join(STAMP_FILE), &Stamp { begun: Some(self.run), ..Stamp::default() })?;
        write(&data.join(CONVERSION_FILE), self)
    }

    /// Removes the mark: the node has joined the cluster.
    pub fn remove(data: &Path) -> Result<(), Error> {
        let file = data.join(CONVERSION_FILE);
        // Most starts have nothing to remove, and need not sync.
        if file.exists() { remove(&file) } else { Ok(()) }
    }
}

/// A data directory as the protocols use it.
#[derive(Clone, Debug)]
pub struct StampFiles {
    data: PathBuf,
}

impl StampFiles {
    /// The files of a data directory that this process has locked.
    pub fn new(data: &Path) -> Self {
        StampFiles { data: data.to_owned() }
    }

    async fn run<T: Send + 'static>(
        &self,
        action: impl FnOnce(PathBuf) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let data = self.data.clone();
        let ran = tokio::task::spawn_blocking(move || action(data)).await;
        ran.unwrap_or_else(|error| Err(Error::Directory(error.to_string())))
    }
}

#[async_trait]
impl DataDirectory for StampFiles {
    async fn stamp(&self) -> Result<Option<Stamp>, Error> {
        self.run(|data| read(&data.join(STAMP_FILE))).await
    }

    async fn set_stamp(&self, stamp: Stamp) -> Result<(), Error> {
        self.run(move |data| write(&data.join(STAMP_FILE), &stamp)).await
    }

    async fn crash_report(&self) -> Result<Option<CrashReport>, Error> {
        self.run(|data| Ok(read_crash_report(&data.join(CRASH_FILE)))).await
    }

    async fn clear_crash_report(&self) -> Result<(), Error> {
        self.run(|data| remove(&data.join(CRASH_FILE))).await
    }
}

/// Reads the crash report. An unreadable one is ignored: without it only one death does not count
/// towards the quarantine of a partition.
fn read_crash_report(path: &Path) -> Option<CrashReport> {
    let report = match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::from),
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => Err(error),
    };
    report
        .inspect_err(
            |error| tracing::warn!(file = %path.display(), %error, "ignored an unreadable crash report"),
        )
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stamp_is_kept_and_a_damaged_one_is_an_error() {
        let data = tempfile::tempdir().unwrap();
        let files = StampFiles::new(data.path());
        assert_eq!(files.stamp().await.unwrap(), None);
        let stamp = Stamp { begun: Some(7), attempts: vec![8], generation: 9 };
        files.set_stamp(stamp.clone()).await.unwrap();
        assert_eq!(files.stamp().await.unwrap(), Some(stamp));
        fs::write(data.path().join(STAMP_FILE), r#"{"v":1,"begun":7,"attempts":[8],"generation":9}"#)
            .unwrap();
        let error = files.stamp().await.unwrap_err().to_string();
        assert!(error.contains("stamp.json is damaged: it does not match its checksum; restore"), "{error}");
    }

    #[tokio::test]
    async fn unreadable_crash_report_is_ignored() {
        let data = tempfile::tempdir().unwrap();
        let (files, path) = (StampFiles::new(data.path()), data.path().join(CRASH_FILE));
        assert_eq!(files.crash_report().await.unwrap(), None);
        for damaged in ["", "{\"partition\":42", "\0"] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(files.crash_report().await.unwrap(), None, "{damaged:?}");
        }
        fs::write(&path, "{\"partition\":42,\"incarnation\":7}").unwrap();
        let report = files.crash_report().await.unwrap().unwrap();
        assert_eq!((report.partition.0, report.incarnation), (42, 7));
        files.clear_crash_report().await.unwrap();
        assert_eq!(files.crash_report().await.unwrap(), None);
    }

    #[test]
    fn directory_remembers_its_node() {
        let data = tempfile::tempdir().unwrap();
        assert_eq!(DirectoryOwner::read(data.path()).unwrap(), None);
        let owner = DirectoryOwner::new(0xfe, "n1");
        owner.write(data.path()).unwrap();
        assert_eq!(DirectoryOwner::read(data.path()).unwrap(), Some(owner));
    }
}
