//! The file `store.id`, which binds a data directory to its store.
//!
//! ```text
//!   id 8c1f...
//!   store s3://...    or `below`: the directory `store` in the data directory, wherever that is.
//!                     Missing until the store is known to have the id
//!   stopped 51d0...   missing while the node runs, and after a crash
//! ```

use std::io::{ErrorKind, Write};
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, bail};
use fulmar_store::StoreUrl;

/// Name of the file in the data directory.
pub(super) const BINDING_FILE: &str = "store.id";
/// Name of the default store's directory in the data directory.
pub(super) const DEFAULT_STORE_DIRECTORY: &str = "store";

/// The location of a store, as recorded in a data directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum StoreLocation {
    /// The default store in the data directory.
    Default,
    Url(StoreUrl),
}

impl StoreLocation {
    pub(super) fn url(&self, data: &Path) -> StoreUrl {
        match self {
            StoreLocation::Default => StoreUrl::Directory(data.join(DEFAULT_STORE_DIRECTORY)),
            StoreLocation::Url(url) => url.clone(),
        }
    }

    /// Returns the instruction for a start with this store, for error messages.
    pub(super) fn start_instruction(&self) -> String {
        match self {
            StoreLocation::Default => "start without --store".to_owned(),
            StoreLocation::Url(StoreUrl::Memory) => {
                "a store in memory is lost when its process ends".to_owned()
            }
            StoreLocation::Url(url) => format!("start with --store {url}"),
        }
    }
}

/// The contents of `store.id`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Binding {
    pub(super) id: u128,
    /// `None` until the store is known to have the id.
    pub(super) location: Option<StoreLocation>,
    /// The number that the last clean shutdown wrote to the store. `None` while the node runs, and
    /// after a crash.
    pub(super) shutdown_id: Option<u128>,
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

    /// Writes the file atomically and durably.
    pub(super) fn write(&self, data: &Path) -> anyhow::Result<()> {
        let mut text = format!("id {:032x}\n", self.id);
        match &self.location {
            None => {}
            Some(StoreLocation::Default) => text += "store below\n",
            Some(StoreLocation::Url(url)) => text += &format!("store {url}\n"),
        }
        if let Some(number) = self.shutdown_id {
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
            .with_context(|| format!("cannot write {BINDING_FILE} to the data directory {}", data.display()))
    }
}

impl FromStr for Binding {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Binding> {
        let mut lines = text.lines();
        let id = lines.next().and_then(|line| line.strip_prefix("id ")).context("the id is missing")?;
        // Require all digits: a truncated file must not be read as another id.
        let id = Some(id).filter(|id| id.len() == 32).context("the id is truncated")?;
        let id = u128::from_str_radix(id, 16).context("the id is not a number")?;
        let place = match lines.next().map(|line| line.strip_prefix("store ")) {
            None => None,
            Some(Some("below")) => Some(StoreLocation::Default),
            Some(Some(url)) => Some(StoreLocation::Url(url.parse()?)),
            Some(None) => bail!("the second line is not a store line"),
        };
        let stopped = match lines.next().map(|line| line.strip_prefix("stopped ")) {
            None => None,
            Some(Some(number)) => {
                Some(u128::from_str_radix(number, 16).context("the stop number is invalid")?)
            }
            Some(None) => bail!("the third line is not a stopped line"),
        };
        Ok(Binding { id, location: place, shutdown_id: stopped })
    }
}
