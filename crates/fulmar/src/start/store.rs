//! Binds a data directory to its store, one to one.
//!
//! The log in the data directory continues where the manifests in the store end, so neither is
//! usable with another counterpart. Two data directories that use one store would corrupt it.
//! Therefore each side records the other:
//!
//! ```text
//!   DATA/store.id                                        in the store
//!     id 8c1f...        created at the first start         owner     the same id; created only if
//!     store s3://...    once the store has the id                    absent
//!     stopped 51d0...   while the node is stopped          stopped   the same number
//! ```
//!
//! - A start with another store than before is refused, including a start without `--store`: it
//!   would find no data, and show all tenants as empty.
//! - A store can be moved by copying it while the node is stopped. An outdated copy has the right
//!   owner, but old manifests, from which the log does not continue. To detect that, each clean
//!   shutdown writes a new random number to both sides, and the next start removes it. A copy with
//!   the number is as the shutdown left it.

mod binding;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow, bail, ensure};
use binding::{Binding, DEFAULT_STORE_DIRECTORY, StoreLocation};
use bytes::Bytes;
use fulmar_store::{Backend, FailureKind, Limits, Reliable, Span, Store, StoreUrl};

/// The object in the store with the id.
const OWNER_OBJECT: &str = "owner";
/// The object that marks the store of a single node that became a cluster's.
const CLUSTER_OBJECT: &str = "cluster";
/// The object in the store with the number of the last clean shutdown.
const STOPPED_OBJECT: &str = "stopped";

/// Delay before the removal of files left incomplete by a crash. It lists all directories, which
/// would slow down the startup.
const SWEEP_DELAY: Duration = Duration::from_secs(10);

/// The store of a running node.
pub struct NodeStore {
    backend: Backend,
    data: PathBuf,
    binding: Binding,
}

impl NodeStore {
    pub fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.backend.clone())
    }

    /// Returns true for the default store in the data directory. The lock of the directory excludes
    /// other processes.
    pub fn is_default(&self) -> bool {
        self.binding.location == Some(StoreLocation::Default)
    }

    /// The id that the store and the data directory share.
    pub fn id(&self) -> u128 {
        self.binding.id
    }

    /// Records a clean shutdown, after which the store can be moved. Call it when the node has
    /// stopped and all its data is in the store.
    pub async fn record_clean_shutdown(self) -> anyhow::Result<()> {
        let number = rand::random();
        let store = Reliable::new(self.store(), Limits::default());
        let put = store.put(STOPPED_OBJECT, encode(number)).await;
        put.map_err(|failure| cannot_use(&store, failure))?;
        Binding { shutdown_id: Some(number), ..self.binding }.write(&self.data)
    }
}

/// The default store of a data directory.
pub(super) fn default_url(data: &Path) -> StoreUrl {
    StoreLocation::Default.url(data)
}

/// Opens the requested store, or the default store in the data directory, which this process must
/// have locked. Fails if the store belongs to another data directory, or the data directory to
/// another store.
pub async fn open(data: &Path, requested: Option<&StoreUrl>) -> anyhow::Result<NodeStore> {
    if let Some(url) = requested {
        let backend = url.open().with_context(|| format!("cannot open the store {url}"))?;
        let store = Reliable::new(Arc::new(backend), Limits::default());
        // A copy of the data directory from before the conversion matches the id.
        ensure!(
            read(&store, CLUSTER_OBJECT).await?.is_none(),
            "the store {url} belongs to a cluster now; start the node with --node, --rpc and --meta, and with \
             the data directory that was converted"
        );
    }
    open_for_conversion(data, requested).await
}

