//! Manifests that stay though they are old: pinned in the store, where whoever collects finds that out ([`fulmar_store`]'s
//! `objects/fates`).
//!
//! Who makes a branch or a restore pins what he makes it of, and looks behind that whether it is still there ([`Held`]). Who reads beside
//! the owner pins the manifests that the partitions have which are open there, the past's too, again and again ([`Pins`]). Where that fails
//! it goes without: then what is older than the retention may be deleted under it.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use fulmar_store::{ManifestName, PIN_AGAIN, Pinned, StoreError};
use futures::stream::{self, StreamExt};
use parking_lot::Mutex;

use crate::node::Node;
use crate::partition::store_error;
use crate::{Error, Result, sqlstate};

/// After so long it is tried again to pin what could not be pinned.
const TRY_AGAIN: Duration = Duration::from_secs(60);
/// Pins that are renewed at the same time.
const AT_ONCE: usize = 16;

/// A manifest that something is made of.
pub(crate) struct Held(ManifestName);

impl Held {
    /// Keeps a manifest for a while. An error if it is gone.
    pub(crate) async fn pin(node: &Node, manifest: ManifestName) -> Result<Held> {
        match node.store.pin(manifest, node.clock.unix_ms()).await.map_err(store_error)? {
            Pinned::Yes => Ok(Held(manifest)),
            Pinned::Gone => Err(gone()),
            Pinned::Refused => Err(Error::new(sqlstate::IO_ERROR, "the store may not be written")
                .hint("See to the credentials of the store and their rights.")),
        }
    }

    /// Whether it is still there, now that what is made of it is stored. Whoever deletes it later finds that first.
    pub(crate) async fn check(&self, node: &Node) -> Result<()> {
        match node.store.read_manifest(self.0).await {
            Ok(_) => Ok(()),
            Err(StoreError::Missing { .. }) => Err(gone()),
            Err(error) => Err(store_error(error)),
        }
    }
}

/// The error of who wants a version of the past that was there a moment ago.
pub(crate) fn gone() -> Error {
    let message = "that version of the database has just been deleted: its retention is over";
    Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
        .hint("Choose a later time: `SELECT * FROM fulmar.history` lists what there is.")
}

/// What a node that reads beside the owner has pinned, and when that is to be asked for again (monotonic milliseconds).
#[derive(Default)]
pub(crate) struct Pins(Mutex<HashMap<ManifestName, u64>>);

impl Pins {
    /// Pins a manifest, unless that was done a while ago. `false`: it is gone.
    pub(crate) async fn pin(&self, node: &Node, manifest: ManifestName) -> bool {
        let now_ms = node.clock.monotonic_ms();
        if self.0.lock().get(&manifest).is_some_and(|again_ms| now_ms < *again_ms) {
            return true;
        }
        let again = match node.store.pin(manifest, node.clock.unix_ms()).await {
            Ok(Pinned::Yes) => PIN_AGAIN,
            Ok(Pinned::Gone) => return false,
            Ok(Pinned::Refused) => {
                tracing::warn!("what is read here cannot be pinned: the store may not be written");
                PIN_AGAIN
            }
            Err(error) => {
                tracing::warn!(%error, "a manifest that is read here cannot be pinned; it is tried again");
                TRY_AGAIN
            }
        };
        self.0.lock().insert(manifest, now_ms + again.as_millis() as u64);
        true
    }

    /// Pins again what is still used, and forgets the others: their pins end by themselves.
    pub(crate) async fn renew(&self, node: &Node, used: HashSet<ManifestName>) {
        self.0.lock().retain(|manifest, _| used.contains(manifest));
        let pinning = used.into_iter().map(|manifest| async move {
            if !self.pin(node, manifest).await {
                // Whoever misses something of it is told.
                tracing::warn!(?manifest, "a manifest that is read here has been deleted");
                self.0.lock().insert(manifest, u64::MAX);
            }
        });
        stream::iter(pinning.collect::<Vec<_>>()).buffer_unordered(AT_ONCE).collect::<()>().await;
    }
}
