//! Looks at the node's health now and then: what changes is an event.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_engine::Health;

use super::{Event, Kind};
use crate::gateway::Shared;

/// How often it looks.
const PERIOD: Duration = Duration::from_secs(1);

/// What a node is taken for when it starts.
const WELL: Health = Health { disk_level: 0, log_failures: 0, log_works: true, log_full: false };

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
    let failed = (now.log_failures > before.log_failures).then_some(Kind::LogFailed);
    // It may have failed and begun anew since the last look.
    let works = (now.log_works && (!before.log_works || failed.is_some())).then_some(Kind::LogWorks);
    let full = (now.log_full != before.log_full).then_some(match now.log_full {
        true => Kind::LogFull,
        false => Kind::LogFree,
    });
    let disk = (now.disk_level != before.disk_level).then_some(match now.disk_level {
        0 => Kind::DiskFree,
        1 => Kind::DiskLow,
        _ => Kind::DiskFull,
    });
    [failed, works, full, disk].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_is_told() {
        let well = WELL;
        let failing = Health { log_failures: 1, log_works: false, ..well };
        let full = Health { log_full: true, ..well };
        let again = Health { log_works: true, ..failing };
        let told = |before, now| changes(before, now).collect::<Vec<_>>();
        assert_eq!(told(well, well), []);
        assert_eq!(told(well, failing), [Kind::LogFailed]);
        assert_eq!(told(failing, again), [Kind::LogWorks]);
        assert_eq!(told(well, again), [Kind::LogFailed, Kind::LogWorks]);
        assert_eq!((told(well, full), told(full, full)), (vec![Kind::LogFull], vec![]));
        assert_eq!(told(full, well), [Kind::LogFree]);
        assert_eq!(told(well, Health { disk_level: 2, ..well }), [Kind::DiskFull]);
        assert_eq!(told(Health { disk_level: 2, ..well }, Health { disk_level: 1, ..well }), [Kind::DiskLow]);
        assert_eq!(told(Health { disk_level: 1, ..well }, well), [Kind::DiskFree]);
    }
}
