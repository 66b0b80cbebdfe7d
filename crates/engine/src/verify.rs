//! Reads everything that is kept and compares it with its checksums: what an operator does before a backup is trusted.
//!
//! | | of a node that runs ([`Session::verify`]) | of a directory without a node ([`verify_directory`]), or of a store alone ([`verify_store`]) |
//! | --- | --- | --- |
//! | manifests | all | all |
//! | segments | those that manifests name, or open partitions read | all, and that those which are named are there, by logs too |
//! | the log in the directory | - (it is being written; the next start reads it) | every record that counts, as a start would, but nothing is written |
//! | logs in the store | - (the same) | all objects, also what a start passes over, and that none is missing |
//! | lists of hot pages, catalogs for readers, terms, fates of manifests | - (they come and go) | all; that there is a catalog, and the term that somebody has written in |
//!
//! (A damaged list of hot pages is a hint that nobody takes; a damaged catalog is replaced by the next one, a damaged fate keeps its manifest.)
//!
//! Nothing is changed. Of each object the first damage is told; the others are read all the same.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use fulmar_pages::{PartitionId, Record, SegmentId};
use fulmar_store::{CommitLog, LogError, PageStore, StdFiles, Store, StoreError};
use futures::stream::{self, StreamExt};

use crate::partition::{log_error, store_error};
use crate::tenure::term_of;
use crate::{Engine, Error, Result, Session, sqlstate};

/// Manifests that are read at the same time.
const READS_AT_ONCE: usize = 16;

/// A place that is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file, from the data directory on.
    pub file: String,
    /// Where in it.
    pub offset: Option<u64>,
    /// What is wrong there, and what to do.
    pub problem: String,
    /// Whose data it has, as far as that is known: none for what is nobody's, or everybody's.
    pub partitions: Vec<PartitionId>,
}

/// Who names which segments.
type Users = BTreeMap<SegmentId, BTreeSet<PartitionId>>;

/// What manifests say.
#[derive(Default)]
struct Named {
    /// The segments that they name, with those who do.
    users: Users,
    /// Each partition's newest version.
    newest: HashMap<PartitionId, u64>,
    /// The last term in which one was stored.
    term: u32,
}

/// What was read.
#[derive(Clone, Debug, Default)]
pub struct Verified {
    /// Records of the log.
    pub records: u64,
    /// Manifests.
    pub manifests: u64,
    /// Segments.
    pub segments: u64,
    /// Pages in segments.
    pub pages: u64,
    /// Other objects of the store.
    pub others: u64,
    /// What was found.
    pub damage: Vec<Damage>,
}

impl Verified {
    /// Notes what is wrong with an object of the store. That it cannot be told is an error.
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

    /// Reads all manifests. Those of epochs that a partition has not come to are garbage, and count for nothing.
    async fn manifests(&mut self, store: &PageStore, epoch: impl Fn(PartitionId) -> u32) -> Result<Named> {
        let mut named = Named::default();
        let names = store.list_manifests(None).await.map_err(store_error)?;
        let read = |name| async move { (name, store.read_manifest(name).await) };
        let mut reads = stream::iter(names.into_iter().map(read)).buffered(READS_AT_ONCE);
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

    /// Reads what there is beside manifests, segments and logs. Something was stored in this term.
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
        for name in listed.fates {
            self.other(store.verify_fate(name).await, vec![name.manifest.partition])?;
        }
        self.catalogs(store).await?;
        let terms = store.list_terms().await.map_err(store_error)?;
        for (number, has_ended) in &terms {
            self.other(store.read_term(*number, *has_ended).await.map(drop), Vec::new())?;
        }
        store.check_terms(&terms, term).or_else(|missing| self.note(missing, Vec::new()))
    }

