//! The kinds of events. `docs/operations.md` has them all; a test compares.

use serde::{Deserialize, Serialize};

/// How much an event asks for somebody's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It was meant to happen.
    Info,
    /// Somebody should have a look.
    Warning,
    /// Something does not work.
    Error,
}

impl Severity {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

macro_rules! kinds {
    ($($(#[$about:meta])* $kind:ident $severity:ident $name:literal $text:literal)*) => {
        /// What can happen.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Kind {
            $($(#[$about])* $kind,)*
        }

        impl Kind {
            /// All of them.
            pub const ALL: &[Kind] = &[$(Kind::$kind,)*];

            /// What it is called.
            pub fn name(self) -> &'static str {
                match self { $(Kind::$kind => $name,)* }
            }

            pub(crate) fn severity(self) -> Severity {
                match self { $(Kind::$kind => Severity::$severity,)* }
            }

            pub(crate) fn text(self) -> &'static str {
                match self { $(Kind::$kind => $text,)* }
            }
        }
    };
}

kinds! {
    /// `after` tells how it ended before, the rest what was read of the log.
    NodeStarted Info "node.started" "the node takes connections"
    /// By a signal.
    NodeStopping Info "node.stopping" "the node was asked to stop"
    /// All is flushed.
    NodeStopped Info "node.stopped" "the log is sealed; the node has stopped"
    /// A write or a sync.
    LogFailed Error "log.failed" "writing the log has failed; commits that had not been acknowledged were taken back"
    /// After that.
    LogWorks Info "log.works" "a new log has begun; commits are accepted"
    /// No further file of it can be made.
    LogFull Error "log.full" "the log is full: commits are refused until flushes, or the disk, make room"
    /// After that.
    LogFree Info "log.free" "the log has room again; commits are accepted"
    /// A put of one of its objects, or another process has it.
    SharedLogFailed Error "shared_log.failed" "the log in the store cannot be written: commits of databases that are shared wait or are refused"
    /// After that.
    SharedLogWorks Info "shared_log.works" "the log in the store is written again; commits of databases that are shared are accepted"
    /// It has come to its bound.
    SharedLogFull Error "shared_log.full" "the log in the store is full: commits of databases that are shared are refused until flushes make room"
    /// After that.
    SharedLogFree Info "shared_log.free" "the log in the store has room again; commits of databases that are shared are accepted"
    /// Less than the reserve is left.
    DiskLow Warning "disk.low" "the disk is nearly full: commits that need more space are refused"
    /// Less than half of it.
    DiskFull Error "disk.full" "the disk is nearly full: no commit is accepted"
    /// After either.
    DiskFree Info "disk.free" "the disk has space again: all commits are accepted"
    /// `VERIFY` found nothing.
    Verified Info "node.verified" "all that is kept has been read and is sound"
    /// `VERIFY` found something.
    Damage Error "node.damage" "data on the disk are damaged"
    /// By CREATE DATABASE.
    DatabaseCreated Info "database.created" "the database was created"
    /// By DROP DATABASE.
    DatabaseDropped Info "database.dropped" "the database was dropped"
    /// By ALTER DATABASE.
    DatabaseRenamed Info "database.renamed" "the database was renamed"
    /// By ALTER DATABASE.
    DatabaseRestored Info "database.restored" "the database was made what it was at an earlier time; its sessions ended"
    /// By COPY DATABASE FROM.
    DatabaseImported Info "database.imported" "the database was made of a file"
    /// The same, in vain.
    ImportFailed Warning "database.import_failed" "a file was not imported"
    /// By COPY DATABASE TO; gathered.
    DatabaseExported Info "database.exported" "the database was read as a file"
    /// By ALTER DATABASE.
    LimitChanged Info "limit.changed" "a limit of the database was changed"
    /// By ALTER DATABASE.
    DurabilityChanged Info "durability.changed" "where the database's commits are made durable was changed"
    /// By CREATE USER.
    UserCreated Info "user.created" "a user was created"
    /// By DROP USER.
    UserDropped Info "user.dropped" "a user was dropped; its sessions end"
    /// By ALTER USER.
    PasswordChanged Info "user.password_changed" "the password of a user was changed; its other sessions end"
    /// By GRANT.
    RightGranted Info "right.granted" "a right to the database was granted"
    /// By REVOKE.
    RightRevoked Info "right.revoked" "a right to the database was taken away"
    /// By pg_cancel_backend.
    SessionCancelled Info "session.cancelled" "the statement of a session was cancelled"
    /// By pg_terminate_backend.
    SessionTerminated Info "session.terminated" "a session was ended"
    /// Gathered.
    LoginFailed Warning "login.failed" "a password was wrong; the next answers are slowed down"
    /// By CREATE TOKEN.
    TokenCreated Info "token.created" "a token for HTTP was made"
    /// By DROP TOKEN.
    TokenDropped Info "token.dropped" "a token for HTTP was dropped"
    /// Gathered.
    TokenRefused Warning "token.refused" "a token for HTTP was unknown or had expired; the next answers are slowed down"
    /// By a signal, or because the files have changed.
    TlsReloaded Info "tls.reloaded" "new connections get the new certificate"
    /// The same, in vain.
    TlsRefused Error "tls.refused" "the new certificate cannot be used; new connections get the old one"
}
