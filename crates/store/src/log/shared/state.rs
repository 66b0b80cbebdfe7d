//! State shared by a shared log's callers and its writer.
//!
//! # The backlog
//!
//! The *backlog* consists of the durable objects that no truncation has covered. A start reads
//! them. It has a limit in objects ([`SharedLogOptions::backlog_objects`]), because reading an
//! object costs a request, however small it is, and one in bytes
//! ([`SharedLogOptions::backlog_bytes`]):
//!
//! ```text
//!   0 ------- 1/4 ---------------- 1/2 ------------------------- 1 ----------->
//!              ^                    | a flush is due, of records | at the limit in objects, puts
//!              '- the flush leaves -'   before the newest        |   are throttled: one when an
//!                 this much             quarter of the limit         object is full, or every
//!                                                                    100 ms
//! ```
//!
//! The other half of the limit is for objects that are appended while the flush runs. Throttling
//! puts bounds the number of objects if flushes cannot keep up or fail: commits wait up to 100 ms
//! longer, and are rejected only when the log is full. The limit in bytes throttles nothing, since
//! a delay batches records but does not reduce their size. If flushes cannot keep up or fail, the
//! backlog grows to the log's capacity.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::object_format::{self, HEAD_BYTES, LENGTH_BYTES};
use super::options::SharedLogOptions;
use super::slot::Slot;
use crate::log::options::{RESERVE_DIVISOR, Stop};
use crate::log::progress::Progress;
use crate::log::{FullCause, LogError, Lsn, Urgency};

/// Maximum length of a record: its length must fit into 32 bits, and a put must complete in time.
const MAX_BODY_BYTES: u64 = 1 << 30;

pub(super) struct Core {
    pub(super) options: SharedLogOptions,
    pub(super) progress: Arc<Progress>,
    pub(super) state: Mutex<State>,
    /// Notifies the writer that there is work.
    pub(super) work: Notify,
}

/// Whether the log accepts records.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    Running,
    /// The store has rejected an object for some time.
    Unreachable(Arc<str>),
    /// The writer has stopped. Contains the error if the log could not be sealed.
    Closed(Option<LogError>),
}

/// Records of one object.
pub(super) struct Batch {
    /// The object's bytes, whose head is not filled in yet.
    pub(super) bytes: Vec<u8>,
    pub(super) records: u64,
    /// Position of the object's end.
    pub(super) end: u64,
}

impl Batch {
    /// An object without records at a position.
    pub(super) fn mark(end: u64) -> Batch {
        Batch { bytes: object_format::begin(), records: 0, end }
    }
}

/// A valid object that is needed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    pub(super) slot: Slot,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) bytes: u64,
}

/// State protected by the lock.
pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) stop: Stop,
    pub(super) appended: u64,
    /// Objects to put, oldest first. Only the last one takes further records.
    pub(super) pending: VecDeque<Batch>,
    /// Bytes of records that were appended and are not yet durable.
    open_bytes: u64,
    /// Durable objects that no truncation has covered, oldest first.
    live: VecDeque<Live>,
    live_bytes: u64,
    /// Objects that were covered since. They are deleted once a durable object states it.
    pub(super) covered: VecDeque<Slot>,
    /// Time at which the first of them was covered.
    pub(super) covered_since: Instant,
    /// The slot after the last durable one.
    pub(super) next: Slot,
    /// Records of earlier incarnations, which this log has not read, may be unflushed.
    has_inherited: bool,
}

impl Core {
    pub(super) fn append(&self, body: &[u8], urgency: Urgency) -> Result<Lsn, LogError> {
        let mut state = self.state.lock();
        state.admit(&self.options, body.len(), urgency)?;
        let batches = state.pending.len();
        state.push(self.options.object_bytes, body);
        let position = state.appended;
        self.progress.set_appended(position);
        // The writer's timer handles further records of a batch.
        let wake = state.pending.len() > batches;
        drop(state);
        if wake {
            self.work.notify_one();
        }
        Ok(Lsn(position))
    }

