//! The slow query log: one log line for each statement that takes longer than the configured limit.
//! `fulmar.slow_statements` shows the newest ones ([`crate::statement_stats`]).
//!
//! - Statements are redacted, because logs may be less protected than the data: parameters and
//!   comments are omitted, string literals are logged as `'...'`, and the text is truncated at
//!   1,024 bytes.
//! - The rate is limited to 10 lines per second. The next line reports how many were omitted.

use std::time::{Duration, Instant};

use fulmar_dialect::token::{Lexer, TokenKind};
use parking_lot::Mutex;

/// Maximum number of log lines per second.
const MAX_LINES: u32 = 10;
/// Maximum size of a statement's text in the log.
const MAX_TEXT_BYTES: usize = 1024;

/// The threshold and the rate limiter of the slow query log.
pub(crate) struct SlowLog {
    /// `None` if the log is disabled.
    threshold: Option<Duration>,
    window: Mutex<Window>,
}

/// The current one-second window of the rate limiter.
struct Window {
    begun: Instant,
    lines: u32,
    /// Lines omitted since the last one that was written.
    left_out: u64,
}

impl SlowLog {
    /// Creates a log of the statements that take longer than `threshold`.
    pub(crate) fn new(threshold: Option<Duration>) -> SlowLog {
        let window = Window { begun: Instant::now(), lines: 0, left_out: 0 };
        SlowLog { threshold, window: Mutex::new(window) }
    }

    pub(super) fn is_slow(&self, time: Duration) -> bool {
        self.threshold.is_some_and(|limit| time > limit)
    }

    /// Returns the number of lines omitted since the last one, or `None` if the rate limit is
    /// reached.
    pub(super) fn admit(&self, now: Instant) -> Option<u64> {
        let mut window = self.window.lock();
        if now.saturating_duration_since(window.begun) >= Duration::from_secs(1) {
            (window.begun, window.lines) = (now, 0);
        }
        if window.lines == MAX_LINES {
            window.left_out += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

/// The redacted text of a statement for the log.
pub(super) fn redact(sql: &str) -> String {
    let mut shown = String::new();
    let mut end = 0;
    for token in Lexer::new(sql) {
        if token.start > end && !shown.is_empty() {
            shown.push(' '); // also replaces line breaks and comments
        }
        let text = if token.kind == TokenKind::String { "'...'" } else { token.text };
        let room = MAX_TEXT_BYTES.saturating_sub(shown.len());
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
    fn literals_and_comments_are_redacted() {
        for (sql, expected) in [
            ("SELECT 'it''s secret',\n\t$1 -- secret\n, 7", "SELECT '...', $1 , 7"),
            ("/* secret */ALTER USER a PASSWORD E'se\\'cret'", "ALTER USER a PASSWORD '...'"),
            ("CREATE PROCEDURE p AS $x$ secret $x$ LANGUAGE lua", "CREATE PROCEDURE p AS '...' LANGUAGE lua"),
            ("SELECT x'5EC2E7' FROM \"a 'name'\"", "SELECT x'...' FROM \"a 'name'\""),
            ("SELECT 'secret", "SELECT '...'"),
            ("", ""),
        ] {
            assert_eq!(redact(sql), expected);
        }
    }

    #[test]
    fn long_text_is_truncated_at_a_character_boundary() {
        let long = redact(&format!("SELECT \"{}\"", "\u{e9}".repeat(MAX_TEXT_BYTES)));
        assert!(long.ends_with("\u{e9}..."), "{long}");
        assert!((MAX_TEXT_BYTES - 1..=MAX_TEXT_BYTES + 3).contains(&long.len()), "{}", long.len());
        let many = redact(&"SELECT a, ".repeat(MAX_TEXT_BYTES));
        assert!(many.len() <= MAX_TEXT_BYTES + 4 && many.ends_with("..."), "{many}");
    }

    #[test]
    fn slow_log_is_rate_limited() {
        let log = SlowLog::new(Some(Duration::from_millis(10)));
        assert!(!log.is_slow(Duration::from_millis(10)) && log.is_slow(Duration::from_millis(11)));
        assert!(!SlowLog::new(None).is_slow(Duration::MAX));
        let now = Instant::now();
        let written = (0..MAX_LINES + 5).filter(|_| log.admit(now) == Some(0)).count();
        assert_eq!(written, MAX_LINES as usize);
        let later = now + Duration::from_secs(1);
        assert_eq!((log.admit(later), log.admit(later)), (Some(5), Some(0)));
    }
}
