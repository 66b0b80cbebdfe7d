//! Translates PostgreSQL statements that SQLite does not understand.
//!
//! Fulmar's SQL dialect is SQLite's. psql, pgbench and drivers also send PostgreSQL statements of
//! their own: they set parameters, call `version()`, create databases and copy rows. [`front`]
//! classifies a statement by its first keyword, which is the whole cost for most statements, and
//! returns one of four:
//!
//! ```text
//! SELECT abalance FROM ...            Pass        SQLite syntax: the engine prepares it unchanged
//! CREATE TABLE t (...) WITH (...)     Rewritten   the engine prepares the rewritten text
//! SELECT 't'::regclass                Translated  as above; system tables and functions may be used
//! SET statement_timeout = '5s'        Command     the gateway executes it
//! ```
//!
//! Rewriting replaces whole tokens. It never substitutes inside the text.

pub(crate) mod admin;
mod catalog;
pub(crate) mod copy;
mod functions;
pub(crate) mod primary_key;
pub(crate) mod procedure;
mod schema;
mod setting;
pub(crate) mod token;

use fulmar_engine::{Error, sqlstate};

use crate::Result;
use admin::Admin;
use catalog::Translated;
use copy::Copy;
use primary_key::PrimaryKey;
use procedure::Procedure;
use token::{Cursor, Lexer, Token, first_statement};

/// The session state that translation depends on.
pub(crate) struct Context<'a> {
    pub(crate) database: &'a str,
    pub(crate) user: &'a str,
    pub(crate) pid: i32,
}

/// A statement that the gateway executes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Command {
    /// `SET name = value`. `None` sets the default.
    Set { name: String, value: Option<String>, local: bool },
    /// `SET [SESSION CHARACTERISTICS AS] TRANSACTION ...`.
    SetTransaction { read_only: Option<bool>, session: bool },
    /// `SHOW name`.
    Show(String),
    /// `SHOW ALL`.
    ShowAll,
    /// `RESET ALL`.
    ResetAll,
    /// `DISCARD ALL`.
    DiscardAll,
    /// `DISCARD PLANS` or `DISCARD SEQUENCES`: only returns the command tag.
    DiscardPlans,
    /// `DEALLOCATE name`. `None` is `DEALLOCATE ALL`.
    Deallocate(Option<String>),
    /// SQLite statements that together implement one PostgreSQL statement, and its command tag.
    Batch { statements: Vec<String>, tag: &'static str },
    /// `ALTER TABLE t ADD PRIMARY KEY (...)`.
    AddPrimaryKey(PrimaryKey),
    /// `COPY t FROM STDIN`, `COPY t TO STDOUT`.
    Copy(Copy),
    /// `CREATE PROCEDURE`, `DROP PROCEDURE`.
    Procedure(Procedure),
    /// Administration of tenants and users.
    Admin(Admin),
    /// `VERIFY`: verifies the checksums of all data stored on the node.
    Verify,
}

