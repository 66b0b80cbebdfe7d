//! A commit log as objects in a store: acknowledged commits survive the loss of the node's machine.
//!
//! ```text
//!   logs/NODE/0000000000000007/0000000000000000    claim     incarnation 7 of the node has started
//!                             /0000000000000001    records   a batch of commits of any tenants
//!                             /0000000000000002    records
//!                             /0000000000000003    seal      ... and has ended
//!   logs/NODE/0000000000000008/0000000000000000    claim
//! ```
//!
//! Each start of a node begins a new log, its next *incarnation*. The log's objects are created in
//! sequence under numbered names, each with create-if-absent: a name is a *slot*, which exactly one
//! writer wins.
//!
//! # Writing
//!
//! A task batches appended records and puts each batch as one object, with several puts in flight.
//! A new put starts when another one completes, when its batch is full, or at intervals that spread
//! the puts evenly over the latency of a put. A slow store therefore gets larger batches, not more
//! of them. Puts may complete in any order. Only the **contiguous prefix** is durable and
//! acknowledged.
//!
//! A put that failed or timed out is repeated until its outcome is known: either the writer's
//! object stands in the slot, or another one does. "Already exists" may refer to the writer's own
//! first attempt, so the object is read back and compared; it contains the writer's random id. No
//! commit is answered before the outcome is known. While the store cannot be reached, new records
//! are rejected.
//!
//! # Sealing and fencing
//!
//! A process that takes over a log closes it: it puts a *seal* into the slot after the last
//! contiguous object. If it loses that slot to a put in flight, it tries the next one, and limits
//! how far the old writer can get by a second seal further ahead ([`recovery`]). Once the first
//! seal is stored, the log's end is fixed permanently. If the old writer is still alive, it finds
//! the seal in a slot that it needed for records, and is *fenced*: none of its later objects will
//! ever be part of a contiguous prefix, even if some exist after the seal, and it has acknowledged
//! none of them. It reports their commits as lost if rule 3 below makes that certain, and their
//! outcome as unknown otherwise.
//!
//! A start seals all earlier incarnations, because their processes may be alive or their puts still
//! in flight.
//!
//! # Space and zombies
//!
//! The unflushed objects, which a start reads, are bounded in number and bytes ([`state`]). The log
//! notifies the engine when a flush is due. If no commit states what a flush has covered, a *mark*,
//! an object without records, does ([`writer`]).
//!
//! An object is deleted when all its records are covered, by manifests or by copies in later
//! durable objects (the records of a partition that cannot be opened are carried forward). A
//! deleted slot is free again. A delayed put may take it, or a seal for a log whose state was read
//! long ago, or a writer that does not know of the takeover. The object of such a *zombie* must
//! have no effect, and must not make the zombie conclude that it has won the slot. Four rules
//! ensure this:
//!
//! 1. **Every object states the slot from which on the log is needed**, in its own or an earlier
//!    incarnation (the slots of a node are totally ordered). Nothing is deleted before an object
//!    that states this is durable. Reading starts at the greatest slot that any object states;
//!    objects before it are ignored. The statement is a fact about manifests and durable objects.
//!    It remains true whether or not the object itself counts. An object with the greatest
//!    statement always exists.
//! 2. **The seal that ends a log is never deleted.** A fenced writer that retries a slot below the
//!    seal can only put the object that was read when the log was sealed, so it is right to
//!    acknowledge it. At the seal itself it always fails. A seal has about 100 bytes, and there is
//!    one per start.
//! 3. **A lost slot proves a loss only if nothing was deleted there.** A writer that finds another
//!    object in a slot where its own put timed out cannot conclude from that object which one was
//!    first. Its own object may have been stored, read by a successor, covered by manifests and
//!    deleted, before a late seal took the free slot. The writer therefore lists and reads the
//!    objects with greater names. If none of them states a needed slot beyond the lost one, no
//!    object that stated more was ever durable (rule 1). Then nothing was deleted there, its own
//!    object was never stored, and the loss is certain. Otherwise, or if the store does not
//!    respond, the outcome is unknown, and clients get an error that states this.
//! 4. **A writer that has won a slot lists the log again before it relies on that.** A seal counts
//!    when a new reading ends at it. A claim counts when it has the greatest name of all. If the
//!    slot had been used and deleted, objects in later slots replace it, and the listing contains
//!    one of them: names are listed in order, and the object with the greatest statement is deleted
//!    only after one with a greater name is durable, so a concurrent listing finds that one.
//!
//! # Crash points
//!
//! A process may be killed at any point. In the order of an object's life:
//!
//! | killed | the next start finds | why no acknowledged commit is lost or duplicated |
//! | --- | --- | --- |
//! | before a flush's manifest is durable | the records | the log was not truncated |
//! | after the manifest, before [`CommitLog::truncate`](super::CommitLog::truncate) | the records | the engine skips records that the manifest covers, by version |
//! | after the truncation, before an object states it | the records | the same; a truncation alone changes nothing in the store |
//! | while such an object (a commit or a mark) is put | the object, or nothing | if it is stored, it is durable, and its statement is true whether it counts or not; otherwise as before |
//! | after it, before or during the deletions | some covered objects below the needed slot | they are not read; a gap among them is no gap of the log, which starts at the needed slot |
//! | after the seal of a clean stop, during its deletions | the seal, and covered objects below it | the same; the seal has the greatest name and states the needed slot |
//! | while deleting objects that an earlier process left | seals, and the remaining objects | each of these objects is read before it is deleted, and is kept if it is a seal |
//!
//! A late deletion removes a slot below the needed one, where no object counts any more. A mark
//! takes a slot, is read back if its put is uncertain, and fences its writer like any other object.
//! A commit that arrives in the meantime is put concurrently and acknowledged after the mark.
//!
//! # Concurrent readers
//!
//! Other processes can read the durable part of the log while it is written ([`tail`]).
//!
//! # Damaged and missing objects
//!
//! An object has a checksum; a damaged object is refused and named in the error. A gap is the end
//! of a log. However, each object also states up to which slot the log was durable when it was
//! created, and a gap below that is a lost object, which is refused too. As with log files, the
//! loss of the last acknowledged object cannot be detected if no later object and no seal was
//! created. [`verify`] reads all objects and reports each one that is damaged or missing.

