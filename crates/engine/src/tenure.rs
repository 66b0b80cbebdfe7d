//! This process's time as the owner of a store: what it may do, and since when, because no other one owns it.
//!
//! A store has one owner at a time, its partitions' and its collector: whoever has begun the last *term* ([`Term`]). Beginning one takes
//! the store away from whoever held the term before. That one need not know it yet; it may even live for long, cut off from everything but
//! the store: a *zombie*. Of what it can still do:
//!
//! | it | why it does no harm |
//! | --- | --- |
//! | commits | of `shared` partitions its log is sealed ([`fulmar_store`]'s `log/shared`); of `local` ones nobody takes over |
//! | stores a manifest | it has nothing that is not durable in its log, and a number of its own term: below all that its successor commits or stores ([`Tenure::first_number`]). So where the successor has stored one already it is the past; else it is the same version in another place |
//! | stores a segment, and names it later | its successor deletes no segment of earlier terms before their zombies are gone ([`Tenure::may_delete`]) |
//! | deletes | only what it has listed and then found to be still its own: [`Engine::check_term`]. That it knew all of; for why it is garbage for ever see [`crate::collect`] |
//! | branches, restores | the same: they store manifests, and pin what those name |
//!
//! # When zombies are gone
//! What an earlier process has asked of the store may arrive late, and it may have been stopped in the middle of a flush for a while. Object
//! stores refuse requests that were signed more than a quarter of an hour ago, connections end sooner, and a flush names its segment
//! within minutes; so an hour after the beginning of a term nothing of earlier ones comes any more. If the process before has ended
//! well, and knew that of all before it, none is there to wait for. The same where the store lies in the data directory, which is
//! locked.

use std::time::Duration;

use fulmar_pages::SegmentId;
use fulmar_store::{PageStore, Term};

use crate::clock::Clock;
use crate::partition::store_error;
use crate::{Engine, Error, Result, sqlstate};

/// How long something of an earlier term may still arrive.
const ZOMBIES_LAST: Duration = Duration::from_secs(3600);

/// Versions' numbers have the term above so many bits.
const NUMBER_BITS: u32 = 40;

/// The term that this process has begun.
#[derive(Debug)]
pub(crate) struct Tenure {
    term: Term,
    /// From when on nothing of earlier terms arrives (monotonic milliseconds).
    alone_ms: u64,
}

impl Tenure {
    /// Takes a store over. `is_alone`: no other process can have it, or have had it a moment ago.
    pub(crate) async fn begin(store: &PageStore, clock: &Clock, is_alone: bool) -> Result<Tenure> {
        let term = store.begin_term().await.map_err(store_error)?;
        let wait_ms = if is_alone || term.is_alone { 0 } else { ZOMBIES_LAST.as_millis() as u64 };
        Ok(Tenure { term, alone_ms: clock.monotonic_ms() + wait_ms })
    }

    /// The term.
    pub(crate) fn term(&self) -> &Term {
        &self.term
    }

    /// Versions that are made in this term have this number or a greater one. Those of all earlier terms have smaller ones.
    pub(crate) fn first_number(&self) -> u64 {
        u64::from(self.term.number) << NUMBER_BITS
    }

    /// Whether a segment that nothing names will be named by nothing later, as far as other processes go.
    pub(crate) fn may_delete(&self, segment: SegmentId, now_ms: u64) -> bool {
        segment.term() == self.term.number || (segment.term() < self.term.number && now_ms >= self.alone_ms)
    }
}

impl Engine {
    /// Refuses what only the store's owner may do, if there is another one by now. For who has listed what he is about to delete.
    pub(crate) async fn check_term(&self) -> Result<()> {
        let node = self.node();
        let Some(tenure) = &node.tenure else { return self.check_owner() };
        match node.store.is_last_term(&tenure.term).await.map_err(store_error)? {
            true => Ok(()),
            false => Err(taken_over()),
        }
    }

    /// Nothing is under way in the store any more: whoever owns it next need not wait.
    pub(crate) async fn end_term(&self) -> Result<()> {
        let node = self.node();
        match &node.tenure {
            Some(tenure) if node.clock.monotonic_ms() >= tenure.alone_ms => {
                node.store.end_term(&tenure.term).await.map_err(store_error)
            }
            _ => Ok(()),
        }
    }
}

fn taken_over() -> Error {
    Error::new(sqlstate::IO_ERROR, "another process has taken over the store")
        .detail("A node that was started later owns it now; this one deletes nothing from it any more.")
        .hint("See that one node only is started with this data directory and this store, and end this one.")
}
