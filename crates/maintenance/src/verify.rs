//! Verifies all stored data against its checksums, for example before a backup is trusted. Nothing
//! is changed.
//!
//! A running node ([`Maintenance::verify`]) reads:
//! - all manifests;
//! - the segments that manifests reference or open partitions read.
//!
//! It skips the logs, which are being written and are read by the next start, and all short-lived
//! objects.
//!
//! On a data directory without a node ([`verify_directory`]), or a store alone ([`verify_store`]),
//! it reads:
//! - all manifests;
//! - all segments, and checks that every segment referenced by a manifest or a log exists;
//! - the log in the directory: every record that counts, as a start would, but without writing;
//! - logs in the store: all objects, including those that a start skips, and checks that none is
//!   missing;
//! - lists of hot pages, catalogs for replicas, terms and manifest holds; and checks that a catalog
//!   and the term of the newest manifest exist.
//!
//! (A damaged list of hot pages is ignored, a damaged catalog is replaced by the next one, and a
//! damaged hold keeps its manifest.)
//!
//! Only the first damage of each object is reported; all other objects are still read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use fulmar_pages::{PartitionId, Record, SegmentId};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{CommitLog, LogError, PageStore, StdFiles, Store, StoreError};
use futures::stream::{self, StreamExt};

use crate::maintenance::Maintenance;
use fulmar_mvcc::{log_error, store_error, term_of};

/// Maximum number of concurrent manifest reads.
const MAX_CONCURRENT_READS: usize = 16;

/// A damaged place in a file or object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Path of the file, relative to the data directory.
    pub file: String,
    /// Offset of the damage within the file.
    pub offset: Option<u64>,
    /// What is wrong, and the remedy.
    pub problem: String,
    /// Affected partitions, as far as known. Empty if the data belongs to no partition or to all.
    pub partitions: Vec<PartitionId>,
}

/// Segments and the partitions that reference them.
type Users = BTreeMap<SegmentId, BTreeSet<PartitionId>>;

/// What the manifests reference.
#[derive(Default)]
struct Named {
    /// Referenced segments, and the partitions that reference them.
    users: Users,
    /// Newest version number of each partition.
    newest: HashMap<PartitionId, u64>,
    /// The latest term in which a manifest was stored.
    term: u32,
}

/// Result of a verification.
#[derive(Clone, Debug, Default)]
pub struct Verified {
    /// Log records read.
    pub records: u64,
    /// Manifests read.
    pub manifests: u64,
    /// Segments read.
    pub segments: u64,
    /// Pages in these segments.
    pub pages: u64,
    /// Other objects read.
    pub others: u64,
    /// Damage found.
    pub damage: Vec<Damage>,
}

impl Verified {
    /// Records damage of an object in the store. Any other error is returned.
    fn note(&mut self, error: StoreError, partitions: Vec<PartitionId>) -> Result<()> {
        let Some(object) = error.damaged_object() else { return Err(store_error(error)) };
        let file = format!("store/{object}");
        let offset = match &error {
            StoreError::Damaged { cause, .. } => Some(cause.at as u64),
            _ => None,
        };
        self.damage.push(Damage { file, offset, problem: error.to_string(), partitions });
        Ok(())
    }

    /// Reads all manifests. Manifests above a partition's epoch are garbage and do not count as its
    /// newest version.
    async fn manifests(&mut self, store: &PageStore, epoch: impl Fn(PartitionId) -> u32) -> Result<Named> {
        let mut named = Named::default();
        let names = store.list_manifests(None).await.map_err(store_error)?;
        let read = |name| async move { (name, store.read_manifest(name).await) };
        let mut reads = stream::iter(names.into_iter().map(read)).buffered(MAX_CONCURRENT_READS);
        while let Some((name, read)) = reads.next().await {
            self.manifests += 1;
            named.term = named.term.max(term_of(name.number));
            match read {
                Ok(manifest) => {
                    for segment in &manifest.segments {
                        named.users.entry(segment.id).or_default().insert(name.partition);
                    }
                    if name.epoch <= epoch(name.partition) {
                        named.newest.insert(name.partition, name.number);
                    }
                }
                Err(error) => self.note(error, vec![name.partition])?,
            }
        }
        Ok(named)
    }

