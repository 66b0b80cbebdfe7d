//! `fulmar start --read-only`: a node without data of its own, which reads the store of another one beside it.
//!
//! ```text
//!   --store ─ opened to be read            whatever happens, nothing is changed there; what is read is pinned
//!   catalog ─ the owner's newest one       and then, each second, a newer one if there is one
//!   engine ─ no log, nothing recovered     partitions open at a manifest and the owner's log so far
//!   gateway, HTTP ─ listen                 "fulmar ready: ..., reads URL"
//! ```
//!
//! Users, passwords and rights are the owner's. Nothing is locked: there may be any number of these, and the owner need not run.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use fulmar_engine::{Config, Engine, Era, Owner, Standing};
use fulmar_gateway::events::Journal;
use fulmar_meta::{Catalog, Followed};
use fulmar_pages::PartitionId;
use fulmar_store::{FateName, PageStore, ReadOnlyStore, Store, StoreUrl};

use super::node::{Node, Role, Rooms, listen, retention};
use super::tls::Tls;
use crate::cli::StartArgs;
use crate::size::Bytes;

/// Begins to listen.
pub(super) async fn start(
    arguments: &StartArgs,
    memory: Bytes,
    tls: Option<Arc<Tls>>,
) -> anyhow::Result<Node> {
    let Some(url) = &arguments.store else { bail!("--read-only needs --store") };
    let http = listen(arguments, Arc::new(|| "reading the catalog in the store".to_owned())).await?;
    let store = open(url)?;
    let followed = Followed::open(PageStore::open(store.clone())).await?;
    let catalog = Catalog::read_only(followed.clone()).await?;
    let scratch = tempfile::Builder::new().prefix("fulmar-").tempdir();
    let scratch = scratch.context("cannot make a directory for temporary files; set TMPDIR")?;
    let mut config = Config::new(scratch.path(), memory.0);
    config.whole_process = true;
    config.max_statement_bytes = arguments.max_statement_size.0 as usize;
    config.retention = retention(catalog.clone());
    config.store = Some(store);
    config.disk_reserve_bytes = arguments.disk_reserve.map(|reserve| reserve.0);
    config.statement_stack_bytes = arguments.statement_stack.0 as usize;
    let known = catalog.clone();
    config.beside =
        Some(Owner { node_id: followed.node(), standing: Arc::new(move |id| standing(&known, id)) });
    let engine = Engine::start(config).await.context("cannot start the engine")?;
    let following = tokio::spawn(followed.go_on());
    let temporary_directory = scratch.path().to_owned();
    let role = Role::Reader { following, scratch };
    let journal = Arc::new(Journal::in_memory());
    let rooms = Rooms { engine, catalog, journal, role, temporary_directory, http };
    Node::serve(arguments, rooms, memory, tls).await
}

/// Opens the store of another process, to read it.
pub fn open(url: &StoreUrl) -> anyhow::Result<Arc<dyn Store>> {
    match url {
        StoreUrl::Memory => {
            bail!("--store memory: is nothing that another process could read; give its store's URL")
        }
        // It would be made.
        StoreUrl::Directory(directory) => {
            ensure!(directory.is_dir(), "there is no store at {}", directory.display());
        }
        StoreUrl::S3 { .. } => {}
    }
    let backend = url.open().with_context(|| format!("cannot open the store {url}"))?;
    // Who deletes is told what is read here.
    Ok(Arc::new(ReadOnlyStore::new(Arc::new(backend), FateName::is_one)))
}

/// How a partition stands, if clients can connect to its tenant.
fn standing(catalog: &Catalog, id: PartitionId) -> Option<Standing> {
    let (partition, tenant) = (catalog.partition(id)?, catalog.tenant_of(id)?);
    let era = Era { lineage: partition.lineage, epoch: partition.epoch };
    Some(Standing { era, durability: tenant.durability })
}
