//! An interval as people read it, and the terminal that it is shown on.
//!
//! The terminal's other screen is used, so that what stood there before is there again at the end. Each frame is written
//! over the one before, in one piece: nothing flickers.

use std::io::Write;

use anyhow::Context;
use comfy_table::CellAlignment;
use rustix::termios::tcgetwinsize;

use super::figures::{Figures, Interval, Running, Tenant};
use crate::output;
use crate::size::Bytes;

/// The other screen; no cursor; lines that are too long are cut.
const BEGIN: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const END: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
/// To the first line; to the end of a line is blank; all below is blank.
const HOME: &str = "\x1b[H";
const REST_OF_LINE: &str = "\x1b[K";
const REST_OF_SCREEN: &str = "\x1b[J";

/// Lines that a terminal has that does not say.
const LINES: usize = 24;
/// Lines of a table beside its rows.
const FRAME_LINES: usize = 4;

/// A terminal that shows one interval after the other, until it is dropped.
pub struct Screen(());

impl Screen {
    /// Takes the terminal.
    pub fn begin() -> anyhow::Result<Self> {
        let screen = Self(()); // from now on it is given back
        write(BEGIN)?;
        Ok(screen)
    }

    /// Shows an interval: so many tenants, or as many as there is room for.
    pub fn show(&self, interval: &Interval, rows: Option<usize>) -> anyhow::Result<()> {
        let size = tcgetwinsize(std::io::stdout()).ok();
        let lines = size.map_or(LINES, |size| usize::from(size.ws_row)).max(1);
        let others = 1 + FRAME_LINES + interval.running_lines().len();
        let room = lines.saturating_sub(others).max(1);
        write(&frame(&interval.lines(rows.unwrap_or(room).min(room)), lines))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If nobody reads any more there is nothing to give back.
        let _ = write(END);
    }
}

fn write(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("cannot write to the terminal")
}

/// What is written over the frame before.
fn frame(lines: &[String], most: usize) -> String {
    let lines: Vec<&str> = lines.iter().take(most).map(String::as_str).collect();
    format!("{HOME}{}{REST_OF_LINE}{REST_OF_SCREEN}", lines.join(&format!("{REST_OF_LINE}\r\n")))
}

impl Interval {
    /// All of it.
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
        let mut lines = vec![head(self.seconds, &self.total)];
        lines.extend(table.to_string().lines().map(str::to_owned));
        lines.extend(self.running_lines());
        lines
    }

    /// What runs longest; no line at all if nothing does.
    fn running_lines(&self) -> Vec<String> {
        let head = (!self.running.is_empty()).then(|| "running longest:".to_owned());
        head.into_iter().chain(self.running.iter().map(running)).collect()
    }
}

fn head(seconds: f64, total: &Figures) -> String {
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
    let figures = &tenant.figures;
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
    /// Of a statement; a terminal cuts what is still too long.
    const CHARACTERS: usize = 200;
    let Running { tenant, user, pid, state, seconds, query } = running;
    let query: String =
        query.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(CHARACTERS).collect();
    printable(&format!("{seconds:8.1} s  {tenant}  {user}  pid {pid}  {state}: {query}"))
}

/// Others wrote it: nothing of it may command the terminal.
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
    use super::super::figures::tests::interval;
    use super::*;

    #[test]
    fn an_interval_is_a_head_a_table_and_what_runs() {
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
    fn a_frame_is_written_over_the_last_one() {
        let lines: Vec<String> = ["a", "b", "c"].map(str::to_owned).to_vec();
        assert_eq!(frame(&lines, 2), "\x1b[Ha\x1b[K\r\nb\x1b[K\x1b[J");
    }
}
