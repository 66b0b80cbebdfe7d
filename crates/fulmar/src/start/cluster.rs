//! `fulmar start --node NAME --rpc ADDR --meta URL`: runs a node of a cluster.
//!
//! 1. Metadata store: connect to etcd, and find the cluster in it.
//! 2. Store: its object `owner` contains the cluster's id. The founder of the cluster creates it;
//!    every other node refuses a store with another id, or without one.
//! 3. Catalog: all nodes share it.
//! 4. Node: register, listen for other nodes, begin an incarnation ([`fulmar_node::Node::join`]).
//! 5. Engine, gateway and HTTP, as on a single node. The engine opens what the cluster assigns.
//!
//! An incarnation that was declared dead replaces its process by a new one with the same arguments
//! ([`rejoin`]), which joins as the next incarnation.

use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow, bail, ensure};
use fulmar_engine::{Config, Engine};
use fulmar_gateway::cluster::Cluster;
use fulmar_gateway::events::EventLog;
use fulmar_meta::reject_unfinished;
use fulmar_meta::{
    Catalog, Embedded, EtcdOptions, EtcdStore, MetaError, MetadataStore, SYSTEM_PARTITION, TenantState,
};
use fulmar_node::directory::{Conversion, DirectoryOwner};
use fulmar_node::metadata::{RemoteOptions, RemoteStore};
use fulmar_node::registration::{self, Place, Registration};
use fulmar_node::{NodeOptions, PulledSegments, ReplicaOwners, rpc};
use fulmar_pages::Durability;
use fulmar_store::{FallbackStore, Limits, Reliable, Store, StoreUrl};

use fulmar_transport::tls::NodeTls;

use super::catalog_check::with_remedy;
use super::data::DataDirectory;
use super::metadata_move::MARK_FILE;
use super::node::{self, EVENTS_DIRECTORY, Node, NodeParts, Role, TEMPORARY_DIRECTORY};
use super::tls::Tls;
use super::{conversion, disk_cache, metadata_move, provisioner, security, store, superuser};
use crate::cli::{Join, MetaUrl, StartArgs};
use crate::size::Bytes;

/// The embedded metadata store of a cluster, in the data directory.
pub(super) const CLUSTER_METADATA_FILE: &str = "cluster.db";
/// Deadline of a request to the node with the embedded metadata store.
const REMOTE_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum time from the start of a process to its replacement.
const MIN_RUN_TIME: Duration = Duration::from_secs(1);
/// How long a node that has joined the cluster before waits for the metadata store, and then for the
/// store.
const STORE_TIMEOUT: Duration = Duration::from_secs(300);
const METADATA_RETRY_DELAY: Duration = Duration::from_secs(1);
/// How long a node waits for the founder of the cluster to mark the store.
const FOUNDING_TIMEOUT: Duration = Duration::from_secs(10);
const FOUNDING_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// A tenant that has been in creation for this long was left by a node that died.
const ABANDONED_AFTER: Duration = Duration::from_secs(300);

/// Where the metadata store of the cluster is.
enum Metadata<'a> {
    /// `--meta`.
    Url(&'a MetaUrl),
    /// `--join`: embedded in another node.
    Joined(&'a Join),
}

/// The flags of a node of a cluster.
struct Flags<'a> {
    name: &'a str,
    rpc: SocketAddr,
    metadata: Metadata<'a>,
    /// The store of all nodes. `None`: each has its own in its data directory.
    store: Option<&'a StoreUrl>,
}

/// The flags of a cluster, if they are given.
fn flags(arguments: &StartArgs) -> Option<Flags<'_>> {
    let cluster = &arguments.cluster;
    Some(Flags {
        name: cluster.node.as_deref()?,
        rpc: cluster.rpc?,
        metadata: match (&cluster.meta, &cluster.join) {
            (Some(url), _) => Metadata::Url(url),
            (None, join) => Metadata::Joined(join.as_ref()?),
        },
        store: arguments.store.as_ref(),
    })
}

/// Refuses a data directory of a cluster's node for a single node, and the other way round.
pub(super) fn check_directory(arguments: &StartArgs, data: &Path) -> anyhow::Result<()> {
    let owner = DirectoryOwner::read(data)?;
    match (flags(arguments), owner) {
        (None, Some(owner)) => Err(anyhow!(
            "{} is the data directory of node \"{}\" of a cluster; start it with --node {}, --rpc, --meta and \
             its --store if it has one, or use another --data",
            data.display(),
            owner.name,
            owner.name
        )),
        (None, None) => conversion::check_not_begun(data),
        (Some(_), _) => Ok(()),
    }
}

