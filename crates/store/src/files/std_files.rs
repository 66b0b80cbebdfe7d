//! Log files on a real file system.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use super::direct::DirectWriter;
use super::{LogFile, LogFiles};

/// Zeros are written in pieces of this size: so much of a file that is made ahead is before others at the disk.
const ZEROS_BYTES: usize = 256 << 10;

/// Log files in a directory, which is locked while this lives, so that no other process has the same log.
#[derive(Debug)]
pub struct StdFiles {
    path: PathBuf,
    /// To sync the directory; holds the lock.
    directory: File,
}

impl StdFiles {
    /// Opens a directory and locks it; makes it (not its parent) if it is not there.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        match fs::create_dir(&path) {
            Ok(()) => sync_parent(&path)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(about(&path, "cannot make the directory", error)),
        }
        let directory =
            File::open(&path).map_err(|error| about(&path, "cannot open the directory", error))?;
        match directory.try_lock() {
            Ok(()) => Ok(StdFiles { path, directory }),
            Err(TryLockError::WouldBlock) => {
                let message = format!("{} is in use by another process; stop that one first", path.display());
                Err(io::Error::new(io::ErrorKind::ResourceBusy, message))
            }
            Err(TryLockError::Error(error)) => Err(about(&path, "cannot lock the directory", error)),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl LogFiles for StdFiles {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if entry.file_type()?.is_file()
                && let Ok(name) = entry.file_name().into_string()
            {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn LogFile>> {
        let path = self.path(name);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path)?;
        let filled = StdFile::new(file, &path, bytes).and_then(|file| file.fill_with_zeros(bytes));
        let opened = filled.and_then(|()| self.open(name));
        if opened.is_err() {
            // The first error counts. A start that finds what is left uses it, or removes it if it is short.
            let _ = fs::remove_file(&path);
        }
        opened
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn LogFile>> {
        let path = self.path(name);
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        let bytes = file.metadata()?.len();
        Ok(Box::new(StdFile::new(file, &path, bytes)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path(from), self.path(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path(name))
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.directory.sync_all()
    }

    fn describe(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }
}

/// Asks for the space in one piece, so that the file is contiguous and a full disk is told before anything is
/// written. The zeros have to be written all the same: reserved space counts as unwritten, and turning it into
/// written space is a change of metadata, which every sync would wait for. The file's length grows with the zeros: one whose
/// making was interrupted is shorter.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    let length = libc::off_t::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    // SAFETY: fallocate takes no pointer; the descriptor is open for as long as `file` is borrowed.
    match unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, length) } {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
            error => Err(error),
        },
    }
}

fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)?.sync_all().map_err(|error| about(parent, "cannot sync the directory", error))
}

fn about(path: &Path, what: &str, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

struct StdFile {
    file: File,
    /// Writes past the page cache, where the file system can.
    direct: Option<Mutex<DirectWriter>>,
}

impl StdFile {
    /// Of a file that has so many bytes or will have.
    fn new(file: File, path: &Path, bytes: u64) -> io::Result<Self> {
        let direct = match DirectWriter::takes(bytes) {
            true => OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path).ok(),
            false => None,
        };
        Ok(StdFile { file, direct: direct.map(|file| Mutex::new(DirectWriter::new(file))) })
    }

    /// Piece by piece past the page cache: written to that and synced at the end, all of them would be sent to the disk at once, and
    /// whoever reads or syncs meanwhile would wait for the last.
    fn fill_with_zeros(&self, bytes: u64) -> io::Result<()> {
        reserve(&self.file, bytes)?;
        let zeros = vec![0; ZEROS_BYTES.min(bytes as usize)];
        for offset in (0..bytes).step_by(ZEROS_BYTES) {
            let length = (bytes - offset).min(ZEROS_BYTES as u64);
            self.write_at(offset, &zeros[..length as usize])?;
        }
        self.file.sync_all()
    }
}

impl LogFile for StdFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match &self.direct {
            None => self.file.write_all_at(bytes, offset),
            Some(direct) => {
                let before = |offset, buffer: &mut [u8]| self.file.read_exact_at(buffer, offset);
                match direct.lock().write_at(offset, bytes, before) {
                    // Some file systems let a file be opened so and do not write to it.
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                        self.file.write_all_at(bytes, offset)
                    }
                    outcome => outcome,
                }
            }
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn length_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
}