    /// Reads all objects except manifests, segments and logs. `term` is the latest term in which
    /// something was stored.
    async fn others(
        &mut self,
        store: &PageStore,
        term: u32,
        epoch: impl Fn(PartitionId) -> u32,
    ) -> Result<()> {
        let listed = store.list_partitions(None).await.map_err(store_error)?;
        for anchors in listed.anchors.chunk_by(|a, b| a.partition == b.partition) {
            let id = anchors[0].partition;
            self.other(store.check_anchors(&listed, id, epoch(id)), vec![id])?;
        }
        for name in listed.hot_pages {
            self.other(store.read_hot_pages(name).await.map(drop), vec![name.partition])?;
        }
        for name in listed.holds {
            self.other(store.verify_hold(name).await, vec![name.manifest.partition])?;
        }
        self.catalogs(store).await?;
        let terms = store.list_terms().await.map_err(store_error)?;
        for (number, has_ended) in &terms {
            self.other(store.read_term(*number, *has_ended).await.map(drop), Vec::new())?;
        }
        store.check_terms(&terms, term).or_else(|missing| self.note(missing, Vec::new()))
    }

    // At least one catalog must exist: a node stores its catalog before it accepts connections.
    async fn catalogs(&mut self, store: &PageStore) -> Result<()> {
        let numbers = store.list_catalogs().await.map_err(store_error)?;
        if numbers.is_empty() && self.manifests > 0 {
            let problem = "no catalog found: replicas cannot open the store, and its databases \
                           cannot be listed by name; the primary writes a catalog when it starts";
            self.damage.push(Damage {
                file: "store/catalog".to_owned(),
                offset: None,
                problem: problem.to_owned(),
                partitions: Vec::new(),
            });
        }
        for number in numbers {
            self.other(store.read_catalog(number).await.map(drop), Vec::new())?;
        }
        Ok(())
    }

    fn other(
        &mut self,
        read: std::result::Result<(), StoreError>,
        partitions: Vec<PartitionId>,
    ) -> Result<()> {
        self.others += 1;
        read.or_else(|error| self.note(error, partitions))
    }

    async fn segment(
        &mut self,
        store: &PageStore,
        id: SegmentId,
        users: &BTreeSet<PartitionId>,
    ) -> Result<()> {
        self.segments += 1;
        match store.verify_segment(id).await {
            Ok(pages) => {
                self.pages += pages;
                Ok(())
            }
            Err(error) => self.note(error, users.iter().copied().collect()),
        }
    }
}

impl Verified {
    /// Reads all existing and all referenced segments.
    async fn segments(
        &mut self,
        store: &PageStore,
        mut users: Users,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<()> {
        for segment in store.list_segments().await.map_err(store_error)? {
            users.entry(segment).or_default();
        }
        for (done, (segment, segment_users)) in users.iter().enumerate() {
            progress(done as u64, users.len() as u64);
            self.segment(store, *segment, segment_users).await?;
        }
        Ok(())
    }
}

impl Maintenance {
    /// Verifies the data that this node keeps in the store for its partitions. `check` is called
    /// before each segment; its error ends the verification.
    pub async fn verify(&self, check: impl Fn() -> Result<()>) -> Result<Verified> {
        let mut verified = Verified::default();
        let (users, _held) = self.hold_named(&mut verified).await?;
        for (segment, users) in &users {
            check()?;
            verified.segment(&self.node().store, *segment, users).await?;
        }
        Ok(verified)
    }

