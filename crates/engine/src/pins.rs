//! Manifests that stay though they are old: pinned in the store, where whoever collects finds that out ([`fulmar_store`]'s
//! `objects/fates`).
//!
//! Who makes a branch or a restore pins what he makes it of ([`Held`]), for as long as that takes. Who reads beside the owner
//! pins the manifests that the partitions have which are open there, the past's too, again and again ([`Pins`]). Without the right to write to
//! the store it goes without: then what is older than the retention may be deleted under it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fulmar_store::{ManifestName, PIN_HOLDS, Pinned};
use parking_lot::Mutex;

use crate::node::Node;
use crate::partition::store_error;
use crate::{Error, Result, sqlstate};

/// After so long a manifest that is still needed is pinned again.
const RENEW_AFTER: Duration = Duration::from_secs(600);

/// A manifest stays until then.
pub(crate) struct Held {
    until_ms: u64,
}

impl Held {
    /// Keeps a manifest for a while. An error if it is gone.
    pub(crate) async fn pin(node: &Node, manifest: ManifestName) -> Result<Held> {
        let asked_ms = node.clock.monotonic_ms();
        match node.store.pin(manifest, node.clock.unix_ms()).await.map_err(store_error)? {
            Pinned::Yes => Ok(Held { until_ms: asked_ms + PIN_HOLDS.as_millis() as u64 }),
            Pinned::Gone => Err(gone()),
            Pinned::Refused => Err(Error::new(sqlstate::IO_ERROR, "the store may not be written")
                .hint("See to the credentials of the store and their rights.")),
        }
    }

    /// Whether it was kept until now.
    pub(crate) fn check(&self, node: &Node) -> Result<()> {
        match node.clock.monotonic_ms() <= self.until_ms {
            true => Ok(()),
            false => Err(Error::new(sqlstate::IO_ERROR, "the store has taken too long to answer")
                .hint("Try again; see whether the store is slow.")),
        }
    }
}

/// The error of who wants a version of the past that was there a moment ago.
pub(crate) fn gone() -> Error {
    let message = "that version of the database has just been deleted: its retention is over";
    Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
        .hint("Choose a later time: `SELECT * FROM fulmar.history` lists what there is.")
}

/// What a node that reads beside the owner has pinned.
#[derive(Default)]
pub(crate) struct Pins {
    /// When that was asked for (monotonic milliseconds).
    asked_ms: Mutex<HashMap<ManifestName, u64>>,
    /// It may not write to the store.
    refused: AtomicBool,
}

impl Pins {
    /// Pins a manifest, unless that was done a while ago. `false`: it is gone.
    pub(crate) async fn pin(&self, node: &Node, manifest: ManifestName) -> Result<bool> {
        let now_ms = node.clock.monotonic_ms();
        let is_fresh = |asked_ms: &u64| u128::from(now_ms - asked_ms) < RENEW_AFTER.as_millis();
        if self.refused.load(Ordering::Relaxed) || self.asked_ms.lock().get(&manifest).is_some_and(is_fresh) {
            return Ok(true);
        }
        match node.store.pin(manifest, node.clock.unix_ms()).await.map_err(store_error)? {
            Pinned::Yes => {
                self.asked_ms.lock().insert(manifest, now_ms);
            }
            Pinned::Gone => return Ok(false),
            Pinned::Refused => {
                if !self.refused.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "the store may not be written, so nothing can be pinned there: what is older than a database's retention may \
                         be deleted while it is read here; give this node's credentials the right to create objects below \
                         manifests/"
                    );
                }
            }
        }
        Ok(true)
    }

    /// Pins again what is still used, and forgets the others: their pins end by themselves.
    pub(crate) async fn renew(&self, node: &Node, used: &[ManifestName]) {
        self.asked_ms.lock().retain(|manifest, _| used.contains(manifest));
        for manifest in used {
            match self.pin(node, *manifest).await {
                Ok(true) => {}
                // Whoever misses something of it is told.
                Ok(false) => tracing::warn!(?manifest, "a manifest that is read here has been deleted"),
                Err(error) => {
                    tracing::warn!(%error, "a manifest that is read here cannot be pinned; it is tried again");
                }
            }
        }
    }
}