/// Starts a node of a cluster. `None` if the flags are those of a single node.
pub(super) async fn start(
    arguments: &StartArgs,
    data: &DataDirectory,
    memory: Bytes,
    tls: Option<Arc<Tls>>,
) -> anyhow::Result<Option<Node>> {
    let Some(flags) = flags(arguments) else { return Ok(None) };
    ensure!(
        !flags.rpc.ip().is_unspecified() && flags.rpc.port() != 0,
        "--rpc {} is not an address that other nodes can reach; use this machine's address and a fixed port",
        flags.rpc
    );
    registration::check_name(flags.name)?;
    let node_tls = security::node_tls(&arguments.cluster.rpc_tls, flags.name, flags.rpc)?;
    let http = node::listen(arguments, Arc::new(|| "joining the cluster".to_owned())).await?;
    let listener = rpc::bind(flags.rpc)?;
    let events = data.path().join(EVENTS_DIRECTORY);
    let event_log = tokio::task::spawn_blocking(move || {
        EventLog::open(&events).with_context(|| format!("cannot open the event log in {}", events.display()))
    });
    let metadata = open_metadata(&flags.metadata, arguments, data.path(), node_tls.clone()).await?;
    match flags.metadata {
        Metadata::Url(url) => {
            let target = (flags.name, url.to_string());
            conversion::convert(arguments, data, memory, target, &*metadata).await?;
        }
        Metadata::Joined(_) => conversion::check_joinable(data.path())?,
    }
    let has_joined = DirectoryOwner::read(data.path())?.is_some();
    let (store, registration) = match flags.store {
        Some(url) => open_store(url, flags.name, &*metadata, has_joined).await?,
        None => open_private_store(data.path(), flags.name, &*metadata).await?,
    };
    let catalog = Catalog::open(metadata.clone()).await.map_err(with_remedy)?;
    let event_log = Arc::new(event_log.await.context("the task that reads the event log panicked")??);
    let options = NodeOptions {
        name: flags.name.to_owned(),
        rpc: flags.rpc,
        sql: arguments.sql,
        data: data.path().to_owned(),
        tls: node_tls,
        archive_bytes: arguments.cluster.archives.map_or(0, |archives| archives.0),
        serves_metadata: matches!(flags.metadata, Metadata::Url(MetaUrl::Embedded)),
        place: Place {
            site: arguments.cluster.site.clone().unwrap_or_default(),
            rack: arguments.cluster.rack.clone().unwrap_or_default(),
        },
        provisioner: provisioner::open(arguments, registration.cluster)?,
        accepted_generation: arguments.accept_catalog,
    };
    let reliable = Reliable::new(store.clone(), Limits::default());
    let member =
        fulmar_node::Node::join(options, registration, listener, metadata, catalog.clone(), reliable).await?;
    Conversion::remove(data.path())?;
    share_system_partition(&member, &catalog).await?;
    let store: Arc<dyn Store> = match member.is_private() {
        true => Arc::new(FallbackStore::new(store, Arc::new(PulledSegments::of(&member)))),
        false => store,
    };
    let engine = start_engine(arguments, data, memory, &catalog, &member, store).await?;
    if !arguments.insecure {
        superuser::ensure_password(&catalog, data.path()).await?;
    }
    let role = Role::Member { node: member.clone() };
    let temporary_directory = data.path().join(TEMPORARY_DIRECTORY);
    let parts = NodeParts {
        engine: engine.clone(),
        catalog: catalog.clone(),
        event_log,
        role,
        temporary_directory,
        http,
    };
    let node = Node::serve(arguments, parts, memory, tls).await?;
    tokio::spawn(drop_abandoned(member, engine, catalog));
    Ok(Some(node))
}

