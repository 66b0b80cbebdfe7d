//! What a data directory remembers of its store: the file `store.id`.
//!
//! ```text
//!   id 8c1f...
//!   store s3://...    or `below`: the one in the data directory, wherever that is. Missing while the store may not know the id
//!   stopped 51d0...   missing while the node runs, or if it has crashed
//! ```

use std::io::{ErrorKind, Write};
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, bail};
use fulmar_store::StoreUrl;

/// In the data directory.
pub(super) const BINDING_FILE: &str = "store.id";
/// The store below the data directory, wherever that is.
pub(super) const OWN_DIRECTORY: &str = "store";

/// A store, as a data directory remembers it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// Below the data directory.
    Own,
    Url(StoreUrl),
}

impl Place {
    pub(super) fn url(&self, data: &Path) -> StoreUrl {
        match self {
            Place::Own => StoreUrl::Directory(data.join(OWN_DIRECTORY)),
            Place::Url(url) => url.clone(),
        }
    }

    /// How to start with it.
    pub(super) fn flag(&self) -> String {
        match self {
            Place::Own => "start without --store".to_owned(),
            Place::Url(StoreUrl::Memory) => "what was in a process's memory is gone with it".to_owned(),
            Place::Url(url) => format!("start with --store {url}"),
        }
    }
}

/// What a data directory knows of its store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Binding {
    pub(super) id: u128,
    /// None while it is not known whether the store knows the id too.
    pub(super) place: Option<Place>,
    /// What the last stop has left in the store. None while the node runs, or if it has crashed.
    pub(super) stopped: Option<u128>,
}

impl Binding {
    pub(super) fn read(data: &Path) -> anyhow::Result<Option<Binding>> {
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
    pub(super) fn write(&self, data: &Path) -> anyhow::Result<()> {
        let mut text = format!("id {:032x}\n", self.id);
        match &self.place {
            None => {}
            Some(Place::Own) => text += "store below\n",
            Some(Place::Url(url)) => text += &format!("store {url}\n"),
        }
        if let Some(number) = self.stopped {
            text += &format!("stopped {number:032x}\n");
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
        // All digits: a file that was cut off must not pass for another id.
        let id = Some(id).filter(|id| id.len() == 32).context("the id is cut off")?;
        let id = u128::from_str_radix(id, 16).context("the id is no number")?;
        let place = match lines.next().map(|line| line.strip_prefix("store ")) {
            None => None,
            Some(Some("below")) => Some(Place::Own),
            Some(Some(url)) => Some(Place::Url(url.parse()?)),
            Some(None) => bail!("the second line names no store"),
        };
        let stopped = match lines.next().map(|line| line.strip_prefix("stopped ")) {
            None => None,
            Some(Some(number)) => Some(u128::from_str_radix(number, 16).context("the stop is no number")?),
            Some(None) => bail!("the third line names no stop"),
        };
        Ok(Binding { id, place, stopped })
    }
}