    /// Reads the manifests, and keeps the referenced segments from garbage collection while the
    /// result lives.
    async fn hold_named(&self, verified: &mut Verified) -> Result<(Users, Arc<Vec<SegmentId>>)> {
        let _past = self.node().old_manifests.read().await;
        let mut users =
            verified.manifests(&self.node().store, |id| self.partitions.timeline(id).epoch).await?.users;
        for partition in self.partitions.open_partitions() {
            for segment in partition.frame_segments() {
                users.entry(segment).or_default().insert(partition.id);
            }
        }
        let held = Arc::new(users.keys().copied().collect());
        self.node().exported.lock().push(Arc::downgrade(&held));
        Ok((users, held))
    }
}

/// The partitions in the catalog, with their epochs.
pub type KnownPartitions = HashMap<PartitionId, u32>;

/// Verifies a data directory that no node uses, and its store. `live` holds the partitions in the
/// catalog, if the catalog could be read. `progress` receives the number of segments read and their
/// total.
pub async fn verify_directory(
    data: &Path,
    store: Arc<dyn Store>,
    live: Option<&KnownPartitions>,
    progress: impl FnMut(u64, u64),
) -> Result<Verified> {
    let log = data.join("log");
    let read = tokio::task::spawn_blocking(move || read_log(&log)).await;
    let panicked = |error| Error::new(sqlstate::INTERNAL, format!("panic while reading the log: {error}"));
    let log = read.map_err(panicked)?.map_err(log_error)?;
    verify_kept(store, vec![log], live, progress).await
}

/// Verifies a store without its data directory. No node may use it. `live` holds the partitions in
/// the store's catalog, if the catalog could be read.
pub async fn verify_store(
    store: Arc<dyn Store>,
    live: Option<&KnownPartitions>,
    progress: impl FnMut(u64, u64),
) -> Result<Verified> {
    verify_kept(store, Vec::new(), live, progress).await
}

/// Reads everything in a store. `logs` are the results of logs outside of it.
async fn verify_kept(
    store: Arc<dyn Store>,
    mut logs: Vec<FromLog>,
    live: Option<&KnownPartitions>,
    progress: impl FnMut(u64, u64),
) -> Result<Verified> {
    let mut verified = Verified::default();
    let store = PageStore::open(store);
    let epoch = |id: PartitionId| live.map_or(u32::MAX, |live| live.get(&id).copied().unwrap_or(u32::MAX));
    let Named { mut users, newest, term } = verified.manifests(&store, epoch).await?;
    for node in CommitLog::nodes_in(store.store()).await.map_err(log_error)? {
        logs.push(read_shared_logs(&store, node).await.map_err(log_error)?);
    }
    // A record may reference collected segments if a manifest covers it or its partition was
    // dropped.
    let needed = |partition: &PartitionId, number: u64| {
        live.is_some_and(|live| live.contains_key(partition))
            && newest.get(partition).is_none_or(|newest| *newest < number)
    };
    for log in logs {
        for (partition, _, segment) in log.named.iter().filter(|(id, number, _)| needed(id, *number)) {
            users.entry(*segment).or_default().insert(*partition);
        }
        verified.records += log.records;
        verified.others += log.objects;
        verified.damage.extend(log.damage);
    }
    verified.segments(&store, users, progress).await?;
    verified.others(&store, term, epoch).await?;
    Ok(verified)
}

/// What was read from a log.
#[derive(Default)]
struct FromLog {
    records: u64,
    /// Number of the log's objects in the store.
    objects: u64,
    /// Segments of large commits: partition, version number, segment id.
    named: Vec<(PartitionId, u64, SegmentId)>,
    damage: Vec<Damage>,
}

impl FromLog {
    fn note(&mut self, record: &Record<'_>) {
        self.records += 1;
        let header = &record.header;
        self.named.extend(record.segments().map(|id| (header.partition, header.version.number, id)));
    }

    /// Records damage together with `remedy`. Any other error is returned.
    fn note_damage(&mut self, error: LogError, remedy: &str) -> std::result::Result<(), LogError> {
        let LogError::Corrupt { file, offset, problem } = error else { return Err(error) };
        let problem = format!("{problem}; {remedy}");
        self.damage.push(Damage { file, offset: Some(offset), problem, partitions: Vec::new() });
        Ok(())
    }
}

async fn read_shared_logs(store: &PageStore, node: u128) -> std::result::Result<FromLog, LogError> {
    let mut found = FromLog::default();
    let mut note = |_, record: &Record<'_>| {
        found.note(record);
        Ok(())
    };
    let checked = CommitLog::verify_shared(store.store().clone(), node, &mut note).await?;
    found.objects = checked.objects;
    for error in checked.damage {
        let remedy = "restore it from a copy of the store: it may contain commits of any shared database";
        found.note_damage(error, remedy)?;
    }
    // Report objects by their names in the store, independent of the store's location.
    let below = format!("{}/", store.store());
    for damage in &mut found.damage {
        if let Some(object) = damage.file.strip_prefix(&below) {
            damage.file = format!("store/{object}");
        }
    }
    Ok(found)
}

fn read_log(directory: &Path) -> std::result::Result<FromLog, LogError> {
    let mut found = FromLog::default();
    let files = StdFiles::open(directory).map_err(|cause| LogError::Io {
        operation: "open",
        file: directory.display().to_string(),
        cause: Arc::new(cause),
    })?;
    let read = CommitLog::verify(&files, &mut |_, record| {
        found.note(record);
        Ok(())
    });
    let remedy = "restore the directory from a backup: it may contain commits of any local database";
    read.or_else(|error| found.note_damage(error, remedy))?;
    Ok(found)
}
