//! A simulated in-memory disk with fault injection, for tests of this crate and of its users.
//!
//! ```text
//!   names    now -- sync_dir --> safe   after a power failure: safe + a prefix of the changes
//!   sectors  now -- sync_data -> safe   after a power failure: safe + some sectors written since
//! ```
//!
//! An injected sync failure behaves as on Linux: the sectors remain readable, count as clean, are
//! not on the disk, and the next sync succeeds.

mod disk;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{LogFile, LogFiles};
use disk::{Contents, Countdown, Disk, FileId, NameChange, Random, whole_sectors};

/// An operation that can be made to fail.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Operation {
    /// [`LogFiles::create`]
    Create,
    /// [`LogFiles::open`]
    Open,
    /// [`LogFiles::rename`]
    Rename,
    /// [`LogFiles::remove`]
    Remove,
    /// [`LogFiles::sync_dir`]
    SyncDir,
    /// [`LogFile::read_at`]
    Read,
    /// [`LogFile::write_at`]; a failed write still writes about half of its sectors.
    Write,
    /// [`LogFile::sync_data`]
    Sync,
}

/// How an operation fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// EIO: an I/O error.
    Io,
    /// ENOSPC: the disk is full.
    NoSpace,
}

impl Fault {
    fn error(self) -> io::Error {
        io::Error::from_raw_os_error(match self {
            Fault::Io => libc::EIO,
            Fault::NoSpace => libc::ENOSPC,
        })
    }
}

/// A simulated in-memory disk with fault injection. Clones share the same disk.
#[derive(Clone, Default)]
pub struct FaultyFiles {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    disk: Mutex<Disk>,
    /// Signalled when `held` changes or the power is cut.
    released: Condvar,
}

impl FaultyFiles {
    /// An empty disk without faults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the `nth` operation of this kind from now on fail (1 is the next one).
    pub fn fail_nth(&self, operation: Operation, nth: u64, fault: Fault) {
        let countdown = Countdown { operation, thread: None, left: nth, fault };
        self.shared.disk.lock().countdowns.push(countdown);
    }

    /// Makes the next operation of this kind fail that the named thread performs. Both threads of a
    /// log, the one that writes records and the one that prepares files, sync at arbitrary times.
    pub fn fail_next_of(&self, thread: &'static str, operation: Operation, fault: Fault) {
        let countdown = Countdown { operation, thread: Some(thread), left: 1, fault };
        self.shared.disk.lock().countdowns.push(countdown);
    }

    /// Makes all operations of this kind fail until it is called with None.
    pub fn fail_while(&self, operation: Operation, fault: Option<Fault>) {
        let mut disk = self.shared.disk.lock();
        match fault {
            Some(fault) => disk.switches.insert(operation, fault),
            None => disk.switches.remove(&operation),
        };
    }

    /// Blocks all operations of this kind until it is called with false or the power is cut.
    pub fn hold(&self, operation: Operation, hold: bool) {
        let mut disk = self.shared.disk.lock();
        match hold {
            true => disk.held.insert(operation),
            false => disk.held.remove(&operation),
        };
        self.shared.released.notify_all();
    }

    /// Cuts the power at the `nth` passage of a failpoint (see [`crate::failpoint`]): every later
    /// operation fails.
    pub fn stop_at(&self, failpoint: &'static str, nth: u64) {
        self.shared.disk.lock().stops.insert(failpoint, nth);
    }

    /// Cuts the power in the middle of the `nth` [`LogFiles::create`] from now on (1 is the next
    /// one). At that point the file has its name and its first `left_bytes` bytes.
    pub fn stop_in_create(&self, nth: u64, left_bytes: u64) {
        self.shared.disk.lock().creates = Some((nth, left_bytes));
    }

    /// Number of operations of this kind that have started, failed ones included.
    pub fn count(&self, operation: Operation) -> u64 {
        self.shared.disk.lock().begun.get(&operation).copied().unwrap_or(0)
    }

    /// Flips the bits of `mask` in one byte of a file, both in the current and in the safe
    /// contents.
    pub fn damage(&self, name: &str, offset: u64, mask: u8) {
        let mut disk = self.shared.disk.lock();
        let id = disk.names[name];
        let contents = disk.files.get_mut(&id).expect("a named file exists");
        contents.now[offset as usize] ^= mask;
        contents.safe[offset as usize] ^= mask;
    }

    /// Stores a file on the disk, synced.
    pub fn put(&self, name: &str, bytes: Vec<u8>) {
        let mut disk = self.shared.disk.lock();
        let id = disk.next_id;
        disk.next_id += 1;
        disk.files.insert(id, Contents { safe: bytes.clone(), now: bytes, dirty: BTreeSet::new() });
        disk.names.insert(name.to_owned(), id);
        disk.safe_names.insert(name.to_owned(), id);
    }

