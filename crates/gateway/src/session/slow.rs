//! The log of slow statements: a line for each that took longer than the node was told.
//!
//! Logs go to many places, and what a statement says need not: parameters are not logged at all, string literals as
//! `'...'`, comments not, and only the beginning of a long text. A node that is slow as a whole does not drown in its
//! log: there are so many lines a second, and a line says how many were left out before it.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::statements::Plan;
use super::{End, Fault, Ran, Session};
use crate::dialect::token::{Kind, Lexer};

/// Lines of one second.
const LINES: u32 = 10;
/// Bytes of a statement's text that are logged.
const TEXT_BYTES: usize = 1024;

/// Which statements are slow, and how many of them were logged of late.
pub(crate) struct SlowLog {
    /// `None`: nothing is logged.
    longer_than: Option<Duration>,
    window: Mutex<Window>,
}

struct Window {
    begun: Instant,
    lines: u32,
    /// Lines that were not written since the last one.
    left_out: u64,
}

impl SlowLog {
    /// A log of the statements that take longer than this.
    pub(crate) fn new(longer_than: Option<Duration>) -> SlowLog {
        let window = Window { begun: Instant::now(), lines: 0, left_out: 0 };
        SlowLog { longer_than, window: Mutex::new(window) }
    }

    fn is_slow(&self, time: Duration) -> bool {
        self.longer_than.is_some_and(|limit| time > limit)
    }

    /// Whether a line may be written now, and how many were left out before it.
    fn admit(&self, now: Instant) -> Option<u64> {
        let mut window = self.window.lock();
        if now.saturating_duration_since(window.begun) >= Duration::from_secs(1) {
            (window.begun, window.lines) = (now, 0);
        }
        if window.lines == LINES {
            window.left_out += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

impl Session {
    /// Logs a statement that has been run, if it was slow.
    pub(super) fn log_if_slow(&self, plan: &Plan, time: Duration, rows: u64, ran: &Result<Ran, Fault>) {
        let log = &self.shared.slow;
        if !log.is_slow(time) {
            return;
        }
        let Some(left_out) = log.admit(Instant::now()) else { return };
        let sqlstate = match ran {
            Err(Fault::Statement(error) | Fault::End(End::Fatal(error))) => Some(error.state()),
            _ => None,
        };
        let statement = match plan {
            Plan::Engine(statement) => &shown(&statement.sql),
            Plan::Command { shown, .. } => &**shown,
        };
        let (tenant, user) = (self.identity.tenant.name.as_str(), self.identity.user.as_str());
        let milliseconds = time.as_millis() as u64;
        // As texts (no `%`): the log's writer escapes what would begin another line.
        tracing::warn!(
            tenant,
            user,
            milliseconds,
            rows,
            sqlstate,
            statement,
            left_out,
            "a statement was slow"
        );
    }
}

/// A statement as it may be logged.
pub(super) fn shown(sql: &str) -> String {
    let mut shown = String::new();
    let mut end = 0;
    for token in Lexer::new(sql) {
        if token.start > end && !shown.is_empty() {
            shown.push(' '); // for a line break or a comment, too
        }
        let text = if token.kind == Kind::String { "'...'" } else { token.text };
        let room = TEXT_BYTES.saturating_sub(shown.len());
        if text.len() > room {
            shown.push_str(&text[..text.floor_char_boundary(room)]);
            shown.push_str("...");
            break;
        }
        shown.push_str(text);
        end = token.end();
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_and_comments_are_not_shown() {
        for (sql, expected) in [
            ("SELECT 'it''s secret',\n\t$1 -- secret\n, 7", "SELECT '...', $1 , 7"),
            ("/* secret */ALTER USER a PASSWORD E'se\\'cret'", "ALTER USER a PASSWORD '...'"),
            ("CREATE PROCEDURE p AS $x$ secret $x$ LANGUAGE lua", "CREATE PROCEDURE p AS '...' LANGUAGE lua"),
            ("SELECT x'5EC2E7' FROM \"a 'name'\"", "SELECT x'...' FROM \"a 'name'\""),
            ("SELECT 'secret", "SELECT '...'"),
            ("", ""),
        ] {
            assert_eq!(shown(sql), expected);
        }
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let long = shown(&format!("SELECT \"{}\"", "\u{e9}".repeat(TEXT_BYTES)));
        assert!(long.ends_with("\u{e9}..."), "{long}");
        assert!((TEXT_BYTES - 1..=TEXT_BYTES + 3).contains(&long.len()), "{}", long.len());
        let many = shown(&"SELECT a, ".repeat(TEXT_BYTES));
        assert!(many.len() <= TEXT_BYTES + 4 && many.ends_with("..."), "{many}");
    }

    #[test]
    fn so_many_lines_a_second_and_the_rest_is_counted() {
        let log = SlowLog::new(Some(Duration::from_millis(10)));
        assert!(!log.is_slow(Duration::from_millis(10)) && log.is_slow(Duration::from_millis(11)));
        assert!(!SlowLog::new(None).is_slow(Duration::MAX));
        let now = Instant::now();
        let written = (0..LINES + 5).filter(|_| log.admit(now) == Some(0)).count();
        assert_eq!(written, LINES as usize);
        let later = now + Duration::from_secs(1);
        assert_eq!((log.admit(later), log.admit(later)), (Some(5), Some(0)));
    }
}