    /// A node puts its catalog into the store before it takes connections.
    async fn catalogs(&mut self, store: &PageStore) -> Result<()> {
        let numbers = store.list_catalogs().await.map_err(store_error)?;
        if numbers.is_empty() && self.manifests > 0 {
            let problem = "there is no catalog, so nobody can read the store beside its owner, nor tell its databases by their \
                           names; the owner puts one there when it starts";
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
    /// Reads all segments that there are, or that somebody names.
    async fn segments(
        &mut self,
        store: &PageStore,
        mut users: Users,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<()> {
        for segment in store.list_segments().await.map_err(store_error)? {
            users.entry(segment).or_default();
        }
        for (done, (segment, users_of_it)) in users.iter().enumerate() {
            progress(done as u64, users.len() as u64);
            self.segment(store, *segment, users_of_it).await?;
        }
        Ok(())
    }
}

impl Session {
    /// Verifies all that this node keeps of its partitions in the store. Can be cancelled like a statement.
    pub async fn verify(&mut self) -> Result<Verified> {
        let _running = self.start();
        let engine = self.engine().clone();
        let mut verified = Verified::default();
        let (users, _held) = engine.hold_named(&mut verified).await?;
        for (segment, users) in &users {
            self.check_cancelled()?;
            verified.segment(&engine.node().store, *segment, users).await?;
        }
        Ok(verified)
    }
}

impl Engine {
    /// Reads the manifests, and keeps what they name from the collector for as long as the answer lives.
    async fn hold_named(&self, verified: &mut Verified) -> Result<(Users, Arc<Vec<SegmentId>>)> {
        let _past = self.node().past.read().await;
        let mut users = verified.manifests(&self.node().store, |id| self.era(id).epoch).await?.users;
        for partition in self.open_partitions() {
            for segment in partition.frame_segments() {
                users.entry(segment).or_default().insert(partition.id);
            }
        }
        let held = Arc::new(users.keys().copied().collect());
        self.node().exported.lock().push(Arc::downgrade(&held));
        Ok((users, held))
    }
}

/// The partitions that a catalog knows, with their epochs.
pub type KnownPartitions = HashMap<PartitionId, u32>;

/// Verifies a data directory that no node uses, and its store. `live` are the partitions that the catalog knows, if it could be
/// read; `progress` is told how many segments of how many have been read.
pub async fn verify_directory(
    data: &Path,
    store: Arc<dyn Store>,
    live: Option<&KnownPartitions>,
    progress: impl FnMut(u64, u64),
) -> Result<Verified> {
    let log = data.join("log");
    let read = tokio::task::spawn_blocking(move || read_log(&log)).await;
    let panicked = |error| Error::new(sqlstate::INTERNAL, format!("reading the log panicked: {error}"));
    let log = read.map_err(panicked)?.map_err(log_error)?;
    verify_kept(store, vec![log], live, progress).await
}

/// Verifies a store without the data directory that it belongs to, which no node uses now. `live` are the partitions that the
/// catalog in the store knows, if it could be read.
pub async fn verify_store(
    store: Arc<dyn Store>,
    live: Option<&KnownPartitions>,
    progress: impl FnMut(u64, u64),
) -> Result<Verified> {
    verify_kept(store, Vec::new(), live, progress).await
}

/// Reads all of a store. `logs` are those that were read elsewhere.
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
    // A record that a manifest covers, or whose partition was dropped, may name what has been collected.
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

/// What a log holds.
#[derive(Default)]
struct FromLog {
    records: u64,
    /// Objects of the store that were read for it.
    objects: u64,
    /// Segments of large commits: partition, version's number, name.
    named: Vec<(PartitionId, u64, SegmentId)>,
    damage: Vec<Damage>,
}

impl FromLog {
    fn note(&mut self, record: &Record<'_>) {
        self.records += 1;
        let header = &record.header;
        self.named.extend(record.segments().map(|id| (header.partition, header.version.number, id)));
    }

    /// Notes what is wrong, and `remedy`. That it cannot be told is an error.
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
        let remedy =
            "restore it from a copy of the store: commits of any database that is shared may be in it";
        found.note_damage(error, remedy)?;
    }
    // Objects are told by their names, wherever the store is.
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
    let remedy = "restore the directory from a backup: commits of any database that is local may be in it";
    read.or_else(|error| found.note_damage(error, remedy))?;
    Ok(found)
}