    /// Returns a file's bytes as a process would read them, or None if the file does not exist.
    pub fn contents(&self, name: &str) -> Option<Vec<u8>> {
        let disk = self.shared.disk.lock();
        Some(disk.files[disk.names.get(name)?].now.clone())
    }

    /// Returns another disk with the same files, all of them safe.
    pub fn copy(&self) -> FaultyFiles {
        let disk = self.shared.disk.lock();
        let synced = |contents: &Contents| Contents {
            safe: contents.now.clone(),
            dirty: BTreeSet::new(),
            ..contents.clone()
        };
        let files = disk.files.iter().map(|(id, contents)| (*id, synced(contents))).collect();
        Self::with(disk.names.clone(), files, disk.next_id)
    }

    /// Cuts the power: this disk fails from now on. Returns the disk as it is found afterwards. The
    /// seed decides which unsynced sectors and names have survived.
    pub fn power_cut(&self, seed: u64) -> FaultyFiles {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut disk = self.shared.disk.lock();
        disk.off = true;
        self.shared.released.notify_all();
        let mut names = disk.safe_names.clone();
        let survivors = random.below(disk.renames.len() + 1);
        for change in &disk.renames[..survivors] {
            change.apply(&mut names);
        }
        let files =
            disk.files.iter().map(|(id, contents)| (*id, contents.after_power_cut(&mut random))).collect();
        Self::with(names, files, disk.next_id)
    }

    /// Kills the process: this disk fails from now on. Returns the same disk as the next process
    /// finds it: all written data is there, and data that was not synced is still not safe.
    pub fn process_kill(&self) -> FaultyFiles {
        let mut disk = self.shared.disk.lock();
        disk.off = true;
        self.shared.released.notify_all();
        let next = Self::with(disk.names.clone(), disk.files.clone(), disk.next_id);
        let mut next_disk = next.shared.disk.lock();
        next_disk.safe_names = disk.safe_names.clone();
        next_disk.renames = disk.renames.clone();
        drop(next_disk);
        next
    }

    fn with(names: BTreeMap<String, FileId>, files: BTreeMap<FileId, Contents>, next_id: FileId) -> Self {
        let disk = Disk { safe_names: names.clone(), names, files, next_id, ..Disk::default() };
        FaultyFiles { shared: Arc::new(Shared { disk: Mutex::new(disk), released: Condvar::new() }) }
    }

    fn file(&self, id: FileId) -> Box<dyn LogFile> {
        Box::new(FaultyFile { shared: self.shared.clone(), id })
    }
}

impl Shared {
    /// Counts an operation, and blocks or fails it if a test has requested that.
    fn begin(&self, operation: Operation) -> (MutexGuard<'_, Disk>, io::Result<()>) {
        let mut disk = self.disk.lock();
        *disk.begun.entry(operation).or_default() += 1;
        while disk.held.contains(&operation) && !disk.off {
            self.released.wait(&mut disk);
        }
        let outcome = disk.fault(operation);
        (disk, outcome)
    }
}

