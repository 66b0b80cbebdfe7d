//! Parses SET, SHOW, RESET, DISCARD and DEALLOCATE.

use fulmar_sqlite::{Error, sqlstate};

use crate::Result;
use crate::statement::Command;
use crate::syntax::{end, shorten, unexpected};
use crate::token::{Cursor, TokenKind};

/// Parses a statement that starts with one of the five keywords.
pub(super) fn parse(cursor: &mut Cursor<'_, '_>) -> Result<Command> {
    let command = if cursor.word("set") {
        set(cursor)?
    } else if cursor.word("show") {
        show(cursor)?
    } else if cursor.word("reset") {
        match parameter(cursor)? {
            name if name == "all" => Command::ResetAll,
            name => Command::Set { name, value: None, local: false },
        }
    } else if cursor.word("discard") {
        discard(cursor)?
    } else {
        cursor.word("deallocate");
        cursor.word("prepare");
        let all = cursor.word("all");
        Command::Deallocate(if all { None } else { Some(cursor.name().ok_or_else(|| unexpected(cursor))?) })
    };
    end(cursor)?;
    Ok(command)
}

/// Parses UNLISTEN * and CLOSE ALL, which drivers send when they return a connection to a pool.
/// Both do nothing.
pub(super) fn listen_or_close(cursor: &mut Cursor<'_, '_>) -> Result<Command> {
    let tag = match cursor.name().as_deref() {
        Some("unlisten") => "UNLISTEN",
        Some("close") if cursor.word("all") => "CLOSE CURSOR ALL",
        Some("close") => {
            let name = cursor.name().ok_or_else(|| unexpected(cursor))?;
            let message = format!("cursor \"{name}\" does not exist");
            return Err(Error::new(sqlstate::INVALID_CURSOR_NAME, message));
        }
        _ => {
            return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "LISTEN and NOTIFY are not supported")
                .hint("Poll for new rows, or notify the clients from the application."));
        }
    };
    Ok(Command::Batch { statements: Vec::new(), tag })
}

fn set(cursor: &mut Cursor<'_, '_>) -> Result<Command> {
    if cursor.words(&["session", "characteristics", "as", "transaction"]) {
        return transaction(cursor, true);
    }
    if cursor.word("transaction") {
        return transaction(cursor, false);
    }
    let local = cursor.word("local");
    if !local {
        cursor.word("session");
    }
    if cursor.word("role") || cursor.word("authorization") {
        return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "cannot change the user of a session")
            .hint("Connect as the other user."));
    }
    if cursor.words(&["time", "zone"]) {
        let value = value(cursor)?;
        return Ok(Command::Set {
            name: "timezone".into(),
            value: value.filter(|zone| zone != "local"),
            local,
        });
    }
    if cursor.word("names") {
        return Ok(Command::Set { name: "client_encoding".into(), value: value(cursor)?, local });
    }
    let (name, value) = assignment(cursor)?;
    Ok(Command::Set { name, value, local })
}

/// `name = value` or `name TO value`, up to the end of the statement. The value is `None` for
/// DEFAULT.
pub(super) fn assignment(cursor: &mut Cursor<'_, '_>) -> Result<(String, Option<String>)> {
    let name = parameter(cursor)?;
    if !cursor.symbol('=') && !cursor.word("to") {
        return Err(unexpected(cursor));
    }
    Ok((name, value(cursor)?))
}

/// A parameter's name, optionally with a namespace: `fulmar.key`.
pub(super) fn parameter(cursor: &mut Cursor<'_, '_>) -> Result<String> {
    if cursor.words(&["time", "zone"]) {
        return Ok("timezone".into());
    }
    if cursor.words(&["transaction", "isolation", "level"]) {
        return Ok("transaction_isolation".into());
    }
    if cursor.words(&["session", "authorization"]) {
        return Ok("session_authorization".into());
    }
    let mut name = cursor.name().ok_or_else(|| unexpected(cursor))?;
    while cursor.symbol('.') {
        name.push('.');
        name.push_str(&cursor.name().ok_or_else(|| unexpected(cursor))?);
    }
    Ok(name.to_lowercase())
}

/// The rest of the statement as a value. `None` for DEFAULT.
fn value(cursor: &mut Cursor<'_, '_>) -> Result<Option<String>> {
    if cursor.rest().len() == 1 && cursor.word("default") {
        return Ok(None);
    }
    let mut value = String::new();
    let mut after_comma = true;
    while let Some(token) = cursor.next() {
        let part = match token.kind {
            TokenKind::String => token.string(),
            TokenKind::Quoted => token.name(),
            TokenKind::Word | TokenKind::Number => Some(token.text.to_owned()),
            TokenKind::Symbol if token.is_symbol('-') || token.is_symbol('+') => Some(token.text.to_owned()),
            TokenKind::Symbol if token.is_symbol(',') && !after_comma => Some(", ".to_owned()),
            _ => None,
        };
        let part = part.ok_or_else(|| {
            Error::new(sqlstate::SYNTAX_ERROR, format!("syntax error at or near \"{}\"", shorten(token.text)))
        })?;
        after_comma = token.is_symbol(',');
        value.push_str(&part);
    }
    if after_comma {
        return Err(unexpected(cursor));
    }
    Ok(Some(value))
}

fn show(cursor: &mut Cursor<'_, '_>) -> Result<Command> {
    if cursor.rest().len() == 1 && cursor.word("all") {
        return Ok(Command::ShowAll);
    }
    Ok(Command::Show(parameter(cursor)?))
}

/// Parses transaction modes. Every isolation level is accepted: all transactions are serializable,
/// which is at least as strict.
fn transaction(cursor: &mut Cursor<'_, '_>, session: bool) -> Result<Command> {
    let mut read_only = None;
    loop {
        if cursor.words(&["isolation", "level"]) {
            let known = cursor.word("serializable")
                || cursor.words(&["repeatable", "read"])
                || cursor.words(&["read", "committed"])
                || cursor.words(&["read", "uncommitted"]);
            if !known {
                return Err(unexpected(cursor));
            }
        } else if cursor.words(&["read", "only"]) {
            read_only = Some(true);
        } else if cursor.words(&["read", "write"]) {
            read_only = Some(false);
        } else if !cursor.word("deferrable") && !cursor.words(&["not", "deferrable"]) {
            return Err(unexpected(cursor));
        }
        cursor.symbol(',');
        if cursor.is_end() {
            return Ok(Command::SetTransaction { read_only, session });
        }
    }
}

fn discard(cursor: &mut Cursor<'_, '_>) -> Result<Command> {
    if cursor.word("all") {
        Ok(Command::DiscardAll)
    } else if cursor.word("plans") || cursor.word("sequences") {
        Ok(Command::DiscardPlans)
    } else if cursor.word("temp") || cursor.word("temporary") {
        Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "DISCARD TEMP is not supported")
            .hint("Drop the temporary tables by name, or use DISCARD ALL."))
    } else {
        Err(unexpected(cursor))
    }
}
