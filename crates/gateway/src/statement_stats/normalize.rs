//! Normalized texts of statements: statements that differ only in their constants have the same
//! one.
//!
//! - Constants and parameters become `?`, and comments and line breaks one blank. A text therefore
//!   contains no data and no password.
//! - A list of constants becomes `?, ...`, and equal rows of a VALUES list one row, so that the
//!   length of a list makes no difference.

use fulmar_dialect::token::{Lexer, Token, TokenKind};

/// Maximum size of a text.
const MAX_TEXT_BYTES: usize = 1024;
/// What follows these bytes of a statement makes no difference.
const MAX_READ_BYTES: usize = 64 << 10;
/// What a constant adds to a text, at most.
const MAX_CONSTANT_BYTES: usize = "...".len();
/// The end of a text that was truncated.
const TRUNCATED: &str = "...";

/// The normalized text of a statement.
pub(super) fn normalize(sql: &str) -> String {
    let mut text = Normalized::default();
    for token in Lexer::new(sql) {
        if token.start >= MAX_READ_BYTES || !text.add(&token) {
            text.truncate();
            break;
        }
    }
    text.shown
}

#[derive(Default)]
struct Normalized {
    shown: String,
    /// The offset in the statement after the last token.
    end: usize,
    /// Whether a constant can follow: the last token is a symbol that no operand ends with.
    expects_operand: bool,
    /// The length of the text before a sign that may belong to a constant.
    sign: Option<usize>,
}

impl Normalized {
    /// Adds a token. Returns false if the text would be too long.
    fn add(&mut self, token: &Token<'_>) -> bool {
        let blank = match (self.shown.as_bytes().last(), token.text) {
            (None | Some(b'('), _) | (_, "," | ")" | ";") => "",
            (Some(b','), _) => " ",
            _ if token.start > self.end => " ",
            _ => "",
        };
        self.end = token.end();
        let is_constant = match token.kind {
            TokenKind::String | TokenKind::Number | TokenKind::Parameter => true,
            TokenKind::Word => self.expects_operand && is_constant(token.text),
            TokenKind::Quoted | TokenKind::Symbol => false,
        };
        let bytes = if is_constant { MAX_CONSTANT_BYTES } else { token.text.len() };
        if self.shown.len() + blank.len() + bytes > MAX_TEXT_BYTES {
            return false;
        }
        let sign = self.sign.take();
        if is_constant {
            match sign {
                Some(before) => self.shown.truncate(before),
                None => self.shown.push_str(blank),
            }
            self.add_constant();
            self.expects_operand = false;
            return true;
        }
        self.shown.push_str(blank);
        if self.expects_operand && matches!(token.text, "-" | "+") {
            self.sign = Some(self.shown.len());
        }
        self.shown.push_str(token.text);
        self.expects_operand = matches!(token.text, "(" | "," | "=" | "<" | ">");
        if token.text == ")" {
            self.merge_rows();
        }
        true
    }

    /// Adds a constant, or nothing but `...` if one precedes it in the same list.
    fn add_constant(&mut self) {
        if self.shown.ends_with("?, ..., ") {
            self.shown.truncate(self.shown.len() - 2);
        } else if self.shown.ends_with("?, ") {
            self.shown.push_str("...");
        } else {
            self.shown.push('?');
        }
    }

    /// Removes the row of constants that has just ended if the row before it is equal.
    fn merge_rows(&mut self) {
        for row in ["(?)", "(?, ...)"] {
            let before = self.shown.strip_suffix(row).and_then(|before| before.strip_suffix(", "));
            if let Some(kept) = before.filter(|before| before.ends_with(row)).map(str::len) {
                self.shown.truncate(kept);
                return;
            }
        }
    }

