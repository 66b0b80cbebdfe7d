//! What the log's callers and its writer share.
//!
//! # The backlog
//!
//! The *backlog* are the durable objects that no truncation has covered: a start would read them. It is bounded in objects and in
//! bytes ([`SharedLogOptions::backlog_objects`]), because reading an object costs a request however small it is:
//!
//! ```text
//!   0 ------- 1/4 ---------------- 1/2 ------------------------- 1 ----------->
//!              ^                    | a flush is due: of records  | puts are spread out: one when an
//!              '-- is left by it ---'   before the newest          |   object is full, or every 100 ms
//!                                       quarter of the bound
//! ```
//!
//! The other half of the bound is for objects that are appended while the flush runs. Spreading puts out keeps the number of objects bounded
//! when flushes cannot keep up or fail: commits wait up to 100 ms longer and are refused only when the log is full.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::object::{self, HEAD_BYTES, LENGTH_BYTES};
use super::{FullCause, LogError, Lsn, RESERVE_PART, SharedLogOptions, Slot, Stop, Urgency};
use crate::log::progress::Progress;

/// The longest record: its length must fit, and a put must end.
const MAX_BODY_BYTES: u64 = 1 << 30;

pub(super) struct Core {
    pub(super) options: SharedLogOptions,
    pub(super) progress: Arc<Progress>,
    pub(super) state: Mutex<State>,
    /// Tells the writer that there is something to do.
    pub(super) work: Notify,
}

/// Whether the log takes records.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    Running,
    /// The store has not taken an object for a while.
    Troubled(Arc<str>),
    /// The writer has ended. With the reason, if the log could not be sealed.
    Closed(Option<LogError>),
}

/// Records that make one object.
pub(super) struct Batch {
    /// The object's bytes, its head not filled in.
    pub(super) bytes: Vec<u8>,
    pub(super) records: u64,
    /// The position of its end.
    pub(super) end: u64,
}

/// An object that counts and is needed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    pub(super) slot: Slot,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) bytes: u64,
}

/// What the state's lock protects.
pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) stop: Stop,
    pub(super) appended: u64,
    /// Objects to be put, oldest first; only the last one takes further records.
    pub(super) pending: VecDeque<Batch>,
    /// Bytes of records that were appended and are not durable.
    open_bytes: u64,
    /// The durable objects that no truncation has covered, oldest first.
    live: VecDeque<Live>,
    live_bytes: u64,
    /// Those that were covered since: to be deleted when a durable object says so.
    pub(super) covered: VecDeque<Slot>,
    /// When the first of these was covered.
    pub(super) covered_since: Instant,
    /// The slot after the last durable one.
    pub(super) next: Slot,
}

impl Core {
    pub(super) fn append(&self, body: &[u8], urgency: Urgency) -> Result<Lsn, LogError> {
        let mut state = self.state.lock();
        state.admit(&self.options, body.len(), urgency)?;
        let batches = state.pending.len();
        state.push(self.options.object_bytes, body);
        let position = state.appended;
        self.progress.set_appended(position);
        // The writer looks at the time for the rest of a batch.
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

    /// The store does not take an object.
    pub(super) fn trouble(&self, cause: &str) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Running) {
            tracing::error!(%cause, "the log in the store cannot be written; it is tried again");
            state.phase = Phase::Troubled(cause.into());
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

    /// The writer ends: nothing that is not yet durable will be.
    pub(super) fn closed(&self, error: Option<LogError>) {
        self.state.lock().phase = Phase::Closed(error);
        self.progress.end();
    }

    /// How the writer has ended.
    pub(super) fn stopped(&self) -> Result<(), LogError> {
        match &self.state.lock().phase {
            Phase::Closed(Some(error)) => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

impl State {
    pub(super) fn new(position: u64, live: VecDeque<Live>, next: Slot) -> Self {
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
        }
    }

    /// Whether a record of so many bytes could be appended now.
    pub(super) fn admit(
        &self,
        options: &SharedLogOptions,
        body_bytes: usize,
        urgency: Urgency,
    ) -> Result<(), LogError> {
        match (&self.phase, self.stop) {
            (Phase::Closed(Some(fenced @ LogError::Fenced { .. })), _) => return Err(fenced.clone()),
            (Phase::Closed(_), _) | (_, Stop::Drain | Stop::Abandon) => return Err(LogError::Closed),
            (Phase::Troubled(cause), _) => return Err(LogError::Unreachable { cause: cause.clone() }),
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

    /// Whether there is no room for so many bytes of a record, until the log is cut.
    pub(super) fn full(&self, options: &SharedLogOptions, bytes: u64, urgency: Urgency) -> Option<FullCause> {
        let SharedLogOptions { capacity_bytes, .. } = *options;
        let reserve_bytes = match urgency {
            Urgency::MakesRoom => capacity_bytes / RESERVE_PART,
            Urgency::Prompt | Urgency::Patient(_) => 0,
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
            self.pending.push_back(Batch { bytes: object::begin(), records: 0, end: 0 });
        }
        if let Some(batch) = self.pending.back_mut() {
            object::push(&mut batch.bytes, body);
            batch.records += 1;
            batch.end = self.appended;
        }
    }

    /// An object is durable, and all before it are.
    pub(super) fn durable(&mut self, live: Live) {
        self.open_bytes -= live.end - live.start;
        self.live_bytes += live.bytes;
        self.live.push_back(live);
        self.next = live.slot.next();
        if matches!(self.phase, Phase::Troubled(_)) {
            self.phase = Phase::Running;
        }
    }

    /// From which slot on the log is needed.
    pub(super) fn needed(&self) -> Slot {
        self.live.front().map_or(self.next, |live| live.slot)
    }

    /// Covers the objects before a position. Returns whether there were any. A mark of this incarnation at the log's end is not
    /// covered: that would only take another mark to state. Claims and marks of earlier incarnations are.
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

    /// The log is about to be sealed. If only marks are left, the seal covers them: it states what they state, and neither
    /// has records. Returns from which slot on the log is needed.
    pub(super) fn cover_marks(&mut self) -> Slot {
        let incarnation = self.next.incarnation;
        if self.live.iter().all(|live| live.start == live.end && live.slot.incarnation == incarnation) {
            self.live_bytes = 0;
            self.covered.extend(self.live.drain(..).map(|live| live.slot));
        }
        self.needed()
    }

    /// Objects that a start would read.
    pub(super) fn backlog_objects(&self) -> usize {
        self.live.len()
    }

    /// Whether the backlog is as long as it may be.
    pub(super) fn backlog_is_full(&self, options: &SharedLogOptions) -> bool {
        self.live.len() >= options.backlog_objects
    }

    /// Whether the backlog takes more than half of its bound.
    pub(super) fn flush_is_due(&self, options: &SharedLogOptions) -> bool {
        self.live.len() > options.backlog_objects / 2 || self.live_bytes > options.backlog_bytes / 2
    }

    /// If a flush is due: the position before which records are to be flushed, so that a quarter of the bound is left.
    pub(super) fn flush_before(&self, options: &SharedLogOptions) -> Option<u64> {
        if !self.flush_is_due(options) {
            return None;
        }
        let mut bytes = 0;
        let newest = self.live.iter().rev().take(options.backlog_objects / 4).take_while(|live| {
            bytes += live.bytes;
            bytes <= options.backlog_bytes / 4
        });
        // The newest object alone may be longer than a quarter.
        let end = self.live.back().map(|live| live.end);
        newest.last().map(|live| live.start).or(end)
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.live_bytes + self.open_bytes
    }
}
