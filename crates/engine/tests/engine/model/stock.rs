//! Stock SQLite in memory, configured like the engine's, and the comparison of errors.

use fulmar_engine::{Error, Value, sqlstate};
use rusqlite::config::DbConfig;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, ffi};

/// A connection to an empty database in memory.
pub struct Stock {
    connection: Connection,
}

/// An error of stock SQLite.
#[derive(Debug)]
pub struct StockError {
    /// The extended result code.
    pub code: i32,
    pub message: String,
}

impl Stock {
    pub fn open() -> Stock {
        let connection = Connection::open_in_memory().unwrap();
        for (option, on) in [
            (DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true),
            (DbConfig::SQLITE_DBCONFIG_DQS_DML, false),
            (DbConfig::SQLITE_DBCONFIG_DQS_DDL, false),
        ] {
            connection.set_db_config(option, on).unwrap();
        }
        connection.execute_batch("PRAGMA foreign_keys = ON; PRAGMA recursive_triggers = OFF").unwrap();
        Stock { connection }
    }

    pub fn is_autocommit(&self) -> bool {
        self.connection.is_autocommit()
    }

    /// Rows changed by the last statement that changes rows.
    pub fn changes(&self) -> u64 {
        self.connection.changes()
    }

    /// Runs one statement to completion.
    pub fn run(&self, sql: &str, parameters: &[Value]) -> Result<Vec<Vec<Value>>, StockError> {
        self.try_run(sql, parameters).map_err(|error| match error {
            rusqlite::Error::SqliteFailure(code, message) => {
                StockError { code: code.extended_code, message: message.unwrap_or_default() }
            }
            rusqlite::Error::SqlInputError { error, msg, .. } => {
                StockError { code: error.extended_code, message: msg }
            }
            other => panic!("{sql}: {other}"),
        })
    }

    fn try_run(&self, sql: &str, parameters: &[Value]) -> rusqlite::Result<Vec<Vec<Value>>> {
        let mut statement = self.connection.prepare(sql)?;
        for (number, parameter) in (1..).zip(parameters) {
            if let Some(index) = statement.parameter_index(&format!("${number}"))? {
                statement.raw_bind_parameter(index, to_stock(parameter))?;
            }
        }
        let columns = statement.column_count();
        let mut cursor = statement.raw_query();
        let mut rows = Vec::new();
        while let Some(row) = cursor.next()? {
            let mut values = Vec::with_capacity(columns);
            for column in 0..columns {
                values.push(from_stock(row.get_ref(column)?));
            }
            rows.push(values);
        }
        Ok(rows)
    }
}

fn to_stock(value: &Value) -> rusqlite::types::Value {
    match value.clone() {
        Value::Null => rusqlite::types::Value::Null,
        Value::Integer(i) => rusqlite::types::Value::Integer(i),
        Value::Real(r) => rusqlite::types::Value::Real(r),
        Value::Text(t) => rusqlite::types::Value::Text(t),
        Value::Blob(b) => rusqlite::types::Value::Blob(b),
    }
}

fn from_stock(value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Null => Value::Null,
        ValueRef::Integer(i) => Value::Integer(i),
        ValueRef::Real(r) => Value::Real(r),
        ValueRef::Text(t) => Value::Text(String::from_utf8_lossy(t).into_owned()),
        ValueRef::Blob(b) => Value::Blob(b.to_vec()),
    }
}

/// Returns true if both errors are equivalent: constraint and type errors by SQLSTATE, others by
/// message.
pub fn same_error(stock: &StockError, engine: &Error) -> bool {
    let state = match stock.code {
        ffi::SQLITE_CONSTRAINT_UNIQUE | ffi::SQLITE_CONSTRAINT_PRIMARYKEY | ffi::SQLITE_CONSTRAINT_ROWID => {
            sqlstate::UNIQUE_VIOLATION
        }
        ffi::SQLITE_CONSTRAINT_FOREIGNKEY => sqlstate::FOREIGN_KEY_VIOLATION,
        ffi::SQLITE_CONSTRAINT_NOTNULL => sqlstate::NOT_NULL_VIOLATION,
        ffi::SQLITE_CONSTRAINT_CHECK => sqlstate::CHECK_VIOLATION,
        ffi::SQLITE_CONSTRAINT_DATATYPE | ffi::SQLITE_MISMATCH => sqlstate::DATATYPE_MISMATCH,
        code if code & 0xff == ffi::SQLITE_CONSTRAINT => sqlstate::INTEGRITY_VIOLATION,
        _ => return stock.message == engine.message(),
    };
    engine.state() == state
}