/// Selects the component that executes a statement. The `&str` is the text after the statement.
#[derive(Debug, PartialEq)]
pub(crate) enum Front<'a> {
    /// The engine, with the text unchanged.
    Pass,
    /// The engine, with this text instead.
    Rewritten(String, &'a str),
    /// The engine, with the translated statement.
    Translated(Translated, &'a str),
    /// The gateway.
    Command(Box<Command>, &'a str),
}

/// Returns true if [`front`] translates the first statement of `sql`, which takes memory. Stores no
/// tokens.
pub(crate) fn translates(sql: &str) -> bool {
    functions::may_translate(sql)
}

/// Classifies the first statement of `sql`, and translates it if necessary.
pub(crate) fn front<'a>(sql: &'a str, context: &Context<'_>) -> Result<Front<'a>> {
    let Some((text, rest)) = in_main_schema(sql) else { return front_of(sql, context) };
    Ok(match front_of(&text, context)? {
        Front::Rewritten(text, _) => Front::Rewritten(text, rest),
        Front::Translated(translated, _) => Front::Translated(translated, rest),
        Front::Command(command, _) => Front::Command(command, rest),
        Front::Pass => Front::Rewritten(text, rest),
    })
}

/// Replaces the schema `public` with SQLite's `main` in the first statement. Returns the new text
/// and the text after the statement, or `None` if the statement does not use the schema.
fn in_main_schema(sql: &str) -> Option<(String, &str)> {
    if !first_has(sql, |window| matches!(window, [b'i', b'c', b'.' | b'"' | b' '])) {
        return None;
    }
    let (tokens, rest) = first_statement(sql);
    let is_public = |token: &Token<'_>| token.name().is_some_and(|name| name == "public");
    // Another object is named `public`.
    let dotted = |at: usize| tokens.get(at + 1).is_some_and(|next| next.is_sign('.'));
    if tokens.iter().enumerate().any(|(at, token)| is_public(token) && !dotted(at)) {
        return None;
    }
    let mut text = String::new();
    let start = tokens.first()?.start;
    let mut copied = start;
    for (at, token) in tokens.iter().enumerate() {
        let dot = |place: Option<usize>| {
            place.and_then(|place| tokens.get(place)).is_some_and(|token| token.is_sign('.'))
        };
        let is_schema = dot(Some(at + 1)) && !dot(at.checked_sub(1));
        if is_schema && is_public(token) {
            text.push_str(&sql[copied..token.start]);
            text.push_str("main");
            copied = token.end();
        }
    }
    if copied == start {
        return None;
    }
    text.push_str(&sql[copied..tokens.last()?.end()]);
    Some((text, rest))
}

/// Returns true if `wanted` accepts any three consecutive bytes, in lower case, of the first
/// statement. Stops at the end of that statement: in a script of many statements, each would
/// otherwise scan all the following ones.
fn first_has(sql: &str, wanted: impl Fn([u8; 3]) -> bool) -> bool {
    let has = |text: &str| {
        let mut windows = text.as_bytes().windows(3);
        windows.any(|window| wanted([window[0], window[1], window[2]].map(|byte| byte.to_ascii_lowercase())))
    };
    let alone = sql.split_once(';').is_none_or(|(_, rest)| rest.trim_ascii_start().is_empty());
    if alone {
        return has(sql);
    }
    let end = Lexer::new(sql).find(|token| token.is_sign(';')).map_or(sql.len(), |token| token.end());
    has(&sql[..end])
}

fn front_of<'a>(sql: &'a str, context: &Context<'_>) -> Result<Front<'a>> {
    let Some(first) = Lexer::new(sql).next() else { return Ok(Front::Pass) };
    let is = |words: &[&str]| words.iter().any(|word| first.is(word));
    if is(&["select", "insert", "update", "delete", "with", "values"]) {
        return functions::front(sql, context);
    }
    type Parser = fn(&mut Cursor<'_, '_>, &str) -> Result<Option<Answer>>;
    let parser: Parser = if is(&["create", "drop", "alter", "truncate", "vacuum"]) {
        |cursor, sql| match admin::parse(cursor)? {
            Some(admin) => Ok(Some(Answer::Command(Command::Admin(admin)))),
            None => match procedure::parse(cursor)? {
                Some(procedure) => Ok(Some(Answer::Command(Command::Procedure(procedure)))),
                None => schema::parse(cursor, sql),
            },
        }
    } else if is(&["grant", "revoke"]) {
        |cursor, _| Ok(admin::parse(cursor)?.map(|admin| Answer::Command(Command::Admin(admin))))
    } else if is(&["set", "show", "reset", "discard", "deallocate"]) {
        |cursor, _| setting::parse(cursor).map(|command| Some(Answer::Command(command)))
    } else if is(&["verify"]) {
        |cursor, _| {
            cursor.word("verify");
            end(cursor).map(|()| Some(Answer::Command(Command::Verify)))
        }
    } else if is(&["unlisten", "close", "listen", "notify"]) {
        |cursor, _| setting::listen_or_close(cursor).map(|command| Some(Answer::Command(command)))
    } else if is(&["copy"]) {
        |cursor, sql| copy::parse(cursor, sql).map(|copy| Some(Answer::Command(Command::Copy(copy))))
    } else {
        return Ok(Front::Pass);
    };
    let (tokens, rest) = first_statement(sql);
    Ok(match parser(&mut Cursor::new(&tokens), sql)? {
        None => Front::Pass,
        Some(Answer::Rewritten(text)) => Front::Rewritten(text, rest),
        Some(Answer::Command(command)) => Front::Command(Box::new(command), rest),
    })
}

/// The result of a parser.
enum Answer {
    Rewritten(String),
    Command(Command),
}

/// A syntax error at the next token.
fn unexpected(cursor: &Cursor<'_, '_>) -> Error {
    match cursor.peek() {
        Some(token) => {
            Error::new(sqlstate::SYNTAX_ERROR, format!("syntax error at or near \"{}\"", shorten(token.text)))
        }
        None => Error::new(sqlstate::SYNTAX_ERROR, "syntax error at end of input"),
    }
}

pub(crate) fn shorten(text: &str) -> String {
    text.chars().take(60).collect()
}

/// Fails unless all tokens have been read.
fn end(cursor: &Cursor<'_, '_>) -> Result<()> {
    if cursor.is_end() { Ok(()) } else { Err(unexpected(cursor)) }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
