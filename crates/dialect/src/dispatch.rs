//! Classifies statements by their first keyword, and selects the parser of a statement.

use crate::statement::{Answer, Command, Context, Dispatch};
use crate::syntax::{end, first_has};
use crate::token::{Cursor, Lexer, Token, first_statement};
use crate::{Result, admin, copy, functions, procedure, schema, setting};

/// Returns true if [`translate`] translates the first statement of `sql`, which takes memory.
/// Stores no tokens.
pub fn needs_translation(sql: &str) -> bool {
    functions::may_translate(sql)
}

/// Classifies the first statement of `sql`, and translates it if necessary.
pub fn translate<'a>(sql: &'a str, context: &Context<'_>) -> Result<Dispatch<'a>> {
    let Some((text, rest)) = in_main_schema(sql) else { return front_of(sql, context) };
    Ok(match front_of(&text, context)? {
        Dispatch::Rewritten(text, _) => Dispatch::Rewritten(text, rest),
        Dispatch::Translated(translated, _) => Dispatch::Translated(translated, rest),
        Dispatch::Command(command, _) => Dispatch::Command(command, rest),
        Dispatch::Pass => Dispatch::Rewritten(text, rest),
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
    let dotted = |at: usize| tokens.get(at + 1).is_some_and(|next| next.is_symbol('.'));
    if tokens.iter().enumerate().any(|(at, token)| is_public(token) && !dotted(at)) {
        return None;
    }
    let mut text = String::new();
    let start = tokens.first()?.start;
    let mut copied = start;
    for (at, token) in tokens.iter().enumerate() {
        let dot = |place: Option<usize>| {
            place.and_then(|place| tokens.get(place)).is_some_and(|token| token.is_symbol('.'))
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

fn front_of<'a>(sql: &'a str, context: &Context<'_>) -> Result<Dispatch<'a>> {
    let Some(first) = Lexer::new(sql).next() else { return Ok(Dispatch::Pass) };
    let is = |words: &[&str]| words.iter().any(|word| first.is(word));
    if is(&["select", "insert", "update", "delete", "with", "values"]) {
        return functions::translate(sql, context);
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
        return Ok(Dispatch::Pass);
    };
    let (tokens, rest) = first_statement(sql);
    Ok(match parser(&mut Cursor::new(&tokens), sql)? {
        None => Dispatch::Pass,
        Some(Answer::Rewritten(text)) => Dispatch::Rewritten(text, rest),
        Some(Answer::Command(command)) => Dispatch::Command(Box::new(command), rest),
    })
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
