//! Store ownership: fencing terms, and what a fenced process can still do.
//!
//! A store has one owner at a time, which writes its partitions and collects its garbage: the
//! process that began the latest *term* ([`Term`]). Beginning a term takes the store away from the
//! previous owner. The previous owner may not notice; cut off from everything but the store, it can
//! run on for a long time as a *zombie*. What a zombie can still do, and why it is harmless:
//!
//! - **Commits.** Its log of `shared` partitions is sealed ([`fulmar_store`]'s `log/shared`).
//!   `local` partitions are never taken over; starting two nodes on copies of one data directory
//!   gives two databases, one of which survives.
//! - **Stores a manifest.** The manifest contains only versions that are durable in its log, and
//!   has a number of its own term, below all that its successor commits or stores
//!   ([`StoreOwnership::first_number`]). If the successor has already stored a manifest, the
//!   zombie's is history; otherwise it is the same version in another place. The zombie never
//!   continues from a version of its successor ([`StoreOwnership::check_number`]).
//! - **Stores a segment and references it later.** It puts a manifest only if the store confirmed
//!   its term within the last 5 minutes
//!   ([`Node::check_term_confirmed`](crate::Node::check_term_confirmed)); its successor deletes no
//!   segments of earlier terms during its first hour ([`StoreOwnership::may_delete`]). If the
//!   process is suspended in between nevertheless, it checks again after the put, and deletes a
//!   manifest that references a deleted segment (`flush` in `fulmar_maintenance`).
//! - **Deletes.** It deletes only objects that it listed and afterwards found to be still its own
//!   ([`Node::check_term`](crate::Node::check_term)), so it knew everything that referenced them.
//!   The head of `collect` in `fulmar_maintenance` argues why they are garbage forever.
//! - **Branches and restores.** Both store manifests, and check after the put that the objects
//!   these reference are still present.
//! - **Publishes its catalog.** It uses a number of its own term, below all numbers of its
//!   successor (`meta/catalog_replication`).
//!
//! A process that finds the store taken over stops flushing, collecting and committing.
//!
//! # When zombies are gone
//! Requests that an earlier process has sent to the store may arrive late, and the process may have
//! been suspended during a flush. Object stores reject requests signed more than 15 minutes ago,
//! connections time out sooner, and a flush references its segment within minutes. One hour after
//! the beginning of a term, nothing of earlier terms arrives any more. A process that shuts down
//! cleanly records how much of that hour is left.
//!
//! A store inside the data directory has no terms: the directory is locked, so no other process can
//! own it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fulmar_pages::SegmentId;
use fulmar_sqlite::Result;
use fulmar_store::{MAX_TERM, PageStore, Term, VERSION_BITS};

use crate::clock::Clock;
use crate::error::{store_error, taken_over};

/// How long writes of earlier terms may still arrive.
const FENCED_WRITE_GRACE: Duration = Duration::from_secs(3600);
/// Maximum age of the term's last confirmation when a manifest is put. This plus the duration of
/// the put must stay far below [`FENCED_WRITE_GRACE`].
const MAX_CONFIRMATION_AGE: Duration = Duration::from_secs(300);

/// The term in which a version was made, from its number. 0 if the store has no terms.
pub fn term_of(number: u64) -> u32 {
    (number >> VERSION_BITS) as u32
}

/// The term that this process began.
#[derive(Debug)]
pub struct StoreOwnership {
    term: Term,
    /// From this time on nothing of earlier terms arrives (monotonic milliseconds).
    exclusive_from_ms: u64,
    /// Another process has begun a later term.
    is_fenced: AtomicBool,
    /// When the store last confirmed the term (monotonic milliseconds, taken before the request).
    confirmed_ms: AtomicU64,
}

impl StoreOwnership {
    /// Takes over a store by beginning a new term.
    pub async fn begin(store: &PageStore, clock: &Clock) -> Result<StoreOwnership> {
        let asked_ms = clock.monotonic_ms();
        let term = store.start_term().await.map_err(store_error)?;
        let wait = term.quiet_period.unwrap_or(FENCED_WRITE_GRACE).min(FENCED_WRITE_GRACE);
        let alone_ms = clock.monotonic_ms() + wait.as_millis() as u64;
        Ok(StoreOwnership {
            term,
            exclusive_from_ms: alone_ms,
            is_fenced: AtomicBool::new(false),
            confirmed_ms: AtomicU64::new(asked_ms),
        })
    }

    /// The term.
    pub fn term(&self) -> &Term {
        &self.term
    }

    /// The smallest version number of this term. All earlier terms have smaller numbers.
    pub(crate) fn first_number(&self) -> u64 {
        u64::from(self.term.number) << VERSION_BITS
    }

    /// Fails if a later term made this version: a fenced process must not continue from it.
    pub fn check_number(&self, number: u64) -> Result<()> {
        match term_of(number) > self.term.number {
            true => Err(taken_over()),
            false => Ok(()),
        }
    }

    /// Whether another process is known to own the store.
    pub fn is_fenced(&self) -> bool {
        self.is_fenced.load(Ordering::Relaxed)
    }

    /// Fails if another process has begun a later term.
    pub async fn check(&self, store: &PageStore, clock: &Clock) -> Result<()> {
        let asked_ms = clock.monotonic_ms();
        if !self.is_fenced() && store.is_last_term(&self.term).await.map_err(store_error)? {
            self.confirmed_ms.fetch_max(asked_ms, Ordering::Relaxed);
            return Ok(());
        }
        if !self.is_fenced.swap(true, Ordering::Relaxed) {
            tracing::error!("another process has taken over the store; this node no longer accepts commits");
        }
        Err(taken_over())
    }

    /// Whether the store has confirmed the term within the last 5 minutes.
    pub(crate) fn is_confirmed(&self, clock: &Clock) -> bool {
        let age_ms = clock.monotonic_ms().saturating_sub(self.confirmed_ms.load(Ordering::Relaxed));
        !self.is_fenced() && age_ms <= MAX_CONFIRMATION_AGE.as_millis() as u64
    }

    /// Ends the term. None of this process's requests to the store may be in flight.
    pub async fn end(&self, store: &PageStore, clock: &Clock) -> Result<()> {
        let wait_ms = self.exclusive_from_ms.saturating_sub(clock.monotonic_ms());
        store.end_term(&self.term, Duration::from_millis(wait_ms)).await.map_err(store_error)
    }

    /// Whether an unreferenced segment can be deleted, as far as other processes are concerned:
    /// true if none of them can reference it later.
    pub fn may_delete(&self, segment: SegmentId, now_ms: u64) -> bool {
        // Before there were terms all bits were random.
        let term = if segment.term() > MAX_TERM { 0 } else { segment.term() };
        term == self.term.number || (term < self.term.number && now_ms >= self.exclusive_from_ms)
    }
}
