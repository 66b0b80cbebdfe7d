//! Uploads into a directory.
//!
//! An upload is written into a staging file next to the object's final place, `NAME#1`, a name that
//! the crate `object_store` uses for its puts, too. The completion syncs the file, renames it, and
//! syncs the directory. A staging file that a crash has left is removed by [`super::sweep`].
//!
//! # Direct writes
//!
//! [`Upload::bypass_page_cache`] selects O_DIRECT. Large uploads through the page cache take most
//! of their CPU time for allocating its pages and copying into them. The last block is padded with
//! zeros; the completion truncates the file to the object's length before it syncs the file. If the
//! file system does not support direct writes, the parts are written through the page cache.
//!
//! # Operations that exceed their time limit
//!
//! A part that takes too long is still written, on a blocking thread, and its position is taken.
//! The running operation is therefore kept if its caller is dropped. A retry waits for it and gets
//! its result.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::{Failure, FailureKind, Upload};
use crate::files::DirectWriter;

/// An upload into a staging file.
pub(super) struct FileUpload {
    /// `None` while an operation is in progress, and at the end.
    staged: Option<StagedFile>,
    /// The operation that is in progress.
    running: Option<(Operation, Running)>,
}

/// Returns the staging file, unless the operation ends the upload.
type Running = JoinHandle<(Option<StagedFile>, io::Result<()>)>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    Part,
    Completion,
    Abort,
}

impl FileUpload {
    /// Starts an object whose file will have this path.
    pub(super) async fn start(path: PathBuf) -> Result<Self, Failure> {
        let created = tokio::task::spawn_blocking(move || StagedFile::create(path)).await;
        let created = created.unwrap_or_else(|panic| Err(io::Error::other(panic)));
        let staged = created.map_err(|cause| Failure::new(FailureKind::Other, cause))?;
        Ok(FileUpload { staged: Some(staged), running: None })
    }

    /// Runs an operation on a blocking thread. If the same one is in progress, this is a retry, and
    /// does nothing.
    fn run(
        &mut self,
        operation: Operation,
        work: impl FnOnce(StagedFile) -> (Option<StagedFile>, io::Result<()>) + Send + 'static,
    ) -> Result<(), Failure> {
        match self.running {
            Some((running, _)) if running == operation => Ok(()),
            Some(_) => Err(Failure::new(FailureKind::Other, "the previous operation is still in progress")),
            None => {
                let ended = || Failure::new(FailureKind::Other, "the upload has ended");
                let staged = self.staged.take().ok_or_else(ended)?;
                self.running = Some((operation, tokio::task::spawn_blocking(move || work(staged))));
                Ok(())
            }
        }
    }

    /// Waits for the operation. If the caller is dropped, the operation remains in `running`.
    async fn wait_until_done(&mut self) -> Result<(), Failure> {
        let Some((_, running)) = &mut self.running else { return Ok(()) };
        let (staged, result) = running.await.unwrap_or_else(|panic| (None, Err(io::Error::other(panic))));
        (self.running, self.staged) = (None, staged);
        result.map_err(|cause| Failure::new(FailureKind::Other, cause))
    }
}

#[async_trait]
impl Upload for FileUpload {
    fn bypass_page_cache(&mut self) {
        if let Some(staged) = &mut self.staged {
            staged.bypasses_page_cache = true;
        }
    }

    async fn part(&mut self, bytes: Bytes) -> Result<(), Failure> {
        self.run(Operation::Part, move |mut staged| {
            let written = staged.append(&bytes);
            (Some(staged), written)
        })?;
        self.wait_until_done().await
    }

    async fn complete(&mut self) -> Result<(), Failure> {
        self.run(Operation::Completion, |staged| (None, staged.publish()))?;
        self.wait_until_done().await
    }

    async fn abort(&mut self) -> Result<(), Failure> {
        if self.staged.is_none() && self.running.is_none() {
            // A completion that failed has removed the file.
            return Ok(());
        }
        self.run(Operation::Abort, |staged| (None, staged.remove()))?;
        self.wait_until_done().await
    }
}