/// Like [`open`], but also opens a store that is marked as a cluster's.
pub(super) async fn open_for_conversion(
    data: &Path,
    requested: Option<&StoreUrl>,
) -> anyhow::Result<NodeStore> {
    let began = SystemTime::now();
    let place = requested.map_or(StoreLocation::Default, |url| StoreLocation::Url(url.clone()));
    let url = place.url(data);
    let backend = url.open().with_context(|| format!("cannot open the store {url}"))?;
    let store = Reliable::new(Arc::new(backend.clone()), Limits::default());
    let id = match Binding::read(data)? {
        Some(Binding { id, location: Some(known), shutdown_id: stopped }) => {
            if let Some(problem) = wrong_owner(read(&store, OWNER_OBJECT).await?.as_ref(), Some(id)) {
                // If the location has changed, report that. A store in memory is always another
                // one.
                let is_same = known == place && place != StoreLocation::Url(StoreUrl::Memory);
                ensure!(
                    is_same,
                    "{url} is not the store of this data directory; {}",
                    known.start_instruction()
                );
                bail!("the object `{OWNER_OBJECT}` of the store {url} {problem}");
            }
            ensure!(
                known == place
                    || (stopped.is_some() && read(&store, STOPPED_OBJECT).await? == stopped.map(encode)),
                "{url} is not a copy of the store as of this node's last shutdown; {}, stop the \
                 node, and copy all of {} again",
                known.start_instruction(),
                known.url(data)
            );
            id
        }
        unfinished => {
            ensure!(
                place == StoreLocation::Default
                    || !data.join(DEFAULT_STORE_DIRECTORY).join("manifests").exists(),
                "the store of this data directory is {0}/{DEFAULT_STORE_DIRECTORY}; to move it, start once \
                 without --store, stop the node, copy all of {0}/{DEFAULT_STORE_DIRECTORY} to {url}, and \
                 start with --store {url}",
                data.display()
            );
            let id = unfinished.map_or_else(rand::random, |binding| binding.id);
            Binding { id, location: None, shutdown_id: None }.write(data)?;
            claim(&store, id).await?;
            id
        }
    };
    let binding = Binding { id, location: Some(place), shutdown_id: None };
    // In this order: once `store.id` has no stop number, all earlier copies of the store are
    // rejected, even if the node crashes here.
    binding.write(data)?;
    store.delete(STOPPED_OBJECT).await.map_err(|failure| cannot_use(&store, failure))?;
    sweep(backend.clone(), began);
    Ok(NodeStore { backend, data: data.to_owned(), binding })
}

/// The id of the store that a data directory is bound to, if it is.
pub(super) fn bound_id(data: &Path) -> anyhow::Result<Option<u128>> {
    Ok(Binding::read(data)?.map(|binding| binding.id))
}

/// The store of a data directory, opened for reading.
pub struct StoreToRead {
    pub store: Arc<dyn Store>,
    /// Its location, for reports.
    pub location: String,
    /// The expected binding. `None` until the store is known to have the id.
    pub binding: Option<ExpectedBinding>,
}

/// Opens the store of a data directory for reading.
pub fn open_for_reading(data: &Path) -> anyhow::Result<StoreToRead> {
    let binding = Binding::read(data)?;
    let known = binding.as_ref().and_then(|binding| binding.location.clone());
    let expected = binding.filter(|_| known.is_some()).map(|Binding { id, shutdown_id: stopped, .. }| {
        ExpectedBinding { owner: Some(id), shutdown_id: stopped }
    });
    let url = known.unwrap_or(StoreLocation::Default).url(data);
    let location = match &url {
        StoreUrl::Directory(directory) => {
            ensure!(directory.is_dir(), "store directory {} does not exist", directory.display());
            directory.display().to_string()
        }
        url => url.to_string(),
    };
    let backend = url.open().with_context(|| format!("cannot open the store {url}"))?;
    Ok(StoreToRead { store: Arc::new(backend), location, binding: expected })
}

/// The expected contents of the store's binding objects, as far as known.
pub struct ExpectedBinding {
    /// The id that `owner` must contain.
    pub owner: Option<u128>,
    /// The number that `stopped` must contain.
    pub shutdown_id: Option<u128>,
}

impl ExpectedBinding {
    /// Returns the binding objects with unexpected contents, each with the problem and the remedy.
    pub async fn verify(&self, store: Arc<dyn Store>) -> anyhow::Result<Vec<(&'static str, String)>> {
        let store = Reliable::new(store, Limits::default());
        let (owner, stopped) = (read(&store, OWNER_OBJECT).await?, read(&store, STOPPED_OBJECT).await?);
        let owner = wrong_owner(owner.as_ref(), self.owner).map(|problem| (OWNER_OBJECT, problem));
        let stopped = wrong_stop(stopped.as_ref(), self.shutdown_id).map(|problem| (STOPPED_OBJECT, problem));
        Ok(owner
            .into_iter()
            .chain(stopped)
            .map(|(object, problem)| (object, format!("it {problem}")))
            .collect())
    }
}

/// Returns the problem with the object `owner` and its remedy, if it is not as expected. `id` is
/// the expected id, if known.
fn wrong_owner(found: Option<&Bytes>, id: Option<u128>) -> Option<String> {
    let problem = match (found.map(decode), id) {
        (None, _) => "is missing".to_owned(),
        (Some(None), _) => "is damaged".to_owned(),
        (Some(Some(other)), Some(id)) if other != id => {
            format!(
                "is damaged or belongs to another data directory: it contains {other:032x}, but \
                 store.id of this data directory contains {id:032x}"
            )
        }
        _ => return None,
    };
    let id =
        id.map_or_else(|| "the id in store.id of the data directory".to_owned(), |id| format!("{id:032x}"));
    Some(format!(
        "{problem}; restore it from a copy of the store, or, if no other data directory uses this \
         store, recreate it with a single line: {id}"
    ))
}

