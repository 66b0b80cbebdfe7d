//! The data directory and its lock, which admits one process at a time.
//!
//! The lock is an advisory lock (`flock`) on the file `lock` in the directory. The kernel releases
//! it when the process ends, however it ends, so a stale lock cannot remain. The file contains the
//! process id, for error messages and operators.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// A data directory, locked by this process until the value is dropped.
#[derive(Debug)]
pub struct DataDirectory {
    path: PathBuf,
    _lock: File,
}

impl DataDirectory {
    /// Creates the directory if it does not exist, accessible only to its owner, and locks it.
    pub fn lock(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .with_context(|| format!("cannot create the data directory {shown}"))?;
        let path = path.canonicalize().with_context(|| format!("cannot find the data directory {shown}"))?;
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join("lock"))
            .with_context(|| {
                format!("cannot write to the data directory {shown}; check that this user owns it")
            })?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "the data directory {shown} is in use by process {}; stop that process, or use \
                 another --data",
                holder(&mut lock)
            ),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock the data directory {shown}"));
            }
        }
        lock.set_len(0)
            .and_then(|()| writeln!(lock, "{}", std::process::id()))
            .with_context(|| format!("cannot write to the data directory {shown}"))?;
        Ok(Self { path, _lock: lock })
    }

    /// The absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Returns the process id in a lock file that another process holds. That process may not have
/// written it yet.
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
    fn second_lock_fails_and_names_the_holder() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a/b");
        let data = DataDirectory::lock(&path).unwrap();
        assert_eq!(std::fs::metadata(data.path()).unwrap().permissions().mode() & 0o777, 0o700);
        // flock belongs to the open file, so a second lock in the same process fails as well.
        let error = DataDirectory::lock(&path).unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        drop(data);
        DataDirectory::lock(&path).unwrap();
    }

    #[test]
    fn path_of_a_regular_file_is_rejected() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("file");
        std::fs::write(&path, "x").unwrap();
        assert!(DataDirectory::lock(&path).is_err());
    }
}
