//! Converts SQLite errors into errors with SQLSTATEs, as PostgreSQL clients expect them.

use std::ffi::c_int;

use libsqlite3_sys as ffi;

use crate::system::with_table_names;
use crate::{Error, heap, sqlstate};

/// The error for a result code and its message. `offset` is the position in the SQL text in bytes,
/// or negative.
pub(crate) fn sqlite_error(code: c_int, message: String, offset: c_int) -> Error {
    let error = match code {
        ffi::SQLITE_CONSTRAINT_UNIQUE | ffi::SQLITE_CONSTRAINT_PRIMARYKEY | ffi::SQLITE_CONSTRAINT_ROWID => {
            Error::new(sqlstate::UNIQUE_VIOLATION, unique(&message))
        }
        ffi::SQLITE_CONSTRAINT_FOREIGNKEY => {
            Error::new(sqlstate::FOREIGN_KEY_VIOLATION, "foreign key constraint violated")
                .hint("Run PRAGMA foreign_key_check to list the rows without a parent.")
        }
        ffi::SQLITE_CONSTRAINT_NOTNULL => Error::new(sqlstate::NOT_NULL_VIOLATION, message),
        ffi::SQLITE_CONSTRAINT_CHECK => Error::new(sqlstate::CHECK_VIOLATION, message),
        ffi::SQLITE_CONSTRAINT_DATATYPE => Error::new(sqlstate::DATATYPE_MISMATCH, message),
        _ => by_primary_code(code, message),
    };
    match usize::try_from(offset) {
        Ok(offset) if error.state().starts_with("42") => error.position(offset + 1),
        _ => error,
    }
}

/// The error for a statement that exceeds the stack.
pub(super) fn stack_exhausted() -> Error {
    Error::new(sqlstate::STATEMENT_TOO_COMPLEX, "stack depth limit exceeded")
        .hint("Nest fewer subqueries, views, expressions or generated columns.")
}

/// The error for a value, a row or a text that exceeds SQLite's length limit.
pub fn too_large(message: String, largest_value_bytes: u64) -> Error {
    let hint = format!(
        "A value or row may have up to {} kB: max_value_size of the database, and at most an eighth of \
         the node's memory for statements, which is set by --memory.",
        largest_value_bytes / 1024
    );
    Error::new(sqlstate::PROGRAM_LIMIT, message).hint(hint)
}

/// The error of a statement that is longer than the node accepts.
pub fn statement_too_long(limit_bytes: usize) -> Error {
    let message = format!("statement exceeds the limit of {limit_bytes} bytes");
    Error::new(sqlstate::PROGRAM_LIMIT, message).hint(
        "Pass large values as parameters, split the statement, or start the node with a larger --max-statement-size.",
    )
}

fn unique(message: &str) -> String {
    match message.strip_prefix("UNIQUE constraint failed: ") {
        Some(columns) => format!("duplicate key value violates unique constraint on {columns}"),
        None => message.to_owned(),
    }
}

