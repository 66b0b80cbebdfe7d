//! Structured logging to stderr, as text or as JSON.

use std::io::IsTerminal;

use anyhow::{Context, anyhow};
use tracing_subscriber::EnvFilter;

use crate::cli::LogFormat;

/// Installs the process-wide logger, with `level` as its filter.
pub fn init(format: LogFormat, level: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(format!("rustls=error,{level}")).with_context(|| {
        format!("invalid --log-level {level}; use a level such as info, or fulmar_gateway=debug,info")
    })?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let installed = match format {
        LogFormat::Text => logs.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => logs.json().flatten_event(true).try_init(),
    };
    installed.map_err(|error| anyhow!("cannot start logging: {error}"))
}
