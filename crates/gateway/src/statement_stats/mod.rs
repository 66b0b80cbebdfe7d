//! Statistics per statement: `fulmar.statements` and `fulmar.slow_statements`.
//!
//! ```text
//! run_plan --> note of the prepared statement: StatementText --> StatementTable of the tenant
//!                 | unset                         ^
//!                 v                               |
//!              normalize, hash --> StatementTexts of the node
//! ```
//!
//! Statements that differ only in their constants have one text ([`normalize`]). The engine caches
//! prepared statements and shares them between sessions, so a text is normalized once. An execution
//! locks the tenant's table for a binary search and five additions.
//!
//! # Memory
//! Tenants of one application execute the same statements: a node has each text once. A tenant that is
//! not used has one allocation.
//!
//! A tenant has up to [`table::MAX_ROWS`] statements. Tables and the texts in them take up to
//! [`texts::MAX_NODE_BYTES`]. Beyond that the least used statements are evicted: those with the fewest
//! executions, where earlier ones count less with every eviction.

mod normalize;
mod slow;
mod table;
mod texts;

use serde::{Deserialize, Serialize};

pub(crate) use self::slow::SlowStatements;
pub(crate) use self::table::{Execution, StatementTable};
pub(crate) use self::texts::{StatementText, StatementTexts};

/// What a node has counted of statements.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StatementReport {
    /// The statistics of statements.
    pub statements: Vec<StatementCounts>,
    /// The newest slow statements, oldest first.
    pub slow: Vec<SlowStatement>,
}

/// The statistics of the statements with one normalized text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StatementCounts {
    /// The partition.
    pub partition: u64,
    /// The hash of the text.
    pub fingerprint: u64,
    /// The normalized text.
    pub text: String,
    /// Number of executions.
    pub calls: u64,
    /// Total execution time, in microseconds.
    pub time_us: u64,
    /// The longest execution time, in microseconds.
    pub max_us: u64,
    /// Number of rows.
    pub rows: u64,
    /// Number of executions that failed.
    pub errors: u64,
}

/// A slow statement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlowStatement {
    /// The partition.
    pub partition: u64,
    /// When it ended, in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// The user.
    pub user: String,
    /// Its execution time, in microseconds.
    pub time_us: u64,
    /// Number of rows.
    pub rows: u64,
    /// The error, if it failed.
    pub sqlstate: Option<String>,
    /// The hash of the text.
    pub fingerprint: u64,
    /// The normalized text.
    pub text: String,
}
