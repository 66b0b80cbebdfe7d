//! The tenants that run YCSB: one connection each, at a steady rate over all of them.
//!
//! An open loop, because a hundred small customers do not wait for each other: transactions fall due whether
//! the node answers or not, and latency counts from the moment that they were due. So the crash shows in the
//! longest wait, instead of hiding in a pause of the load.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use fulmar_workload::Target;
use fulmar_workload::arrival::Arrival;
use fulmar_workload::run::{Report, RunEvent, RunOptions, run};
use fulmar_workload::ycsb::Ycsb;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::live::Live;

/// Transactions a second over all shops, of twelve statements each: work for a fraction of a processor.
const RATE_TPS: f64 = 400.0;
/// Keys of each shop; three rows of a kilobyte for each.
const RECORDS: u32 = 20;
/// A node that is not back by then does not come back.
const PATIENCE: Duration = Duration::from_secs(60);

/// A run of YCSB; it ends with the value.
pub struct Shops {
    run: JoinHandle<anyhow::Result<Report>>,
}

impl Shops {
    /// Loads the shops' data; answers when the measured window opens.
    pub async fn start(
        target: &Target,
        databases: &[String],
        duration: Duration,
        live: Arc<Live>,
    ) -> anyhow::Result<Self> {
        let (opened, opens) = oneshot::channel();
        let opened = Mutex::new(Some(opened));
        let watcher = move |event: &RunEvent| match event {
            RunEvent::Tick(tick) => live.shops(tick),
            RunEvent::Opens => {
                if let Some(opened) = opened.lock().unwrap_or_else(PoisonError::into_inner).take() {
                    // Nobody waits any more if the demo was interrupted.
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
            patience: PATIENCE,
            watcher: Some(Arc::new(watcher)),
            ..RunOptions::new(target.clone())
        };
        let shops = Self { run: tokio::spawn(run(Ycsb { records: RECORDS, ..Ycsb::default() }, options)) };
        match opens.await {
            Ok(()) => Ok(shops),
            // The watcher is gone, so the run has ended before it began to measure: it says why.
            Err(_) => Err(shops.finish().await.err().context("YCSB ended before it began")?),
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
