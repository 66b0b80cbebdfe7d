//! Reads everything that is kept and compares it with its checksums: what an operator does before a backup is trusted.
//!
//! | | of a node that runs ([`Session::verify`]) | of a directory without a node ([`verify_directory`]) |
//! | --- | --- | --- |
//! | manifests | all | all |
//! | segments | those that manifests name, or open partitions read | all, and that those which are named are there |
//! | logs | - (they are being written; the next start reads them) | every record that counts, as a start would, but nothing is written |
//! | lists of hot pages, catalogs for readers, terms, fates of manifests | - (they come and go) | all |
//!
//! (A damaged list of hot pages is a hint that nobody takes; a damaged catalog is replaced by the next one, a damaged fate keeps its manifest.)
//!
//! Nothing is changed. Of each object the first damage is told; the others are read all the same.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use fulmar_pages::{PartitionId, Record, SegmentId};
use fulmar_store::{CommitLog, LogError, PageStore, StdFiles, Store, StoreError};

use crate::partition::{log_error, store_error};
use crate::{Engine, Error, Result, Session, sqlstate};

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
        let (object, offset) = match &error {
            StoreError::Damaged { object, cause, .. } => (object.clone(), Some(cause.at as u64)),
            StoreError::Missing { object, .. } | StoreError::Misnamed { object, .. } => {
                (object.clone(), None)
            }
            _ => return Err(store_error(error)),
        };
        let file = format!("store/{object}");
        self.damage.push(Damage { file, offset, problem: error.to_string(), partitions });
        Ok(())
    }

    /// Reads all manifests. Answers the segments that they name, with those who do, and each partition's newest version.
    /// Manifests of epochs that a partition has not come to are garbage, and count for nothing.
    async fn manifests(
        &mut self,
        store: &PageStore,
        epoch: impl Fn(PartitionId) -> u32,
    ) -> Result<(Users, HashMap<PartitionId, u64>)> {
        let (mut users, mut newest) = (Users::new(), HashMap::new());
        for name in store.list_manifests(None).await.map_err(store_error)? {
            self.manifests += 1;
            match store.read_manifest(name).await {
                Ok(manifest) => {
                    for segment in &manifest.segments {
                        users.entry(segment.id).or_default().insert(name.partition);
                    }
                    if name.epoch <= epoch(name.partition) {
                        newest.insert(name.partition, name.number);
                    }
                }
                Err(error) => self.note(error, vec![name.partition])?,
            }
        }
        Ok((users, newest))
    }

    /// Reads what there is beside manifests and segments.
    async fn others(&mut self, store: &PageStore) -> Result<()> {
        let listed = store.list_partitions(None).await.map_err(store_error)?;
        for name in listed.hot_pages {
            self.other(store.read_hot_pages(name).await.map(drop), vec![name.partition])?;
        }
        for name in listed.fates {
            self.other(store.verify_fate(name).await, vec![name.manifest.partition])?;
        }
        for number in store.list_catalogs().await.map_err(store_error)? {
            self.other(store.read_catalog(number).await.map(drop), Vec::new())?;
        }
        for (number, has_ended) in store.list_terms().await.map_err(store_error)? {
            self.other(store.read_term(number, has_ended).await.map(drop), Vec::new())?;
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
        let (mut users, _) = verified.manifests(&self.node().store, |id| self.era(id).epoch).await?;
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

/// Verifies a data directory that no node uses, and its store, where its log has the name `node_id`. `live` are the partitions
/// that the catalog knows, if it could be read, with their epochs; `progress` is told how many segments of how many have been
/// read.
pub async fn verify_directory(
    data: &Path,
    store: Arc<dyn Store>,
    node_id: u128,
    live: Option<&HashMap<PartitionId, u32>>,
    progress: impl FnMut(u64, u64),
) -> Result<Verified> {
    let mut verified = Verified::default();
    let store = PageStore::open(store);
    let epoch = |id: PartitionId| live.map_or(u32::MAX, |live| live.get(&id).copied().unwrap_or(u32::MAX));
    let (mut users, newest) = verified.manifests(&store, epoch).await?;
    let log = data.join("log");
    let from_log = tokio::task::spawn_blocking(move || read_log(&log)).await;
    let from_log = from_log
        .map_err(|error| Error::new(sqlstate::INTERNAL, format!("reading the log panicked: {error}")))?;
    let shared = read_shared_log(&store, node_id).await;
    for log in [&from_log, &shared] {
        verified.records += log.records;
        match log.outcome.clone() {
            Ok(()) => {}
            Err(LogError::Corrupt { file, offset, problem }) => {
                // Objects are told by their names, wherever the store is.
                let object = file.strip_prefix(&format!("{}/", store.store()));
                let file = object.map_or_else(|| file.clone(), |object| format!("store/{object}"));
                verified.damage.push(Damage { file, offset: Some(offset), problem, partitions: Vec::new() });
            }
            Err(error) => return Err(log_error(error)),
        }
    }
    // A record that a manifest covers, or whose partition was dropped, may name what has been collected.
    let needed = |partition: &PartitionId, number: u64| {
        live.is_some_and(|live| live.contains_key(partition))
            && newest.get(partition).is_none_or(|newest| *newest < number)
    };
    let named = from_log.named.iter().chain(&shared.named);
    for (partition, _, segment) in named.filter(|(id, number, _)| needed(id, *number)) {
        users.entry(*segment).or_default().insert(*partition);
    }
    verified.segments(&store, users, progress).await?;
    verified.others(&store).await?;
    Ok(verified)
}

/// Verifies a store without the data directory that it belongs to, which no node uses now.
pub async fn verify_store(store: Arc<dyn Store>, progress: impl FnMut(u64, u64)) -> Result<Verified> {
    let mut verified = Verified::default();
    let store = PageStore::open(store);
    let (users, _) = verified.manifests(&store, |_| u32::MAX).await?;
    verified.segments(&store, users, progress).await?;
    verified.others(&store).await?;
    Ok(verified)
}

/// What a log holds.
struct FromLog {
    records: u64,
    /// Segments of large commits: partition, version's number, name.
    named: Vec<(PartitionId, u64, SegmentId)>,
    outcome: std::result::Result<(), LogError>,
}

impl FromLog {
    fn nothing() -> Self {
        FromLog { records: 0, named: Vec::new(), outcome: Ok(()) }
    }

    fn note(&mut self, record: &Record<'_>) {
        self.records += 1;
        let header = &record.header;
        self.named.extend(record.segments().map(|id| (header.partition, header.version.number, id)));
    }
}

async fn read_shared_log(store: &PageStore, node_id: u128) -> FromLog {
    let mut found = FromLog::nothing();
    let mut note = |_, record: &Record<'_>| {
        found.note(record);
        Ok(())
    };
    let outcome = CommitLog::verify_shared(store.store().clone(), node_id, &mut note).await;
    FromLog { outcome, ..found }
}

fn read_log(directory: &Path) -> FromLog {
    let mut found = FromLog::nothing();
    let outcome = match StdFiles::open(directory) {
        Ok(files) => CommitLog::verify(&files, &mut |_, record| {
            found.note(record);
            Ok(())
        }),
        Err(cause) => Err(LogError::Io {
            operation: "open",
            file: directory.display().to_string(),
            cause: Arc::new(cause),
        }),
    };
    FromLog { outcome, ..found }
}
