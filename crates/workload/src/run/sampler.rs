//! Samples the resource usage of the server's processes at the end of each interval.
//!
//! It runs on a separate thread, because the kernel takes milliseconds to sum up the memory of a
//! large process, and no terminal may be delayed by that.

use std::sync::Arc;

use anyhow::Context;

use super::driver::Plan;
use super::record::UsageRecord;
use crate::measure::first_interval;
use crate::server::{ProcessTree, Usage};
use crate::workload::Workload;

/// Samples until the window closes. Returns the usage in the window, if the processes existed at
/// both of its ends.
pub(super) async fn sample<W: Workload>(plan: Arc<Plan<W>>) -> anyhow::Result<Option<UsageRecord>> {
    let trees: Vec<_> = plan.options.server_processes.iter().copied().map(ProcessTree::of).collect();
    // Reports an invalid process id now instead of after the run.
    Usage::of(&trees).context("could not read the resource usage of the server's processes")?;
    let clock = plan.clock().await;
    let tick = plan.options.tick;
    let mut number = first_interval(plan.options.warm_up, tick);
    let mut before = Usage::of(&trees).ok();
    let mut opened = before;
    loop {
        let end = clock.window.interval_end(tick, number);
        if end > clock.window.closes {
            break;
        }
        tokio::time::sleep_until(end.into()).await;
        // A server that is not running has no usage. Its usage before it stopped is no base for
        // later differences.
        let now = Usage::of(&trees).ok();
        plan.collector.add_usage(number, now.zip(before).map(|(now, before)| record(now, before)));
        before = now;
        number += 1;
        if number == 0 {
            opened = now;
        }
    }
    Ok(before.zip(opened).map(|(closed, opened)| record(closed, opened)))
}

fn record(now: Usage, before: Usage) -> UsageRecord {
    UsageRecord {
        cpu_s: now.cpu.saturating_sub(before.cpu).as_secs_f64(),
        pss_bytes: now.pss_bytes,
        read_bytes: now.read_bytes.saturating_sub(before.read_bytes),
        written_bytes: now.written_bytes.saturating_sub(before.written_bytes),
        received_bytes: now.received_bytes.saturating_sub(before.received_bytes),
        sent_bytes: now.sent_bytes.saturating_sub(before.sent_bytes),
    }
}
