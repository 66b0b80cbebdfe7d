//! Detects that files have changed, from their metadata.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use crate::Error;

/// Certificates that are loaded from files, and can be reloaded.
pub trait Reload: Send + Sync {
    /// A name for log messages.
    fn name(&self) -> &'static str;

    /// The files.
    fn files(&self) -> &FileWatch;

    /// Loads the files again. If they are invalid, the old certificates stay in use.
    fn reload(&self) -> Result<(), Error>;

    /// A warning to log at the start, after each reload and once a day.
    fn warning(&self) -> Option<String> {
        None
    }
}

/// Identifies a version of a file: device, inode, size and modification time. `None` if it cannot
/// be read.
type Stamp = Option<[u64; 5]>;

/// Files, and their versions when they were last checked.
#[derive(Debug)]
pub struct FileWatch {
    files: Vec<PathBuf>,
    seen: Mutex<Vec<Stamp>>,
}

impl FileWatch {
    /// Records the versions of the files. Called before the files are read, so that every later
    /// change is detected.
    pub fn new<'a>(files: impl IntoIterator<Item = &'a Path>) -> Self {
        let files: Vec<_> = files.into_iter().map(Path::to_owned).collect();
        let seen = Mutex::new(stamps(&files));
        FileWatch { files, seen }
    }

    /// Returns true if a file has changed since the last call, or since the creation.
    pub fn changed(&self) -> bool {
        let now = stamps(&self.files);
        let mut seen = self.seen.lock();
        let changed = *seen != now;
        *seen = now;
        changed
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    files.iter().map(|file| stamp(file)).collect()
}

fn stamp(file: &Path) -> Stamp {
    let file = std::fs::metadata(file).ok()?;
    Some([file.dev(), file.ino(), file.size(), file.mtime() as u64, file.mtime_nsec() as u64])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_and_removed_files_are_detected() {
        let directory = tempfile::tempdir().unwrap();
        let (old, new) = (directory.path().join("old"), directory.path().join("new"));
        std::fs::write(&old, "same size").unwrap();
        let watch = FileWatch::new([old.as_path()]);
        assert!(!watch.changed());
        std::fs::write(&new, "same size").unwrap();
        std::fs::rename(&new, &old).unwrap();
        assert!(watch.changed());
        assert!(!watch.changed(), "a change is reported once");
        std::fs::remove_file(&old).unwrap();
        assert!(watch.changed());
    }
}
