//! `fulmar start --read-only`: runs a read-only replica on the store of another node, the primary.
//!
//! 1. Store: open it for reading. The replica writes only garbage-collection holds, which keep the
//!    collector from deleting the manifests that it reads.
//! 2. Catalog: read the newest copy that the primary has published, then poll for newer ones every
//!    second.
//! 3. Engine: start without a log and without recovery. A partition opens at a manifest and applies
//!    the primary's log up to the present.
//! 4. Gateway and HTTP: listen, and print `fulmar ready: ..., reads URL`.
//!
//! With `--meta`, it follows a cluster: the catalog and the owners of the databases are those of the
//! metadata store, and the store must be that of the cluster ([`cluster::open_for_replica`]).
//!
//! Users, passwords and privileges are those of the primary. Nothing is locked: a store can have
//! any number of replicas, and the primary does not have to be running.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use fulmar_engine::{CatalogState, Config, Engine, Primary, Timeline};
use fulmar_gateway::events::EventLog;
use fulmar_meta::{Catalog, CatalogReplica};
use fulmar_node::ReplicaOwners;
use fulmar_pages::PartitionId;
use fulmar_store::{HoldName, PageStore, ReadOnlyStore, Store, StoreUrl};

use super::cluster;
use super::node::{Node, NodeParts, Role, listen, retention};
use super::tls::Tls;
use crate::cli::StartArgs;
use crate::size::Bytes;

/// Starts the replica.
pub(super) async fn start(
    arguments: &StartArgs,
    memory: Bytes,
    tls: Option<Arc<Tls>>,
) -> anyhow::Result<Node> {
    let Some(url) = &arguments.store else { bail!("--read-only requires --store") };
    let http = listen(arguments, Arc::new(|| "reading the catalog".to_owned())).await?;
    let store = open_read_only(url)?;
    let (catalog, primary, catalog_task) = match cluster::open_for_replica(arguments, &store, url).await? {
        Some((catalog, owners)) => (catalog.clone(), member_of(catalog, Arc::new(owners)), None),
        None => {
            let replica = CatalogReplica::open(PageStore::open(store.clone())).await?;
            let catalog = Catalog::read_only(replica.clone()).await?;
            let known = catalog.clone();
            let primary = Primary {
                node_id: replica.node(),
                catalog_state: Arc::new(move |id| catalog_state(&known, id)),
                ownerships: None,
            };
            (catalog, primary, Some(replica))
        }
    };
    let scratch = tempfile::Builder::new().prefix("fulmar-").tempdir();
    let scratch = scratch.context("cannot create a temporary directory; set TMPDIR")?;
    let mut config = Config::new(scratch.path(), memory.0);
    config.whole_process = true;
    config.max_statement_bytes = arguments.max_statement_size.0 as usize;
    config.retention = retention(catalog.clone());
    config.store = Some(store);
    config.disk_reserve_bytes = arguments.disk_reserve.map(|reserve| reserve.0);
    config.statement_stack_bytes = arguments.statement_stack.0 as usize;
    config.replica_of = Some(primary);
    let engine = Engine::start(config).await.context("cannot start the engine")?;
    let catalog_task = catalog_task.map(|replica| tokio::spawn(replica.run()));
    let temporary_directory = scratch.path().to_owned();
    let role = Role::Replica { catalog_task, scratch };
    let event_log = Arc::new(EventLog::in_memory());
    let parts = NodeParts { engine, catalog, event_log, role, temporary_directory, http };
    Node::serve(arguments, parts, memory, tls).await
}

/// The primary of a replica of a cluster.
fn member_of(catalog: Arc<Catalog>, owners: Arc<ReplicaOwners>) -> Primary {
    let known = owners.clone();
    // A change of durability changes the owner's record first.
    let state = move |id| {
        let state = catalog_state(&catalog, id)?;
        Some(CatalogState { durability: known.durability(id).unwrap_or(state.durability), ..state })
    };
    Primary { node_id: 0, catalog_state: Arc::new(state), ownerships: Some(owners) }
}

/// Opens the store of another node for reading.
pub fn open_read_only(url: &StoreUrl) -> anyhow::Result<Arc<dyn Store>> {
    match url {
        StoreUrl::Memory => {
            bail!("--store memory: cannot be read by another process; use the URL of the primary's store")
        }
        // Opening a directory that does not exist would create it.
        StoreUrl::Directory(directory) => {
            ensure!(directory.is_dir(), "store directory {} does not exist", directory.display());
        }
        StoreUrl::S3 { .. } => {}
    }
    let backend = url.open().with_context(|| format!("cannot open the store {url}"))?;
    // Writable names are those of garbage-collection holds, which tell the collector what is in
    // use.
    Ok(Arc::new(ReadOnlyStore::new(Arc::new(backend), HoldName::is_valid)))
}

/// Returns the primary's state of a partition, if clients can connect to its tenant.
fn catalog_state(catalog: &Catalog, id: PartitionId) -> Option<CatalogState> {
    let (partition, tenant) = (catalog.partition(id)?, catalog.tenant_of(id)?);
    let timeline = Timeline { lineage: partition.lineage, epoch: partition.epoch };
    Some(CatalogState { timeline, durability: tenant.durability })
}
