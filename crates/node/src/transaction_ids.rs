//! The transaction ids that this incarnation may assign ([`fulmar_cluster::ids`]).

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use fulmar_cluster::incarnation::Begun;
use fulmar_cluster::{Error, NodeId, ids};
use fulmar_engine::IdReservation;
use tokio::time::sleep;

use crate::environment::NodeEnvironment;

/// What is reserved.
pub(crate) struct TransactionIds(Arc<IdReservation>);

impl TransactionIds {
    /// Reserves the first ids of an incarnation.
    pub(crate) async fn reserve(
        environment: &NodeEnvironment,
        node: NodeId,
        begun: &Begun,
    ) -> Result<TransactionIds, Error> {
        let reserved = ids::reserve(environment, node, begun, unix_ms()).await?;
        let reservation = IdReservation::new(reserved.from_ms, reserved.until_ms);
        Ok(TransactionIds(Arc::new(reservation)))
    }

    /// Reserves more ids in time, until the incarnation has ended. Returns the error then.
    pub(crate) async fn keep(&self, environment: &NodeEnvironment, node: NodeId, begun: &Begun) -> Error {
        loop {
            sleep(ids::RENEWAL_INTERVAL).await;
            match ids::reserve(environment, node, begun, unix_ms()).await {
                Ok(reserved) => self.0.extend(reserved.until_ms),
                Err(error) => return error,
            }
        }
    }

    /// The ids, for the engine.
    pub(crate) fn reservation(&self) -> Arc<IdReservation> {
        self.0.clone()
    }
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}
