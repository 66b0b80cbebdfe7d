use std::sync::Arc;

use fulmar_pages::PartitionId;

use super::*;
use crate::cancel::CancelFlag;
use crate::{CancelReason, Config, Engine};

/// SQLite looks at the clock once in some thousand steps, of a kept statement over all its runs: at last also behind the only
/// step of a BEGIN, which has been done by then.
#[tokio::test]
async fn a_cancel_takes_no_control_statement_for_a_failure() {
    let data = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(data.path(), 64 << 20)).await.unwrap();
    let mut connection = Connection::open(engine.partition(PartitionId(1)).await.unwrap()).await.unwrap();
    let cancelled = Arc::new(CancelFlag::default());
    cancelled.set(CancelReason::Timeout);
    *connection.link.cancel.borrow_mut() = cancelled;
    for _ in 0..STEPS_PER_CHECKPOINT {
        let controlled = connection.run(|connection| {
            let begun = connection.control_here(BEGIN.0, BEGIN.1);
            assert!(matches!(begun, Step::Done(_)) && !connection.is_autocommit());
            let ended = connection.control_here(ROLLBACK.0, ROLLBACK.1);
            assert!(matches!(ended, Step::Done(_)) && connection.is_autocommit());
        });
        controlled.unwrap().await;
    }
    drop(connection);
    engine.shutdown().await.unwrap();
}
