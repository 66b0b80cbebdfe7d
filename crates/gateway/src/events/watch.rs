//! Looks at the node's health now and then: what changes is an event.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_engine::{Health, LogHealth};

use super::{Event, Kind};
use crate::gateway::Shared;

/// How often it looks.
const PERIOD: Duration = Duration::from_secs(1);

/// What a node is taken for when it starts.
const WELL: Health = Health { disk_level: 0, log: LogHealth::WELL, shared_log: LogHealth::WELL };

/// What a log does: it fails, works again, is full, has room again.
const LOG: [Kind; 4] = [Kind::LogFailed, Kind::LogWorks, Kind::LogFull, Kind::LogFree];
const SHARED_LOG: [Kind; 4] =
    [Kind::SharedLogFailed, Kind::SharedLogWorks, Kind::SharedLogFull, Kind::SharedLogFree];

/// Watches until the gateway closes.
pub(crate) async fn watch(shared: Arc<Shared>) {
    let closing = shared.closing.clone();
    let mut seen = WELL;
    loop {
        let now = shared.engine.health();
        changes(seen, now).for_each(|kind| shared.journal().record(Event::new(kind)));
        seen = now;
        shared.journal().settle(Instant::now());
        if closing.run_until_cancelled(tokio::time::sleep(PERIOD)).await.is_none() {
            return;
        }
    }
}

/// What has happened between two looks.
fn changes(before: Health, now: Health) -> impl Iterator<Item = Kind> {
    let disk = (now.disk_level != before.disk_level).then_some(match now.disk_level {
        0 => Kind::DiskFree,
        1 => Kind::DiskLow,
        _ => Kind::DiskFull,
    });
    let log = log_changes(before.log, now.log, LOG);
    log.chain(log_changes(before.shared_log, now.shared_log, SHARED_LOG)).chain(disk)
}

fn log_changes(before: LogHealth, now: LogHealth, kinds: [Kind; 4]) -> impl Iterator<Item = Kind> {
    let [failed, works, full, free] = kinds;
    let has_failed = now.failures > before.failures || (before.works && !now.works);
    // It may have failed and begun anew since the last look.
    let works_again = now.works && (!before.works || has_failed);
    let failed = has_failed.then_some(failed);
    let works = works_again.then_some(works);
    let full = (now.full != before.full).then_some(if now.full { full } else { free });
    [failed, works, full].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_is_told() {
        let told = |before, now| changes(before, now).collect::<Vec<_>>();
        let well = WELL;
        assert_eq!(told(well, well), []);
        assert_eq!(told(well, Health { disk_level: 2, ..well }), [Kind::DiskFull]);
        assert_eq!(told(Health { disk_level: 2, ..well }, Health { disk_level: 1, ..well }), [Kind::DiskLow]);
        assert_eq!(told(Health { disk_level: 1, ..well }, well), [Kind::DiskFree]);
    }

    #[test]
    fn what_becomes_of_a_log_is_told() {
        let well = LogHealth::WELL;
        let failing = LogHealth { failures: 1, works: false, ..well };
        let full = LogHealth { full: true, ..well };
        let again = LogHealth { works: true, ..failing };
        // Nothing is lost yet, so nothing is counted.
        let waiting = LogHealth { works: false, ..well };
        type Of = fn(LogHealth) -> Health;
        let local: Of = |log| Health { log, ..WELL };
        let shared: Of = |shared_log| Health { shared_log, ..WELL };
        for (of, kinds) in [(local, LOG), (shared, SHARED_LOG)] {
            let [is_failed, is_works, is_full, is_free] = kinds;
            let told = |before, now| changes(of(before), of(now)).collect::<Vec<_>>();
            assert_eq!(told(well, failing), [is_failed]);
            assert_eq!(told(failing, failing), []);
            assert_eq!(told(failing, again), [is_works]);
            assert_eq!(told(well, again), [is_failed, is_works]);
            assert_eq!((told(well, waiting), told(waiting, well)), (vec![is_failed], vec![is_works]));
            assert_eq!(told(waiting, failing), [is_failed], "it was waiting, and has lost");
            assert_eq!((told(well, full), told(full, full)), (vec![is_full], vec![]));
            assert_eq!(told(full, well), [is_free]);
        }
    }
}