/// Returns the problem with the object `stopped`, which exists while the node is stopped.
fn wrong_stop(found: Option<&Bytes>, number: Option<u128>) -> Option<String> {
    let problem = match (found.map(decode), number) {
        (None, Some(_)) => "is missing",
        (Some(None), _) => "is damaged",
        (Some(Some(other)), Some(number)) if other != number => "was not written by the last shutdown",
        _ => return None,
    };
    Some(format!("{problem}; no data is lost, but start and stop the node once before you move the store"))
}

/// Encodes a number as the contents of a binding object.
fn encode(number: u128) -> Bytes {
    format!("{number:032x}\n").into()
}

/// Decodes the contents of a binding object. Accepts only the exact output of [`encode`].
fn decode(bytes: &Bytes) -> Option<u128> {
    let digits = std::str::from_utf8(bytes).ok()?.strip_suffix('\n')?;
    u128::from_str_radix(digits, 16).ok().filter(|number| encode(*number) == bytes)
}

/// Claims a store that has no owner. Fails if it has one, or if it does not support conditional
/// puts, so that a second data directory could claim it as well.
pub(super) async fn claim(store: &Reliable, id: u128) -> anyhow::Result<()> {
    let belongs_to_another = || {
        anyhow!(
            "the store {store} belongs to another data directory, or store.id of this data \
             directory is damaged or missing; use another prefix or directory, start with the data \
             directory of this store, or restore store.id"
        )
    };
    // Read first: a store without conditional puts would overwrite the id of its owner.
    match read(store, OWNER_OBJECT).await? {
        Some(owner) => ensure!(owner == encode(id), belongs_to_another()),
        None => put_if_absent(store, OWNER_OBJECT, encode(id))
            .await?
            .then_some(())
            .ok_or_else(belongs_to_another)?,
    }
    if put_if_absent(store, OWNER_OBJECT, Bytes::from_static(b"probe\n")).await? {
        store.delete(OWNER_OBJECT).await.map_err(|failure| cannot_use(store, failure))?;
        bail!(
            "cannot use the store {store}: it overwrites existing objects and does not support \
             conditional puts (If-None-Match: *); use an object store that supports them"
        );
    }
    Ok(())
}

/// Marks the store of a single node as a cluster's: copies of the data directory cannot be started
/// as single nodes any more.
pub(super) async fn mark_as_clusters(store: &Reliable, id: u128) -> anyhow::Result<()> {
    put_if_absent(store, CLUSTER_OBJECT, encode(id)).await.map(drop)
}

/// Creates an object. Returns false if it exists.
async fn put_if_absent(store: &Reliable, object: &str, contents: Bytes) -> anyhow::Result<bool> {
    match store.put(object, contents).await {
        Ok(()) => Ok(true),
        Err(failure) if failure.kind() == FailureKind::Exists => Ok(false),
        Err(failure) => Err(cannot_use(store, failure)),
    }
}

/// The id in the store's object `owner`. `None` if the store has no owner.
pub(super) async fn owner(store: &Reliable) -> anyhow::Result<Option<u128>> {
    let Some(found) = read(store, OWNER_OBJECT).await? else { return Ok(None) };
    let id = decode(&found).with_context(|| {
        format!(
            "the object `{OWNER_OBJECT}` of the store {store} is damaged; restore it from a copy of the store"
        )
    });
    id.map(Some)
}

/// Reads a whole object. Returns `None` if it does not exist.
async fn read(store: &Reliable, object: &str) -> anyhow::Result<Option<Bytes>> {
    match store.get(object, Span::Whole).await {
        Ok(found) => Ok(Some(found.bytes)),
        Err(failure) if failure.kind() == FailureKind::Missing => Ok(None),
        Err(failure) => Err(cannot_use(store, failure)),
    }
}

fn cannot_use(store: &Reliable, failure: fulmar_store::Failure) -> anyhow::Error {
    anyhow!("cannot use the store {store}: {failure}; {}", failure.kind().remedy())
}

