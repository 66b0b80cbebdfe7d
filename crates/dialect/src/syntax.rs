//! What all parsers share: syntax errors, and a search that stores no tokens.

use fulmar_sqlite::{Error, sqlstate};

use crate::Result;
use crate::token::{Cursor, Lexer};

/// Returns true if `wanted` accepts any three consecutive bytes, in lower case, of the first
/// statement. Stops at the end of that statement: in a script of many statements, each would
/// otherwise scan all the following ones.
pub(crate) fn first_has(sql: &str, wanted: impl Fn([u8; 3]) -> bool) -> bool {
    let has = |text: &str| {
        let mut windows = text.as_bytes().windows(3);
        windows.any(|window| wanted([window[0], window[1], window[2]].map(|byte| byte.to_ascii_lowercase())))
    };
    let alone = sql.split_once(';').is_none_or(|(_, rest)| rest.trim_ascii_start().is_empty());
    if alone {
        return has(sql);
    }
    let end = Lexer::new(sql).find(|token| token.is_symbol(';')).map_or(sql.len(), |token| token.end());
    has(&sql[..end])
}

/// A syntax error at the next token.
pub(crate) fn unexpected(cursor: &Cursor<'_, '_>) -> Error {
    match cursor.peek() {
        Some(token) => {
            Error::new(sqlstate::SYNTAX_ERROR, format!("syntax error at or near \"{}\"", shorten(token.text)))
        }
        None => Error::new(sqlstate::SYNTAX_ERROR, "syntax error at end of input"),
    }
}

/// The first 60 characters of a text, for an error message.
pub fn shorten(text: &str) -> String {
    text.chars().take(60).collect()
}

/// Fails unless all tokens have been read.
pub(crate) fn end(cursor: &Cursor<'_, '_>) -> Result<()> {
    if cursor.is_end() { Ok(()) } else { Err(unexpected(cursor)) }
}
