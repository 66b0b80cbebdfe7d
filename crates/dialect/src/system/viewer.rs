//! What the system catalog needs to know about the session that queries it ([`Viewer`]).

use std::sync::Arc;

use fulmar_meta::{Tenant, User};
use fulmar_sqlite::{Database, Value};

use super::asked::{Rows, Tables};
use crate::Result;

/// The session that queries the catalog: a snapshot of its state, and the node around it. It
/// decides which tenants and users are visible.
pub trait Viewer: Send + Sync {
    /// All tables of the catalog: [`Tables::with`] the viewer's own.
    fn tables(&self) -> &'static Tables;

    /// The rows of one of the viewer's own tables.
    fn rows(&self, table: usize, database: &Database<'_>) -> Result<Rows>;

    /// The tenant that the session is connected to.
    fn tenant(&self) -> &Tenant;

    /// The tenants that the session may connect to. The names of other tenants are confidential.
    fn tenants(&self) -> Vec<Arc<Tenant>>;

    /// The users that the session may see, with their OIDs. The owner of the session's tenant has
    /// the OID [`OWNER`](super::OWNER).
    fn users(&self) -> Vec<(i64, Arc<User>)>;

    /// All configuration parameters: name, value and description.
    fn settings(&self) -> Vec<[&str; 3]>;

    /// The value of a configuration parameter.
    fn setting(&self, name: &str) -> Result<&str>;

    /// Returns true if the node is a replica.
    fn is_replica(&self) -> bool;

    /// The time at which the node started to accept connections, in milliseconds since 1970.
    fn started_ms(&self) -> u64;

    /// Runs a function that acts on the session or the node.
    fn act(&self, action: Action<'_>) -> Result<Value>;
}

/// A function that acts on the session or the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action<'a> {
    /// `set_config`. The change takes effect after the statement. The result is the new value.
    SetConfig {
        /// The parameter.
        name: &'a str,
        /// Its new value.
        value: &'a str,
        /// Whether the change ends with the transaction.
        local: bool,
    },
    /// `pg_cancel_backend`, with the session's process id.
    Cancel(i64),
    /// `pg_terminate_backend`, with the session's process id.
    Terminate(i64),
    /// `pg_advisory_lock`, with the lock's key.
    Lock(i64),
    /// `pg_try_advisory_lock`.
    TryLock(i64),
    /// `pg_advisory_unlock`.
    Unlock(i64),
    /// `pg_advisory_unlock_all`.
    UnlockAll,
}
