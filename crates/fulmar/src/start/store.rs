//! Which store a data directory has, and that it is nobody else's.
//!
//! The two belong together: the log in the one goes on where the manifests in the other end, and a store that is used by
//! two directories would soon be nobody's. So each knows the other:
//!
//! ```text
//!   DATA/store.id     id 8c1f...       made at the first start        owner    the same id, in the store:
//!                     store s3://...   when the store has it too               created only if absent
//!                     stopped 51d0...  while the node is stopped      stopped  the same number
//! ```
//!
//! A start with another store, or without `--store` where there was one, is refused: it would find no tenant's data, and
//! say that they are empty.
//!
//! A store may move: it is copied while the node is stopped. A copy that is older has the right owner and old manifests, which the
//! log does not go on from. So each clean stop leaves a new random number in both, and the next start removes it: who has the
//! number is as it was left.

mod binding;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow, bail, ensure};
use binding::{Binding, OWN_DIRECTORY, Place};
use bytes::Bytes;
use fulmar_store::{Backend, FailureKind, Limits, Reliable, Span, Store, StoreUrl};

/// In the store.
const OWNER: &str = "owner";
const STOPPED: &str = "stopped";

/// When what a crash has left is removed: all directories are looked at, and the start has enough to do.
const SWEPT_AFTER: Duration = Duration::from_secs(10);

/// The store of a node that runs.
pub struct OwnStore {
    backend: Backend,
    data: PathBuf,
    binding: Binding,
}

impl OwnStore {
    pub fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.backend.clone())
    }

    /// Whether it lies below the data directory, which is locked: then no other process can have it.
    pub fn is_below(&self) -> bool {
        self.binding.place == Some(Place::Own)
    }

    /// By which it and the data directory know each other.
    pub fn id(&self) -> u128 {
        self.binding.id
    }

    /// The node has stopped, with all that it has in the store: from now on the store may move.
    pub async fn stopped(self) -> anyhow::Result<()> {
        let number = rand::random();
        let store = Reliable::new(self.store(), Limits::default());
        store.put(STOPPED, line(number)).await.map_err(|failure| cannot_use(&store, failure))?;
        Binding { stopped: Some(number), ..self.binding }.write(&self.data)
    }
}

/// Opens the store that was asked for, or the one below the data directory, which must be this process's. Refused if it
/// belongs to another data directory, or this one to another store.
pub async fn open(data: &Path, asked: Option<&StoreUrl>) -> anyhow::Result<OwnStore> {
    let began = SystemTime::now();
    let place = asked.map_or(Place::Own, |url| Place::Url(url.clone()));
    let url = place.url(data);
    let backend = url.open().with_context(|| format!("cannot open the store {url}"))?;
    let store = Reliable::new(Arc::new(backend.clone()), Limits::default());
    let id = match Binding::read(data)? {
        Some(Binding { id, place: Some(known), stopped }) => {
            if let Some(problem) = wrong_owner(holds(&store, OWNER).await?.as_ref(), Some(id)) {
                // Where it is another one than before, that is what is the matter. One in memory always is.
                let is_same = known == place && place != Place::Url(StoreUrl::Memory);
                ensure!(is_same, "{url} is not the store of this data directory; {}", known.flag());
                bail!("the object `{OWNER}` of the store {url} {problem}");
            }
            ensure!(
                known == place || (stopped.is_some() && holds(&store, STOPPED).await? == stopped.map(line)),
                "{url} is no copy of the store as it was at this node's last stop; {}, stop the node, copy all of \
                 {} once more",
                known.flag(),
                known.url(data)
            );
            id
        }
        unfinished => {
            ensure!(
                place == Place::Own || !data.join(OWN_DIRECTORY).join("manifests").exists(),
                "the data of this directory lie in {0}/{OWN_DIRECTORY}; to move them, start once without --store, stop, \
                 copy all of {0}/{OWN_DIRECTORY} to {url}, and start with --store {url}",
                data.display()
            );
            let id = unfinished.map_or_else(rand::random, |binding| binding.id);
            Binding { id, place: None, stopped: None }.write(data)?;
            claim(&store, id).await?;
            id
        }
    };
    let binding = Binding { id, place: Some(place), stopped: None };
    // In this order: from here on all copies are old ones, whatever becomes of the node.
    binding.write(data)?;
    store.delete(STOPPED).await.map_err(|failure| cannot_use(&store, failure))?;
    sweep(backend.clone(), began);
    Ok(OwnStore { backend, data: data.to_owned(), binding })
}

