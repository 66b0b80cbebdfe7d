//! The tenants that run YCSB: one connection each, at a constant total rate.
//!
//! The load is an open loop, because many independent customers do not wait for each other:
//! transactions are scheduled whether the node responds or not, and latency is measured from the
//! scheduled time. The outage therefore appears in the maximum latency, instead of as a pause in
//! the load.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use fulmar_workload::Target;
use fulmar_workload::arrival::Arrival;
use fulmar_workload::run::{Report, RunEvent, RunOptions, run};
use fulmar_workload::ycsb::Ycsb;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::live::DemoStatistics;

/// Transactions per second over all shops, of twelve statements each. They need a fraction of one
/// CPU.
const RATE_TPS: f64 = 400.0;
/// Number of keys of each shop. Each key has three rows of 1 KB.
pub const RECORDS: u32 = 20;
/// A node that does not accept connections within this time does not recover.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// A run of YCSB, aborted on drop.
pub struct Shops {
    run: JoinHandle<anyhow::Result<Report>>,
}

impl Shops {
    /// Loads the shops' data. Returns when the measured window begins.
    pub async fn start(
        target: &Target,
        databases: &[String],
        duration: Duration,
        live: Arc<DemoStatistics>,
    ) -> anyhow::Result<Self> {
        let (opened, opens) = oneshot::channel();
        let opened = Mutex::new(Some(opened));
        let watcher = move |event: &RunEvent| match event {
            RunEvent::Tick(tick) => live.shops(tick),
            RunEvent::Opens => {
                if let Some(opened) = opened.lock().unwrap_or_else(PoisonError::into_inner).take() {
                    // Fails if the demo was interrupted and the receiver is gone.
                    let _ = opened.send(());
                }
            }
            RunEvent::Loading { .. } | RunEvent::WarmUp | RunEvent::Closes => {}
        };
        let options = RunOptions {
            databases: databases.to_vec(),
            connections: 1,
            warm_up: Duration::from_secs(1),
            measure: duration,
            arrival: Arrival::poisson(RATE_TPS),
            reconnect_timeout: RECONNECT_TIMEOUT,
            watcher: Some(Arc::new(watcher)),
            ..RunOptions::new(target.clone())
        };
        let shops = Self { run: tokio::spawn(run(Ycsb { records: RECORDS, ..Ycsb::default() }, options)) };
        match opens.await {
            Ok(()) => Ok(shops),
            // The watcher was dropped: the run has failed before the measured window. Return its
            // error.
            Err(_) => Err(shops.finish().await.err().context("YCSB ended before its measured window")?),
        }
    }

    /// Waits for the end of the run.
    pub async fn finish(mut self) -> anyhow::Result<Report> {
        (&mut self.run).await.context("YCSB failed")?
    }
}

impl Drop for Shops {
    fn drop(&mut self) {
        self.run.abort();
    }
}
