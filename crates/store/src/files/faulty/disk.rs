//! State of a simulated disk: its current contents, and the contents that survive a power failure.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::{Fault, Operation};

/// Atomic write unit of a disk: a sector is written completely or not at all.
pub(super) const SECTOR_BYTES: usize = 512;

#[derive(Default)]
pub(super) struct Disk {
    pub(super) names: BTreeMap<String, FileId>,
    pub(super) safe_names: BTreeMap<String, FileId>,
    /// Changes of names since the last directory sync, in order.
    pub(super) renames: Vec<NameChange>,
    pub(super) files: BTreeMap<FileId, Contents>,
    pub(super) next_id: FileId,
    pub(super) off: bool,
    /// Faults that trigger after a number of operations.
    pub(super) countdowns: Vec<Countdown>,
    /// Operations that fail until further notice.
    pub(super) switches: BTreeMap<Operation, Fault>,
    /// Operations that block.
    pub(super) held: BTreeSet<Operation>,
    /// Remaining passages per failpoint until the power is cut.
    pub(super) stops: BTreeMap<&'static str, u64>,
    /// Remaining file creations until the power is cut in the middle of one, and the number of
    /// bytes that file has at that point.
    pub(super) creates: Option<(u64, u64)>,
    pub(super) begun: BTreeMap<Operation, u64>,
}

/// A fault that triggers after `left` matching operations.
pub(super) struct Countdown {
    pub(super) operation: Operation,
    /// Thread whose operations count, or None if those of all threads do.
    pub(super) thread: Option<&'static str>,
    pub(super) left: u64,
    pub(super) fault: Fault,
}

impl Countdown {
    /// Returns true if an operation of the current thread counts.
    fn counts(&self, operation: Operation) -> bool {
        let matches_thread = |thread| std::thread::current().name() == Some(thread);
        self.operation == operation && self.thread.is_none_or(matches_thread)
    }
}

pub(super) type FileId = u64;

#[derive(Clone)]
pub(super) enum NameChange {
    Put(String, FileId),
    Rename(String, String),
    Remove(String),
}

#[derive(Clone, Default)]
pub(super) struct Contents {
    pub(super) now: Vec<u8>,
    pub(super) safe: Vec<u8>,
    /// Sectors written since the last sync.
    pub(super) dirty: BTreeSet<usize>,
}

impl NameChange {
    pub(super) fn apply(&self, names: &mut BTreeMap<String, FileId>) {
        match self {
            NameChange::Put(name, id) => {
                names.insert(name.clone(), *id);
            }
            NameChange::Rename(from, to) => {
                if let Some(id) = names.remove(from) {
                    names.insert(to.clone(), id);
                }
            }
            NameChange::Remove(name) => {
                names.remove(name);
            }
        }
    }
}

impl Contents {
    pub(super) fn after_power_cut(&self, random: &mut Random) -> Contents {
        let mut safe = self.safe.clone();
        // Each power cut draws its own survival rate, so that "almost none" and "almost all" occur.
        let share = random.below(101);
        for &sector in &self.dirty {
            if random.below(100) < share {
                let range = sector_range(sector, self.now.len());
                safe[range.clone()].copy_from_slice(&self.now[range]);
            }
        }
        Contents { now: safe.clone(), safe, dirty: BTreeSet::new() }
    }

    /// Writes as [`super::super::direct`] does: the rest of the last 4096-byte block becomes zeros.
    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let end = self.write_part(offset, bytes)?;
        if end > offset {
            let block = end.next_multiple_of(4096).min(self.now.len());
            self.now[end..block].fill(0);
            self.dirty.extend(offset / SECTOR_BYTES..=(block - 1) / SECTOR_BYTES);
        }
        Ok(())
    }

    /// Writes the part that a failed write has completed. The sectors after these bytes are
    /// unchanged. Returns the end offset.
    pub(super) fn write_part(&mut self, offset: usize, bytes: &[u8]) -> io::Result<usize> {
        let end = offset.checked_add(bytes.len()).filter(|end| *end <= self.now.len());
        let end = end.ok_or_else(|| io::Error::other("write beyond the end of a log file"))?;
        self.now[offset..end].copy_from_slice(bytes);
        if end > offset {
            self.dirty.extend(offset / SECTOR_BYTES..=(end - 1) / SECTOR_BYTES);
        }
        Ok(end)
    }

    pub(super) fn sync(&mut self) {
        for sector in std::mem::take(&mut self.dirty) {
            let range = sector_range(sector, self.now.len());
            self.safe[range.clone()].copy_from_slice(&self.now[range]);
        }
    }
}

pub(super) fn sector_range(sector: usize, len: usize) -> std::ops::Range<usize> {
    sector * SECTOR_BYTES..((sector + 1) * SECTOR_BYTES).min(len)
}

/// Returns the largest number of bytes, up to `len`, that ends at a sector boundary.
pub(super) fn whole_sectors(offset: usize, len: usize) -> usize {
    ((offset + len) / SECTOR_BYTES * SECTOR_BYTES).saturating_sub(offset)
}

impl Disk {
    /// Returns the injected error for an operation, if there is one.
    pub(super) fn fault(&mut self, operation: Operation) -> io::Result<()> {
        if self.off {
            return Err(Fault::Io.error());
        }
        let mut fault = self.switches.get(&operation).copied();
        self.countdowns.retain_mut(|countdown| {
            countdown.left -= u64::from(countdown.counts(operation));
            if countdown.left == 0 {
                fault = Some(countdown.fault);
            }
            countdown.left > 0
        });
        fault.map_or(Ok(()), |fault| Err(fault.error()))
    }

    /// Counts a file creation. If the power is cut in the middle of it, returns the file's length
    /// at that point.
    pub(super) fn stopped_in_create(&mut self) -> Option<u64> {
        let (left, bytes) = self.creates.as_mut()?;
        *left = left.saturating_sub(1);
        (*left == 0).then_some(*bytes)
    }

    pub(super) fn change(&mut self, change: NameChange) {
        change.apply(&mut self.names);
        self.renames.push(change);
    }

    pub(super) fn id(&self, name: &str) -> io::Result<FileId> {
        self.names.get(name).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub(super) fn contents(&mut self, id: FileId) -> io::Result<&mut Contents> {
        self.files.get_mut(&id).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// Xorshift: sufficient for choosing sectors, and deterministic on every platform.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) % bound.max(1) as u64) as usize
    }
}
