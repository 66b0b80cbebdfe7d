//! Which store a data directory has, and that it is nobody else's.
//!
//! The two belong together: the log in the one goes on where the manifests in the other end, and a store that is used by
//! two directories would soon be nobody's. So each knows the other:
//!
//! ```text
//!   DATA/store.id     id 8c1f...      made at the first start        owner   the same id, in the store:
//!                     store s3://...  when the store has it too              created only if absent
//! ```
//!
//! A start with another store, or without `--store` where there was one, is refused: it would find no tenant's data, and
//! say that they are empty.

use std::io::{ErrorKind, Write};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow, bail, ensure};
use bytes::Bytes;
use fulmar_store::{Backend, FailureKind, Limits, Reliable, Span, Store, StoreUrl};

/// In the data directory.
const BINDING_FILE: &str = "store.id";
/// In the store.
const OWNER: &str = "owner";
/// The store below the data directory, wherever that is.
const OWN_DIRECTORY: &str = "store";

/// A store, as a data directory remembers it.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Place {
    /// Below the data directory.
    Own,
    Url(StoreUrl),
}

impl Place {
    fn url(&self, data: &Path) -> StoreUrl {
        match self {
            Place::Own => StoreUrl::Directory(data.join(OWN_DIRECTORY)),
            Place::Url(url) => url.clone(),
        }
    }

    /// How to start with it.
    fn flag(&self) -> String {
        match self {
            Place::Own => "start without --store".to_owned(),
            Place::Url(StoreUrl::Memory) => "what was in a process's memory is gone with it".to_owned(),
            Place::Url(url) => format!("start with --store {url}"),
        }
    }
}

/// What a data directory knows of its store.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Binding {
    id: u128,
    /// None while it is not known whether the store knows the id too.
    place: Option<Place>,
}

/// Opens the store that was asked for, or the one below the data directory, which must be this process's. Refused if it
/// belongs to another data directory, or this one to another store. Answers also the id by which they know each other.
pub async fn open(data: &Path, asked: Option<&StoreUrl>) -> anyhow::Result<(Arc<dyn Store>, u128)> {
    let began = SystemTime::now();
    let place = asked.map_or(Place::Own, |url| Place::Url(url.clone()));
    let url = place.url(data);
    let backend = url.open().with_context(|| format!("cannot open the store {url}"))?;
    let store = Reliable::new(Arc::new(backend.clone()), Limits::default());
    let id = match Binding::read(data)? {
        Some(Binding { id, place: Some(known) }) => {
            ensure!(
                belongs_to(&store, id).await?,
                "{url} is not the store of this data directory; {}",
                known.flag()
            );
            if known != place {
                Binding { id, place: Some(place) }.write(data)?;
            }
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
            Binding { id, place: None }.write(data)?;
            claim(&store, id).await?;
            Binding { id, place: Some(place) }.write(data)?;
            id
        }
    };
    sweep(backend.clone(), began);
    Ok((Arc::new(backend), id))
}

/// Opens the store of a data directory to read it; answers also the id by which they know each other, and where it is, for
/// people.
pub fn open_to_read(data: &Path) -> anyhow::Result<(Arc<dyn Store>, u128, String)> {
    let binding = Binding::read(data)?;
    // Without one there is nothing that has the id in its name.
    let id = binding.as_ref().map_or(0, |binding| binding.id);
    let place = binding.and_then(|binding| binding.place).unwrap_or(Place::Own);
    let url = place.url(data);
    let shown = match &url {
        StoreUrl::Directory(directory) => {
            ensure!(directory.is_dir(), "there is no store at {}", directory.display());
            directory.display().to_string()
        }
        url => url.to_string(),
    };
    let backend = url.open().with_context(|| format!("cannot open the store {url}"))?;
    Ok((Arc::new(backend), id, shown))
}

fn owner(id: u128) -> Bytes {
    format!("{id:032x}\n").into()
}

/// Makes the store ours, if it is nobody's.
async fn claim(store: &Reliable, id: u128) -> anyhow::Result<()> {
    store.put(OWNER, owner(id)).await.map_err(|failure| match failure.kind() {
        FailureKind::Exists => anyhow!(
            "the store {store} belongs to another data directory; choose another prefix or directory, or start with \
             the data directory that it belongs to"
        ),
        _ => cannot_use(store, failure),
    })
}

async fn belongs_to(store: &Reliable, id: u128) -> anyhow::Result<bool> {
    match store.get(OWNER, Span::Whole).await {
        Ok(found) => Ok(found.bytes == owner(id)),
        Err(failure) if failure.kind() == FailureKind::Missing => Ok(false),
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
    tokio::task::spawn_blocking(move || match backend.sweep(before) {
        Ok(0) => {}
        Ok(files) => tracing::info!(files, "removed what a crash had left half written in the store"),
        Err(error) => {
            tracing::warn!(%error, "the store cannot be swept of what a crash has left half written")
        }
    });
}

impl Binding {
    fn read(data: &Path) -> anyhow::Result<Option<Binding>> {
        let file = data.join(BINDING_FILE);
        let text = match std::fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", file.display())),
        };
        text.parse()
            .map(Some)
            .with_context(|| format!("{} is damaged; restore it from a backup", file.display()))
    }

    /// Whole or not at all, and synced.
    fn write(&self, data: &Path) -> anyhow::Result<()> {
        let mut text = format!("id {:032x}\n", self.id);
        match &self.place {
            None => {}
            Some(Place::Own) => text += "store below\n",
            Some(Place::Url(url)) => text += &format!("store {url}\n"),
        }
        let write = || {
            let mut file = tempfile::NamedTempFile::new_in(data)?;
            file.write_all(text.as_bytes())?;
            file.as_file().sync_all()?;
            file.persist(data.join(BINDING_FILE))?;
            std::fs::File::open(data)?.sync_all()
        };
        write()
            .with_context(|| format!("cannot write {BINDING_FILE} in the data directory {}", data.display()))
    }
}

impl FromStr for Binding {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Binding> {
        let mut lines = text.lines();
        let id = lines.next().and_then(|line| line.strip_prefix("id ")).context("there is no id")?;
        let id = u128::from_str_radix(id, 16).context("the id is no number")?;
        let place = match lines.next().map(|line| line.strip_prefix("store ")) {
            None => None,
            Some(Some("below")) => Some(Place::Own),
            Some(Some(url)) => Some(Place::Url(url.parse()?)),
            Some(None) => bail!("the second line names no store"),
        };
        Ok(Binding { id, place })
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(open_to_read(data.path()).unwrap().0.to_string(), there.to_string());
    }

    #[tokio::test]
    async fn a_store_may_move_with_all_that_is_in_it() {
        let [data, there] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        open(data.path(), None).await.unwrap();
        let owner = std::fs::read(data.path().join("store/owner")).unwrap();
        std::fs::write(there.path().join("owner"), owner).unwrap();
        open(data.path(), Some(&url(there.path()))).await.unwrap();
        assert_eq!(Binding::read(data.path()).unwrap().unwrap().place, Some(Place::Url(url(there.path()))));
    }

    #[tokio::test]
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
        Binding { id: 7, place: None }.write(data.path()).unwrap();
        open(data.path(), None).await.unwrap();
        assert_eq!(Binding::read(data.path()).unwrap(), Some(Binding { id: 7, place: Some(Place::Own) }));
        std::fs::write(data.path().join(BINDING_FILE), "id x\n").unwrap();
        assert!(refusal(data.path(), None).await.contains("restore it from a backup"));
    }
}
