//! Stops writers before the disk is full.
//!
//! A disk that is full stops more than commits: no flush can make the log shorter, no temporary file holds a large sort,
//! and a node that has to start again finds no room for its new log. So a part of the file system is kept free:
//!
//! ```text
//!   available  > reserve              everything is accepted
//!              < reserve              commits that make a database larger get 53100, and so do large ones, imports and
//!                                     CREATE DATABASE; reading, deleting, changing what is there, DROP DATABASE go on
//!              < half of the reserve  no commit is accepted, no temporary file grows; what reads without one, and
//!                                     DROP DATABASE, go on
//! ```
//!
//! It goes on by itself when an eighth of the reserve more is available. Meanwhile garbage is collected at once, since
//! dropping databases is what an operator does then.
//!
//! What can be given back without harm has been by then: the disk cache keeps a quarter of the reserve more free than the
//! reserve ([`fulmar_store::DiskCache::make_room`]), and is told at each look what there is.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::node::Node;
use crate::{Engine, Error, Result, sqlstate};

/// How often the file system is asked.
const PERIOD: Duration = Duration::from_millis(250);
/// The reserve, if nobody says another: so much, or a twentieth of a small file system.
const RESERVE_BYTES: u64 = 1 << 30;
const RESERVE_PART: u64 = 20;

/// A file system's space.
#[derive(Clone, Copy, Debug)]
pub struct Space {
    /// What this process may still write.
    pub available_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
}

/// Tells the space of the data directory's file system.
pub type SpaceSource = Arc<dyn Fn() -> io::Result<Space> + Send + Sync>;

/// Asks the operating system.
pub(crate) fn space_of(directory: PathBuf) -> SpaceSource {
    Arc::new(move || {
        let space = rustix::fs::statvfs(&directory)?;
        let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
        Ok(Space { available_bytes: bytes(space.f_bavail), total_bytes: bytes(space.f_blocks) })
    })
}

const ENOUGH: u8 = 0;
const LOW: u8 = 1;
const OUT: u8 = 2;
/// Not known yet.
const UNKNOWN: u8 = 3;

/// The disk, as it was seen last.
pub(crate) struct Disk {
    source: SpaceSource,
    wanted_bytes: Option<u64>,
    state: AtomicU8,
    available_bytes: AtomicU64,
    reserve_bytes: AtomicU64,
}

impl Disk {
    /// `reserve_bytes` are kept free; `None` leaves it to us.
    pub(crate) fn new(source: SpaceSource, reserve_bytes: Option<u64>) -> Self {
        Disk {
            source,
            wanted_bytes: reserve_bytes,
            state: AtomicU8::new(UNKNOWN),
            available_bytes: AtomicU64::new(0),
            reserve_bytes: AtomicU64::new(0),
        }
    }

    /// Looks at the disk; tells the log when its state changes. Answers whether the file system has told its space.
    fn look(&self) -> bool {
        let before = self.state.load(Ordering::Relaxed);
        let space = match (self.source)() {
            Ok(space) => space,
            Err(error) => {
                if before == UNKNOWN {
                    tracing::warn!(%error, "the data directory's file system does not tell its space; writers are not stopped before it is full");
                    self.state.store(ENOUGH, Ordering::Relaxed);
                }
                return false;
            }
        };
        let reserve = self.wanted_bytes.unwrap_or(RESERVE_BYTES.min(space.total_bytes / RESERVE_PART));
        self.available_bytes.store(space.available_bytes, Ordering::Relaxed);
        self.reserve_bytes.store(reserve, Ordering::Relaxed);
        let now = next_state(before, space.available_bytes, reserve);
        self.state.store(now, Ordering::Relaxed);
        let (available_mib, reserve_mib) = (space.available_bytes >> 20, reserve >> 20);
        match now {
            _ if now == before => {}
            OUT => {
                tracing::error!(available_mib, reserve_mib, "the disk is nearly full: no commit is accepted")
            }
            LOW => {
                tracing::error!(
                    available_mib,
                    reserve_mib,
                    "the disk is nearly full: commits that need more space are refused"
                );
            }
            _ if before != UNKNOWN => {
                tracing::info!(
                    available_mib,
                    reserve_mib,
                    "the disk has space again: all commits are accepted"
                );
            }
            _ => {}
        }
        true
    }

    /// Whether a commit is accepted.
    pub(crate) fn admit(&self, needs_space: bool) -> Result<()> {
        match self.state.load(Ordering::Relaxed) {
            OUT => Err(self.refused(
                "no commit is accepted",
                "drop databases that are not needed, or free space on the disk that holds the data directory",
            )),
            LOW if needs_space => Err(self.refused(
                "what needs more space is refused",
                "delete rows, drop databases, or free space on the disk that holds the data directory",
            )),
            _ => Ok(()),
        }
    }

    fn refused(&self, what: &str, remedy: &str) -> Error {
        let (available, reserve) = (self.available_bytes() >> 20, self.reserve_bytes() >> 20);
        Error::new(sqlstate::DISK_FULL, format!("the disk is nearly full: {what}"))
            .detail(format!("{available} MiB are left; {reserve} MiB are kept free (--disk-reserve)."))
            .hint(format!("{remedy}; it goes on by itself"))
    }

    pub(crate) fn is_low(&self) -> bool {
        matches!(self.state.load(Ordering::Relaxed), LOW | OUT)
    }

    /// 0 enough, 1 what needs space is refused, 2 every commit is.
    pub(crate) fn level(&self) -> u64 {
        match self.state.load(Ordering::Relaxed) {
            UNKNOWN => ENOUGH.into(),
            state => state.into(),
        }
    }

    pub(crate) fn available_bytes(&self) -> u64 {
        self.available_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn reserve_bytes(&self) -> u64 {
        self.reserve_bytes.load(Ordering::Relaxed)
    }
}

/// It gets worse at once, and better with an eighth of the reserve in hand, so that it does not flutter.
fn next_state(before: u8, available: u64, reserve: u64) -> u8 {
    let at = |available: u64| match available {
        _ if available >= reserve => ENOUGH,
        _ if available >= reserve / 2 => LOW,
        _ => OUT,
    };
    let (now, careful) = (at(available), at(available.saturating_sub(reserve / 8)));
    match before {
        LOW | OUT if now < before => careful.min(before),
        _ => now,
    }
}

/// Polls the node's disk, and adapts the limits of temporary files and of the disk cache to its free space.
pub(crate) fn look(node: &Node) {
    if node.disk.look() {
        let (available_bytes, reserve_bytes) = (node.disk.available_bytes(), node.disk.reserve_bytes());
        node.temporary.follow_disk(available_bytes, reserve_bytes);
        if let Some(cache) = node.store.disk_cache() {
            cache.make_room(available_bytes, reserve_bytes);
        }
    }
}

/// Looks at the disk now and then, until the engine is gone.
pub(crate) fn spawn(engine: &Arc<Engine>) {
    let weak = Arc::downgrade(engine);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(PERIOD).await;
            let Some(node) = Weak::upgrade(&weak).map(|engine| engine.node().clone()) else { return };
            // It may hang, where the file system is remote.
            let looked = tokio::task::spawn_blocking(move || look(&node)).await;
            if looked.is_err() {
                return;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_gets_worse_at_once_and_better_with_some_in_hand() {
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
