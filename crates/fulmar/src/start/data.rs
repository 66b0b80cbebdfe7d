//! The data directory, and the lock that gives it to one process.
//!
//! The lock is an advisory lock (`flock`) on the file `lock` inside: the kernel gives it back whenever and
//! however its process ends, so it is never left behind. The file holds the process id, for people.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// A data directory that this process owns until the value is dropped.
#[derive(Debug)]
pub struct DataDirectory {
    path: PathBuf,
    _lock: File,
}

impl DataDirectory {
    /// Makes the directory if it is not there (for its owner only) and locks it.
    pub fn lock(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .with_context(|| format!("cannot make the data directory {shown}"))?;
        let path = path.canonicalize().with_context(|| format!("cannot find the data directory {shown}"))?;
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join("lock"))
            .with_context(|| {
                format!("cannot write in the data directory {shown}; does it belong to this user?")
            })?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "the data directory {shown} is in use by process {}; stop that one, or choose another --data",
                holder(&mut lock)
            ),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock the data directory {shown}"));
            }
        }
        lock.set_len(0)
            .and_then(|()| writeln!(lock, "{}", std::process::id()))
            .with_context(|| format!("cannot write in the data directory {shown}"))?;
        Ok(Self { path, _lock: lock })
    }

    /// Where it is, as an absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The process id in the lock file of another; it may be about to write it.
fn holder(lock: &mut File) -> String {
    let mut text = String::new();
    let read = lock.rewind().and_then(|()| lock.take(20).read_to_string(&mut text));
    match (read, text.trim()) {
        (Ok(_), id) if !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit()) => id.to_owned(),
        _ => "(id unknown)".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn one_owner_at_a_time_and_the_second_is_told_who() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a/b");
        let data = DataDirectory::lock(&path).unwrap();
        assert_eq!(std::fs::metadata(data.path()).unwrap().permissions().mode() & 0o777, 0o700);
        // flock belongs to the open file, so a second one in the same process is refused as well.
        let refused = DataDirectory::lock(&path).unwrap_err().to_string();
        assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
        drop(data);
        DataDirectory::lock(&path).unwrap();
    }

    #[test]
    fn a_file_in_its_place_is_an_error() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("file");
        std::fs::write(&path, "x").unwrap();
        assert!(DataDirectory::lock(&path).is_err());
    }
}