impl Drop for FileUpload {
    fn drop(&mut self) {
        // Removing a large file takes long. If an operation is in progress, the file is removed at
        // its end.
        if let (Some(staged), Ok(runtime)) = (self.staged.take(), Handle::try_current()) {
            runtime.spawn_blocking(|| drop(staged));
        }
    }
}

/// A file with a temporary name, which is removed unless it is published. Every call blocks the
/// thread.
struct StagedFile {
    file: File,
    /// The parts are to be written past the page cache.
    bypasses_page_cache: bool,
    /// Writes the parts past the page cache. `None` before the first such write.
    direct: Option<DirectWriter>,
    path: PathBuf,
    /// The path of the object.
    target: PathBuf,
    /// Total size of the parts.
    bytes: u64,
    /// The file does not exist under its temporary name any more.
    is_gone: bool,
}

impl StagedFile {
    fn create(target: PathBuf) -> io::Result<Self> {
        let mut number = 1_u32;
        loop {
            let mut path = target.clone().into_os_string();
            path.push(format!("#{number}"));
            let path = PathBuf::from(path);
            match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => {
                    let (bypasses_page_cache, direct, bytes, is_gone) = (false, None, 0, false);
                    return Ok(StagedFile {
                        file,
                        bypasses_page_cache,
                        direct,
                        path,
                        target,
                        bytes,
                        is_gone,
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) if error.kind() == io::ErrorKind::NotFound => create_parents(&target)?,
                Err(error) => return Err(about(&path, "could not create file", &error)),
            }
        }
    }

    /// Appends a part. After an error, the same part can be passed again.
    fn append(&mut self, part: &[u8]) -> io::Result<()> {
        let written = self.write(part);
        written.map_err(|error| about(&self.path, "could not write to file", &error))?;
        self.bytes += part.len() as u64;
        Ok(())
    }

    fn write(&mut self, part: &[u8]) -> io::Result<()> {
        if self.bypasses_page_cache && self.direct.is_none() {
            let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&self.path);
            self.direct = direct.ok().map(DirectWriter::new);
            self.bypasses_page_cache = self.direct.is_some();
        }
        if let Some(direct) = &mut self.direct {
            let file = &self.file;
            let before = |offset, buffer: &mut [u8]| file.read_exact_at(buffer, offset);
            match direct.write_at(self.bytes, part, before) {
                // Some file systems accept O_DIRECT at open, but reject writes.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    (self.bypasses_page_cache, self.direct) = (false, None);
                }
                outcome => return outcome,
            }
        }
        self.file.write_all_at(part, self.bytes)
    }

    /// Makes the file durable under the name of its object.
    fn publish(mut self) -> io::Result<()> {
        let synced = self.file.set_len(self.bytes).and_then(|()| self.file.sync_all());
        synced.map_err(|error| about(&self.path, "could not sync file", &error))?;
        let renamed = fs::rename(&self.path, &self.target);
        renamed.map_err(|error| about(&self.path, "could not rename file", &error))?;
        self.is_gone = true;
        sync_directory(parent(&self.target))
    }

    fn remove(mut self) -> io::Result<()> {
        self.is_gone = true;
        fs::remove_file(&self.path).map_err(|error| about(&self.path, "could not remove file", &error))
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        if !self.is_gone {
            // If this fails, the next start removes the file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Creates the directories above an object, and syncs each directory that has a new entry.
fn create_parents(target: &Path) -> io::Result<()> {
    let is_missing = |directory: &&Path| !directory.as_os_str().is_empty() && !directory.exists();
    let missing: Vec<&Path> = target.ancestors().skip(1).take_while(is_missing).collect();
    for directory in missing.into_iter().rev() {
        match fs::create_dir(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(about(directory, "could not create directory", &error));
            }
            _ => sync_directory(parent(directory))?,
        }
    }
    Ok(())
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn sync_directory(directory: &Path) -> io::Result<()> {
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(|error| about(directory, "could not sync directory", &error))
}

fn about(path: &Path, what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::store::{Backend, Span, Store};

    const BLOCK: usize = 4096;
    const MIB: usize = 1 << 20;

    fn staged(directory: &Path) -> StagedFile {
        let mut staged = StagedFile::create(directory.join("segments/a")).unwrap();
        staged.bypasses_page_cache = true;
        staged
    }

    /// Bytes that differ from block to block, in memory whose address is `lead` bytes after a block
    /// boundary.
    fn part(bytes: usize, seed: usize, lead: usize) -> Bytes {
        let mut memory = vec![0; bytes + 2 * BLOCK];
        let begin = memory.as_ptr().align_offset(BLOCK) + lead;
        for (at, byte) in memory[begin..begin + bytes].iter_mut().enumerate() {
            *byte = ((at + seed) / 61 % 251) as u8;
        }
        Bytes::from(memory).slice(begin..begin + bytes)
    }

    fn names_in(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory.join("segments")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Parts of any length, also such that end within a block, from aligned and other memory.
    #[tokio::test]
    async fn direct_writes_store_exactly_the_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let store = Backend::directory(directory.path()).unwrap();
        let sizes = [
            vec![1],
            vec![BLOCK],
            vec![8 * MIB, 8 * MIB, 3 * MIB + 17],
            vec![8 * MIB, 2 * MIB],
            vec![MIB + 1, BLOCK - 1, 300_000, 5 * BLOCK, 77, 2 * MIB],
        ];
        for (number, sizes) in sizes.iter().enumerate() {
            for lead in [0, 16] {
                let name = format!("segments/{number}-{lead}");
                let mut upload = store.upload(&name).await.unwrap();
                upload.bypass_page_cache();
                let mut expected = Vec::new();
                for (seed, bytes) in sizes.iter().enumerate() {
                    let part = part(*bytes, seed, lead);
                    expected.extend_from_slice(&part);
                    upload.part(part).await.unwrap();
                }
                upload.complete().await.unwrap();
                let stored = store.get(&name, Span::Whole).await.unwrap().bytes;
                assert!(stored == expected, "{name}: {sizes:?}, {} bytes stored", stored.len());
            }
        }
    }

    /// Returns how many pages of a file are in the page cache. Reading would add some.
    fn cached_pages(file: &File) -> usize {
        let bytes = file.metadata().unwrap().len() as usize;
        let mut pages = vec![0_u8; bytes.div_ceil(BLOCK)];
        let (null, fd) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: the mapping is not accessed, and `pages` has a byte for each of its pages.
        unsafe {
            let address = libc::mmap(null, bytes, libc::PROT_READ, libc::MAP_SHARED, fd, 0);
            assert_ne!(address, libc::MAP_FAILED);
            assert_eq!(libc::mincore(address, bytes, pages.as_mut_ptr()), 0);
            libc::munmap(address, bytes);
        }
        pages.into_iter().filter(|page| page & 1 == 1).count()
    }

    #[test]
    fn only_a_bypassing_upload_leaves_the_page_cache_empty() {
        let directory = tempfile::tempdir().unwrap();
        let mut probe = staged(directory.path());
        probe.append(&part(BLOCK, 0, 0)).unwrap();
        // The file system of temporary files may lack direct writes, or keep all files in memory.
        let has_direct_writes = probe.direct.is_some() && cached_pages(&probe.file) == 0;
        for bypasses_page_cache in [false, true] {
            let mut staged = staged(directory.path());
            staged.bypasses_page_cache = bypasses_page_cache;
            staged.append(&part(MIB, 0, 0)).unwrap();
            staged.append(&part(MIB, 1, 16)).unwrap();
            let expected = if bypasses_page_cache && has_direct_writes { 0 } else { 2 * MIB / BLOCK };
            assert_eq!(cached_pages(&staged.file), expected, "{bypasses_page_cache}");
        }
    }

    /// Some file systems accept O_DIRECT at open and reject the writes.
    #[test]
    fn rejected_direct_writes_are_repeated_through_the_page_cache() {
        let directory = tempfile::tempdir().unwrap();
        let mut staged = staged(directory.path());
        let (first, second) = (part(MIB + 5, 0, 0), part(MIB, 1, 0));
        staged.append(&first).unwrap();
        // The kernel rejects everything but a number with EINVAL.
        let rejecting = OpenOptions::new().write(true).open("/proc/self/oom_score_adj").unwrap();
        assert_eq!(rejecting.write_at(&second, 0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        staged.direct = Some(DirectWriter::new(rejecting));
        staged.append(&second).unwrap();
        assert!(staged.direct.is_none() && !staged.bypasses_page_cache);
        staged.append(&first).unwrap();
        staged.publish().unwrap();
        let stored = fs::read(directory.path().join("segments/a")).unwrap();
        assert!(stored == [&first[..], &second[..], &first[..]].concat());
    }

    #[tokio::test]
    async fn full_disk_leaves_no_object() {
        let directory = tempfile::tempdir().unwrap();
        let store = Backend::directory(directory.path()).unwrap();
        let mut upload = FileUpload::start(directory.path().join("segments/a")).await.unwrap();
        upload.bypass_page_cache();
        upload.part(part(MIB, 0, 0)).await.unwrap();
        let full = || DirectWriter::new(OpenOptions::new().write(true).open("/dev/full").unwrap());
        upload.staged.as_mut().unwrap().direct = Some(full());
        for lead in [0, 16] {
            let failed = upload.part(part(MIB, 1, lead)).await.unwrap_err();
            assert_eq!(failed.kind(), FailureKind::Other);
            assert!(failed.to_string().contains("No space left on device"), "{failed}");
        }
        assert_eq!(names_in(directory.path()), ["a#1"]);
        assert!(store.list("segments", None).await.unwrap().names.is_empty());
        let missing = store.get("segments/a", Span::Last(1)).await.unwrap_err();
        assert_eq!(missing.kind(), FailureKind::Missing);

        // The same part takes its place once there is space.
        upload.staged.as_mut().unwrap().direct = None;
        upload.part(part(MIB, 1, 0)).await.unwrap();
        upload.complete().await.unwrap();
        let stored = store.get("segments/a", Span::Whole).await.unwrap().bytes;
        assert!(stored == [part(MIB, 0, 0), part(MIB, 1, 0)].concat());
    }

    #[tokio::test]
    async fn failed_and_dropped_uploads_remove_their_files() {
        let directory = tempfile::tempdir().unwrap();
        let start = async || {
            let mut upload = FileUpload::start(directory.path().join("segments/a")).await.unwrap();
            upload.bypass_page_cache();
            upload.part(part(MIB, 0, 0)).await.unwrap();
            upload
        };
        let removed = async || {
            while !names_in(directory.path()).is_empty() {
                tokio::task::yield_now().await;
            }
        };
        drop(start().await);
        removed().await;
        // A write is in progress.
        let mut upload = start().await;
        upload
            .run(Operation::Part, |mut staged| {
                let written = staged.append(&part(MIB, 1, 0));
                (Some(staged), written)
            })
            .unwrap();
        assert!(upload.abort().await.is_err(), "an upload must not be aborted during a write");
        assert!(upload.complete().await.is_err(), "an upload must not be completed during a write");
        drop(upload);
        removed().await;
        start().await.abort().await.unwrap();
        removed().await;
        // The completion fails: its name is taken by a directory.
        let mut upload = start().await;
        fs::create_dir(directory.path().join("segments/a")).unwrap();
        let failed = upload.complete().await.unwrap_err();
        assert!(failed.to_string().contains("could not rename file"), "{failed}");
        assert_eq!(names_in(directory.path()), ["a"]);
        assert!(upload.part(part(MIB, 0, 0)).await.is_err(), "an upload that has ended takes no parts");
        upload.abort().await.unwrap();
    }

    /// A crash after any part leaves a file that is not listed, and that the next start removes.
    #[tokio::test]
    async fn crash_leaves_no_part_of_an_object() {
        let directory = tempfile::tempdir().unwrap();
        let store = Backend::directory(directory.path()).unwrap();
        for parts in 0..3 {
            let mut upload = store.upload("segments/a").await.unwrap();
            upload.bypass_page_cache();
            for seed in 0..parts {
                upload.part(part(MIB + 3, seed, 0)).await.unwrap();
            }
            std::mem::forget(upload);
        }
        assert_eq!(names_in(directory.path()).len(), 3);
        assert!(store.list("segments", None).await.unwrap().names.is_empty());
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(1);
        assert_eq!(store.sweep(later).unwrap(), 3);
        assert!(names_in(directory.path()).is_empty());
    }
}
