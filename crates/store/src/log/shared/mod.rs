//! A log as objects of a store: what is acknowledged outlives the node's machine.
//!
//! ```text
//!   logs/NODE/0000000000000007/0000000000000000    claim     incarnation 7 of the node has begun
//!                             /0000000000000001    records   a batch of commits of any tenants
//!                             /0000000000000002    records
//!                             /0000000000000003    seal      ... and has ended
//!   logs/NODE/0000000000000008/0000000000000000    claim
//! ```
//!
//! A node begins a new log each time it starts: its next *incarnation*. The log's objects are made one after the other
//! under numbered names, each only if there is none: the name is a *slot*, which one writer gets.
//!
//! # Writing
//!
//! A task takes what was appended and puts it as one object, while it waits puts the next one, several at once. A
//! new one begins when one is done or when as much time has passed as spreads them evenly over the time that a put
//! takes, or when its bytes are enough. So a slow store gets larger batches, not more of them. Puts may end in any order;
//! what is durable is the **contiguous prefix**, and only that is acknowledged.
//!
//! A put that failed, or got no answer, is made again until it is known: our object stands in the slot, or something
//! else does. ("Already exists" may be our own first try; so the object is read, and its bytes tell: they hold the
//! writer's random id.) Nobody is answered before. While the store cannot be reached new records are refused.
//!
//! # Sealing, and being fenced
//!
//! Who takes over closes the log: a *seal* is put into the slot after the last contiguous object. If it loses that slot
//! to a put that was on its way, it tries the next one. From then on the log's end is fixed for ever: its writer, should
//! it live, finds the seal in a slot that it wanted for records, and is *fenced*: none of its later objects, though some
//! may stand behind the seal, will ever be in a contiguous prefix, and it has acknowledged none of them. It reports their
//! commits as lost if rule 3 below makes that certain, and as unknown otherwise.
//!
//! A start seals all incarnations before its own: one may still live, or its puts may still be on their way.
//!
//! # Space, and zombies
//!
//! The unflushed objects, which a start reads, are bounded in number and bytes ([`state`]). The log notifies the engine when
//! a flush is due. A *mark*, an object without records, states what a flush has covered when no commit does so ([`writer`]).
//!
//! Objects are deleted whose records are all covered: by manifests, or since they stand once more in later objects that are
//! durable (what a partition that cannot be opened has in the log is carried forward). A slot that was deleted is free again, and a put that was on its way, a seal that somebody meant for a log that he had read long ago, or a writer that knows of nothing may
//! take it. What such a *zombie* puts there must mean nothing, and must not make the zombie believe that it has won.
//! Four rules see to that:
//!
//! 1. **Every object says from which slot on the log is needed** (of this or of an earlier incarnation: slots are in one
//!    order for a node). Nothing is deleted before an object that says so is durable. Reading begins at the greatest
//!    slot that any object tells; what stands before means nothing. What an object says of this is a fact about manifests, and about
//!    objects that are durable, which stays true whether or not the object counts. One that says the greatest always stands.
//! 2. **Seals are never deleted.** A fenced writer that retries a slot below the seal can only put again what was read
//!    when the log was sealed: it is right to acknowledge it. At the seal itself it fails, for ever. (A seal takes some
//!    hundred bytes, one for each start.)
//! 3. **A lost slot proves a loss only if nothing was deleted there.** A writer that finds another object in a slot where its
//!    own put got no answer cannot tell by that object alone which was first. Its own may have stood there, was read by a
//!    successor, covered by manifests and deleted, and a late seal took the free slot. So the writer lists and reads the
//!    objects with greater names. If no needed slot that they state lies beyond the lost one, no object that stated more was
//!    ever durable (rule 1), hence nothing was deleted there: its own object never stood there, and the loss is certain.
//!    Otherwise, or if the store does not answer, the outcome is unknown, and clients get an error that states this.
//! 4. **Nobody trusts a slot that he has won until he has listed the log anew.** A seal counts when a fresh reading ends at
//!    it; a claim, when it is the greatest name of all. If the slot had been used and deleted, what replaced it stands in
//!    slots beyond, and is seen: names are listed in order, and an object that tells the greatest needed slot is
//!    deleted only after one with a greater name is durable, so that a listing that runs at the same time meets that one.
//!
//! # Crash points
//!
//! A process may be killed at any point. In the order of an object's life:
//!
//! | killed | the next start finds | why nothing acknowledged is lost or doubled |
//! | --- | --- | --- |
//! | before a flush's manifest is durable | the records | the log was not truncated |
//! | after the manifest, before [`CommitLog::truncate`](super::CommitLog::truncate) | the records | the engine passes over what the manifest covers, by its version |
//! | after the truncation, before an object states it | the records | the same; a truncation by itself changes nothing in the store |
//! | while such an object (a commit or a mark) is put | it stands in its slot or not | it stands: it is durable, so its statement is true whether it counts or not. It does not: as before |
//! | after it, before or amid the deletions | covered objects below the needed slot, some of them | they are not read. A gap among them is no gap of the log, which begins at the needed slot |
//! | after the seal of a clean stop, amid its deletions | the seal, and covered objects below it | the same; the seal has the greatest name and states the needed slot |
//! | amid the deletions of objects that an earlier process left | seals, and the rest of the objects | each of these objects is read before it is deleted, and stays if it is a seal |
//!
//! A deletion that arrives late removes a slot below the needed one, in which nothing counts any more. A mark takes a slot, is
//! read back when its put is uncertain, and fences its writer like any other object. A commit that arrives
//! meanwhile is put concurrently and acknowledged after it.
//!
//! # Reading beside the writer
//!
//! Another process may read what is durable while the log is written ([`tail`]).
//!
//! # What is damaged or missing
//!
//! An object has a checksum; one that does not read is refused, and named. A gap is a log's end; but each object also
//! says up to which slot the log was durable when it was made, and a gap below that is a lost object, which is refused
//! too. As in files, the last object that was acknowledged has no witness if no other was begun after it, nor a seal.
//! Who wants to know of every one that is not as it was written reads all of them ([`check`]).

