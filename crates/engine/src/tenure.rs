//! This process's time as the owner of a store: what it may do, and since when, because no other one owns it.
//!
//! A store has one owner at a time, its partitions' and its collector: whoever has begun the last *term* ([`Term`]). Beginning one takes
//! the store away from whoever held the term before. That one need not know it yet; it may even live for long, cut off from everything but
//! the store: a *zombie*. Of what it can still do:
//!
//! | it | why it does no harm |
//! | --- | --- |
//! | commits | of `shared` partitions its log is sealed ([`fulmar_store`]'s `log/shared`). Of `local` ones nobody takes over; who copies a data directory and starts both has two databases, of which one stays |
//! | stores a manifest | it has nothing that is not durable in its log, and a number of its own term: below all that its successor commits or stores ([`Tenure::first_number`]). So where the successor has stored one already it is the past; else it is the same version in another place. What its successor has stored it does not go on from ([`Tenure::check_number`]) |
//! | stores a segment, and names it later | it puts a manifest only if the store has confirmed its term in the last five minutes ([`Engine::check_term_confirmed`]); its successor deletes no segment of earlier terms before an hour ([`Tenure::may_delete`]). If it is stopped between the two all the same, it finds that out after the put, and deletes a manifest that names a deleted segment ([`crate::flush`]) |
//! | deletes | only what it has listed and then found to be still its own: [`Engine::check_term`]. That it knew all of; for why it is garbage for ever see [`crate::collect`] |
//! | branches, restores | the same: they store manifests, and what those name was there behind that |
//! | publishes its catalog | under a number of its own term, below all of its successor's (`meta/published`) |
//!
//! Who has found out that the store is another one's flushes, collects and commits nothing any more.
//!
//! # When zombies are gone
//! What an earlier process has asked of the store may arrive late, and it may have been stopped in the middle of a flush for a while. Object
//! stores refuse requests that were signed more than a quarter of an hour ago, connections end sooner, and a flush names its segment
//! within minutes; so an hour after the beginning of a term nothing of earlier ones comes any more. A process that ends well says how
//! much of that is left. Where the store lies in the data directory, which is locked, no other process
//! can have it, and it has no terms.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fulmar_pages::SegmentId;
use fulmar_store::{MOST_TERMS, PageStore, Term, VERSION_BITS};

use crate::clock::Clock;
use crate::partition::store_error;
use crate::{Engine, Error, Result, sqlstate};

/// How long something of an earlier term may still arrive.
const ZOMBIES_LAST: Duration = Duration::from_secs(3600);
/// How old the last confirmation of the term may be when a manifest is put. With the time that the put itself takes this must
/// stay far below [`ZOMBIES_LAST`].
const CONFIRMATION_LASTS: Duration = Duration::from_secs(300);

/// The term in which a version was made, by its number; 0 where there are no terms.
pub(crate) fn term_of(number: u64) -> u32 {
    (number >> VERSION_BITS) as u32
}

/// The term that this process has begun.
#[derive(Debug)]
pub(crate) struct Tenure {
    term: Term,
    /// From when on nothing of earlier terms arrives (monotonic milliseconds).
    alone_ms: u64,
    /// Another process has begun a later one.
    is_over: AtomicBool,
    /// When the store was last asked for the term and confirmed it (monotonic milliseconds, before the request).
    confirmed_ms: AtomicU64,
}

impl Tenure {
    /// Takes a store over.
    pub(crate) async fn begin(store: &PageStore, clock: &Clock) -> Result<Tenure> {
        let asked_ms = clock.monotonic_ms();
        let term = store.begin_term().await.map_err(store_error)?;
        let wait = term.wait.unwrap_or(ZOMBIES_LAST).min(ZOMBIES_LAST);
        let alone_ms = clock.monotonic_ms() + wait.as_millis() as u64;
        Ok(Tenure { term, alone_ms, is_over: AtomicBool::new(false), confirmed_ms: AtomicU64::new(asked_ms) })
    }

    /// The term.
    pub(crate) fn term(&self) -> &Term {
        &self.term
    }

    /// Versions that are made in this term have this number or a greater one. Those of all earlier terms have smaller ones.
    pub(crate) fn first_number(&self) -> u64 {
        u64::from(self.term.number) << VERSION_BITS
    }

    /// Refuses to go on from a version that a later term has made.
    pub(crate) fn check_number(&self, number: u64) -> Result<()> {
        match term_of(number) > self.term.number {
            true => Err(taken_over()),
            false => Ok(()),
        }
    }

    /// Whether another process is known to own the store.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Whether a segment that nothing names will be named by nothing later, as far as other processes go.
    pub(crate) fn may_delete(&self, segment: SegmentId, now_ms: u64) -> bool {
        // Before there were terms all bits were random.
        let term = if segment.term() > MOST_TERMS { 0 } else { segment.term() };
        term == self.term.number || (term < self.term.number && now_ms >= self.alone_ms)
    }
}

impl Engine {
    /// Refuses what only the store's owner may do, if there is another one by now. For who has listed what he is about to delete, or
    /// is about to name what he has stored.
    pub(crate) async fn check_term(&self) -> Result<()> {
        let node = self.node();
        // Alone, or a reader.
        let Some(tenure) = &node.tenure else { return self.check_owner() };
        let asked_ms = node.clock.monotonic_ms();
        if !tenure.is_over() && node.store.is_last_term(&tenure.term).await.map_err(store_error)? {
            tenure.confirmed_ms.fetch_max(asked_ms, Ordering::Relaxed);
            return Ok(());
        }
        if !tenure.is_over.swap(true, Ordering::Relaxed) {
            tracing::error!("another process has taken over the store; this node commits nothing any more");
        }
        Err(taken_over())
    }

    /// The same just before a manifest is put: a confirmation of the last five minutes is enough. The process may have been
    /// stopped since an earlier check, for longer than its successor waits before it deletes segments.
    pub(crate) async fn check_term_confirmed(&self) -> Result<()> {
        let node = self.node();
        let is_recent = |tenure: &Tenure| {
            let age_ms =
                node.clock.monotonic_ms().saturating_sub(tenure.confirmed_ms.load(Ordering::Relaxed));
            !tenure.is_over() && age_ms <= CONFIRMATION_LASTS.as_millis() as u64
        };
        if node.tenure.as_ref().is_some_and(is_recent) {
            return Ok(());
        }
        self.check_term().await
    }

    /// Whether another process is known to own the store.
    pub(crate) fn is_taken_over(&self) -> bool {
        self.node().tenure.as_ref().is_some_and(Tenure::is_over)
    }

    /// Nothing of this process is under way in the store any more.
    pub(crate) async fn end_term(&self) -> Result<()> {
        let node = self.node();
        let Some(tenure) = &node.tenure else { return Ok(()) };
        let wait_ms = tenure.alone_ms.saturating_sub(node.clock.monotonic_ms());
        node.store.end_term(&tenure.term, Duration::from_millis(wait_ms)).await.map_err(store_error)
    }
}

pub(crate) fn taken_over() -> Error {
    Error::new(sqlstate::IO_ERROR, "another process has taken over the store")
        .detail("A node that was started later owns it now; this one flushes, collects and commits nothing any more.")
        .hint("See that one node only is started with this data directory and this store, and end this one.")
}