/// Opens the metadata store of the cluster.
async fn open_metadata(
    metadata: &Metadata<'_>,
    arguments: &StartArgs,
    data: &Path,
    tls: Option<Arc<NodeTls>>,
) -> anyhow::Result<Arc<dyn MetadataStore>> {
    let embedded = data.join(CLUSTER_METADATA_FILE);
    let is_embedded = matches!(metadata, Metadata::Url(MetaUrl::Embedded));
    let moved = metadata_move::check(data, is_embedded)?;
    if !is_embedded && !moved && embedded.exists() {
        // A start with --meta embedded that was refused leaves one without a cluster.
        let store = Embedded::open(&embedded).map_err(with_remedy)?;
        ensure!(
            registration::find_cluster(&store).await?.is_none(),
            "{} is the metadata store of the cluster; start this node with --meta embedded. If \"fulmar cluster \
             convert\" has moved the metadata, restore {} from a backup of this data directory instead",
            embedded.display(),
            data.join(MARK_FILE).display()
        );
    }
    let has_joined = DirectoryOwner::read(data)?.is_some();
    Ok(match metadata {
        Metadata::Url(MetaUrl::Etcd { endpoints, cluster }) => {
            let mut etcd = EtcdOptions::new(endpoints.clone(), cluster);
            security::secure_etcd(&mut etcd, &arguments.cluster.meta_security)?;
            Arc::new(open_remote(has_joined, async || EtcdStore::open(etcd.clone()).await).await?)
        }
        Metadata::Url(MetaUrl::Embedded) => {
            ensure!(
                !has_joined || embedded.exists(),
                "{0} is missing; if this node has started with --meta embedded, restore {0}, {0}-wal and {1} from a \
                 backup of this data directory, all three from the same moment; otherwise start it with the --join \
                 or --meta that it had",
                embedded.display(),
                embedded.with_extension("head").display()
            );
            tracing::info!(
                "the metadata store is embedded in this node: the cluster stops when the node stops"
            );
            Arc::new(Embedded::open(&embedded).map_err(with_remedy)?)
        }
        Metadata::Joined(Join { name, address }) => {
            ensure!(
                name.is_some() || tls.is_none(),
                "--join {address}: with TLS between nodes, use --join NAME@{address}"
            );
            let name = name.clone().unwrap_or_default();
            let options = RemoteOptions { address: *address, name, tls, timeout: REMOTE_TIMEOUT };
            Arc::new(open_remote(has_joined, async || RemoteStore::open(options.clone()).await).await?)
        }
    })
}

/// Opens a metadata store in other processes. A node that has joined the cluster before has the right
/// flags, so it waits if the store does not answer.
async fn open_remote<T>(has_joined: bool, open: impl AsyncFn() -> Result<T, MetaError>) -> anyhow::Result<T> {
    let began = Instant::now();
    loop {
        match open().await {
            Err(error @ (MetaError::Unavailable { .. } | MetaError::OutcomeUnknown { .. }))
                if has_joined && began.elapsed() < STORE_TIMEOUT =>
            {
                tracing::warn!(%error, "the metadata store does not answer; will retry");
                tokio::time::sleep(METADATA_RETRY_DELAY).await;
            }
            opened => return opened.map_err(with_remedy),
        }
    }
}

async fn start_engine(
    arguments: &StartArgs,
    data: &DataDirectory,
    memory: Bytes,
    catalog: &Arc<Catalog>,
    member: &Arc<fulmar_node::Node>,
    store: Arc<dyn Store>,
) -> anyhow::Result<Arc<Engine>> {
    let mut config = Config::new(data.path(), memory.0);
    config.whole_process = true;
    config.max_statement_bytes = arguments.max_statement_size.0 as usize;
    config.retention = node::retention(catalog.clone());
    config.store = Some(store);
    // Records of other partitions in the local log are of an earlier durability, and in manifests.
    config.live = Some(member.local_partitions().await?.into_iter().collect());
    if member.is_private() {
        // The collector of this node's store needs them.
        let partitions = catalog.partitions();
        config.timelines =
            partitions.iter().map(|partition| (partition.id, node::timeline(partition))).collect();
    }
    config.membership = Some(member.membership());
    config.node_id = config.membership.as_ref().map_or(0, |membership| membership.log_node);
    config.disk_reserve_bytes = arguments.disk_reserve.map(|reserve| reserve.0);
    config.statement_stack_bytes = arguments.statement_stack.0 as usize;
    config.disk_cache_bytes = disk_cache::bytes(arguments.disk_cache, arguments.store.as_ref())?;
    tokio::select! {
        engine = Engine::start(config) => engine.context("cannot start the engine"),
        reason = member.fenced() => Err(rejoin(&reason, Instant::now()).await),
    }
}

