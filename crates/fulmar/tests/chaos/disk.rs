//! Small disks for the data directories of nodes, in memory. They vanish with the private mount
//! namespace of this process.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Enough for a node's logs and catalog.
const SIZE: &str = "384m";
/// Bytes that are written to a disk at a time, until it is full.
const FILLING_BYTES: usize = 1 << 20;

/// A mounted disk. Dropping it unmounts it.
pub struct Disk {
    path: PathBuf,
}

impl Disk {
    /// Mounts a disk at a directory.
    pub fn mount(path: &Path) -> Disk {
        std::fs::create_dir_all(path).unwrap();
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={SIZE},mode=700"), "disk"])
            .arg(path));
        Disk { path: path.to_owned() }
    }

    /// Fills the disk.
    pub fn fill(&self) {
        let mut file = File::create(self.filler()).unwrap();
        let piece = vec![0; FILLING_BYTES];
        while file.write(&piece).is_ok() {}
    }

    /// Removes what filled the disk.
    pub fn free(&self) {
        std::fs::remove_file(self.filler()).unwrap();
    }

    fn filler(&self) -> PathBuf {
        self.path.join("filler")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The node may still run. A disk that stays mounted vanishes with the namespace.
        let _ = Command::new("umount").arg("--lazy").arg(&self.path).status();
    }
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}