/// The store of a data directory, to be read.
pub struct StoreToRead {
    pub store: Arc<dyn Store>,
    /// Where it is, for people.
    pub place: String,
    /// By what they know each other; none while it is not known whether the store knows it too.
    pub marks: Option<Marks>,
}

/// Opens the store of a data directory to read it.
pub fn open_to_read(data: &Path) -> anyhow::Result<StoreToRead> {
    let binding = Binding::read(data)?;
    let known = binding.as_ref().and_then(|binding| binding.place.clone());
    let marks = binding
        .filter(|_| known.is_some())
        .map(|Binding { id, stopped, .. }| Marks { owner: Some(id), stopped });
    let url = known.unwrap_or(Place::Own).url(data);
    let place = match &url {
        StoreUrl::Directory(directory) => {
            ensure!(directory.is_dir(), "there is no store at {}", directory.display());
            directory.display().to_string()
        }
        url => url.to_string(),
    };
    let backend = url.open().with_context(|| format!("cannot open the store {url}"))?;
    Ok(StoreToRead { store: Arc::new(backend), place, marks })
}

/// By what a store and its data directory know each other, as far as it is known.
pub struct Marks {
    /// The id that `owner` must hold.
    pub owner: Option<u128>,
    /// The number that `stopped` must hold.
    pub stopped: Option<u128>,
}

impl Marks {
    /// The objects of a store that are not what they must be, each with what is wrong and how it is put right.
    pub async fn verify(&self, store: Arc<dyn Store>) -> anyhow::Result<Vec<(&'static str, String)>> {
        let store = Reliable::new(store, Limits::default());
        let (owner, stopped) = (holds(&store, OWNER).await?, holds(&store, STOPPED).await?);
        let owner = wrong_owner(owner.as_ref(), self.owner).map(|problem| (OWNER, problem));
        let stopped = wrong_stop(stopped.as_ref(), self.stopped).map(|problem| (STOPPED, problem));
        Ok(owner
            .into_iter()
            .chain(stopped)
            .map(|(object, problem)| (object, format!("it {problem}")))
            .collect())
    }
}

/// What is the matter with what `owner` holds, and how it is put right. `id` is what it must hold, if that is known.
fn wrong_owner(found: Option<&Bytes>, id: Option<u128>) -> Option<String> {
    let matter = match (found.map(number_of), id) {
        (None, _) => "is missing".to_owned(),
        (Some(None), _) => "is damaged".to_owned(),
        (Some(Some(other)), Some(id)) if other != id => {
            format!(
                "is damaged, or of another data directory: it holds {other:032x}, and store.id of this data directory {id:032x}"
            )
        }
        _ => return None,
    };
    let id = id.map_or_else(
        || "the id that stands in store.id of the data directory".to_owned(),
        |id| format!("{id:032x}"),
    );
    Some(format!(
        "{matter}; restore it from a copy of the store, or, if no other data directory uses this store, make it anew: its \
         only line is {id}"
    ))
}

/// The same of `stopped`, which is there while the node is stopped.
fn wrong_stop(found: Option<&Bytes>, number: Option<u128>) -> Option<String> {
    let matter = match (found.map(number_of), number) {
        (None, Some(_)) => "is missing",
        (Some(None), _) => "is damaged",
        (Some(Some(other)), Some(number)) if other != number => "is not what the last stop has left",
        _ => return None,
    };
    Some(format!("{matter}; nothing is lost, but to move the store start and stop the node once more before"))
}

