//! The error type that reaches clients: SQLSTATE, message, and optionally detail, hint and
//! position.

use std::fmt;

/// SQLSTATEs that the engine and the gateway return.
pub mod sqlstate {
    #![allow(missing_docs)]
    pub const SUCCESSFUL_COMPLETION: &str = "00000";
    pub const WARNING: &str = "01000";
    pub const CONNECTION_FAILURE: &str = "08006";
    pub const PROTOCOL_VIOLATION: &str = "08P01";
    pub const FEATURE_NOT_SUPPORTED: &str = "0A000";
    pub const DATATYPE_MISMATCH: &str = "42804";
    pub const NUMERIC_OUT_OF_RANGE: &str = "22003";
    pub const INVALID_DATETIME: &str = "22007";
    pub const INVALID_PARAMETER_VALUE: &str = "22023";
    pub const INVALID_BINARY: &str = "22P03";
    pub const INVALID_TEXT: &str = "22P02";
    pub const BAD_COPY_FILE: &str = "22P04";
    pub const INTEGRITY_VIOLATION: &str = "23000";
    pub const NOT_NULL_VIOLATION: &str = "23502";
    pub const FOREIGN_KEY_VIOLATION: &str = "23503";
    pub const UNIQUE_VIOLATION: &str = "23505";
    pub const CHECK_VIOLATION: &str = "23514";
    pub const ACTIVE_TRANSACTION: &str = "25001";
    pub const READ_ONLY_TRANSACTION: &str = "25006";
    pub const NO_ACTIVE_TRANSACTION: &str = "25P01";
    pub const IN_FAILED_TRANSACTION: &str = "25P02";
    pub const IDLE_IN_TRANSACTION: &str = "25P03";
    pub const INVALID_STATEMENT_NAME: &str = "26000";
    pub const INVALID_AUTHORIZATION: &str = "28000";
    pub const INVALID_PASSWORD: &str = "28P01";
    pub const INVALID_SAVEPOINT: &str = "3B001";
    pub const INVALID_CATALOG_NAME: &str = "3D000";
    pub const INVALID_CURSOR_NAME: &str = "34000";
    pub const SERIALIZATION_FAILURE: &str = "40001";
    pub const DEADLOCK_DETECTED: &str = "40P01";
    pub const SYNTAX_ERROR: &str = "42601";
    pub const INSUFFICIENT_PRIVILEGE: &str = "42501";
    pub const DUPLICATE_COLUMN: &str = "42701";
    pub const AMBIGUOUS_COLUMN: &str = "42702";
    pub const UNDEFINED_COLUMN: &str = "42703";
    pub const UNDEFINED_FUNCTION: &str = "42883";
    pub const UNDEFINED_TABLE: &str = "42P01";
    pub const DUPLICATE_TABLE: &str = "42P07";
    pub const DUPLICATE_DATABASE: &str = "42P04";
    pub const DUPLICATE_PREPARED: &str = "42P05";
    pub const DUPLICATE_OBJECT: &str = "42710";
    pub const DISK_FULL: &str = "53100";
    pub const OUT_OF_MEMORY: &str = "53200";
    pub const TOO_MANY_CONNECTIONS: &str = "53300";
    pub const CONFIGURATION_LIMIT: &str = "53400";
    pub const PROGRAM_LIMIT: &str = "54000";
    pub const STATEMENT_TOO_COMPLEX: &str = "54001";
    pub const NOT_IN_PREREQUISITE_STATE: &str = "55000";
    pub const OBJECT_IN_USE: &str = "55006";
    pub const QUERY_CANCELED: &str = "57014";
    /// The partition has another owner. The statement has had no effect. Internal: a gateway repeats
    /// the work at the new owner, and shows the client another state if it cannot.
    pub const PARTITION_MOVED: &str = "FM001";
    pub const ADMIN_SHUTDOWN: &str = "57P01";
    pub const CANNOT_CONNECT_NOW: &str = "57P03";
    pub const DATABASE_DROPPED: &str = "57P04";
    pub const IO_ERROR: &str = "58030";
    pub const INTERNAL: &str = "XX000";
    pub const DATA_CORRUPTED: &str = "XX001";
}

/// Part of the error of a start that finds records of an unknown partition.
/// [`Error::is_of_unknown_partition`] recognises the error by it.
pub const UNKNOWN_PARTITION: &str = "which the catalog does not contain, even as a dropped partition";

/// An error for a client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Error(Box<Fields>);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Fields {
    state: &'static str,
    message: String,
    detail: Option<String>,
    hint: Option<String>,
    position: Option<usize>,
}

/// The result type of the engine's functions.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Creates an error with an SQLSTATE of [`sqlstate`] and a message.
    pub fn new(state: &'static str, message: impl Into<String>) -> Self {
        Error(Box::new(Fields { state, message: message.into(), detail: None, hint: None, position: None }))
    }

    /// Adds a detail: more about the cause, as a full sentence.
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.0.detail = Some(detail.into());
        self
    }

    /// Adds a hint: what to do, as a full sentence.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Adds the position in the SQL text, in characters, counted from 1.
    pub fn position(mut self, position: usize) -> Self {
        self.0.position = Some(position);
        self
    }

    /// Returns true if a resource was exhausted (class 53, or stack). SQLite has rolled back the
    /// transaction of the statement; a retry may succeed.
    pub fn is_of_resources(&self) -> bool {
        self.0.state.starts_with("53") || self.0.state == sqlstate::STATEMENT_TOO_COMPLEX
    }

    /// Returns true if the text of the statement is invalid or too complex (classes 42, 0A and 54):
    /// a retry fails again.
    pub(crate) fn is_of_the_sql(&self) -> bool {
        ["42", "0A", "54"].iter().any(|class| self.0.state.starts_with(class))
    }

    /// Returns true if a start was refused because the catalog does not know the partition of some
    /// data.
    pub fn is_of_unknown_partition(&self) -> bool {
        self.0.message.contains(UNKNOWN_PARTITION)
    }

    /// The same error without its position, for a client that cannot see the SQL text: in a
    /// procedure.
    pub fn without_position(mut self) -> Self {
        self.0.position = None;
        self
    }

    /// The SQLSTATE: five characters.
    pub fn state(&self) -> &'static str {
        self.0.state
    }

    /// The message.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The detail, if there is one.
    pub fn get_detail(&self) -> Option<&str> {
        self.0.detail.as_deref()
    }

    /// The hint, if there is one.
    pub fn get_hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// The position in the SQL text, in characters, counted from 1.
    pub fn get_position(&self) -> Option<usize> {
        self.0.position
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0.message, self.0.state)?;
        match &self.0.hint {
            Some(hint) => write!(f, "; {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}
