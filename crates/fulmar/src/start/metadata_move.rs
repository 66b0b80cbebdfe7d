//! `fulmar cluster convert`: moves the embedded metadata store of a stopped cluster to etcd.
//!
//! ```text
//!   1 mark      metadata.json in the data directory: neither store is used by this node any more
//!   2 copy      etcd is reserved for the cluster's id; no node uses a reserved one
//!   3 complete  the mark says so: etcd is the metadata store
//! ```
//!
//! Killed before the end of step 2, the next run copies what differs. Killed after it, the copy finds
//! the cluster in etcd and step 3 follows: nodes may have changed etcd since. The embedded store cannot
//! have changed, because its only user, this data directory's node, refuses to start with it from step
//! 1 on.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use fulmar_meta::{Embedded, EtcdOptions, EtcdStore, copy, reject_unfinished, reserve};
use fulmar_node::json_file;
use fulmar_node::registration::find_cluster;
use fulmar_store::failpoint::{self, CONVERT_AFTER_COPY, CONVERT_MID_COPY};
use serde::{Deserialize, Serialize};

use super::catalog_check::with_remedy;
use super::cluster::CLUSTER_METADATA_FILE;
use super::{DataDirectory, security};
use crate::cli::{ClusterAction, ClusterCommandArgs, ConvertArgs, MetaUrl};
use crate::output;

/// The file in the data directory that says where the metadata is.
pub(super) const MARK_FILE: &str = "metadata.json";

#[derive(Serialize, Deserialize)]
struct Mark {
    /// The metadata store to which the embedded one is moved.
    to: String,
    is_complete: bool,
}

impl Mark {
    fn read(data: &Path) -> anyhow::Result<Option<Mark>> {
        Ok(json_file::read(&data.join(MARK_FILE))?)
    }

    fn write(&self, data: &Path) -> anyhow::Result<()> {
        Ok(json_file::write(&data.join(MARK_FILE), self)?)
    }
}

/// Refuses a start with the embedded store if its contents are being moved, or were moved. Returns
/// true if they were.
pub(super) fn check(data: &Path, is_embedded: bool) -> anyhow::Result<bool> {
    let Some(mark) = Mark::read(data)? else { return Ok(false) };
    ensure!(
        mark.is_complete,
        "the metadata of this cluster is being moved to {}; complete that with \"fulmar cluster convert --data {} \
         --to {0}\"",
        mark.to,
        data.display()
    );
    ensure!(!is_embedded, "the metadata of this cluster is in {0}; start all nodes with --meta {0}", mark.to);
    Ok(true)
}

/// Runs `fulmar cluster`.
pub async fn convert_cluster(arguments: ClusterCommandArgs) -> anyhow::Result<()> {
    failpoint::arm_from_environment()?;
    let ClusterAction::Convert(arguments) = arguments.action;
    let ConvertArgs { data, to, meta_security } = *arguments;
    let MetaUrl::Etcd { endpoints, cluster } = &to else {
        bail!("cannot move the metadata to an embedded store; use --to etcd://HOST:PORT,HOST:PORT");
    };
    let file = data.join(CLUSTER_METADATA_FILE);
    ensure!(
        file.exists(),
        "{} is not the data directory of a node with --meta embedded: {} does not exist",
        data.display(),
        file.display()
    );
    let directory = DataDirectory::lock(&data)?;
    let source = Embedded::open(&file).map_err(with_remedy)?;
    let id = find_cluster(&source).await?;
    let id = id.with_context(|| format!("{} contains no cluster", file.display()))?;
    let mark = Mark::read(directory.path())?;
    if let Some(mark) = mark.as_ref().filter(|mark| mark.to != to.to_string()) {
        bail!("the metadata of this cluster was moved, or is being moved, to {}; use that --to", mark.to);
    }
    let mut options = EtcdOptions::new(endpoints.clone(), cluster);
    security::secure_etcd(&mut options, &meta_security)?;
    let etcd = EtcdStore::open(options).await.map_err(with_remedy)?;
    let is_unfinished = reject_unfinished(&etcd).await.is_err();
    let found = if is_unfinished { None } else { find_cluster(&etcd).await? };
    match found {
        Some(found) => ensure!(
            found == id && mark.is_some(),
            "{to} contains a cluster already ({found:032x}); choose another cluster name"
        ),
        None => {
            ensure!(!mark.is_some_and(|mark| mark.is_complete), "{to} has lost the metadata; restore etcd");
            Mark { to: to.to_string(), is_complete: false }.write(directory.path())?;
            reserve(&etcd, id).await.map_err(with_remedy)?;
            copy(&source, &etcd, |_| failpoint::hit(CONVERT_MID_COPY)).await.map_err(with_remedy)?;
            failpoint::hit(CONVERT_AFTER_COPY);
        }
    }
    Mark { to: to.to_string(), is_complete: true }.write(directory.path())?;
    output::line(&format!("moved the metadata of the cluster; start all nodes with --meta {to}"))
}
