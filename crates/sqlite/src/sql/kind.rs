//! The kinds of statements.

/// The kind of a statement, as far as its answer to the client depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatementKind {
    /// Nothing but white space and comments.
    Empty,
    /// SELECT, VALUES, WITH ... SELECT, EXPLAIN, a PRAGMA that returns rows.
    Query,
    /// INSERT or REPLACE.
    Insert,
    /// UPDATE.
    Update,
    /// DELETE.
    Delete,
    /// BEGIN, START TRANSACTION.
    Begin,
    /// COMMIT, END.
    Commit,
    /// ROLLBACK without TO.
    Rollback,
    /// SAVEPOINT.
    Savepoint,
    /// RELEASE.
    Release,
    /// ROLLBACK TO.
    RollbackTo,
    /// CALL of a procedure.
    Call,
    /// CREATE, DROP, ALTER, VACUUM, ... with PostgreSQL's command tag.
    Utility(&'static str),
}