/// Opens the catalog of the cluster in `--meta` and follows its owners, for a replica. `None`
/// without `--meta`.
pub(super) async fn open_for_replica(
    arguments: &StartArgs,
    store: &Arc<dyn Store>,
    url: &StoreUrl,
) -> anyhow::Result<Option<(Arc<Catalog>, ReplicaOwners)>> {
    let metadata: Arc<dyn MetadataStore> = match &arguments.cluster.meta {
        None => return Ok(None),
        Some(MetaUrl::Embedded) => {
            bail!(
                "--read-only needs --meta etcd://HOST:PORT: embedded metadata cannot be read by other processes"
            )
        }
        Some(MetaUrl::Etcd { endpoints, cluster }) => {
            let mut etcd = EtcdOptions::new(endpoints.clone(), cluster);
            security::secure_etcd(&mut etcd, &arguments.cluster.meta_security)?;
            Arc::new(EtcdStore::open(etcd).await.map_err(with_remedy)?)
        }
    };
    reject_unfinished(&*metadata).await.map_err(with_remedy)?;
    let Some(cluster) = registration::find_cluster(&*metadata).await? else {
        bail!("--meta contains no cluster; start its first node, or check the address and the name")
    };
    let owner = store::owner(&Reliable::new(store.clone(), Limits::default())).await?;
    ensure!(
        owner == Some(cluster),
        "the store {url} is not that of the cluster in --meta ({cluster:032x}); use the --store and --meta of one \
         cluster"
    );
    let catalog = Catalog::read_only(metadata.clone()).await.map_err(with_remedy)?;
    let owners = ReplicaOwners::follow(metadata, cluster).await.map_err(with_remedy)?;
    Ok(Some((catalog, owners)))
}

/// Opens the store of the cluster, and registers the node. Founds the cluster if there is none.
async fn open_store(
    url: &StoreUrl,
    name: &str,
    metadata: &dyn MetadataStore,
    has_joined: bool,
) -> anyhow::Result<(Arc<dyn Store>, Registration)> {
    ensure!(
        *url != StoreUrl::Memory,
        "--store memory: cannot be shared by nodes; use file:///directory or s3://bucket/prefix"
    );
    // The contents of an unfinished copy are those of no cluster yet.
    reject_unfinished(metadata).await.map_err(with_remedy)?;
    let backend: Arc<dyn Store> =
        Arc::new(url.open().with_context(|| format!("cannot open the store {url}"))?);
    let limits = match has_joined {
        // The flags are right: the store is only away.
        true => Limits { max_attempts: u32::MAX, retry_timeout: STORE_TIMEOUT, ..Limits::default() },
        false => Limits::default(),
    };
    let store = Reliable::new(backend.clone(), limits);
    let owner = store::owner(&store).await?;
    let existing = registration::find_cluster(metadata).await?;
    let new_cluster = match (existing, owner) {
        (Some(cluster), Some(owner)) if cluster != owner => {
            return Err(anyhow!(
                "the store {url} belongs to another cluster or to a single node ({owner:032x}), not to the \
                 cluster in --meta ({cluster:032x}); use the --store and --meta of one cluster"
            ));
        }
        (None, Some(owner)) => {
            return Err(anyhow!(
                "the store {url} belongs to another cluster or to a single node ({owner:032x}), and --meta \
                 contains no cluster; use the --meta of that cluster, or an empty --store for a new one"
            ));
        }
        (_, owner) => owner.unwrap_or_else(rand::random),
    };
    let registration = registration::register(metadata, name, new_cluster, false).await?;
    if owner.is_none() {
        match registration.is_founder || registration.node.0 == 1 {
            true => store::claim(&store, registration.cluster).await?,
            false => wait_for_founder(&store, url, registration.cluster).await?,
        }
    }
    Ok((backend, registration))
}

