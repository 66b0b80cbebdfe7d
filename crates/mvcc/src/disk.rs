//! Rejects writes before the disk is full.
//!
//! A full disk stops more than commits: flushes cannot shorten the log, large sorts have no
//! temporary file, and a restarting node has no space for its new log. Part of the file system is
//! therefore reserved:
//!
//! - Above the reserve, everything is accepted.
//! - Below the reserve, commits that make a database larger, large commits, imports and CREATE
//!   DATABASE fail with 53100. Reads, deletes, in-place updates and DROP DATABASE continue.
//! - Below half of the reserve, all commits fail with 53100 and temporary files cannot grow. DROP
//!   DATABASE and reads without a temporary file continue.
//!
//! Writes resume automatically once the available space exceeds the threshold by an eighth of the
//! reserve. While the disk is low, the collector runs immediately, since dropping databases is an
//! operator's usual remedy.
//!
//! The disk cache has been shrunk by then: it keeps 1.25 times the reserve free
//! ([`fulmar_store::DiskCache::limit_to_free_space`]), and every poll passes it the available
//! space.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use fulmar_sqlite::{Error, Result, sqlstate};

/// The default reserve: 1 GiB, or a twentieth of a small file system.
const DEFAULT_RESERVE_BYTES: u64 = 1 << 30;
const DEFAULT_RESERVE_DIVISOR: u64 = 20;

/// A file system's space.
#[derive(Clone, Copy, Debug)]
pub struct Space {
    /// The space available to this process.
    pub available_bytes: u64,
    /// The size of the file system.
    pub total_bytes: u64,
}

/// Reads the space of the data directory's file system.
pub type SpaceSource = Arc<dyn Fn() -> io::Result<Space> + Send + Sync>;

/// Returns a source that asks the operating system.
pub fn space_of(directory: PathBuf) -> SpaceSource {
    Arc::new(move || {
        let space = rustix::fs::statvfs(&directory)?;
        let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
        Ok(Space { available_bytes: bytes(space.f_bavail), total_bytes: bytes(space.f_blocks) })
    })
}

const ENOUGH: u8 = 0;
const LOW: u8 = 1;
const OUT: u8 = 2;
/// Not polled yet.
const UNKNOWN: u8 = 3;

/// The state of the disk as of the last poll.
pub struct Disk {
    source: SpaceSource,
    wanted_bytes: Option<u64>,
    state: AtomicU8,
    available_bytes: AtomicU64,
    reserve_bytes: AtomicU64,
}

impl Disk {
    /// `reserve_bytes` is the space to keep free; None selects the default.
    pub fn new(source: SpaceSource, reserve_bytes: Option<u64>) -> Self {
        Disk {
            source,
            wanted_bytes: reserve_bytes,
            state: AtomicU8::new(UNKNOWN),
            available_bytes: AtomicU64::new(0),
            reserve_bytes: AtomicU64::new(0),
        }
    }

    /// Polls the disk and logs changes of its state. Returns true if the file system reported its
    /// space.
    pub fn poll(&self) -> bool {
        let before = self.state.load(Ordering::Relaxed);
        let space = match (self.source)() {
            Ok(space) => space,
            Err(error) => {
                if before == UNKNOWN {
                    tracing::warn!(
                        %error,
                        "cannot read the free space of the data directory; writes are not rejected before \
                         the disk is full"
                    );
                    self.state.store(ENOUGH, Ordering::Relaxed);
                }
                return false;
            }
        };
        let default_bytes = DEFAULT_RESERVE_BYTES.min(space.total_bytes / DEFAULT_RESERVE_DIVISOR);
        let reserve = self.wanted_bytes.unwrap_or(default_bytes);
        self.available_bytes.store(space.available_bytes, Ordering::Relaxed);
        self.reserve_bytes.store(reserve, Ordering::Relaxed);
        let now = next_state(before, space.available_bytes, reserve);
        self.state.store(now, Ordering::Relaxed);
        let (available_mib, reserve_mib) = (space.available_bytes >> 20, reserve >> 20);
        match now {
            _ if now == before => {}
            OUT => {
                tracing::error!(available_mib, reserve_mib, "disk nearly full: all commits are rejected")
            }
            LOW => {
                tracing::error!(
                    available_mib,
                    reserve_mib,
                    "disk nearly full: commits that need more space are rejected"
                );
            }
            _ if before != UNKNOWN => {
                tracing::info!(available_mib, reserve_mib, "disk space recovered: all commits are accepted");
            }
            _ => {}
        }
        true
    }

