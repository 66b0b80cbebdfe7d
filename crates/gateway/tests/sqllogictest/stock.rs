//! Stock SQLite in memory, and the representation of its values in PostgreSQL's text format.
//!
//! It is the same version as Fulmar's, with default settings except two that docs/sql.md documents:
//! text in double quotes is a name, and foreign keys are enforced (which is the default of the
//! library that both use).

use rusqlite::config::DbConfig;
use rusqlite::fallible_iterator::FallibleIterator;
use rusqlite::types::{Value, ValueRef};
use rusqlite::{Batch, Connection, Statement};

/// A database.
pub struct Stock(Connection);

/// A value with the declared type of its column.
#[derive(Debug)]
pub struct Cell {
    declared: Option<String>,
    value: Value,
}

/// The rows of a statement, or its error.
pub type Outcome = Result<Vec<Vec<Cell>>, String>;

impl Stock {
    pub fn open() -> Stock {
        let connection = Connection::open_in_memory().unwrap();
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DQS_DML, false).unwrap();
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DQS_DDL, false).unwrap();
        Stock(connection)
    }

    /// Runs a text, usually a single statement.
    pub fn run(&self, sql: &str) -> Outcome {
        self.rows_of(sql).map_err(|error| error.to_string())
    }

    fn rows_of(&self, sql: &str) -> rusqlite::Result<Vec<Vec<Cell>>> {
        let mut batch = Batch::new(&self.0, sql);
        let mut answer = Vec::new();
        while let Some(mut statement) = batch.next()? {
            answer.extend(rows(&mut statement)?);
        }
        Ok(answer)
    }
}

fn rows(statement: &mut Statement<'_>) -> rusqlite::Result<Vec<Vec<Cell>>> {
    let declared: Vec<Option<String>> =
        statement.columns().map(|column| column.decl_type().map(str::to_ascii_uppercase)).collect();
    let mut rows = statement.raw_query();
    let mut answer = Vec::new();
    while let Some(row) = rows.next()? {
        let cell = |(index, declared): (usize, &Option<String>)| {
            Ok(Cell { declared: declared.clone(), value: owned(row.get_ref(index)?) })
        };
        answer.push(declared.iter().enumerate().map(cell).collect::<rusqlite::Result<_>>()?);
    }
    Ok(answer)
}

/// Replaces the invalid bytes of text that is not UTF-8, as Fulmar does.
fn owned(value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Text(text) => Value::Text(String::from_utf8_lossy(text).into_owned()),
        ValueRef::Null => Value::Null,
        ValueRef::Integer(value) => Value::Integer(value),
        ValueRef::Real(value) => Value::Real(value),
        ValueRef::Blob(bytes) => Value::Blob(bytes.to_vec()),
    }
}

impl Cell {
    /// Returns true if this is the text that a client receives for the value.
    pub fn is_sent_as(&self, sent: Option<&str>) -> bool {
        let Some(sent) = sent else { return self.value == Value::Null };
        match &self.value {
            Value::Null => false,
            Value::Integer(value @ (0 | 1)) if self.is_declared(&["BOOLEAN", "BOOL"]) => {
                sent == if *value == 1 { "t" } else { "f" }
            }
            Value::Integer(value) => sent == value.to_string(),
            // The shortest text that parses to the same value. Its exact form is tested with the
            // types.
            Value::Real(value) => sent.parse() == Ok(*value),
            Value::Text(text) if self.is_bytea() => is_hexadecimal(sent, text.as_bytes()),
            Value::Text(text) => sent == text,
            Value::Blob(bytes) if self.is_bytea() => is_hexadecimal(sent, bytes),
            Value::Blob(bytes) => {
                let plain = std::str::from_utf8(bytes).map_or_else(|_| hexadecimal(bytes), str::to_owned);
                // The type of an expression is derived from its first row.
                sent == plain || (self.declared.is_none() && is_hexadecimal(sent, bytes))
            }
        }
    }

    fn is_bytea(&self) -> bool {
        self.is_declared(&["BLOB", "BYTEA"])
    }

    fn is_declared(&self, types: &[&str]) -> bool {
        self.declared.as_deref().is_some_and(|declared| types.contains(&declared))
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns true if the text is the text format of bytea for these bytes.
fn is_hexadecimal(sent: &str, bytes: &[u8]) -> bool {
    sent.strip_prefix("\\x") == Some(&hexadecimal(bytes))
}
