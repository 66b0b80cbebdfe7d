//! A driver process: one of several that share the terminals of a run (`--processes N`).
//!
//! ```text
//!  fulmar bench run ... --processes 2        loads, measures the server, merges, reports, checks
//!     |
//!     +-- fulmar bench run ... --part 0      terminals of the first threads
//!     +-- fulmar bench run ... --part 1      terminals of the others
//!
//!  part -> parent   {"ready":null}           on its stdout: all terminals are connected
//!  parent -> part   go                       on its stdin: the clock starts, in all parts within
//!                                            a moment
//!  part -> parent   {"interval":{..}} ..     each interval of each thread, as threads of one
//!                                            process pass it to the collector
//!                   {"end":{..}}             all counters, including the histograms
//! ```
//!
//! A part exits when its stdin ends, because its parent is then gone.

use std::io::{BufRead, Read};
use std::sync::{Arc, OnceLock};

use anyhow::Context;
use futures::future::try_join_all;
use tokio::sync::{Barrier, oneshot};

use super::collector::Collector;
use super::driver::{Plan, drive};
use super::message::{Message, PARENT_EXITED, Parent};
use super::stages::{merge_outcomes, run_on_new_thread, workloads};
use super::{Processes, RunOptions, database};
use crate::workload::Workload;

/// Runs the terminals of this part when the parent starts it. The data has already been loaded.
pub(super) async fn run<W: Workload>(workload: W, options: RunOptions) -> anyhow::Result<()> {
    let Processes::Part { number, .. } = options.processes else {
        anyhow::bail!("this process is not a driver process")
    };
    let targets = options.targets();
    let first_target = targets.first().context("at least one database is required")?;
    let server = database::server(first_target).await?;
    let threads = options.threads;
    let parent = Arc::new(Parent::of_this_process());
    let plan = Arc::new(Plan {
        workloads: workloads(&workload, &options),
        rate_shares: options.tenant_rates.shares(options.targets().len()),
        dialect: server.dialect,
        collector: Collector::new(&options, workload.kinds(), threads)?.for_parent(parent.clone()),
        ready: Barrier::new(threads + 1),
        start: Barrier::new(threads + 1),
        clock: OnceLock::new(),
        options,
    });
    let Stdin { go, ended } = Stdin::listen()?;
    let first = number * threads;
    let drivers = try_join_all(
        (first..first + threads).map(|thread| run_on_new_thread(&plan, move |plan| drive(plan, thread))),
    );
    let gate = async {
        plan.ready.wait().await;
        parent.send(&Message::Ready)?;
        go.await.context(PARENT_EXITED)?;
        plan.start.wait().await;
        anyhow::Ok(())
    };
    let outcomes = tokio::select! {
        both = async { tokio::try_join!(drivers, gate) } => both?.0,
        _ = ended => anyhow::bail!(PARENT_EXITED),
    };
    let cpu = outcomes.iter().flat_map(|outcome| outcome.cpu.iter().copied()).collect();
    parent.send(&Message::End { counted: merge_outcomes(outcomes)?.counted(), cpu })
}

/// The messages of the parent.
struct Stdin {
    go: oneshot::Receiver<()>,
    ended: oneshot::Receiver<()>,
}

impl Stdin {
    /// Starts a thread that reads stdin and ends with the process.
    fn listen() -> anyhow::Result<Stdin> {
        let ((send_go, go), (send_ended, ended)) = (oneshot::channel(), oneshot::channel());
        let read = move || {
            let mut stdin = std::io::stdin().lock();
            let mut line = String::new();
            if stdin.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
                // If the run has failed, the receivers are gone. The same applies below.
                let _ = send_go.send(());
                // The parent sends nothing else, so this returns at the end of stdin.
                let _ = stdin.read_to_end(&mut Vec::new());
            }
            let _ = send_ended.send(());
        };
        std::thread::Builder::new().name("fulmar-parent".to_owned()).spawn(read)?;
        Ok(Stdin { go, ended })
    }
}
