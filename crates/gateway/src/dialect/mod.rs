//! The dialect's front: what Postgres clients say that SQLite does not understand.
//!
//! Fulmar's SQL is SQLite's. But psql, pgbench and drivers say things of their own before and around the SQL of their
//! users: they set parameters, ask for `version()`, create databases, copy rows. [`front`] looks at the first keyword
//! of a statement, which is all that most statements pay, and answers one of three:
//!
//! ```text
//! SELECT abalance FROM ...            Pass       SQLite's own: the engine prepares it as it is
//! CREATE TABLE t (...) WITH (...)     Rewritten  SQLite understands the text that stands here instead
//! SELECT 't'::regclass           Translated  as well, with system tables and functions
//! SET statement_timeout = '5s'        Command    the gateway does it itself
//! ```
//!
//! Rewriting replaces whole tokens; it never searches in text.

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

/// What the front must know of the session.
pub(crate) struct Context<'a> {
    pub(crate) database: &'a str,
    pub(crate) user: &'a str,
    pub(crate) pid: i32,
}

/// A statement that the gateway runs itself.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Command {
    /// `SET name = value`; no value means the default.
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
    /// `DISCARD PLANS` or `DISCARD SEQUENCES`: nothing to do, but the tag.
    DiscardPlans,
    /// `DEALLOCATE name`, or all.
    Deallocate(Option<String>),
    /// Statements of SQLite that do together what one of Postgres does, and its tag.
    Batch { statements: Vec<String>, tag: &'static str },
    /// `ALTER TABLE t ADD PRIMARY KEY (...)`.
    AddPrimaryKey(PrimaryKey),
    /// `COPY t FROM STDIN`, `COPY t TO STDOUT`.
    Copy(Copy),
    /// `CREATE PROCEDURE`, `DROP PROCEDURE`.
    Procedure(Procedure),
    /// Administration of tenants and users.
    Admin(Admin),
    /// `VERIFY`: read all that the node keeps, and compare it with its checksums.
    Verify,
}

/// Who takes care of a statement.
#[derive(Debug, PartialEq)]
pub(crate) enum Front<'a> {
    /// The engine, as it is.
    Pass,
    /// The engine, with this text instead; and what follows the statement.
    Rewritten(String, &'a str),
    /// The engine, with what it was translated into; and what follows the statement.
    Translated(Translated, &'a str),
    /// The gateway; and what follows the statement.
    Command(Box<Command>, &'a str),
}

/// Whether [`front`] translates the first statement of `sql`, which needs memory. Keeps no tokens.
pub(crate) fn translates(sql: &str) -> bool {
    functions::may_translate(sql)
}

/// Looks at the first statement of `sql`.
pub(crate) fn front<'a>(sql: &'a str, context: &Context<'_>) -> Result<Front<'a>> {
    let Some((text, rest)) = in_main_schema(sql) else { return front_of(sql, context) };
    Ok(match front_of(&text, context)? {
        Front::Rewritten(text, _) => Front::Rewritten(text, rest),
        Front::Translated(translated, _) => Front::Translated(translated, rest),
        Front::Command(command, _) => Front::Command(command, rest),
        Front::Pass => Front::Rewritten(text, rest),
    })
}

/// The first statement with SQLite's name for the schema `public`, where it names it; and what follows.
fn in_main_schema(sql: &str) -> Option<(String, &str)> {
    if !first_has(sql, |window| matches!(window, [b'i', b'c', b'.' | b'"' | b' '])) {
        return None;
    }
    let (tokens, rest) = first_statement(sql);
    let is_public = |token: &Token<'_>| token.name().is_some_and(|name| name == "public");
    // Something else has that name.
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

/// Whether three bytes in a row of the first statement, in lower case, are what is looked for. Looks no further than the
/// statement: of a text of many, each would read all that follow.
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

/// What a parser makes of a statement.
enum Answer {
    Rewritten(String),
    Command(Command),
}

/// An error at the token that comes next.
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

/// All must have been read.
fn end(cursor: &Cursor<'_, '_>) -> Result<()> {
    if cursor.is_end() { Ok(()) } else { Err(unexpected(cursor)) }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
