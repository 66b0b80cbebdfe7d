//! Parses `COPY table FROM STDIN`, `COPY table TO STDOUT`, `COPY (query) TO STDOUT`, and
//! `COPY DATABASE`, whose only format is `sqlite`.

use fulmar_pgwire::copy::{Columns, Format, Header};
use fulmar_sqlite::{Error, sqlstate};

use crate::Result;
use crate::syntax::{end, unexpected};
use crate::token::{Cursor, TableName, Token, quote_name};

/// Source, destination and row format of a COPY.
#[derive(Clone, Debug, PartialEq)]
pub enum Copy {
    /// `COPY t FROM STDIN`
    In {
        /// The table.
        table: TableName,
        /// The columns. Empty for all.
        columns: Vec<String>,
        /// The format of the lines.
        format: Format,
    },
    /// `COPY t TO STDOUT`: writes the columns that [`Copy::In`] reads.
    TableOut {
        /// The table.
        table: TableName,
        /// The format of the lines.
        format: Format,
    },
    /// `COPY t (a, b) TO STDOUT`, `COPY (SELECT ...) TO STDOUT`: writes the rows of a query.
    Out {
        /// The text of the query.
        query: String,
        /// The format of the lines.
        format: Format,
    },
    /// `COPY DATABASE TO STDOUT (FORMAT sqlite)`: writes the session's database.
    DatabaseOut,
    /// `COPY DATABASE name FROM STDIN (FORMAT sqlite)`: creates a database.
    DatabaseIn {
        /// The name of the database.
        name: String,
        /// Its owner. `None` is the current user.
        owner: Option<String>,
    },
}

/// Parses the COPY statement in `sql`.
pub(super) fn parse(cursor: &mut Cursor<'_, '_>, sql: &str) -> Result<Copy> {
    cursor.word("copy");
    if cursor.rest().windows(2).any(|two| two[0].is("format") && two[1].is("sqlite")) {
        return database(cursor);
    }
    if let Some(query) = query(cursor, sql)? {
        return Ok(Copy::Out { query, format: copy_to(cursor)? });
    }
    let table = cursor.table().ok_or_else(|| unexpected(cursor))?;
    let columns = if cursor.symbol('(') { names(cursor)? } else { Vec::new() };
    if cursor.peek().is_some_and(|token| token.is("to")) {
        let format = copy_to(cursor)?;
        return Ok(match columns.is_empty() {
            true => Copy::TableOut { table, format },
            false => Copy::Out { query: select(&table, &columns), format },
        });
    }
    if !cursor.word("from") {
        return Err(unexpected(cursor));
    }
    if !cursor.word("stdin") {
        return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "COPY from a file is not supported")
            .hint("Use COPY FROM STDIN, or psql's \\copy command."));
    }
    let format = options(cursor)?;
    if format.force_quote != Columns::None {
        return Err(wrong_direction("FORCE_QUOTE", "COPY FROM"));
    }
    end(cursor)?;
    Ok(Copy::In { table, columns, format })
}

/// `DATABASE TO STDOUT (FORMAT sqlite)`, `DATABASE name FROM STDIN (FORMAT sqlite, OWNER user)`.
fn database(cursor: &mut Cursor<'_, '_>) -> Result<Copy> {
    if !cursor.word("database") {
        return Err(Error::new(
            sqlstate::FEATURE_NOT_SUPPORTED,
            "COPY format \"sqlite\" is only supported for whole databases",
        )
        .hint("Use COPY DATABASE TO STDOUT (FORMAT sqlite)."));
    }
    let out = cursor.words(&["to", "stdout"]);
    let name = if out { None } else { Some(cursor.name().ok_or_else(|| unexpected(cursor))?) };
    if !out && !cursor.words(&["from", "stdin"]) {
        return Err(unexpected(cursor));
    }
    cursor.word("with");
    if !cursor.symbol('(') || !cursor.words(&["format", "sqlite"]) {
        return Err(unexpected(cursor));
    }
    let mut owner = None;
    if !out && cursor.symbol(',') {
        let named = cursor.word("owner").then(|| cursor.name()).flatten();
        owner = Some(named.ok_or_else(|| unexpected(cursor))?);
    }
    if !cursor.symbol(')') {
        return Err(unexpected(cursor));
    }
    end(cursor)?;
    Ok(name.map_or(Copy::DatabaseOut, |name| Copy::DatabaseIn { name, owner }))
}

/// The text of a query in parentheses.
fn query(cursor: &mut Cursor<'_, '_>, sql: &str) -> Result<Option<String>> {
    let Some(open) = cursor.peek().filter(|token| token.is_symbol('(')) else { return Ok(None) };
    let start = open.end();
    let mut depth = 0;
    while let Some(token) = cursor.next() {
        depth += i32::from(token.is_symbol('(')) - i32::from(token.is_symbol(')'));
        if depth == 0 {
            return Ok(Some(sql[start..token.start].trim().to_owned()));
        }
    }
    Err(unexpected(cursor))
}

/// A query for these columns of a table.
pub fn select(table: &TableName, columns: &[String]) -> String {
    let columns: Vec<String> = columns.iter().map(|column| quote_name(column)).collect();
    format!("SELECT {} FROM {}", columns.join(", "), table.sql())
}

/// The part after the query or the table.
fn copy_to(cursor: &mut Cursor<'_, '_>) -> Result<Format> {
    if !cursor.word("to") {
        return Err(unexpected(cursor));
    }
    if !cursor.word("stdout") {
        return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "COPY to a file is not supported")
            .hint("Use COPY TO STDOUT, or psql's \\copy command."));
    }
    let format = options(cursor)?;
    if format.force_null != Columns::None || format.force_not_null != Columns::None {
        return Err(wrong_direction("FORCE_NULL", "COPY TO"));
    }
    if format.header == Header::Match {
        return Err(wrong_direction("HEADER MATCH", "COPY TO"));
    }
    end(cursor)?;
    Ok(format)
}