/// As it stands in the store.
fn line(number: u128) -> Bytes {
    format!("{number:032x}\n").into()
}

/// What such a line says, if it is one.
fn number_of(bytes: &Bytes) -> Option<u128> {
    let digits = std::str::from_utf8(bytes).ok()?.strip_suffix('\n')?;
    u128::from_str_radix(digits, 16).ok().filter(|number| line(*number) == bytes)
}

/// Makes the store ours, if it is nobody's; refuses one that would let others do so too.
async fn claim(store: &Reliable, id: u128) -> anyhow::Result<()> {
    let anothers = || {
        anyhow!(
            "the store {store} belongs to another data directory, or store.id of this one is damaged or missing; choose \
             another prefix or directory, start with the data directory that it belongs to, or restore store.id"
        )
    };
    // Asked first, so that nothing of another's is touched where puts are not conditional.
    match holds(store, OWNER).await? {
        Some(owner) => ensure!(owner == line(id), anothers()),
        None => put_if_absent(store, line(id)).await?.then_some(()).ok_or_else(anothers)?,
    }
    if put_if_absent(store, Bytes::from_static(b"nobody\n")).await? {
        store.delete(OWNER).await.map_err(|failure| cannot_use(store, failure))?;
        bail!(
            "cannot use the store {store}: it overwrites what is there, and does not know conditional puts \
             (If-None-Match: *); choose a server that does"
        );
    }
    Ok(())
}

/// Whether there was no owner, and it is this one now.
async fn put_if_absent(store: &Reliable, owner: Bytes) -> anyhow::Result<bool> {
    match store.put(OWNER, owner).await {
        Ok(()) => Ok(true),
        Err(failure) if failure.kind() == FailureKind::Exists => Ok(false),
        Err(failure) => Err(cannot_use(store, failure)),
    }
}

/// A whole object, if it is there.
async fn holds(store: &Reliable, object: &str) -> anyhow::Result<Option<Bytes>> {
    match store.get(object, Span::Whole).await {
        Ok(found) => Ok(Some(found.bytes)),
        Err(failure) if failure.kind() == FailureKind::Missing => Ok(None),
        Err(failure) => Err(cannot_use(store, failure)),
    }
}

fn cannot_use(store: &Reliable, failure: fulmar_store::Failure) -> anyhow::Error {
    anyhow!("cannot use the store {store}: {failure}; {}", failure.kind().remedy())
}