    /// Marks the text as truncated. A row that has begun is removed: where it ends depends on the
    /// constants.
    fn truncate(&mut self) {
        if let Some(before) = self.sign {
            self.shown.truncate(before);
        }
        let text = self.shown.trim_end();
        let row = ["(?, ...", "(?,", "(?", "("].iter().find_map(|begun| text.strip_suffix(begun));
        let kept = row.map_or(text, str::trim_end);
        let length = kept.strip_suffix(',').unwrap_or(kept).len();
        self.shown.truncate(length);
        self.shown.push_str(TRUNCATED);
    }
}

/// Whether a keyword is a constant where an operand is expected.
fn is_constant(word: &str) -> bool {
    ["null", "true", "false"].iter().any(|constant| word.eq_ignore_ascii_case(constant))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_parameters_and_comments_are_omitted() {
        for (sql, expected) in [
            ("SELECT 'it''s secret',\n\t$1 -- secret\n, 7", "SELECT ?, ..."),
            ("/* secret */ALTER USER a PASSWORD E'se\\'cret'", "ALTER USER a PASSWORD ?"),
            ("CREATE PROCEDURE p AS $x$ secret $x$ LANGUAGE lua", "CREATE PROCEDURE p AS ? LANGUAGE lua"),
            ("SELECT x'5EC2E7' FROM \"a 'name'\"", "SELECT x? FROM \"a 'name'\""),
            ("SELECT 'secret", "SELECT ?"),
            ("SELECT v FROM t WHERE id=$1 AND w = 1.5e3", "SELECT v FROM t WHERE id=? AND w = ?"),
            ("UPDATE t SET v = -7, w = NULL WHERE x IS NULL", "UPDATE t SET v = ?, w = ? WHERE x IS NULL"),
            ("SELECT a - 7, b -1 FROM t", "SELECT a - ?, b -? FROM t"),
            ("SELECT count( * ) FROM t LIMIT 10", "SELECT count(*) FROM t LIMIT ?"),
            ("", ""),
        ] {
            assert_eq!(normalize(sql), expected, "{sql}");
        }
    }

    #[test]
    fn lengths_of_lists_make_no_difference() {
        for (sql, expected) in [
            ("SELECT a FROM t WHERE id IN (1)", "SELECT a FROM t WHERE id IN (?)"),
            ("SELECT a FROM t WHERE id IN (1,2)", "SELECT a FROM t WHERE id IN (?, ...)"),
            ("SELECT a FROM t WHERE id IN (1, -2, $3)", "SELECT a FROM t WHERE id IN (?, ...)"),
            ("INSERT INTO t VALUES (1, 'a')", "INSERT INTO t VALUES (?, ...)"),
            ("INSERT INTO t VALUES (1, 'a'), (2, NULL),(-3,'c')", "INSERT INTO t VALUES (?, ...)"),
            ("INSERT INTO t VALUES ($1), ($2), ($3)", "INSERT INTO t VALUES (?)"),
            ("INSERT INTO t VALUES (1, now()), (2, now())", "INSERT INTO t VALUES (?, now()), (?, now())"),
        ] {
            assert_eq!(normalize(sql), expected, "{sql}");
        }
    }

    #[test]
    fn long_texts_are_truncated() {
        let many = normalize(&"SELECT a, ".repeat(MAX_TEXT_BYTES));
        assert!(many.len() <= MAX_TEXT_BYTES + TRUNCATED.len() && many.ends_with(TRUNCATED), "{many}");
        let long = normalize(&format!("SELECT \"{}\"", "\u{e9}".repeat(MAX_TEXT_BYTES)));
        assert_eq!(long, "SELECT...");
        // Where the reading ends depends on the constants, and must not be seen.
        let insert = |digits: usize| {
            let row = format!("({:0digits$}, 'x')", 7);
            normalize(&format!("INSERT INTO t VALUES {}", vec![row; MAX_READ_BYTES / 4].join(", ")))
        };
        for digits in 1..10 {
            assert_eq!(insert(digits), "INSERT INTO t VALUES (?, ...)...", "{digits} digits");
        }
    }
}
