//! The messages of a driver process to its parent.

use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::measure::{Interval, MeterRecord};

pub(super) const PARENT_EXITED: &str = "the parent process of this driver process has exited";

/// A message from a part to its parent, sent as one line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Message {
    /// All terminals are connected.
    Ready,
    /// An interval of a thread has ended.
    Interval {
        /// The number of the thread, counted over all parts.
        thread: usize,
        /// The counts of the interval.
        interval: Interval,
        /// The CPU time that the thread used in the interval.
        cpu: Duration,
    },
    /// The run has ended.
    End {
        /// The counters of the whole run.
        counted: MeterRecord,
        /// The CPU time of each thread in the window.
        cpu: Vec<Duration>,
    },
}

/// The channel to the parent process. Messages to a parent that is gone are lost: the end of stdin
/// then stops this process.
pub(super) struct Parent(Mutex<std::io::Stdout>);

impl Parent {
    pub(super) fn of_this_process() -> Parent {
        Parent(Mutex::new(std::io::stdout()))
    }

    pub(super) fn send(&self, message: &Message) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let mut stdout = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        stdout.write_all(&line).and_then(|()| stdout.flush()).context(PARENT_EXITED)
    }
}
