//! The session that queries system tables, and the state that they show.

use std::sync::Arc;

use fulmar_control::forecast::series::SeriesReport;
use fulmar_dialect::system::{FIRST_USER_OID, OWNER, Rows};
use fulmar_engine::{Database, Engine, SystemTable};
use fulmar_meta::{Catalog, Tenant, User};
use parking_lot::Mutex;

use crate::Result;
use crate::advisory::AdvisoryLocks;
use crate::cluster::Cluster;
use crate::events::EventLog;
use crate::identity::Identity;
use crate::load::{LoadMonitor, NodeLoad, SINGLE_NODE};
use crate::registry::Registry;
use crate::settings::Settings;
use crate::statement_stats::StatementReport;
use crate::tenant_stats::TenantStatsRegistry;

/// The components whose state system tables show, and on which system functions act.
pub(crate) struct Sources {
    pub(crate) engine: Arc<Engine>,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) tenants: Arc<TenantStatsRegistry>,
    pub(crate) advisory: Arc<AdvisoryLocks>,
    pub(crate) event_log: Arc<EventLog>,
    pub(crate) cluster: Option<Arc<dyn Cluster>>,
    pub(crate) load: Arc<LoadMonitor>,
    /// The start time, in milliseconds since 1970.
    pub(crate) started_ms: u64,
}

impl Sources {
    /// The statistics of statements of all nodes that answer, of these partitions or of all.
    pub(crate) async fn statement_reports(
        &self,
        partitions: Option<&[u64]>,
    ) -> Vec<(String, StatementReport)> {
        match &self.cluster {
            Some(cluster) => {
                let reports = cluster.statement_reports(partitions).await.into_iter();
                reports.filter_map(|(node, report)| Some((node, report.ok()?))).collect()
            }
            None => vec![(SINGLE_NODE.to_owned(), self.tenants.statement_report(partitions))],
        }
    }
}

/// A table, and the function that produces its rows.
pub(super) type Table = (SystemTable, fn(&Viewer, &Database<'_>) -> Result<Rows>);

/// What other nodes have sent, because the statement reads it.
pub(crate) struct Remote {
    /// The loads of all nodes.
    pub(crate) loads: Vec<NodeLoad>,
    /// The forecasts of the controller.
    pub(crate) forecasts: Result<Vec<SeriesReport>>,
    /// The statistics of statements of the nodes that have answered, by name.
    pub(crate) statements: Vec<(String, StatementReport)>,
}

impl Default for Remote {
    fn default() -> Remote {
        Remote { loads: Vec::new(), forecasts: Ok(Vec::new()), statements: Vec::new() }
    }
}

/// The session that queries the catalog: a snapshot of its state.
pub(crate) struct Viewer {
    pub(super) sources: Arc<Sources>,
    pub(super) identity: Identity,
    pub(super) pid: i32,
    pub(super) settings: Settings,
    /// What other nodes have sent for the statement.
    pub(super) remote: Remote,
    /// The changes that `set_config` requested: name, value, and whether the change is local to the
    /// transaction.
    pub(crate) changes: Mutex<Vec<(String, String, bool)>>,
}

impl Viewer {
    /// Creates a viewer of a session's current state.
    pub(crate) fn new(sources: Arc<Sources>, identity: Identity, pid: i32, settings: Settings) -> Viewer {
        Viewer { sources, identity, pid, settings, remote: Remote::default(), changes: Mutex::default() }
    }

    /// Adds what other nodes have sent.
    pub(crate) fn with_remote(self, remote: Remote) -> Viewer {
        Viewer { remote, ..self }
    }

    /// The tenants that the viewer may connect to. The names of other tenants are confidential.
    pub(super) fn tenants(&self) -> Vec<Arc<Tenant>> {
        let catalog = &self.sources.catalog;
        let user = catalog.user(&self.identity.user);
        let mut tenants = catalog.tenants();
        tenants.retain(|tenant| {
            self.identity.superuser || user.as_ref().is_some_and(|user| catalog.may_connect(user, tenant))
        });
        tenants
    }

    /// The tenants whose statements the viewer may see: its own, or all for a superuser.
    pub(super) fn owned_tenants(&self) -> Vec<Arc<Tenant>> {
        owned_tenants(&self.sources.catalog, &self.identity)
    }

    /// The users that the viewer may see, with their OIDs. A superuser sees all users. Other users
    /// see themselves and the owners of the tenants that they may connect to. The owner of the
    /// viewer's tenant has the OID [`OWNER`], because it owns the tenant's tables.
    pub(super) fn users(&self) -> Vec<(i64, Arc<User>)> {
        let identity = &self.identity;
        let owners: Vec<String> = match identity.superuser {
            true => Vec::new(),
            false => self.tenants().iter().map(|tenant| tenant.owner.clone()).collect(),
        };
        let numbered = (FIRST_USER_OID..).zip(self.sources.catalog.users());
        numbered
            .filter(|(_, user)| {
                identity.superuser || user.name == identity.user || owners.contains(&user.name)
            })
            .map(|(oid, user)| if user.name == identity.tenant.owner { (OWNER, user) } else { (oid, user) })
            .collect()
    }
}

/// The tenants that belong to a user; all of them if it is a superuser.
pub(crate) fn owned_tenants(catalog: &Catalog, identity: &Identity) -> Vec<Arc<Tenant>> {
    let mut tenants = catalog.tenants();
    tenants.retain(|tenant| identity.superuser || tenant.owner == identity.user);
    tenants
}
