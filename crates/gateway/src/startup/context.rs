//! What the startup of connections uses.

use std::sync::Arc;

use fulmar_engine::Engine;
use fulmar_meta::{Catalog, SaltKey};

use crate::cluster::Cluster;
use crate::events::EventLog;
use crate::login_throttle::LoginThrottle;
use crate::registry::Registry;
use crate::session;

/// What the startup of connections needs.
pub(crate) struct Context {
    /// `None` disables TLS.
    pub(crate) tls: Option<Arc<rustls::ServerConfig>>,
    /// Disables authentication.
    pub(crate) insecure: bool,
    pub(crate) engine: Arc<Engine>,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) login_throttle: Arc<LoginThrottle>,
    /// Used if the catalog has no salt key, because the primary node runs an earlier version.
    pub(crate) fallback_salt_key: Arc<SaltKey>,
    pub(crate) event_log: Arc<EventLog>,
    /// The context of the sessions.
    pub(crate) sessions: Arc<session::Context>,
    /// The cluster of the node.
    pub(crate) cluster: Option<Arc<dyn Cluster>>,
}
