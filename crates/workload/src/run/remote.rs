//! The parent's side of a driver process: starts it, starts its clock, and receives its counts.

use std::process::Stdio;
use std::sync::Arc;

use anyhow::Context;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::driver::{Clock, Outcome, Plan};
use super::message::Message;
use super::{Processes, RunEvent};
use crate::measure::{Meter, MeterRecord};
use crate::workload::Workload;

/// A running driver process. Dropping it kills it.
struct Part {
    number: usize,
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

/// Runs the terminals of a driver process, as [`super::driver::drive`] does on a thread of this
/// process.
pub(super) async fn drive<W: Workload>(plan: Arc<Plan<W>>, number: usize) -> anyhow::Result<Outcome> {
    let mut part = Part::start(&plan.options.processes, number)?;
    match part.message().await? {
        Message::Ready => {}
        other => anyhow::bail!("driver process {number} sent {other:?} before it was ready"),
    }
    let clock = plan.clock().await;
    let started = part.stdin.write_all(b"go\n").await;
    started.with_context(|| format!("could not start driver process {number}"))?;
    let counted = async {
        loop {
            match part.message().await? {
                Message::Interval { thread, interval, cpu } => {
                    plan.collector.add_counts(thread, interval, cpu)
                }
                Message::End { counted, cpu } => return anyhow::Ok((counted, cpu)),
                Message::Ready => anyhow::bail!("driver process {number} reported readiness twice"),
            }
        }
    };
    let ((counted, cpu), ()) = tokio::try_join!(counted, notify_phases(&plan, number, clock))?;
    part.child.wait().await?;
    Ok(Outcome { meter: meter(&plan, clock, counted), cpu })
}

/// Notifies the watcher of the phases of the run.
async fn notify_phases<W: Workload>(plan: &Plan<W>, number: usize, clock: Clock) -> anyhow::Result<()> {
    plan.notify(number, RunEvent::WarmUp);
    tokio::time::sleep_until(clock.window.opens.into()).await;
    plan.notify(number, RunEvent::Opens);
    tokio::time::sleep_until(clock.window.closes.into()).await;
    plan.notify(number, RunEvent::Closes);
    Ok(())
}

fn meter<W: Workload>(plan: &Plan<W>, clock: Clock, counted: MeterRecord) -> Meter {
    let mut meter = plan.meter(clock.window, &[]);
    meter.add(counted);
    meter
}

impl Part {
    fn start(processes: &Processes, number: usize) -> anyhow::Result<Part> {
        let Processes::Parent { command, .. } = processes else {
            anyhow::bail!("this process has no driver processes")
        };
        let (program, arguments) =
            command.split_first().context("the command for driver processes is empty")?;
        let mut child = Command::new(program)
            .args(arguments)
            .arg("--part")
            .arg(number.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("could not start driver process {number}"))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (stdin, stdout) = stdin.zip(stdout).context("driver process has no pipes")?;
        Ok(Part { number, child, stdin, lines: BufReader::new(stdout).lines() })
    }

    /// Reads the next message. A part that exits before its last message reports the reason on
    /// stderr, which it inherits.
    async fn message(&mut self) -> anyhow::Result<Message> {
        let number = self.number;
        match self.lines.next_line().await? {
            Some(line) => serde_json::from_str(&line)
                .with_context(|| format!("invalid message from driver process {number}")),
            None => {
                let status = self.child.wait().await?;
                anyhow::bail!("driver process {number} exited early: {status}")
            }
        }
    }
}