/// Removes in the background what a crash has left half written before this process `began`.
fn sweep(backend: Backend, began: SystemTime) {
    // The clocks of file systems are coarse: what is being written now must not look older than it is.
    let before = began - Duration::from_secs(1);
    let sweep = move || match backend.sweep(before) {
        Ok(0) => {}
        Ok(files) => tracing::info!(files, "removed what a crash had left half written in the store"),
        Err(error) => {
            tracing::warn!(%error, "the store cannot be swept of what a crash has left half written")
        }
    };
    tokio::spawn(async move {
        tokio::time::sleep(SWEPT_AFTER).await;
        tokio::task::spawn_blocking(sweep);
    });
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use fulmar_store::{Failure, Listing, Piece, Upload};

    use super::binding::BINDING_FILE;
    use super::*;

    fn url(directory: &Path) -> StoreUrl {
        StoreUrl::Directory(directory.to_owned())
    }

    async fn refusal(data: &Path, asked: Option<&StoreUrl>) -> String {
        open(data, asked).await.err().unwrap().to_string()
    }

    #[tokio::test]
    async fn a_data_directory_and_its_store_know_each_other() {
        let [data, other_data, there, elsewhere] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let (there, elsewhere) = (url(there.path()), url(elsewhere.path()));
        for _ in 0..2 {
            open(data.path(), Some(&there)).await.unwrap();
        }
        let refused = refusal(data.path(), None).await;
        assert!(refused.contains(&format!("start with --store {there}")), "{refused}");
        let refused = refusal(data.path(), Some(&elsewhere)).await;
        assert!(
            refused.contains(&format!("{elsewhere} is not the store of this data directory")),
            "{refused}"
        );
        let refused = refusal(other_data.path(), Some(&there)).await;
        assert!(refused.contains("belongs to another data directory"), "{refused}");
        // The other one is free to choose still.
        open(other_data.path(), None).await.unwrap();
        let refused = refusal(other_data.path(), Some(&elsewhere)).await;
        assert!(refused.contains("start without --store"), "{refused}");
        assert_eq!(open_to_read(data.path()).unwrap().store.to_string(), there.to_string());
    }

    /// Whoever starts with the store that he had is not sent to that one.
    #[tokio::test]
    async fn an_owner_that_is_not_as_it_was_is_named_and_can_be_made_anew() {
        for asked in [None, Some(tempfile::tempdir().unwrap())] {
            let data = tempfile::tempdir().unwrap();
            let asked = asked.as_ref().map(|directory| (url(directory.path()), directory.path().to_owned()));
            let (asked, store) = match asked {
                Some((url, store)) => (Some(url), store),
                None => (None, data.path().join("store")),
            };
            open(data.path(), asked.as_ref()).await.unwrap().stopped().await.unwrap();
            let id = Binding::read(data.path()).unwrap().unwrap().id;
            let marks = || open_to_read(data.path()).unwrap();
            let told = async || marks().marks.unwrap().verify(marks().store).await.unwrap();
            assert_eq!(told().await, []);
            let remedy = format!("make it anew: its only line is {id:032x}");
            let other = format!("{:032x}\n", id ^ 1);
            let upper = "ABCDEF0123456789ABCDEF0123456789\n";
            let harms = [
                (None, "is missing"),
                (Some("1f\n"), "is damaged;"),
                (Some(upper), "is damaged;"),
                (Some(other.as_str()), "or of another data directory"),
            ];
            for (harm, matter) in harms {
                match harm {
                    None => std::fs::remove_file(store.join(OWNER)).unwrap(),
                    Some(text) => std::fs::write(store.join(OWNER), text).unwrap(),
                }
                let refused = refusal(data.path(), asked.as_ref()).await;
                assert!(refused.starts_with("the object `owner` of the store"), "{refused}");
                assert!(refused.contains(matter) && refused.contains(&remedy), "{refused}");
                let found = told().await;
                assert_eq!((found.len(), found[0].0), (1, OWNER));
                assert!(found[0].1.contains(matter) && found[0].1.contains(&remedy), "{found:?}");
            }
            // As the remedy says.
            std::fs::write(store.join(OWNER), format!("{id:032x}\n")).unwrap();
            assert_eq!(told().await, []);
            for text in [None, Some("1f\n"), Some(other.as_str())] {
                match text {
                    None => std::fs::remove_file(store.join(STOPPED)).unwrap(),
                    Some(text) => std::fs::write(store.join(STOPPED), text).unwrap(),
                }
                let found = told().await;
                assert!(found.len() == 1 && found[0].1.contains("nothing is lost"), "{found:?}");
                assert_eq!(found[0].0, STOPPED);
            }
            open(data.path(), asked.as_ref()).await.unwrap();
            // It runs: what it has removed is not missing.
            assert_eq!(told().await, []);
        }
    }

    #[tokio::test]
    async fn a_store_may_move_as_the_last_stop_left_it() {
        let [data, there] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let copy = || {
            for object in [OWNER, STOPPED] {
                std::fs::copy(data.path().join("store").join(object), there.path().join(object)).unwrap();
            }
        };
        let moved = url(there.path());
        let refused = async || {
            let refused = refusal(data.path(), Some(&moved)).await;
            assert!(refused.contains("at this node's last stop; start without --store"), "{refused}");
        };
        open(data.path(), None).await.unwrap().stopped().await.unwrap();
        copy();
        // It has gone on since, and crashed; then it has stopped.
        let running = open(data.path(), None).await.unwrap();
        refused().await;
        running.stopped().await.unwrap();
        refused().await;
        copy();
        open(data.path(), Some(&moved)).await.unwrap().stopped().await.unwrap();
        // Where it was before there is an old store now.
        let refused = refusal(data.path(), None).await;
        assert!(refused.contains(&format!("last stop; start with --store {moved}")), "{refused}");
        let binding = Binding::read(data.path()).unwrap().unwrap();
        assert_eq!(binding.place, Some(Place::Url(moved)));
        assert!(binding.stopped.is_some());
    }

    /// A server that ignores `If-None-Match`.
    #[derive(Debug)]
    struct Careless(Backend);

    impl std::fmt::Display for Careless {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            self.0.fmt(f)
        }
    }

    #[async_trait]
    impl Store for Careless {
        async fn put(&self, name: &str, bytes: Bytes) -> Result<(), Failure> {
            self.0.delete(name).await?;
            self.0.put(name, bytes).await
        }
        async fn upload(&self, name: &str) -> Result<Box<dyn Upload>, Failure> {
            self.0.upload(name).await
        }
        async fn get(&self, name: &str, span: Span) -> Result<Piece, Failure> {
            self.0.get(name, span).await
        }
        async fn list(&self, directory: &str, after: Option<&str>) -> Result<Listing, Failure> {
            self.0.list(directory, after).await
        }
        async fn delete(&self, name: &str) -> Result<(), Failure> {
            self.0.delete(name).await
        }
    }

    #[tokio::test]
    async fn a_store_that_overwrites_is_refused_and_left_as_it_was() {
        let truth = Backend::memory();
        let store = Reliable::new(Arc::new(Careless(truth.clone())), Limits::default());
        let refused = claim(&store, 1).await.unwrap_err().to_string();
        assert!(refused.contains("does not know conditional puts"), "{refused}");
        assert_eq!(holds(&store, OWNER).await.unwrap(), None);
        truth.put(OWNER, line(2)).await.unwrap();
        let refused = claim(&store, 1).await.unwrap_err().to_string();
        assert!(refused.contains("belongs to another data directory"), "{refused}");
        assert_eq!(holds(&store, OWNER).await.unwrap(), Some(line(2)));
        // One that keeps to the contract may be claimed again, after a crash between the two writes.
        let store = Reliable::new(Arc::new(truth), Limits::default());
        claim(&store, 2).await.unwrap();
        assert_eq!(holds(&store, OWNER).await.unwrap(), Some(line(2)));
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_crash_left_half_written_is_removed() {
        let data = tempfile::tempdir().unwrap();
        let segments = data.path().join("store/segments");
        std::fs::create_dir_all(&segments).unwrap();
        let staged = segments.join("0123456789abcdef0123456789abcdef#1");
        let file = std::fs::File::create(&staged).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(60)).unwrap();
        open(data.path(), None).await.unwrap();
        // In the background: a test that waits for ever has failed.
        while staged.exists() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn a_store_in_memory_ends_with_its_process() {
        let data = tempfile::tempdir().unwrap();
        open(data.path(), Some(&StoreUrl::Memory)).await.unwrap();
        assert!(refusal(data.path(), Some(&StoreUrl::Memory)).await.contains("gone with it"));
    }

    /// From before directories had a store by URL, or from between the two writes.
    #[tokio::test]
    async fn an_unfinished_binding_is_finished() {
        let data = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(data.path().join("store/manifests")).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let refused = refusal(data.path(), Some(&url(elsewhere.path()))).await;
        assert!(refused.contains("start once without --store"), "{refused}");
        Binding { id: 7, place: None, stopped: None }.write(data.path()).unwrap();
        open(data.path(), None).await.unwrap();
        let expected = Binding { id: 7, place: Some(Place::Own), stopped: None };
        assert_eq!(Binding::read(data.path()).unwrap(), Some(expected));
        std::fs::write(data.path().join(BINDING_FILE), "id x\n").unwrap();
        assert!(refusal(data.path(), None).await.contains("restore it from a backup"));
    }
}