/// Opens the store of a node in its data directory, and registers the node. Founds the cluster if there
/// is none.
async fn open_private_store(
    data: &Path,
    name: &str,
    metadata: &dyn MetadataStore,
) -> anyhow::Result<(Arc<dyn Store>, Registration)> {
    reject_unfinished(metadata).await.map_err(with_remedy)?;
    let registration = registration::register(metadata, name, rand::random(), true).await?;
    if registration.is_founder {
        tracing::info!(
            "the nodes of this cluster have stores of their own: databases wait for their node if it stops"
        );
    }
    let (url, began) = (store::default_url(data), SystemTime::now());
    let backend = url.open().with_context(|| format!("cannot open the store {url}"))?;
    store::sweep(backend.clone(), began);
    let backend: Arc<dyn Store> = Arc::new(backend);
    store::claim(&Reliable::new(backend.clone(), Limits::default()), registration.cluster).await?;
    Ok((backend, registration))
}

/// Waits until the founder of the cluster has marked the store with the cluster's id.
async fn wait_for_founder(store: &Reliable, url: &StoreUrl, cluster: u128) -> anyhow::Result<()> {
    let deadline = Instant::now() + FOUNDING_TIMEOUT;
    loop {
        match store::owner(store).await? {
            Some(owner) if owner == cluster => return Ok(()),
            None if Instant::now() < deadline => tokio::time::sleep(FOUNDING_POLL_INTERVAL).await,
            _ => {
                return Err(anyhow!(
                    "the store {url} is not the store of the cluster {cluster:032x}: it has no data of it; \
                     give all nodes the same --store"
                ));
            }
        }
    }
}

/// Makes sure that the system partition has an owner, and can have any.
async fn share_system_partition(member: &fulmar_node::Node, catalog: &Catalog) -> anyhow::Result<()> {
    let tenants = catalog.all_tenants();
    let system = tenants.iter().find(|tenant| tenant.partition == SYSTEM_PARTITION);
    if let Some(system) = system.filter(|system| system.durability != Durability::Shared) {
        catalog.set_durability(system, Durability::Shared).await.map_err(with_remedy)?;
    }
    member.create_partition(SYSTEM_PARTITION, Durability::Shared).await?;
    Ok(())
}

/// Drops tenants whose creation or drop a node has left incomplete when it died. Those of the last
/// minutes may still be in progress on another node.
async fn drop_abandoned(member: Arc<fulmar_node::Node>, engine: Arc<Engine>, catalog: Arc<Catalog>) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let before_unix_ms = now.saturating_sub(ABANDONED_AFTER).as_millis() as u64;
    for tenant in catalog.unfinished() {
        if tenant.created_unix_ms > before_unix_ms {
            continue;
        }
        // One node is enough: that of the system partition.
        if member.owner(SYSTEM_PARTITION).is_none_or(|owner| owner.node != member.this_node()) {
            return;
        }
        let state = match tenant.state {
            TenantState::Creating => "creating",
            _ => "dropping",
        };
        tracing::info!(tenant = tenant.name, state, "dropping a tenant left incomplete by a crash");
        let dropped = async {
            member.drop_partition(tenant.partition).await?;
            // A branch or an import may have stored a manifest before the partition had an owner.
            engine.undo_creation(tenant.partition).await
        };
        if let Err(error) = dropped.await {
            tracing::warn!(tenant = tenant.name, %error, "cannot drop an incomplete tenant");
            continue;
        }
        if let Err(error) = catalog.finish_drop(&tenant).await {
            tracing::info!(tenant = tenant.name, %error, "another node has dropped the incomplete tenant");
        }
    }
}

/// Replaces this process by a new one with the same arguments, because its incarnation has ended.
/// Returns only if that fails. The new process listens on the same ports and locks the same data
/// directory: all files of this one are closed.
pub(super) async fn rejoin(reason: &str, started: Instant) -> anyhow::Error {
    tracing::warn!(reason, "this node was declared dead; it restarts and joins the cluster again");
    tokio::time::sleep(MIN_RUN_TIME.saturating_sub(started.elapsed())).await;
    let mut arguments = std::env::args_os();
    let name = arguments.next();
    // The file may have been replaced by an upgrade: its new contents are executed then.
    let program = std::env::current_exe().ok().filter(|path| path.exists());
    let mut command = Command::new(program.unwrap_or_else(|| "/proc/self/exe".into()));
    if let Some(name) = name {
        command.arg0(name);
    }
    let error = command.args(arguments).exec();
    anyhow::Error::new(error).context("this node was declared dead and cannot restart itself; start it again")
}
