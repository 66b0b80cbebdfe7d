//! Log files on a real file system.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use super::direct::DirectWriter;
use super::{LogFile, LogFiles};

/// Size of one write when a file is filled with zeros. Bounds how long other disk I/O waits for the
/// preallocation of a log file.
const ZEROS_BYTES: usize = 256 << 10;

/// Log files in a directory. The directory is locked while this value exists, so that no other
/// process can open the same log.
#[derive(Debug)]
pub struct StdFiles {
    path: PathBuf,
    /// Used to sync the directory. Holds its lock.
    directory: File,
}

impl StdFiles {
    /// Opens and locks a directory. Creates it, but not its parent, if it does not exist.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        match fs::create_dir(&path) {
            Ok(()) => sync_parent(&path)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(about(&path, "could not create directory", error)),
        }
        let directory = File::open(&path).map_err(|error| about(&path, "could not open directory", error))?;
        match directory.try_lock() {
            Ok(()) => Ok(StdFiles { path, directory }),
            Err(TryLockError::WouldBlock) => {
                let message =
                    format!("{} is in use by another process; stop that process first", path.display());
                Err(io::Error::new(io::ErrorKind::ResourceBusy, message))
            }
            Err(TryLockError::Error(error)) => Err(about(&path, "could not lock directory", error)),
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
            // Keep the first error. If the removal fails, the next start reuses the file, or
            // removes it if it is too short.
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

/// Reserves the space in one piece, so that the file is contiguous and a full disk is detected
/// before anything is written. The zeros must be written nevertheless: reserved space is marked
/// unwritten, and converting it to written space is a metadata change that every sync would wait
/// for. The file's length grows with the zeros, so an interrupted preallocation leaves a shorter
/// file.
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
    File::open(parent)?.sync_all().map_err(|error| about(parent, "could not sync directory", error))
}

fn about(path: &Path, what: &str, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

struct StdFile {
    file: File,
    /// Writes that bypass the page cache, if the file system supports it.
    direct: Option<Mutex<DirectWriter>>,
}

impl StdFile {
    /// Wraps a file whose length is, or will be, `bytes`.
    fn new(file: File, path: &Path, bytes: u64) -> io::Result<Self> {
        let direct = match DirectWriter::takes(bytes) {
            true => OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path).ok(),
            false => None,
        };
        Ok(StdFile { file, direct: direct.map(|file| Mutex::new(DirectWriter::new(file))) })
    }

    /// Writes the zeros in pieces that bypass the page cache. If they were written to the page
    /// cache and synced at the end, the kernel would send all of them to the disk in one burst, and
    /// other reads and syncs would wait until the last one is written.
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
                    // Some file systems accept O_DIRECT at open, but reject writes.
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
