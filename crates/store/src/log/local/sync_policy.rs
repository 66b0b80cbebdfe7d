//! How soon pending records must be written, and the idle announcements of threads.
//!
//! See "Appending" in the description of the local log. A thread that has called
//! [`flush_on_idle`] calls [`announce_idle`] each time before it sleeps. If it
//! does not, because a statement runs for long or blocks, its records are written nevertheless,
//! only later. Durability does not depend on the announcement.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::state::Core;

/// How soon pending records must be written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(super) enum SyncPolicy {
    /// No records are pending.
    #[default]
    None,
    /// Within the commit delay, a few milliseconds.
    Deferred,
    /// When an appending thread becomes idle, or after the maximum hold time.
    OnIdle,
    /// Immediately.
    Immediate,
}

thread_local! {
    static ANNOUNCES_IDLE: Cell<bool> = const { Cell::new(false) };
    /// The log that holds records of this thread. If a thread appends to two logs, the second is
    /// not notified, and writes the records after its maximum hold time.
    static HOLDING_LOG: RefCell<Option<Arc<Core>>> = const { RefCell::new(None) };
}

/// Declares that this thread serves many sessions, and will call [`announce_idle`] whenever
/// none of them has work. Records that it appends to a busy local log may be held until then.
pub fn flush_on_idle() {
    ANNOUNCES_IDLE.set(true);
}

/// Announces that this thread is about to sleep: the records that it has appended are to be written
/// now.
pub fn announce_idle() {
    if let Some(core) = HOLDING_LOG.take() {
        core.write_held();
    }
}

pub(super) fn thread_announces_idle() -> bool {
    ANNOUNCES_IDLE.get()
}

/// Remembers that the log holds a record of this thread.
pub(super) fn remember_held_log(core: &Arc<Core>) {
    HOLDING_LOG.with_borrow_mut(|log| {
        log.get_or_insert_with(|| core.clone());
    });
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fulmar_pages::RecordKind;
    use futures::executor::block_on;

    use super::super::LocalLog;
    use super::super::batching::MAX_COMMIT_DELAY;
    use super::*;
    use crate::files::{Fault, FaultyFiles, LogFiles, Operation, StdFiles};
    use crate::log::own_record::own_record;
    use crate::log::{LogError, LogOptions, Lsn, Urgency};

    fn open(files: impl LogFiles) -> LocalLog {
        LocalLog::open(LogOptions::default(), Arc::new(files), &mut |_, _| Ok(())).unwrap()
    }

    /// Appends to a log that holds records, and returns the sync policy of the pending batch.
    fn append(log: &LocalLog, urgency: Urgency) -> (Lsn, SyncPolicy) {
        let record = own_record(RecordKind::Seal, None);
        let mut state = log.core.state.lock();
        state.hold_until_idle = true;
        let lsn = state.append(&log.core, &record, urgency, thread_announces_idle()).unwrap();
        (lsn, state.pending.sync_policy)
    }

    #[test]
    fn records_of_an_announcing_thread_are_held_until_it_is_idle_or_a_timeout() {
        let directory = tempfile::tempdir().unwrap();
        let log = open(StdFiles::open(directory.path()).unwrap());
        let durable = |lsn: Lsn| block_on(log.progress().wait_durable(lsn.0)).unwrap();
        // Each record is pending alone: the writer has taken all earlier ones.
        let appended = |urgency| {
            let (lsn, policy) = append(&log, urgency);
            log.core.write_held();
            log.core.wake_writer();
            durable(lsn);
            policy
        };
        assert_eq!(
            appended(Urgency::Immediate),
            SyncPolicy::Immediate,
            "a thread that does not announce idleness must not be held"
        );
        flush_on_idle();
        let ms = |ms| Urgency::Deferred(Duration::from_millis(ms));
        assert_eq!(appended(ms(20)), SyncPolicy::Deferred);
        assert_eq!(appended(ms(19)), SyncPolicy::OnIdle, "a frequent appender's record must not be deferred");
        assert_eq!(appended(Urgency::Immediate), SyncPolicy::OnIdle);
        log.core.state.lock().commit_delay = MAX_COMMIT_DELAY;
        assert_eq!(
            appended(ms(59)),
            SyncPolicy::OnIdle,
            "the gap between commits must be ten times the commit delay"
        );
        log.core.state.lock().commit_delay = MAX_COMMIT_DELAY;
        assert_eq!(appended(ms(60)), SyncPolicy::Deferred);
        assert_eq!(appended(Urgency::FreesSpace), SyncPolicy::Immediate);

        log.core.state.lock().hold_until_idle = true;
        let lsn = log.append(&own_record(RecordKind::Seal, None), Urgency::Immediate).unwrap();
        durable(lsn);
        assert!(
            HOLDING_LOG.with_borrow(Option::is_some),
            "a held record must become durable even if the thread is not idle"
        );
        let (lsn, _) = append(&log, Urgency::Immediate);
        announce_idle();
        assert_ne!(log.core.state.lock().pending.sync_policy, SyncPolicy::OnIdle);
        assert!(HOLDING_LOG.with_borrow(Option::is_none));
        log.core.wake_writer();
        durable(lsn);
        log.close().unwrap();
    }

    #[test]
    fn held_records_are_lost_with_a_failed_sync_and_written_by_close() {
        flush_on_idle();
        let files = FaultyFiles::new();
        let log = open(files.clone());
        let progress = log.progress();
        files.fail_next_of("fulmar-log", Operation::Sync, Fault::Io);
        let (lost, policy) = append(&log, Urgency::Immediate);
        assert_eq!(policy, SyncPolicy::OnIdle);
        log.core.wake_writer();
        // The thread does not become idle in between.
        assert!(matches!(block_on(progress.wait_durable(lost.0)), Err(LogError::Discarded { .. })));
        let (kept, policy) = append(&log, Urgency::Immediate);
        assert_eq!(policy, SyncPolicy::OnIdle);
        log.close().unwrap();
        block_on(progress.wait_durable(kept.0)).unwrap();
    }
}
