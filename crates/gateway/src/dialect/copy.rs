//! `COPY table FROM STDIN`.

use fulmar_engine::{Error, sqlstate};

use super::token::{Cursor, Table};
use super::{end, unexpected};
use crate::Result;

/// What to copy, and how the rows are written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Copy {
    pub(crate) table: Table,
    /// Empty: all columns of the table.
    pub(crate) columns: Vec<String>,
    /// What stands between two columns.
    pub(crate) delimiter: u8,
    /// How NULL is written.
    pub(crate) null: String,
    /// The first line names the columns.
    pub(crate) header: bool,
}

/// Parses a COPY.
pub(super) fn parse(cursor: &mut Cursor<'_, '_>) -> Result<Copy> {
    cursor.word("copy");
    if cursor.peek().is_some_and(|token| token.is_sign('(')) {
        return Err(copy_out());
    }
    let table = cursor.table().ok_or_else(|| unexpected(cursor))?;
    let mut copy = Copy { table, columns: Vec::new(), delimiter: b'\t', null: "\\N".into(), header: false };
    if cursor.sign('(') {
        loop {
            copy.columns.push(cursor.name().ok_or_else(|| unexpected(cursor))?);
            if !cursor.sign(',') {
                break;
            }
        }
        if !cursor.sign(')') {
            return Err(unexpected(cursor));
        }
    }
    if cursor.word("to") {
        return Err(copy_out());
    }
    if !cursor.word("from") {
        return Err(unexpected(cursor));
    }
    if !cursor.word("stdin") {
        return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "COPY reads from STDIN only")
            .hint("psql's \\copy reads a file of yours."));
    }
    options(cursor, &mut copy)?;
    end(cursor)?;
    Ok(copy)
}

fn copy_out() -> Error {
    Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "COPY TO is not supported").hint("SELECT the rows.")
}

fn options(cursor: &mut Cursor<'_, '_>, copy: &mut Copy) -> Result<()> {
    cursor.word("with");
    let in_parentheses = cursor.sign('(');
    while let Some(option) = cursor.name() {
        match option.as_str() {
            "format" if cursor.word("text") => {}
            "format" | "csv" | "binary" => {
                return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "COPY knows the text format only"));
            }
            // How Postgres stores the rows; here rows are rows.
            "freeze" => {
                switch(cursor)?;
            }
            "header" => copy.header = switch(cursor)?,
            "delimiter" | "delimiters" => copy.delimiter = delimiter(&argument(cursor)?)?,
            "null" => copy.null = argument(cursor)?,
            "encoding" => encoding(&argument(cursor)?)?,
            _ => {
                return Err(Error::new(
                    sqlstate::FEATURE_NOT_SUPPORTED,
                    format!("COPY does not know \"{option}\""),
                ));
            }
        }
        cursor.sign(',');
    }
    if in_parentheses && !cursor.sign(')') {
        return Err(unexpected(cursor));
    }
    Ok(())
}

fn argument(cursor: &mut Cursor<'_, '_>) -> Result<String> {
    cursor.word("as");
    cursor.string().ok_or_else(|| unexpected(cursor))
}

/// ON or OFF, with nothing meaning ON.
fn switch(cursor: &mut Cursor<'_, '_>) -> Result<bool> {
    let Some(token) = cursor.peek().filter(|token| !token.is_sign(',') && !token.is_sign(')')) else {
        return Ok(true);
    };
    let text = token.string().unwrap_or_else(|| token.text.to_owned());
    let on = match text.to_lowercase().as_str() {
        "on" | "true" | "1" => true,
        "off" | "false" | "0" => false,
        _ => return Err(unexpected(cursor)),
    };
    cursor.next();
    Ok(on)
}

fn delimiter(text: &str) -> Result<u8> {
    match text.as_bytes() {
        [byte] if !byte.is_ascii_alphanumeric() && !matches!(byte, b'\\' | b'\r' | b'\n' | b'.') => Ok(*byte),
        _ => {
            Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, format!("COPY delimiter cannot be \"{text}\""))
                .hint("A delimiter is one character: no letter, digit, backslash, point or end of line."))
        }
    }
}

fn encoding(name: &str) -> Result<()> {
    if matches!(name.to_lowercase().replace('-', "").as_str(), "utf8" | "unicode") {
        return Ok(());
    }
    Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, format!("encoding \"{name}\" is not supported"))
        .hint("All text is UTF-8."))
}
