//! Handling of SIGINT (Ctrl-C) and SIGTERM.
//!
//! Long-running commands start child processes and create temporary directories, and clean both up
//! with drop guards. An interruption is therefore an ordinary error: the future of the command is
//! dropped, its guards run, and `main` returns the exit code that shells expect.

use std::fmt;
use std::future::Future;

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The error of a command that was interrupted by a signal.
#[derive(Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// A listener for SIGINT and SIGTERM.
pub struct EndSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl EndSignals {
    /// Installs the handlers. The signals no longer kill the process; the caller must await
    /// [`EndSignals::next`].
    pub fn listen() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    /// Waits for the next signal and returns its name.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}

/// Runs `command` to completion. A signal drops it and returns [`Interrupted`].
pub async fn or_interrupted(command: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let mut signals = EndSignals::listen()?;
    tokio::select! {
        result = command => result,
        _ = signals.next() => Err(Interrupted.into()),
    }
}