    /// Returns 53100 if the commit is to be rejected.
    pub fn admit(&self, needs_space: bool) -> Result<()> {
        match self.state.load(Ordering::Relaxed) {
            OUT => Err(self.refused(
                "all commits are rejected",
                "Drop unused databases, or free space on the disk of the data directory.",
            )),
            LOW if needs_space => Err(self.refused(
                "operations that need more space are rejected",
                "Delete rows, drop databases, or free space on the disk of the data directory.",
            )),
            _ => Ok(()),
        }
    }

    /// Fails with 53100 if this many bytes do not fit above the reserve.
    pub fn check_room(&self, bytes: u64) -> Result<()> {
        self.admit(true)?;
        // Before the first poll nothing is known.
        let is_known = self.reserve_bytes() > 0;
        match is_known && self.available_bytes() < self.reserve_bytes().saturating_add(bytes) {
            true => {
                let what = format!("{} MiB more do not fit", bytes >> 20);
                Err(self.refused(
                    &what,
                    "Drop unused databases, or free space on the disk of the data directory.",
                ))
            }
            false => Ok(()),
        }
    }

    fn refused(&self, consequence: &str, remedy: &str) -> Error {
        let (available, reserve) = (self.available_bytes() >> 20, self.reserve_bytes() >> 20);
        Error::new(sqlstate::DISK_FULL, format!("disk nearly full: {consequence}"))
            .detail(format!("{available} MiB are available; {reserve} MiB are reserved (--disk-reserve)."))
            .hint(format!("{remedy} Writes resume automatically."))
    }

    /// Returns true if operations that need more space are rejected.
    pub fn is_low(&self) -> bool {
        matches!(self.state.load(Ordering::Relaxed), LOW | OUT)
    }

    /// 0: enough space; 1: operations that need space are rejected; 2: all commits are rejected.
    pub fn level(&self) -> u64 {
        match self.state.load(Ordering::Relaxed) {
            UNKNOWN => ENOUGH.into(),
            state => state.into(),
        }
    }

    /// The available space as of the last poll.
    pub fn available_bytes(&self) -> u64 {
        self.available_bytes.load(Ordering::Relaxed)
    }

    /// The space that is kept free.
    pub fn reserve_bytes(&self) -> u64 {
        self.reserve_bytes.load(Ordering::Relaxed)
    }
}

/// The state becomes worse immediately, and better only with an eighth of the reserve to spare, so
/// that it does not flap.
fn next_state(before: u8, available: u64, reserve: u64) -> u8 {
    let at = |available: u64| match available {
        _ if available >= reserve => ENOUGH,
        _ if available >= reserve / 2 => LOW,
        _ => OUT,
    };
    let (now, with_margin) = (at(available), at(available.saturating_sub(reserve / 8)));
    match before {
        LOW | OUT if now < before => with_margin.min(before),
        _ => now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn level_rises_immediately_and_falls_with_hysteresis() {
        let steps = [
            (UNKNOWN, 1000, ENOUGH),
            (ENOUGH, 800, ENOUGH),
            (ENOUGH, 799, LOW),
            (LOW, 800, LOW),
            (LOW, 899, LOW),
            (LOW, 900, ENOUGH),
            (LOW, 399, OUT),
            (OUT, 450, OUT),
            (OUT, 500, LOW),
            (OUT, 850, LOW),
            (OUT, 2000, ENOUGH),
            (ENOUGH, 0, OUT),
        ];
        for (before, available, after) in steps {
            assert_eq!(next_state(before, available, 800), after, "{before} {available}");
        }
        assert_eq!(next_state(ENOUGH, 0, 0), ENOUGH, "no reserve");
    }
}
