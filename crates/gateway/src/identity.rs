//! The identity of a session.

use std::net::IpAddr;
use std::sync::Arc;

use fulmar_engine::WriteAccess;
use fulmar_meta::{Access, LiveLimits, SYSTEM_PARTITION, Tenant, User};

use crate::cluster::Cluster;
use crate::events::Actor;

/// The application name of the sessions of the console ([`crate::console`]).
pub(crate) const CONSOLE_APPLICATION: &str = "fulmar console";

/// The identity of a session: its user, client address and tenant.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) user: String,
    /// `None` if the operating system does not report the peer address.
    pub(crate) address: Option<IpAddr>,
    /// The user's catalog record at authentication. `None` if authentication is disabled.
    pub(crate) account: Option<Arc<User>>,
    pub(crate) superuser: bool,
    /// The user's access to the tenant.
    pub(crate) access: Access,
    pub(crate) tenant: Arc<Tenant>,
    /// The tenant's current limits.
    pub(crate) limits: Arc<LiveLimits>,
}

impl Identity {
    /// Whether a session may write. In a cluster without a common store the system database is empty
    /// after a failover.
    pub(crate) fn writes(&self, cluster: Option<&dyn Cluster>) -> WriteAccess {
        let is_volatile = cluster.is_some_and(Cluster::has_private_stores);
        match self.access {
            Access::ReadOnly => WriteAccess::ReadOnlyUser,
            Access::ReadWrite if is_volatile && self.tenant.partition == SYSTEM_PARTITION => {
                WriteAccess::Volatile
            }
            Access::ReadWrite => WriteAccess::Allowed,
        }
    }

    /// The actor to record in events that the session causes.
    pub(crate) fn actor(&self) -> Actor<'_> {
        Actor { user: Some(&self.user), address: self.address }
    }
}
