//! Ctrl-C and SIGTERM.
//!
//! The long commands start processes and make temporary directories, whose guards clean up when they are
//! dropped. So an interruption is an error like any other: the future of the command is dropped, its guards
//! run, and `main` answers with the exit code that shells expect.

use std::fmt;
use std::future::Future;

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The user, or whoever manages this process, asked it to end.
#[derive(Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Both signals that ask a process to end.
pub struct EndSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl EndSignals {
    /// From now on the signals do not kill the process: [`EndSignals::next`] must be awaited.
    pub fn listen() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    /// The name of the next one.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}

/// Runs `command` until it ends or the process is asked to; then it is dropped, with all it holds.
pub async fn or_interrupted(command: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let mut signals = EndSignals::listen()?;
    tokio::select! {
        result = command => result,
        _ = signals.next() => Err(Interrupted.into()),
    }
}