/// Removes files that a crash left incomplete before this process `began`, in the background.
pub(super) fn sweep(backend: Backend, began: SystemTime) {
    // File system timestamps are coarse. The margin excludes files that are being written now.
    let before = began - Duration::from_secs(1);
    let sweep = move || match backend.sweep(before) {
        Ok(0) => {}
        Ok(files) => tracing::info!(files, "removed files left incomplete by a crash from the store"),
        Err(error) => {
            tracing::warn!(%error, "cannot remove files left incomplete by a crash from the store")
        }
    };
    tokio::spawn(async move {
        tokio::time::sleep(SWEEP_DELAY).await;
        tokio::task::spawn_blocking(sweep);
    });
}

#[cfg(test)]
mod tests {
    use fulmar_store::{FaultyStore, StoreFault, StoreOperation};

    use super::binding::BINDING_FILE;
    use super::*;

    fn url(directory: &Path) -> StoreUrl {
        StoreUrl::Directory(directory.to_owned())
    }

    async fn open_error(data: &Path, requested: Option<&StoreUrl>) -> String {
        open(data, requested).await.err().unwrap().to_string()
    }

    #[tokio::test]
    async fn data_directory_and_store_reject_other_counterparts() {
        let [data, other_data, store, other_store] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let (store, other_store) = (url(store.path()), url(other_store.path()));
        for _ in 0..2 {
            open(data.path(), Some(&store)).await.unwrap();
        }
        let error = open_error(data.path(), None).await;
        assert!(error.contains(&format!("start with --store {store}")), "{error}");
        let error = open_error(data.path(), Some(&other_store)).await;
        assert!(error.contains(&format!("{other_store} is not the store of this data directory")), "{error}");
        let error = open_error(other_data.path(), Some(&store)).await;
        assert!(error.contains("belongs to another data directory"), "{error}");
        // The failed start has not bound the other data directory to a store.
        open(other_data.path(), None).await.unwrap();
        let error = open_error(other_data.path(), Some(&other_store)).await;
        assert!(error.contains("start without --store"), "{error}");
        assert_eq!(open_for_reading(data.path()).unwrap().store.to_string(), store.to_string());
    }

    /// The error for the right store with a damaged `owner` does not ask for that same store.
    #[tokio::test]
    async fn missing_or_damaged_owner_is_reported_and_can_be_recreated() {
        for directory in [None, Some(tempfile::tempdir().unwrap())] {
            let data = tempfile::tempdir().unwrap();
            let requested = directory.as_ref().map(|directory| url(directory.path()));
            let store = match &directory {
                Some(directory) => directory.path().to_owned(),
                None => data.path().join("store"),
            };
            open(data.path(), requested.as_ref()).await.unwrap().record_clean_shutdown().await.unwrap();
            let id = Binding::read(data.path()).unwrap().unwrap().id;
            let opened = || open_for_reading(data.path()).unwrap();
            let problems = async || opened().binding.unwrap().verify(opened().store).await.unwrap();
            assert_eq!(problems().await, []);
            let remedy = format!("recreate it with a single line: {id:032x}");
            let other = format!("{:032x}\n", id ^ 1);
            let upper = "ABCDEF0123456789ABCDEF0123456789\n";
            let cases = [
                (None, "is missing"),
                (Some("1f\n"), "is damaged;"),
                (Some(upper), "is damaged;"),
                (Some(other.as_str()), "or belongs to another data directory"),
            ];
            for (content, problem) in cases {
                match content {
                    None => std::fs::remove_file(store.join(OWNER_OBJECT)).unwrap(),
                    Some(text) => std::fs::write(store.join(OWNER_OBJECT), text).unwrap(),
                }
                let error = open_error(data.path(), requested.as_ref()).await;
                assert!(error.starts_with("the object `owner` of the store"), "{error}");
                assert!(error.contains(problem) && error.contains(&remedy), "{error}");
                let found = problems().await;
                assert_eq!((found.len(), found[0].0), (1, OWNER_OBJECT));
                assert!(found[0].1.contains(problem) && found[0].1.contains(&remedy), "{found:?}");
            }
            // Apply the remedy.
            std::fs::write(store.join(OWNER_OBJECT), format!("{id:032x}\n")).unwrap();
            assert_eq!(problems().await, []);
            for text in [None, Some("1f\n"), Some(other.as_str())] {
                match text {
                    None => std::fs::remove_file(store.join(STOPPED_OBJECT)).unwrap(),
                    Some(text) => std::fs::write(store.join(STOPPED_OBJECT), text).unwrap(),
                }
                let found = problems().await;
                assert!(found.len() == 1 && found[0].1.contains("no data is lost"), "{found:?}");
                assert_eq!(found[0].0, STOPPED_OBJECT);
            }
            open(data.path(), requested.as_ref()).await.unwrap();
            // A running node has no `stopped` object, which is not a problem.
            assert_eq!(problems().await, []);
        }
    }

