//! The kinds of events. A test checks that `docs/operations.md` lists all of them.

use serde::{Deserialize, Serialize};

/// The severity of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Normal operation.
    Info,
    /// Should be investigated.
    Warning,
    /// A failure that needs action.
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
        /// The kind of an event.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Kind {
            $($(#[$about])* $kind,)*
        }

        impl Kind {
            /// All kinds.
            pub const ALL: &[Kind] = &[$(Kind::$kind,)*];

            /// The name of the kind.
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
    /// Details: `after` is how the previous run ended; the others describe log recovery.
    NodeStarted Info "node.started" "node accepts connections"
    /// A signal was received.
    NodeStopping Info "node.stopping" "node is shutting down"
    /// All data is flushed.
    NodeStopped Info "node.stopped" "log sealed; node stopped"
    /// A node of the cluster has a latency that is many times that of the others.
    NodeSlow Warning "node.slow" "node is much slower than the others; drain it if that lasts"
    /// After `node.slow`.
    NodeNotSlow Info "node.not_slow" "node is not slower than the others any more, or has ended"
    /// Details: `error` names the object.
    NodeLogDamaged Error "node.log_damaged" "an object of a node's log is damaged; databases of that node wait until it is restored"
    /// This node is the cluster's garbage collector.
    CollectorElected Info "collector.elected" "this node collects the cluster's garbage"
    /// Details: `error`.
    CollectorFailed Error "collector.failed" "garbage collection stopped; nothing is deleted"
    /// After `collector.failed`.
    CollectorWorks Info "collector.works" "garbage collection works again"
    /// This node decides where databases are served.
    ControllerElected Info "controller.elected" "this node controls the cluster"
    /// Details: `nodes` do not report their load.
    ControllerWaits Warning "controller.waits" "nothing is decided, because nodes do not report their load"
    /// Details: `seconds`, negative if the clock was set back.
    ControllerClockJumped Warning "controller.clock_jumped" "the clock of the controller's machine was set"
    /// By ALTER SYSTEM, ALTER DATABASE ... PIN or ALTER NODE ... FORBID.
    ControlChanged Info "control.changed" "what the controller may do was changed"
    /// By ALTER NODE ... MOVE TO. Details: `node`, `to`, and what it has cost.
    NodeMoved Info "node.moved" "the databases of a node were moved to another one"
    /// The controller has added a node, which serves now.
    NodeAdded Info "node.added" "node added"
    /// The controller has removed a node.
    NodeRemoved Info "node.removed" "node removed"
    /// Details: `action`, `node`, `error`.
    ProvisionerFailed Warning "provisioner.failed" "the provisioner failed to add or remove a node"
    /// A write or sync of the log failed.
    LogFailed Error "log.failed" "log write failed; unacknowledged commits were rolled back"
    /// After `log.failed`.
    LogWorks Info "log.works" "new log started; commits are accepted"
    /// No further log file can be created.
    LogFull Error "log.full" "log full: commits are rejected until a flush or free disk space makes room"
    /// After `log.full`.
    LogFree Info "log.free" "log has space again; commits are accepted"
    /// A put of a log object failed, or another process has taken over the log.
    SharedLogFailed Error "shared_log.failed" "shared log write failed: commits of shared databases wait or are rejected"
    /// After `shared_log.failed`.
    SharedLogWorks Info "shared_log.works" "shared log is writable again; commits of shared databases are accepted"
    /// The shared log has reached its size limit.
    SharedLogFull Error "shared_log.full" "shared log full: commits of shared databases are rejected until flushes free space"
    /// After `shared_log.full`.
    SharedLogFree Info "shared_log.free" "shared log has space again; commits of shared databases are accepted"
    /// Free space is below the reserve.
    DiskLow Warning "disk.low" "disk nearly full: commits that need more space are rejected"
    /// Free space is below half of the reserve.
    DiskFull Error "disk.full" "disk nearly full: all commits are rejected"
    /// After `disk.low` or `disk.full`.
    DiskFree Info "disk.free" "disk space recovered: all commits are accepted"
    /// `VERIFY` found no damage.
    Verified Info "node.verified" "all stored data was verified; no damage found"
    /// `VERIFY` found damage.
    Damage Error "node.damage" "stored data is damaged"
    /// By CREATE DATABASE.
    DatabaseCreated Info "database.created" "database created"
    /// By DROP DATABASE.
    DatabaseDropped Info "database.dropped" "database dropped"
    /// By ALTER DATABASE.
    DatabaseRenamed Info "database.renamed" "database renamed"
    /// By ALTER DATABASE.
    DatabaseRestored Info "database.restored" "database restored to an earlier time; its sessions were terminated"
    /// By COPY DATABASE FROM.
    DatabaseImported Info "database.imported" "database imported from a file"
    /// A failed COPY DATABASE FROM.
    ImportFailed Warning "database.import_failed" "database import failed"
    /// By COPY DATABASE TO. Aggregated.
    DatabaseExported Info "database.exported" "database exported to a file"
    /// By ALTER DATABASE.
    LimitChanged Info "limit.changed" "database limit changed"
    /// By ALTER DATABASE.
    DurabilityChanged Info "durability.changed" "database durability changed"
    /// By ALTER DATABASE ... MOVE TO.
    DatabaseMoved Info "database.moved" "database moved to another node"
    /// Two nodes have died in its statements.
    DatabaseQuarantined Error "database.quarantined" "database quarantined: its statements have killed two nodes"
    /// By ALTER DATABASE ... RESUME.
    DatabaseResumed Info "database.resumed" "quarantine of the database ended"
    /// By CREATE USER.
    UserCreated Info "user.created" "user created"
    /// By DROP USER.
    UserDropped Info "user.dropped" "user dropped; its sessions are terminated"
    /// By ALTER USER.
    PasswordChanged Info "user.password_changed" "user password changed; the user's other sessions are terminated"
    /// By GRANT.
    RightGranted Info "right.granted" "access to the database granted"
    /// By REVOKE.
    RightRevoked Info "right.revoked" "access to the database revoked"
    /// By pg_cancel_backend.
    SessionCancelled Info "session.cancelled" "statement cancelled"
    /// By pg_terminate_backend.
    SessionTerminated Info "session.terminated" "session terminated"
    /// Aggregated.
    LoginFailed Warning "login.failed" "password authentication failed; further attempts are throttled"
    /// By CREATE TOKEN.
    TokenCreated Info "token.created" "HTTP token created"
    /// By DROP TOKEN.
    TokenDropped Info "token.dropped" "HTTP token dropped"
    /// Aggregated.
    TokenRefused Warning "token.refused" "HTTP token unknown or expired; further attempts are throttled"
    /// Details: `token`, `statement`.
    ConsoleStatement Info "console.statement" "administrative statement from the console"
    /// The console's request was answered before its statement ended. Details: `token`, `statement`.
    ConsoleCompleted Info "console.completed" "statement from the console completed in the background"
    /// Like `console.completed`. Details: `token`, `statement`, `sqlstate`, `problem`.
    ConsoleFailed Warning "console.failed" "statement from the console failed in the background"
    /// By a signal, or because the files have changed.
    TlsReloaded Info "tls.reloaded" "TLS certificate reloaded; new connections use it"
    /// A failed reload.
    TlsRefused Error "tls.refused" "cannot reload the TLS certificate; new connections use the old one"
}
