//! Output: tables that fit the terminal, JSON lines for scripts, and progress bars.

use std::io::Write;

use anyhow::Context;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{ContentArrangement, Table};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Returns an empty table with these column headers, no wider than the terminal.
pub fn table<const N: usize>(headers: [&str; N]) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(headers);
    table
}

/// Prints a value as JSON on one line.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    line(&serde_json::to_string(value)?)
}

/// Prints a line to stdout. A closed pipe (`fulmar ... | head`) is an error, not a panic.
pub fn line(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).context("cannot write to stdout")
}

/// A progress bar on stderr for `total` steps. Hidden if stderr is not a terminal.
pub fn progress(activity: &'static str, total: u64) -> ProgressBar {
    with_style(ProgressBar::new(total), activity, "{msg} [{bar:30}] {pos}/{len} {eta}")
}

/// A progress bar for bytes. A spinner if the total is unknown.
pub fn byte_progress(activity: &'static str, total: Option<u64>) -> ProgressBar {
    let template = match total {
        Some(_) => "{msg} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}",
        None => "{msg} {bytes} {binary_bytes_per_sec}",
    };
    with_style(total.map_or_else(ProgressBar::new_spinner, ProgressBar::new), activity, template)
}

fn with_style(bar: ProgressBar, activity: &'static str, template: &'static str) -> ProgressBar {
    // The templates are constants. An invalid one falls back to indicatif's default style.
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.with_message(activity)
}
