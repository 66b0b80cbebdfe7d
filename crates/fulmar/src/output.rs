//! Results for people (tables that fit the terminal) and for scripts (JSON), and progress on what is long.

use std::io::Write;

use anyhow::Context;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{ContentArrangement, Table};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// A table with these column heads, no wider than the terminal.
pub fn table<const N: usize>(heads: [&str; N]) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(heads);
    table
}

/// Prints a value as JSON on one line.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    line(&serde_json::to_string(value)?)
}

/// Prints a line. A reader that has gone away (`fulmar ... | head`) is an error, not a panic.
pub fn line(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).context("cannot write to stdout")
}

/// A bar on stderr for `total` steps; it hides when stderr is no terminal.
pub fn progress(what: &'static str, total: u64) -> ProgressBar {
    styled(ProgressBar::new(total), what, "{msg} [{bar:30}] {pos}/{len} {eta}")
}

/// The same for bytes, of which there may be any number.
pub fn byte_progress(what: &'static str, total: Option<u64>) -> ProgressBar {
    let template = match total {
        Some(_) => "{msg} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}",
        None => "{msg} {bytes} {binary_bytes_per_sec}",
    };
    styled(total.map_or_else(ProgressBar::new_spinner, ProgressBar::new), what, template)
}

fn styled(bar: ProgressBar, what: &'static str, template: &'static str) -> ProgressBar {
    // The templates are constants; if one were wrong, indicatif's own style would do.
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.with_message(what)
}
