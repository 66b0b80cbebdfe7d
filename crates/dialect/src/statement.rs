//! The result of the translation of a statement ([`Dispatch`]), and the commands that the gateway
//! executes ([`Command`]).

use crate::admin::AdminStatement;
use crate::catalog::Translated;
use crate::copy::Copy;
use crate::primary_key::PrimaryKey;
use crate::procedure::Procedure;

/// The session state that translation depends on.
pub struct Context<'a> {
    /// The name of the session's database.
    pub database: &'a str,
    /// The name of its user.
    pub user: &'a str,
    /// Its process id.
    pub pid: i32,
}

/// A statement that the gateway executes.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// `SET name = value`. `None` sets the default.
    Set {
        /// The parameter.
        name: String,
        /// Its new value.
        value: Option<String>,
        /// `SET LOCAL`.
        local: bool,
    },
    /// `SET [SESSION CHARACTERISTICS AS] TRANSACTION ...`.
    SetTransaction {
        /// The access mode, if the statement sets it.
        read_only: Option<bool>,
        /// Whether it applies to all transactions of the session.
        session: bool,
    },
    /// `SHOW name`.
    Show(String),
    /// `SHOW ALL`.
    ShowAll,
    /// `RESET ALL`.
    ResetAll,
    /// `DISCARD ALL`.
    DiscardAll,
    /// `DISCARD PLANS` or `DISCARD SEQUENCES`: only returns the command tag.
    DiscardPlans,
    /// `DEALLOCATE name`. `None` is `DEALLOCATE ALL`.
    Deallocate(Option<String>),
    /// SQLite statements that together implement one PostgreSQL statement, and its command tag.
    Batch {
        /// The SQLite statements.
        statements: Vec<String>,
        /// The command tag.
        tag: &'static str,
    },
    /// `ALTER TABLE t ADD PRIMARY KEY (...)`.
    AddPrimaryKey(PrimaryKey),
    /// `COPY t FROM STDIN`, `COPY t TO STDOUT`.
    Copy(Copy),
    /// `CREATE PROCEDURE`, `DROP PROCEDURE`.
    Procedure(Procedure),
    /// Administration of tenants and users.
    Admin(AdminStatement),
    /// `VERIFY`: verifies the checksums of all data stored on the node.
    Verify,
}

/// Selects the component that executes a statement. The `&str` is the text after the statement.
#[derive(Debug, PartialEq)]
pub enum Dispatch<'a> {
    /// The engine, with the text unchanged.
    Pass,
    /// The engine, with this text instead.
    Rewritten(String, &'a str),
    /// The engine, with the translated statement.
    Translated(Translated, &'a str),
    /// The gateway.
    Command(Box<Command>, &'a str),
}

/// The result of a parser.
pub(crate) enum Answer {
    Rewritten(String),
    Command(Command),
}