    pub(super) fn oldest(&self) -> u64 {
        let state = self.state.lock();
        state.live.front().map_or_else(|| self.progress.durable(), |live| live.start)
    }

    /// Records that the store rejects an object.
    pub(super) fn set_unreachable(&self, cause: &str) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Running) {
            tracing::error!(%cause, "could not write commit log to the object store; retrying");
            state.phase = Phase::Unreachable(cause.into());
        }
        drop(state);
        self.progress.wake_room();
        self.work.notify_one();
    }

    pub(super) fn stop(&self, stop: Stop) {
        let mut state = self.state.lock();
        if state.stop == Stop::No {
            state.stop = stop;
        }
        drop(state);
        self.work.notify_one();
    }

    /// Called when the writer stops: nothing that is not yet durable will become durable.
    pub(super) fn closed(&self, error: Option<LogError>) {
        self.state.lock().phase = Phase::Closed(error);
        self.progress.end();
    }

    /// Returns how the writer has stopped.
    pub(super) fn stopped(&self) -> Result<(), LogError> {
        match &self.state.lock().phase {
            Phase::Closed(Some(error)) => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

impl State {
    pub(super) fn new(position: u64, live: VecDeque<Live>, next: Slot, has_inherited: bool) -> Self {
        State {
            phase: Phase::Running,
            stop: Stop::No,
            appended: position,
            pending: VecDeque::new(),
            open_bytes: 0,
            live_bytes: live.iter().map(|live| live.bytes).sum(),
            live,
            covered: VecDeque::new(),
            covered_since: Instant::now(),
            next,
            has_inherited,
        }
    }

    /// Checks whether a record of `body_bytes` can be appended now.
    pub(super) fn admit(
        &self,
        options: &SharedLogOptions,
        body_bytes: usize,
        urgency: Urgency,
    ) -> Result<(), LogError> {
        match (&self.phase, self.stop) {
            (Phase::Closed(Some(fenced @ LogError::Fenced { .. })), _) => return Err(fenced.clone()),
            (Phase::Closed(_), _) | (_, Stop::Drain | Stop::Abandon) => return Err(LogError::Closed),
            (Phase::Unreachable(cause), _) => return Err(LogError::Unreachable { cause: cause.clone() }),
            (Phase::Running, Stop::No) => {}
        }
        let (bytes, most) = (body_bytes as u64, MAX_BODY_BYTES.min(options.capacity_bytes / 2));
        if bytes > most {
            return Err(LogError::TooLong { bytes, most });
        }
        if self.open_bytes > 0 && self.open_bytes + bytes > options.pending_bytes as u64 {
            return Err(LogError::Busy);
        }
        self.full(options, bytes, urgency).map_or(Ok(()), |cause| Err(LogError::Full(cause)))
    }

    /// Returns the cause if a record of `bytes` does not fit until the log is truncated.
    pub(super) fn full(&self, options: &SharedLogOptions, bytes: u64, urgency: Urgency) -> Option<FullCause> {
        let SharedLogOptions { capacity_bytes, .. } = *options;
        let reserve_bytes = match urgency {
            Urgency::FreesSpace => capacity_bytes / RESERVE_DIVISOR,
            Urgency::Immediate | Urgency::Deferred(_) => 0,
        };
        let is_full = self.live_bytes + self.open_bytes + bytes > capacity_bytes + reserve_bytes;
        is_full.then_some(FullCause::Capacity { capacity_bytes })
    }

    fn push(&mut self, object_bytes: usize, body: &[u8]) {
        let bytes = (LENGTH_BYTES + body.len()) as u64;
        self.appended += bytes;
        self.open_bytes += bytes;
        let fits = |batch: &Batch| batch.bytes.len() < object_bytes.max(HEAD_BYTES + 1);
        if !self.pending.back().is_some_and(fits) {
            self.pending.push_back(Batch { bytes: object_format::begin(), records: 0, end: 0 });
        }
        if let Some(batch) = self.pending.back_mut() {
            object_format::push(&mut batch.bytes, body);
            batch.records += 1;
            batch.end = self.appended;
        }
    }

    /// Records that an object and all before it are durable.
    pub(super) fn durable(&mut self, live: Live) {
        self.open_bytes -= live.end - live.start;
        self.live_bytes += live.bytes;
        self.live.push_back(live);
        self.next = live.slot.next();
        if matches!(self.phase, Phase::Unreachable(_)) {
            self.phase = Phase::Running;
        }
    }

    /// The slot from which on the log is needed. Slot 0 of incarnation 0 if that is unknown.
    pub(super) fn needed(&self) -> Slot {
        if self.has_inherited {
            return Slot::default();
        }
        self.live.front().map_or(self.next, |live| live.slot)
    }

    /// Covers the objects before a position. Returns true if there were any. A mark of this
    /// incarnation at the log's end is not covered, because another mark would be needed to state
    /// that. Claims and marks of earlier incarnations are covered.
    pub(super) fn truncate(&mut self, upto: u64) -> bool {
        if self.covered.is_empty() {
            self.covered_since = Instant::now();
        }
        let (before, incarnation) = (self.covered.len(), self.next.incarnation);
        let end = self.live.back().map_or(0, |live| live.end);
        let is_last_mark = |live: &Live| live.start == end && live.slot.incarnation == incarnation;
        while let Some(live) = self.live.pop_front_if(|live| live.end <= upto && !is_last_mark(live)) {
            self.live_bytes -= live.bytes;
            self.covered.push_back(live.slot);
        }
        self.covered.len() > before
    }

    /// Returns true if an object that is put now states more than earlier ones.
    pub(super) fn has_unstated(&self) -> bool {
        !self.has_inherited && !self.covered.is_empty()
    }

    /// Records that all records of earlier incarnations are flushed. Returns true if a mark may be
    /// due now.
    pub(super) fn settle_inherited(&mut self) -> bool {
        self.has_inherited = false;
        self.covered_since = Instant::now();
        !self.covered.is_empty()
    }

    /// Called before the log is sealed. If only marks of this incarnation are left, the seal covers
    /// them: it states what they state, and none has records. Returns the first needed slot.
    pub(super) fn cover_marks(&mut self) -> Slot {
        let incarnation = self.next.incarnation;
        if self.live.iter().all(|live| live.start == live.end && live.slot.incarnation == incarnation) {
            self.live_bytes = 0;
            self.covered.extend(self.live.drain(..).map(|live| live.slot));
        }
        self.needed()
    }

    /// Number of objects that a start would read.
    pub(super) fn backlog_objects(&self) -> usize {
        self.live.len()
    }

    /// Returns true if the backlog has reached its limit in objects.
    pub(super) fn backlog_is_full(&self, options: &SharedLogOptions) -> bool {
        self.live.len() >= options.backlog_objects
    }

    /// Returns true if the backlog exceeds half of one of its limits.
    pub(super) fn flush_is_due(&self, options: &SharedLogOptions) -> bool {
        self.live.len() > options.backlog_objects / 2 || self.live_bytes > options.backlog_bytes / 2
    }

    /// If a flush is due, returns the position before which records must be flushed, so that a
    /// quarter of the limit remains.
    pub(super) fn flush_before(&self, options: &SharedLogOptions) -> Option<u64> {
        if !self.flush_is_due(options) {
            return None;
        }
        let mut bytes = 0;
        let newest = self.live.iter().rev().take(options.backlog_objects / 4).take_while(|live| {
            bytes += live.bytes;
            bytes <= options.backlog_bytes / 4
        });
        // The newest object alone may exceed a quarter.
        let end = self.live.back().map(|live| live.end);
        newest.last().map(|live| live.start).or(end)
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.live_bytes + self.open_bytes
    }
}