    #[tokio::test]
    async fn store_can_be_moved_only_in_the_state_of_the_last_shutdown() {
        let [data, target] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let copy = || {
            for object in [OWNER_OBJECT, STOPPED_OBJECT] {
                std::fs::copy(data.path().join("store").join(object), target.path().join(object)).unwrap();
            }
        };
        let moved = url(target.path());
        let assert_rejected = async || {
            let error = open_error(data.path(), Some(&moved)).await;
            assert!(error.contains("as of this node's last shutdown; start without --store"), "{error}");
        };
        open(data.path(), None).await.unwrap().record_clean_shutdown().await.unwrap();
        copy();
        // The copy is outdated after the next start, and after the next shutdown.
        let running = open(data.path(), None).await.unwrap();
        assert_rejected().await;
        running.record_clean_shutdown().await.unwrap();
        assert_rejected().await;
        copy();
        open(data.path(), Some(&moved)).await.unwrap().record_clean_shutdown().await.unwrap();
        // The original location is outdated now.
        let error = open_error(data.path(), None).await;
        assert!(error.contains(&format!("last shutdown; start with --store {moved}")), "{error}");
        let binding = Binding::read(data.path()).unwrap().unwrap();
        assert_eq!(binding.location, Some(StoreLocation::Url(moved)));
        assert!(binding.shutdown_id.is_some());
    }

    #[tokio::test]
    async fn store_without_conditional_puts_is_rejected_and_not_modified() {
        let backend = Backend::memory();
        let overwriting = FaultyStore::new(Arc::new(backend.clone()));
        overwriting.always(StoreOperation::Put, Some(StoreFault::Overwrite));
        let store = Reliable::new(Arc::new(overwriting), Limits::default());
        let error = claim(&store, 1).await.unwrap_err().to_string();
        assert!(error.contains("does not support conditional puts"), "{error}");
        assert_eq!(read(&store, OWNER_OBJECT).await.unwrap(), None);
        backend.put(OWNER_OBJECT, encode(2)).await.unwrap();
        let error = claim(&store, 1).await.unwrap_err().to_string();
        assert!(error.contains("belongs to another data directory"), "{error}");
        assert_eq!(read(&store, OWNER_OBJECT).await.unwrap(), Some(encode(2)));
        // Claiming a conforming store again succeeds, as after a crash between the two writes.
        let store = Reliable::new(Arc::new(backend), Limits::default());
        claim(&store, 2).await.unwrap();
        assert_eq!(read(&store, OWNER_OBJECT).await.unwrap(), Some(encode(2)));
    }

    #[tokio::test(start_paused = true)]
    async fn files_left_incomplete_by_a_crash_are_removed() {
        let data = tempfile::tempdir().unwrap();
        let segments = data.path().join("store/segments");
        std::fs::create_dir_all(&segments).unwrap();
        let staged = segments.join("0123456789abcdef0123456789abcdef#1");
        let file = std::fs::File::create(&staged).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(60)).unwrap();
        open(data.path(), None).await.unwrap();
        // The sweep runs in the background. If it does not remove the file, this loop never ends.
        while staged.exists() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn store_in_memory_cannot_be_reopened() {
        let data = tempfile::tempdir().unwrap();
        open(data.path(), Some(&StoreUrl::Memory)).await.unwrap();
        let error = open_error(data.path(), Some(&StoreUrl::Memory)).await;
        assert!(error.contains("lost when its process ends"), "{error}");
    }

    /// A data directory from before stores had URLs, or after a crash between the two writes.
    #[tokio::test]
    async fn incomplete_binding_is_completed() {
        let data = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(data.path().join("store/manifests")).unwrap();
        let other_store = tempfile::tempdir().unwrap();
        let error = open_error(data.path(), Some(&url(other_store.path()))).await;
        assert!(error.contains("start once without --store"), "{error}");
        Binding { id: 7, location: None, shutdown_id: None }.write(data.path()).unwrap();
        open(data.path(), None).await.unwrap();
        let expected = Binding { id: 7, location: Some(StoreLocation::Default), shutdown_id: None };
        assert_eq!(Binding::read(data.path()).unwrap(), Some(expected));
        std::fs::write(data.path().join(BINDING_FILE), "id x\n").unwrap();
        assert!(open_error(data.path(), None).await.contains("restore it from a backup"));
    }
}