fn by_primary_code(code: c_int, message: String) -> Error {
    match code & 0xff {
        ffi::SQLITE_ERROR => general(message),
        ffi::SQLITE_CONSTRAINT => Error::new(sqlstate::INTEGRITY_VIOLATION, message),
        ffi::SQLITE_MISMATCH => Error::new(sqlstate::DATATYPE_MISMATCH, message),
        ffi::SQLITE_RANGE => Error::new(sqlstate::PROTOCOL_VIOLATION, message),
        ffi::SQLITE_TOOBIG => Error::new(sqlstate::PROGRAM_LIMIT, message),
        ffi::SQLITE_NOMEM => heap::exhausted(),
        ffi::SQLITE_FULL => Error::new(sqlstate::DISK_FULL, "could not extend temporary file: disk is full")
            .hint("Free space on the disk of the data directory."),
        ffi::SQLITE_INTERRUPT => {
            Error::new(sqlstate::QUERY_CANCELED, "canceling statement due to user request")
        }
        ffi::SQLITE_AUTH | ffi::SQLITE_PERM => Error::new(sqlstate::INSUFFICIENT_PRIVILEGE, message)
            .hint("See docs/sql.md for the operations that are permitted in a tenant."),
        ffi::SQLITE_READONLY => {
            Error::new(sqlstate::READ_ONLY_TRANSACTION, "cannot write in a read-only transaction")
        }
        ffi::SQLITE_CORRUPT | ffi::SQLITE_NOTADB => Error::new(sqlstate::DATA_CORRUPTED, message),
        ffi::SQLITE_IOERR | ffi::SQLITE_CANTOPEN => Error::new(sqlstate::IO_ERROR, message),
        ffi::SQLITE_BUSY | ffi::SQLITE_LOCKED => Error::new(sqlstate::SERIALIZATION_FAILURE, message),
        ffi::SQLITE_SCHEMA => {
            Error::new(sqlstate::SERIALIZATION_FAILURE, "schema has changed").hint("Retry the statement.")
        }
        _ => Error::new(sqlstate::INTERNAL, format!("{message} (SQLite code {code})")),
    }
}

/// SQLITE_ERROR has no extended codes: the message determines the SQLSTATE.
fn general(message: String) -> Error {
    let message = with_table_names(message);
    let state = match message.as_str() {
        m if m.starts_with("no such table") => sqlstate::UNDEFINED_TABLE,
        m if m.starts_with("no such view") || m.starts_with("no such index") => sqlstate::UNDEFINED_TABLE,
        m if m.starts_with("no such column") || m.contains("has no column named") => {
            sqlstate::UNDEFINED_COLUMN
        }
        m if m.starts_with("no such function") || m.starts_with("wrong number of arguments") => {
            sqlstate::UNDEFINED_FUNCTION
        }
        m if m.starts_with("no such savepoint") => sqlstate::INVALID_SAVEPOINT,
        m if m.starts_with("constraint ") && m.ends_with(" already exists") => sqlstate::DUPLICATE_OBJECT,
        m if m.starts_with("table ") && m.ends_with("already exists") => sqlstate::DUPLICATE_TABLE,
        m if m.contains("already exists") || m.starts_with("there is already") => sqlstate::DUPLICATE_TABLE,
        m if m.starts_with("duplicate column name") => sqlstate::DUPLICATE_COLUMN,
        m if m.starts_with("ambiguous column name") => sqlstate::AMBIGUOUS_COLUMN,
        m if m.contains("integer overflow") => sqlstate::NUMERIC_OUT_OF_RANGE,
        m if m.contains("malformed JSON") || m.contains("bad JSON path") => sqlstate::INVALID_TEXT,
        m if m.starts_with("not authorized")
            || m.contains("prohibited")
            || m.contains("may not be modified") =>
        {
            sqlstate::INSUFFICIENT_PRIVILEGE
        }
        m if m.contains("too many") || m.contains("pattern too complex") => sqlstate::PROGRAM_LIMIT,
        m if m.contains("too deep")
            || m.contains("too complex")
            || m.contains("Recursion limit")
            || m.contains("stack overflow")
            || m.to_ascii_lowercase().contains("expression tree is too large") =>
        {
            sqlstate::STATEMENT_TOO_COMPLEX
        }
        _ => sqlstate::SYNTAX_ERROR,
    };
    let is_pattern = message.contains("pattern too complex");
    let error = Error::new(state, message);
    match state {
        sqlstate::PROGRAM_LIMIT if is_pattern => {
            error.hint("A superuser can raise the limit with ALTER DATABASE ... SET max_pattern_length.")
        }
        sqlstate::SYNTAX_ERROR | sqlstate::UNDEFINED_FUNCTION => {
            error.hint("The SQL dialect is SQLite's; see docs/sql.md.")
        }
        _ => error,
    }
}
