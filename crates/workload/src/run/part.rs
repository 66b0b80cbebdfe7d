//! A part of the drivers: one of several processes, each with a share of the terminals (`--processes N`).
//!
//! ```text
//!  fulmar bench run ... --processes 2        loads, measures the server, adds up, reports, checks
//!     |
//!     +-- fulmar bench run ... --part 0      terminals of the first threads
//!     +-- fulmar bench run ... --part 1      terminals of the others
//!
//!  part -> parent   {"ready":null}           on its stdout: all terminals are connected
//!  parent -> part   go                       on its stdin: the clock starts, for all parts within a moment
//!  part -> parent   {"interval":{..}} ..     each interval of each thread, as threads of one process hand it over
//!                   {"end":{..}}             all that was counted, histograms and all
//! ```
//! A part whose stdin ends has lost its parent, and ends too.

use std::io::{BufRead, Read, Write};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::Context;
use futures::future::try_join_all;
use serde::{Deserialize, Serialize};
use tokio::sync::{Barrier, oneshot};

use super::collector::Collector;
use super::driver::{Plan, drive};
use super::stages::{merged, on_a_thread, workloads};
use super::{Processes, RunOptions, database};
use crate::measure::{Counted, Interval};
use crate::workload::Workload;

/// What a part tells its parent, a line each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Message {
    /// All terminals are connected.
    Ready,
    /// A thread's interval is over.
    Interval {
        /// Its number among those of all parts.
        thread: usize,
        /// What happened.
        interval: Interval,
        /// What the thread used meanwhile.
        cpu: Duration,
    },
    /// The run is over.
    End {
        /// What was counted.
        counted: Counted,
        /// What each thread used in the window.
        cpu: Vec<Duration>,
    },
}

/// The way to the parent. What cannot be said to a parent that is gone is lost: the end of stdin tells.
pub(super) struct Parent(Mutex<std::io::Stdout>);

impl Parent {
    pub(super) fn of_this_process() -> Parent {
        Parent(Mutex::new(std::io::stdout()))
    }

    pub(super) fn tell(&self, message: &Message) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let mut stdout = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        stdout.write_all(&line).and_then(|()| stdout.flush()).context("the parent of this part is gone")
    }
}

/// Runs the terminals of this part as its parent says. The data is there already.
pub(super) async fn run<W: Workload>(workload: W, options: RunOptions) -> anyhow::Result<()> {
    let Processes::Part { number, .. } = options.processes else { anyhow::bail!("this process is no part") };
    let server = database::server(options.targets().first().context("a run needs a database")?).await?;
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
        (first..first + threads).map(|thread| on_a_thread(&plan, move |plan| drive(plan, thread))),
    );
    let gate = async {
        plan.ready.wait().await;
        parent.tell(&Message::Ready)?;
        go.await.context("the parent of this part is gone")?;
        plan.start.wait().await;
        anyhow::Ok(())
    };
    let outcomes = tokio::select! {
        both = async { tokio::try_join!(drivers, gate) } => both?.0,
        _ = ended => anyhow::bail!("the parent of this part is gone"),
    };
    let cpu = outcomes.iter().flat_map(|outcome| outcome.cpu.iter().copied()).collect();
    parent.tell(&Message::End { counted: merged(outcomes)?.counted(), cpu })
}

/// What the parent says.
struct Stdin {
    go: oneshot::Receiver<()>,
    ended: oneshot::Receiver<()>,
}

impl Stdin {
    /// Reads on a thread of its own, which ends with the process.
    fn listen() -> anyhow::Result<Stdin> {
        let ((say_go, go), (say_ended, ended)) = (oneshot::channel(), oneshot::channel());
        let read = move || {
            let mut stdin = std::io::stdin().lock();
            let mut line = String::new();
            if stdin.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
                // Nobody waits any more where the run has failed; so below.
                let _ = say_go.send(());
                // The parent says no more: this waits for the end.
                let _ = stdin.read_to_end(&mut Vec::new());
            }
            let _ = say_ended.send(());
        };
        std::thread::Builder::new().name("fulmar-parent".to_owned()).spawn(read)?;
        Ok(Stdin { go, ended })
    }
}
