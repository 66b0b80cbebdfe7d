//! Formats an interval as text, and displays it on the terminal.
//!
//! The display uses the terminal's alternate screen, so that the previous contents reappear at the
//! end. Each frame overwrites the previous one in a single write, which avoids flicker.

use std::io::Write;

use anyhow::Context;
use comfy_table::CellAlignment;
use rustix::termios::tcgetwinsize;

use super::stats::{Interval, Running, Tenant, TenantStats};
use crate::output;
use crate::size::Bytes;

/// Switches to the alternate screen, hides the cursor and truncates long lines.
const ENTER_SCREEN: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
/// Undoes [`ENTER_SCREEN`].
const LEAVE_SCREEN: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
/// Moves the cursor to the first line.
const HOME: &str = "\x1b[H";
/// Clears the rest of the line.
const CLEAR_LINE: &str = "\x1b[K";
/// Clears everything below the cursor.
const CLEAR_BELOW: &str = "\x1b[J";

/// Number of lines of a terminal that does not report its size.
const DEFAULT_LINES: usize = 24;
/// Lines of a table in addition to its rows.
const FRAME_LINES: usize = 4;

/// The terminal's alternate screen, left on drop.
pub struct Screen(());

impl Screen {
    /// Switches to the alternate screen.
    pub fn enter() -> anyhow::Result<Self> {
        let screen = Self(()); // from here on, its drop restores the terminal
        write(ENTER_SCREEN)?;
        Ok(screen)
    }

    /// Displays an interval with up to `rows` tenants, or as many as fit.
    pub fn show(&self, interval: &Interval, rows: Option<usize>) -> anyhow::Result<()> {
        let size = tcgetwinsize(std::io::stdout()).ok();
        let lines = size.map_or(DEFAULT_LINES, |size| usize::from(size.ws_row)).max(1);
        let other_lines = 1 + FRAME_LINES + interval.running_lines().len();
        let max_rows = lines.saturating_sub(other_lines).max(1);
        write(&frame(&interval.lines(rows.unwrap_or(max_rows).min(max_rows)), lines))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A write fails if the terminal is gone. There is nothing to restore then.
        let _ = write(LEAVE_SCREEN);
    }
}

fn write(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("cannot write to the terminal")
}

/// Returns the output that replaces the previous frame by these lines.
fn frame(lines: &[String], max_lines: usize) -> String {
    let lines: Vec<&str> = lines.iter().take(max_lines).map(String::as_str).collect();
    format!("{HOME}{}{CLEAR_LINE}{CLEAR_BELOW}", lines.join(&format!("{CLEAR_LINE}\r\n")))
}

impl Interval {
    /// Formats all tenants.
    pub fn text(&self) -> String {
        self.lines(self.tenants.len()).join("\n")
    }

    fn lines(&self, rows: usize) -> Vec<String> {
        let mut table = output::table([
            "tenant",
            "sessions",
            "statements/s",
            "busy %",
            "commits/s",
            "conflicts/s",
            "errors/s",
            "p99 ms",
            "size",
            "memory",
        ]);
        table.add_rows(self.tenants.iter().take(rows).map(cells));
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let mut lines = vec![summary(self.seconds, &self.total)];
        lines.extend(table.to_string().lines().map(str::to_owned));
        lines.extend(self.running_lines());
        lines
    }

    /// Formats the longest-running statements under a heading. No lines if there are none.
    fn running_lines(&self) -> Vec<String> {
        let heading = (!self.running.is_empty()).then(|| "longest running:".to_owned());
        heading.into_iter().chain(self.running.iter().map(running)).collect()
    }
}

fn summary(seconds: f64, total: &TenantStats) -> String {
    format!(
        "in {seconds:.1} s: {} sessions, {} statements/s, {} % busy, {} commits/s, {} conflicts/s, {} errors/s, {} in memory",
        total.sessions,
        number(total.statements_per_second),
        number(total.busy_percent),
        number(total.commits_per_second),
        number(total.conflicts_per_second),
        number(total.errors_per_second),
        bytes(total.memory_bytes),
    )
}

fn cells(tenant: &Tenant) -> [String; 10] {
    let figures = &tenant.stats;
    [
        printable(&tenant.name),
        figures.sessions.to_string(),
        number(figures.statements_per_second),
        number(figures.busy_percent),
        number(figures.commits_per_second),
        number(figures.conflicts_per_second),
        number(figures.errors_per_second),
        number(tenant.p99_ms),
        bytes(figures.size_bytes),
        bytes(figures.memory_bytes),
    ]
}

fn running(running: &Running) -> String {
    /// Maximum length of the statement. The terminal truncates the line further.
    const MAX_QUERY_CHARS: usize = 200;
    let Running { tenant, user, pid, state, seconds, query } = running;
    let query: String =
        query.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(MAX_QUERY_CHARS).collect();
    printable(&format!("{seconds:8.1} s  {tenant}  {user}  pid {pid}  {state}: {query}"))
}

/// Replaces control characters: names and statements of users must not control the terminal.
fn printable(text: &str) -> String {
    text.replace(char::is_control, " ")
}

fn number(value: f64) -> String {
    if value == 0.0 || value >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

fn bytes(count: Option<i64>) -> String {
    count
        .and_then(|count| u64::try_from(count).ok())
        .map_or_else(|| "-".to_owned(), |count| Bytes(count).to_string())
}

#[cfg(test)]
mod tests {
    use super::super::stats::tests::interval;
    use super::*;

    #[test]
    fn interval_is_formatted_as_summary_table_and_running_statements() {
        let mut interval = interval();
        assert_eq!(interval.lines(9).len(), 1 + FRAME_LINES + 2);
        interval.running.push(Running {
            tenant: "a".into(),
            user: "ada".into(),
            pid: 7,
            state: "active".into(),
            seconds: 12.34,
            query: "SELECT '\x1b[2J',\n 1".into(),
        });
        let lines = interval.lines(1);
        assert_eq!(
            lines[0],
            "in 2.0 s: 2 sessions, 15.0 statements/s, 155 % busy, 7.5 commits/s, 0 conflicts/s, 0 errors/s, - in memory"
        );
        assert_eq!(lines.len(), 1 + FRAME_LINES + 1 + 2);
        assert!(
            lines[4].starts_with("│ a") && lines[4].contains(" 5.0 ") && lines[4].contains(" 8.0 KiB "),
            "{lines:?}"
        );
        assert_eq!(lines[7], "    12.3 s  a  ada  pid 7  active: SELECT ' [2J', 1");
    }

    #[test]
    fn frame_overwrites_the_previous_one() {
        let lines: Vec<String> = ["a", "b", "c"].map(str::to_owned).to_vec();
        assert_eq!(frame(&lines, 2), "\x1b[Ha\x1b[K\r\nb\x1b[K\x1b[J");
    }
}
