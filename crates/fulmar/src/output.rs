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
    let style = ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len} {eta}");
    let bar = ProgressBar::new(total).with_message(what);
    // The template is a constant; if it were wrong, indicatif's own style would do.
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}