fn wrong_direction(option: &str, statement: &str) -> Error {
    let message = format!("COPY {option} cannot be used with {statement}");
    Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
}

/// Names up to the closing parenthesis. The opening one has been read.
fn names(cursor: &mut Cursor<'_, '_>) -> Result<Vec<String>> {
    let mut names = Vec::new();
    loop {
        names.push(cursor.name().ok_or_else(|| unexpected(cursor))?);
        if cursor.symbol(')') {
            return Ok(names);
        }
        if !cursor.symbol(',') {
            return Err(unexpected(cursor));
        }
    }
}

/// Returns true if a token is this word, unquoted or as a string.
fn is_named(token: &Token<'_>, word: &str) -> bool {
    token.is(word) || token.string().is_some_and(|text| text.eq_ignore_ascii_case(word))
}

/// Parses options in the current syntax (`WITH (FORMAT csv, HEADER)`) and the old one
/// (`CSV HEADER`).
fn options(cursor: &mut Cursor<'_, '_>) -> Result<Format> {
    cursor.word("with");
    let in_parentheses = cursor.symbol('(');
    let csv = cursor.rest().windows(2).any(|two| two[0].is("format") && is_named(&two[1], "csv"))
        || !in_parentheses && cursor.rest().iter().any(|token| token.is("csv"));
    let mut format = if csv { Format::csv() } else { Format::text() };
    let mut escape = None;
    while let Some(option) = cursor.name() {
        match option.as_str() {
            "format"
                if cursor.peek().is_some_and(|token| is_named(token, "text") || is_named(token, "csv")) =>
            {
                cursor.next();
            }
            "csv" if !in_parentheses => {}
            "format" | "csv" | "binary" => {
                return Err(Error::new(
                    sqlstate::FEATURE_NOT_SUPPORTED,
                    "COPY supports only the formats text and csv",
                ));
            }
            // An optimization of PostgreSQL's storage. Accepted and ignored.
            "freeze" => {
                switch(cursor)?;
            }
            "header" if cursor.word("match") => format.header = Header::Match,
            "header" => format.header = if switch(cursor)? { Header::Names } else { Header::None },
            "delimiter" | "delimiters" => format.delimiter = delimiter(&argument(cursor)?, csv)?,
            "null" => format.null = argument(cursor)?,
            "quote" if csv => format.quote = one_byte("quote", &argument(cursor)?)?,
            "escape" if csv => escape = Some(one_byte("escape", &argument(cursor)?)?),
            "force_quote" if csv => format.force_quote = columns(cursor)?,
            "force_null" if csv => format.force_null = columns(cursor)?,
            "force_not_null" if csv => format.force_not_null = columns(cursor)?,
            "encoding" => encoding(&argument(cursor)?)?,
            _ => {
                let message = format!("option \"{option}\" not recognized");
                return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message));
            }
        }
        cursor.symbol(',');
    }
    if in_parentheses && !cursor.symbol(')') {
        return Err(unexpected(cursor));
    }
    format.escape = escape.unwrap_or(format.quote);
    check(&format)?;
    Ok(format)
}

/// Rejects options that would make the rows ambiguous.
fn check(format: &Format) -> Result<()> {
    let invalid = |message: &str| Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message));
    if format.null.bytes().any(|byte| matches!(byte, b'\r' | b'\n') || byte == format.delimiter) {
        return invalid("COPY null representation cannot contain the delimiter or an end of line");
    }
    if format.csv
        && (format.quote == format.delimiter || format.null.bytes().any(|byte| byte == format.quote))
    {
        return invalid("COPY quote must differ from the delimiter and cannot appear in the NULL string");
    }
    Ok(())
}

/// `(a, b)` or `*`.
fn columns(cursor: &mut Cursor<'_, '_>) -> Result<Columns> {
    if cursor.symbol('*') {
        return Ok(Columns::All);
    }
    if !cursor.symbol('(') {
        return Err(unexpected(cursor));
    }
    names(cursor).map(Columns::Named)
}

fn argument(cursor: &mut Cursor<'_, '_>) -> Result<String> {
    cursor.word("as");
    cursor.string().ok_or_else(|| unexpected(cursor))
}

/// ON or OFF. A missing value means ON.
fn switch(cursor: &mut Cursor<'_, '_>) -> Result<bool> {
    let Some(token) = cursor.peek() else { return Ok(true) };
    let text = token.string().unwrap_or_else(|| token.text.to_owned());
    let on = match text.to_lowercase().as_str() {
        "on" | "true" | "1" => true,
        "off" | "false" | "0" => false,
        // The next option, or a syntax error that the caller reports.
        _ if token.string().is_none() => return Ok(true),
        _ => return Err(unexpected(cursor)),
    };
    cursor.next();
    Ok(on)
}

fn delimiter(text: &str, csv: bool) -> Result<u8> {
    let byte = one_byte("delimiter", text)?;
    if !csv && (byte.is_ascii_alphanumeric() || matches!(byte, b'\\' | b'.')) {
        let message = format!("COPY delimiter cannot be \"{text}\"");
        return Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
            .hint("In text format, the delimiter cannot be a letter, a digit, a backslash or a period."));
    }
    Ok(byte)
}

fn one_byte(option: &str, text: &str) -> Result<u8> {
    match text.as_bytes() {
        [byte] if !matches!(byte, b'\r' | b'\n') => Ok(*byte),
        _ => {
            let message = format!("COPY {option} cannot be \"{text}\"");
            Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
                .hint("It must be a single ASCII character, and not a newline or carriage return."))
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
