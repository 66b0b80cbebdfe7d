//! Parses `CREATE PROCEDURE` and `DROP PROCEDURE`.
//!
//! ```text
//! CREATE [OR REPLACE] PROCEDURE name ( [[IN] parameter type, ...] )
//!     [RETURNS TABLE ( column type, ... )]  LANGUAGE lua  AS $$ ... $$
//! DROP PROCEDURE [IF EXISTS] name [( ... )]
//! ```

use fulmar_engine::Definition;
use fulmar_sqlite::{Error, sqlstate};

use crate::Result;
use crate::syntax::{end, unexpected};
use crate::token::{Cursor, Token, TokenKind};

/// A statement about a procedure.
#[derive(Clone, Debug, PartialEq)]
pub enum Procedure {
    /// `CREATE PROCEDURE`.
    Create {
        /// The procedure.
        definition: Definition,
        /// `OR REPLACE`.
        replace: bool,
    },
    /// `DROP PROCEDURE`.
    Drop {
        /// The procedure's name.
        name: String,
        /// `IF EXISTS`.
        if_exists: bool,
    },
}

impl Procedure {
    /// The command tag of the statement.
    pub fn tag(&self) -> &'static str {
        match self {
            Procedure::Create { .. } => "CREATE PROCEDURE",
            Procedure::Drop { .. } => "DROP PROCEDURE",
        }
    }
}

/// Parses a statement. Returns `None` if it is not about a procedure.
pub(super) fn parse(cursor: &mut Cursor<'_, '_>) -> Result<Option<Procedure>> {
    if cursor.words(&["create", "procedure"]) {
        return create(cursor, false).map(Some);
    }
    if cursor.words(&["create", "or", "replace", "procedure"]) {
        return create(cursor, true).map(Some);
    }
    if !cursor.words(&["drop", "procedure"]) {
        return Ok(None);
    }
    let if_exists = cursor.words(&["if", "exists"]);
    let name = name(cursor)?;
    if cursor.symbol('(') {
        columns(cursor)?;
    }
    end(cursor)?;
    Ok(Some(Procedure::Drop { name, if_exists }))
}

fn create(cursor: &mut Cursor<'_, '_>, replace: bool) -> Result<Procedure> {
    let name = name(cursor)?;
    if !cursor.symbol('(') {
        return Err(unexpected(cursor));
    }
    let parameters = columns(cursor)?;
    let (mut returns, mut source, mut language) = (Vec::new(), None, None);
    while !cursor.is_end() {
        if cursor.words(&["returns", "table"]) && cursor.symbol('(') {
            returns = columns(cursor)?;
        } else if cursor.word("language") {
            language = Some(cursor.string().or_else(|| cursor.name()).ok_or_else(|| unexpected(cursor))?);
        } else if cursor.word("as") {
            source = Some(cursor.string().ok_or_else(|| unexpected(cursor))?);
        } else {
            return Err(unexpected(cursor));
        }
    }
    match language.as_deref() {
        Some("lua" | "luau") => {}
        Some(other) => {
            let message = format!("language \"{other}\" does not exist");
            return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
                .hint("Procedures are written in Lua. Use LANGUAGE lua."));
        }
        None => {
            return Err(Error::new(sqlstate::SYNTAX_ERROR, "no language specified").hint("Add LANGUAGE lua."));
        }
    }
    let Some(source) = source else {
        return Err(
            Error::new(sqlstate::SYNTAX_ERROR, "no procedure body specified").hint("Add AS $$ ... $$.")
        );
    };
    Ok(Procedure::Create { definition: Definition { name, parameters, returns, source }, replace })
}

/// A procedure's name, in the form in which the engine reads it in a CALL: ASCII lower case unless
/// quoted.
fn name(cursor: &mut Cursor<'_, '_>) -> Result<String> {
    let mut name = identifier(cursor)?;
    if cursor.symbol('.') {
        if !["public", "main"].contains(&name.as_str()) {
            let message = "procedures are only supported in schema \"public\"";
            return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message).hint("Omit the schema."));
        }
        name = identifier(cursor)?;
    }
    Ok(name)
}

fn identifier(cursor: &mut Cursor<'_, '_>) -> Result<String> {
    let word = cursor.peek().filter(|token| token.kind == TokenKind::Word).map(|token| token.text);
    let name = cursor.name().ok_or_else(|| unexpected(cursor))?;
    Ok(word.map_or(name, str::to_ascii_lowercase))
}

/// Names with their declared types, up to the closing parenthesis.
fn columns(cursor: &mut Cursor<'_, '_>) -> Result<Vec<(String, String)>> {
    let mut columns = Vec::new();
    if cursor.symbol(')') {
        return Ok(columns);
    }
    loop {
        cursor.word("in");
        let name = cursor.name().ok_or_else(|| unexpected(cursor))?;
        columns.push((name, declared_type(cursor)?));
        if cursor.symbol(')') {
            return Ok(columns);
        }
        if !cursor.symbol(',') {
            return Err(unexpected(cursor));
        }
    }
}

/// A type: words, optionally followed by sizes in parentheses.
fn declared_type(cursor: &mut Cursor<'_, '_>) -> Result<String> {
    let mut words = Vec::new();
    let mut depth = 0;
    while let Some(token) = cursor.peek() {
        let belongs = |token: &Token<'_>| depth > 0 || !token.is_symbol(',') && !token.is_symbol(')');
        if !belongs(token) {
            break;
        }
        if token.is("default") || token.is_symbol('=') {
            let message = "default values of parameters are not supported";
            return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message));
        }
        depth += i32::from(token.is_symbol('(')) - i32::from(token.is_symbol(')'));
        words.push(token.text);
        cursor.next();
    }
    Ok(words.join(" "))
}