mod incarnation;
mod object_format;
mod objects;
mod options;
mod recovery;
mod sealed;
mod slot;
mod slots;
mod state;
mod tail;
mod verify;
mod writer;

use std::collections::BTreeSet;
use std::sync::Arc;

use fulmar_pages::PAGE_SIZE;
use futures::executor::block_on;
use tokio::time::Instant;

use super::options::Stop;
use super::progress::Progress;
use super::{FullCause, LogError, Lsn, Urgency};
use crate::store::Reliable;

use objects::Objects;
pub(super) use options::Replay;
use state::Core;

pub use options::{RecoveryProgress, SharedLogOptions};
pub use sealed::SealedLogs;
pub use slots::{LogSlot, LogSlots};
pub use tail::{LogEnd, LogObject, LogPosition, LogTail, NextRecords};
pub use verify::SharedLogCheck;

/// A log in a store.
pub(super) struct SharedLog {
    core: Arc<Core>,
}

impl SharedLog {
    pub(super) async fn open(
        options: SharedLogOptions,
        store: Reliable,
        node: u128,
        replay: &mut Replay<'_>,
    ) -> Result<Self, LogError> {
        let objects = Objects::new(store, node);
        let started = Instant::now();
        let opened = recovery::open(&objects, &options.progress).await?;
        opened.replay(replay)?;
        opened.report(started.elapsed());
        Ok(SharedLog::begin(options, objects, opened.start()))
    }

    /// Opens the log of one given incarnation ([`incarnation`]).
    pub(super) async fn open_incarnation(
        options: SharedLogOptions,
        store: Reliable,
        node: u128,
        incarnation: u64,
    ) -> Result<Self, LogError> {
        let objects = Objects::new(store, node);
        let start = incarnation::claim(&objects, incarnation).await?;
        Ok(SharedLog::begin(options, objects, start))
    }

    fn begin(options: SharedLogOptions, objects: Objects, start: writer::Start) -> Self {
        let (core, writer) = writer::begin(options, objects, start);
        tokio::spawn(writer.run());
        SharedLog { core }
    }

    pub(super) fn settle_inherited(&self) {
        if self.core.state.lock().settle_inherited() {
            self.core.work.notify_one();
        }
    }

    /// The position after the last durable object.
    pub(super) fn position(&self) -> LogPosition {
        LogPosition(self.core.state.lock().next)
    }

    pub(super) async fn nodes(store: &Reliable) -> Result<BTreeSet<u128>, LogError> {
        Objects::nodes(store).await
    }

    pub(super) async fn verify(
        store: Reliable,
        node: u128,
        replay: &mut Replay<'_>,
    ) -> Result<SharedLogCheck, LogError> {
        verify::check(&Objects::new(store, node), replay).await
    }

    pub(super) fn progress(&self) -> Arc<Progress> {
        self.core.progress.clone()
    }

    pub(super) fn append(&self, body: &[u8], urgency: Urgency) -> Result<Lsn, LogError> {
        self.core.append(body, urgency)
    }

    pub(super) fn admit(&self, body_bytes: usize, urgency: Urgency) -> Result<(), LogError> {
        self.core.state.lock().admit(&self.core.options, body_bytes, urgency)
    }

    pub(super) fn full(&self) -> Option<FullCause> {
        self.core.state.lock().full(&self.core.options, PAGE_SIZE as u64, Urgency::Immediate)
    }

    pub(super) fn oldest(&self) -> Lsn {
        Lsn(self.core.oldest())
    }

    pub(super) fn truncate(&self, upto: Lsn) {
        let durable = self.core.progress.durable();
        if self.core.state.lock().truncate(upto.0.min(durable)) {
            // A mark may be due although there are no records to put.
            self.core.work.notify_one();
        }
    }

    pub(super) fn flush_before(&self) -> Option<Lsn> {
        self.core.state.lock().flush_before(&self.core.options).map(Lsn)
    }

    pub(super) fn backlog_objects(&self) -> u64 {
        self.core.state.lock().backlog_objects() as u64
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.core.state.lock().size_bytes()
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        self.core.options.capacity_bytes
    }

    pub(super) fn close(&self) -> Result<(), LogError> {
        self.core.stop(Stop::Drain);
        block_on(self.core.progress.wait_end());
        self.core.stopped()
    }
}

impl Drop for SharedLog {
    fn drop(&mut self) {
        self.core.stop(Stop::Abandon);
    }
}

#[cfg(test)]
mod tests;
