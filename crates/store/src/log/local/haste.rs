//! How soon what is pending must be written, and threads that say when they rest: see "Appending" in the log's description.
//!
//! A thread that has called [`say_when_this_thread_rests`] calls [`this_thread_rests`] each time before it sleeps. If it does not,
//! because one statement takes long or it blocks, its records are written all the same, only later: nobody's safety rests on it.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::state::Core;

/// How soon what is pending must be written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(super) enum Haste {
    /// There is nothing.
    #[default]
    None,
    /// It may wait for company, for a few milliseconds.
    Patient,
    /// When a thread rests that waits for some of it, or soon.
    Gathers,
    /// Now.
    Prompt,
}

thread_local! {
    static SAYS_WHEN_IT_RESTS: Cell<bool> = const { Cell::new(false) };
    /// The log in which records of this thread gather. (Of two, the second would not be told, and would write in its own time.)
    static GATHERS_IN: RefCell<Option<Arc<Core>>> = const { RefCell::new(None) };
}

/// This thread serves many sessions, and will call [`this_thread_rests`] whenever none of them has anything to do. What it
/// appends to a busy log of this disk may then wait until it does.
pub fn say_when_this_thread_rests() {
    SAYS_WHEN_IT_RESTS.set(true);
}

/// This thread has nothing to do until something comes: what it has appended shall be durable soon.
pub fn this_thread_rests() {
    if let Some(core) = GATHERS_IN.take() {
        core.hurry();
    }
}

pub(super) fn thread_says_when_it_rests() -> bool {
    SAYS_WHEN_IT_RESTS.get()
}

/// A record of this thread gathers in that log.
pub(super) fn remember(core: &Arc<Core>) {
    GATHERS_IN.with_borrow_mut(|log| {
        log.get_or_insert_with(|| core.clone());
    });
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fulmar_pages::RecordKind;
    use futures::executor::block_on;

    use super::super::LocalLog;
    use super::super::batching::MAX_NAP;
    use super::*;
    use crate::files::{Fault, FaultyFiles, LogFiles, Operation, StdFiles};
    use crate::log::{LogError, LogOptions, Lsn, Urgency, own_record};

    fn open(files: impl LogFiles) -> LocalLog {
        LocalLog::open(LogOptions::default(), Arc::new(files), &mut |_, _| Ok(())).unwrap()
    }

    /// Appends to a log for which gathering pays, and answers how hasty what is pending is then.
    fn append(log: &LocalLog, urgency: Urgency) -> (Lsn, Haste) {
        let record = own_record(RecordKind::Seal, None);
        let mut state = log.core.state.lock();
        state.gathers = true;
        let lsn = state.append(&log.core, &record, urgency, thread_says_when_it_rests()).unwrap();
        (lsn, state.pending.haste)
    }

    #[test]
    fn who_says_when_it_rests_gathers_until_then_or_for_a_while() {
        let directory = tempfile::tempdir().unwrap();
        let log = open(StdFiles::open(directory.path()).unwrap());
        let durable = |lsn: Lsn| block_on(log.progress().wait_durable(lsn.0)).unwrap();
        // Each is pending alone: the writer has taken all before.
        let appended = |urgency| {
            let (lsn, haste) = append(&log, urgency);
            log.core.hurry();
            log.core.wake_writer();
            durable(lsn);
            haste
        };
        assert_eq!(appended(Urgency::Prompt), Haste::Prompt, "nobody would say when this thread rests");
        say_when_this_thread_rests();
        let ms = |ms| Urgency::Patient(Duration::from_millis(ms));
        assert_eq!(appended(ms(20)), Haste::Patient);
        assert_eq!(appended(ms(19)), Haste::Gathers, "it comes often");
        assert_eq!(appended(Urgency::Prompt), Haste::Gathers);
        log.core.state.lock().nap = MAX_NAP;
        assert_eq!(appended(ms(59)), Haste::Gathers, "it comes often, beside such naps");
        log.core.state.lock().nap = MAX_NAP;
        assert_eq!(appended(ms(60)), Haste::Patient);
        assert_eq!(appended(Urgency::MakesRoom), Haste::Prompt);

        log.core.state.lock().gathers = true;
        let lsn = log.append(&own_record(RecordKind::Seal, None), Urgency::Prompt).unwrap();
        durable(lsn);
        assert!(GATHERS_IN.with_borrow(Option::is_some), "durable though the thread has not rested");
        let (lsn, _) = append(&log, Urgency::Prompt);
        this_thread_rests();
        assert_ne!(log.core.state.lock().pending.haste, Haste::Gathers);
        assert!(GATHERS_IN.with_borrow(Option::is_none));
        log.core.wake_writer();
        durable(lsn);
        log.close().unwrap();
    }

    #[test]
    fn what_gathers_is_lost_with_its_disk_and_written_by_a_close() {
        say_when_this_thread_rests();
        let files = FaultyFiles::new();
        let log = open(files.clone());
        let progress = log.progress();
        files.fail_next_of("fulmar-log", Operation::Sync, Fault::Io);
        let (lost, haste) = append(&log, Urgency::Prompt);
        assert_eq!(haste, Haste::Gathers);
        log.core.wake_writer();
        // Nobody rests meanwhile.
        assert!(matches!(block_on(progress.wait_durable(lost.0)), Err(LogError::Discarded { .. })));
        let (kept, haste) = append(&log, Urgency::Prompt);
        assert_eq!(haste, Haste::Gathers);
        log.close().unwrap();
        block_on(progress.wait_durable(kept.0)).unwrap();
    }
}
