//! Structured logs on stderr: for people as text, for collectors as JSON.

use std::io::IsTerminal;

use anyhow::{Context, anyhow};
use tracing_subscriber::EnvFilter;

use crate::cli::LogFormat;

/// Sends every event of `level` and above to stderr, from now on.
pub fn begin(format: LogFormat, level: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(format!("rustls=error,{level}")).with_context(|| {
        format!("cannot read --log-level {level}; write info, or fulmar_gateway=debug,info")
    })?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let begun = match format {
        LogFormat::Text => logs.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => logs.json().flatten_event(true).try_init(),
    };
    begun.map_err(|error| anyhow!("cannot begin to log: {error}"))
}