impl LogFiles for FaultyFiles {
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.shared.disk.lock().names.keys().cloned().collect())
    }

    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn LogFile>> {
        let (mut disk, outcome) = self.shared.begin(Operation::Create);
        outcome?;
        let id = disk.next_id;
        disk.next_id += 1;
        let stopped = disk.stopped_in_create();
        let zeros = vec![0; stopped.unwrap_or(bytes).min(bytes) as usize];
        disk.files.insert(id, Contents { now: zeros.clone(), safe: zeros, dirty: BTreeSet::new() });
        disk.change(NameChange::Put(name.to_owned(), id));
        if stopped.is_some() {
            disk.off = true;
            self.shared.released.notify_all();
            return Err(Fault::Io.error());
        }
        Ok(self.file(id))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn LogFile>> {
        let (disk, outcome) = self.shared.begin(Operation::Open);
        outcome?;
        Ok(self.file(disk.id(name)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let (mut disk, outcome) = self.shared.begin(Operation::Rename);
        outcome?;
        disk.id(from)?;
        disk.change(NameChange::Rename(from.to_owned(), to.to_owned()));
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let (mut disk, outcome) = self.shared.begin(Operation::Remove);
        outcome?;
        disk.id(name)?;
        disk.change(NameChange::Remove(name.to_owned()));
        Ok(())
    }

    fn sync_dir(&self) -> io::Result<()> {
        let (mut disk, outcome) = self.shared.begin(Operation::SyncDir);
        outcome?;
        disk.safe_names = disk.names.clone();
        disk.renames.clear();
        Ok(())
    }

    fn is_failpoint_armed(&self, failpoint: &'static str) -> bool {
        self.shared.disk.lock().stops.contains_key(failpoint)
    }

    fn hit_failpoint(&self, failpoint: &'static str) {
        let mut disk = self.shared.disk.lock();
        if let Some(left) = disk.stops.get_mut(failpoint) {
            *left = left.saturating_sub(1);
            if *left == 0 {
                disk.off = true;
                self.shared.released.notify_all();
            }
        }
    }
}

struct FaultyFile {
    shared: Arc<Shared>,
    id: FileId,
}

impl LogFile for FaultyFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let (mut disk, outcome) = self.shared.begin(Operation::Read);
        outcome?;
        let contents = disk.contents(self.id)?;
        let bytes = contents.now.get(offset as usize..offset as usize + buffer.len());
        buffer.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (mut disk, outcome) = self.shared.begin(Operation::Write);
        let half = if disk.off { 0 } else { whole_sectors(offset as usize, bytes.len() / 2) };
        match outcome {
            Ok(()) => disk.contents(self.id)?.write(offset as usize, bytes),
            Err(error) => {
                disk.contents(self.id)?.write_part(offset as usize, &bytes[..half])?;
                Err(error)
            }
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        let (mut disk, outcome) = self.shared.begin(Operation::Sync);
        match outcome {
            Ok(()) => disk.contents(self.id)?.sync(),
            Err(_) if !disk.off => disk.contents(self.id)?.dirty.clear(),
            Err(_) => {}
        }
        outcome
    }

    fn length_bytes(&self) -> io::Result<u64> {
        Ok(self.shared.disk.lock().contents(self.id)?.now.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::disk::SECTOR_BYTES;
    use super::*;

    #[test]
    fn power_cut_keeps_synced_data_and_a_subset_of_unsynced_sectors() {
        let mut seen = BTreeSet::new();
        for seed in 0..300 {
            let files = FaultyFiles::new();
            let file = files.create("a", 4 * SECTOR_BYTES as u64).unwrap();
            file.write_at(0, &[1; SECTOR_BYTES]).unwrap();
            file.sync_data().unwrap();
            files.sync_dir().unwrap();
            file.write_at(0, &[2; 3 * SECTOR_BYTES]).unwrap();
            files.rename("a", "b").unwrap();
            let after = files.power_cut(seed);
            assert!(file.write_at(0, &[3]).is_err(), "the old disk must fail after a power cut");
            let (name, bytes) = match after.contents("a") {
                Some(bytes) => ("a", bytes),
                None => ("b", after.contents("b").unwrap()),
            };
            let sectors: Vec<u8> = bytes.chunks(SECTOR_BYTES).map(|sector| sector[0]).collect();
            assert!(matches!(sectors[..], [1 | 2, 0 | 2, 0 | 2, 0]), "{sectors:?}");
            seen.insert((name, sectors));
        }
        assert_eq!(seen.len(), 16, "every combination of surviving sectors must occur");
    }

    #[test]
    fn failed_sync_loses_data_silently() {
        let files = FaultyFiles::new();
        let file = files.create("a", 512).unwrap();
        files.sync_dir().unwrap();
        file.write_at(0, &[1; 512]).unwrap();
        files.fail_nth(Operation::Sync, 1, Fault::Io);
        assert!(file.sync_data().is_err());
        file.sync_data().unwrap();
        let next = files.process_kill();
        assert_eq!(
            next.contents("a").unwrap()[0],
            1,
            "unsynced data must stay readable after a process kill"
        );
        assert_eq!(
            next.power_cut(1).contents("a").unwrap()[0],
            0,
            "data of a failed sync must not survive a power cut"
        );
    }

    #[test]
    fn a_fault_for_one_thread_does_not_affect_others() {
        let files = FaultyFiles::new();
        let file = files.create("a", 512).unwrap();
        files.fail_next_of("other", Operation::Sync, Fault::Io);
        file.sync_data().unwrap();
        let other = std::thread::Builder::new().name("other".to_owned());
        std::thread::scope(|scope| {
            let failed = other.spawn_scoped(scope, || file.sync_data().is_err()).unwrap();
            assert!(failed.join().unwrap(), "the fault must hit the named thread");
        });
        file.sync_data().unwrap();
    }

    #[test]
    fn a_fault_affects_only_the_named_operation() {
        let files = FaultyFiles::new();
        files.fail_nth(Operation::Create, 2, Fault::NoSpace);
        let file = files.create("a", 512).unwrap();
        let error = files.create("b", 512).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        files.create("b", 512).unwrap();
        files.fail_while(Operation::Sync, Some(Fault::Io));
        assert!(file.sync_data().is_err() && file.sync_data().is_err());
        files.fail_while(Operation::Sync, None);
        file.sync_data().unwrap();
        files.stop_at("here", 2);
        files.hit_failpoint("here");
        file.sync_data().unwrap();
        files.hit_failpoint("here");
        assert!(file.sync_data().is_err());
    }
}