mod check;
mod object;
mod objects;
mod open;
mod state;
mod tail;
mod writer;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use fulmar_pages::{PAGE_SIZE, Record};
use futures::executor::block_on;
use tokio::time::Instant;

use super::progress::Progress;
use super::{FullCause, LogError, Lsn, RESERVE_PART, Stop, Urgency, own_record};
use crate::store::Reliable;

use objects::Objects;
use state::Core;

pub use check::SharedLogCheck;
pub use tail::{Ahead, LogEnd, LogObject, LogPlace, LogTail};

/// The name of an object in a node's logs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
struct Slot {
    /// Which of the node's logs: they are numbered.
    incarnation: u64,
    /// Which of its objects.
    sequence: u64,
}

impl Slot {
    fn next(self) -> Slot {
        Slot { sequence: self.sequence + 1, ..self }
    }

    /// The slot before this one, whether it can have an object or not.
    fn before(self) -> Option<Slot> {
        match (self.incarnation.checked_sub(1), self.sequence.checked_sub(1)) {
            (_, Some(sequence)) => Some(Slot { sequence, ..self }),
            (Some(incarnation), None) => Some(Slot { incarnation, sequence: u64::MAX }),
            (None, None) => None,
        }
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}/{:016x}", self.incarnation, self.sequence)
    }
}

/// How a log in a store is set up.
#[derive(Clone, Debug)]
pub struct SharedLogOptions {
    /// An object that has so many bytes gets no further record (one record may be longer).
    pub object_bytes: usize,
    /// Puts at the same time, at most.
    pub in_flight: usize,
    /// The most that all objects together may take.
    pub capacity_bytes: u64,
    /// The most that may be held in memory because it is not durable yet.
    pub pending_bytes: usize,
    /// Objects that are to be flushed, at most; from half of them on a flush is due.
    pub backlog_objects: usize,
    /// The same for their bytes.
    pub backlog_bytes: u64,
    /// Counts the objects that the opening reads.
    pub progress: Arc<RecoveryProgress>,
}

impl Default for SharedLogOptions {
    fn default() -> Self {
        SharedLogOptions {
            object_bytes: 4 << 20,
            in_flight: 4,
            capacity_bytes: 1 << 30,
            pending_bytes: 64 << 20,
            backlog_objects: 4000,
            backlog_bytes: 64 << 20,
            progress: Arc::default(),
        }
    }
}

/// How many objects the opening of a shared log has read, and how many it has to read.
#[derive(Debug, Default)]
pub struct RecoveryProgress {
    read: AtomicU64,
    expected: AtomicU64,
}

impl RecoveryProgress {
    /// Objects that were read.
    pub fn read(&self) -> u64 {
        self.read.load(Relaxed)
    }

    /// Objects that are to be read, as far as is known; 0 until the first one was read.
    pub fn expected(&self) -> u64 {
        self.expected.load(Relaxed)
    }

    fn object_read(&self) {
        self.read.fetch_add(1, Relaxed);
    }

    fn expect(&self, objects: u64) {
        self.expected.store(objects, Relaxed);
    }
}

/// What is given the records that count, at an opening.
pub(super) type Replay<'a> = dyn FnMut(Lsn, &Record<'_>) -> Result<(), LogError> + Send + 'a;

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
        let begun = Instant::now();
        let opened = open::open(&objects, &options.progress).await?;
        opened.replay(replay)?;
        opened.report(begun.elapsed());
        let (core, writer) = writer::begin(options, objects, opened);
        tokio::spawn(writer.run());
        Ok(SharedLog { core })
    }

    pub(super) async fn nodes(store: &Reliable) -> Result<BTreeSet<u128>, LogError> {
        Objects::nodes(store).await
    }

    pub(super) async fn verify(
        store: Reliable,
        node: u128,
        replay: &mut Replay<'_>,
    ) -> Result<SharedLogCheck, LogError> {
        check::check(&Objects::new(store, node), replay).await
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
        self.core.state.lock().full(&self.core.options, PAGE_SIZE as u64, Urgency::Prompt)
    }

    pub(super) fn oldest(&self) -> Lsn {
        Lsn(self.core.oldest())
    }

    pub(super) fn truncate(&self, upto: Lsn) {
        let durable = self.core.progress.durable();
        if self.core.state.lock().truncate(upto.0.min(durable)) {
            // It may have nothing else to put.
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
