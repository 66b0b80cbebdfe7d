//! Protects old manifests from garbage collection by pinning them in the store. The collector reads
//! the pins before it deletes a manifest ([`fulmar_store`]'s `objects/manifest_holds`).
//!
//! - A branch or a restore pins its source manifest, and checks that the manifest still exists
//!   after its own manifest is stored ([`PinnedManifest`]).
//! - A replica pins the manifests of its open partitions, historical ones included, and renews the
//!   pins periodically ([`Pins`]). If pinning fails it continues without a pin: manifests older
//!   than the retention period may then be deleted while the replica reads them.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use fulmar_store::{ManifestName, PIN_RENEWAL_INTERVAL, PinOutcome, StoreError};
use futures::stream::{self, StreamExt};
use parking_lot::Mutex;

use fulmar_mvcc::{Node, store_error};
use fulmar_sqlite::{Error, Result, sqlstate};

/// Delay before a failed pin is retried.
const RETRY_DELAY: Duration = Duration::from_secs(60);
/// Maximum number of concurrent pin requests.
const MAX_CONCURRENT_PINS: usize = 16;

/// A pinned manifest that a branch or a restore is made of.
pub(crate) struct PinnedManifest(ManifestName);

impl PinnedManifest {
    /// Pins a manifest for a limited time. Fails if the manifest no longer exists.
    pub(crate) async fn pin(node: &Node, manifest: ManifestName) -> Result<PinnedManifest> {
        match node.store.pin(manifest, node.clock.unix_ms()).await.map_err(store_error)? {
            PinOutcome::Pinned => Ok(PinnedManifest(manifest)),
            PinOutcome::Deleted => Err(gone()),
            PinOutcome::NotPermitted => {
                Err(Error::new(sqlstate::IO_ERROR, "permission denied for the object store")
                    .hint("Check the object-store credentials and their permissions."))
            }
        }
    }

    /// Checks that the manifest still exists, now that the manifest made of it is stored. A later
    /// deletion finds the new manifest first.
    pub(crate) async fn check(&self, node: &Node) -> Result<()> {
        match node.store.read_manifest(self.0).await {
            Ok(_) => Ok(()),
            Err(StoreError::Missing { .. }) => Err(gone()),
            Err(error) => Err(store_error(error)),
        }
    }
}

/// The error for a historical version that was deleted between the choice of it and its use.
pub(crate) fn gone() -> Error {
    let message = "this version of the database was deleted after its retention period";
    Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
        .hint("Choose a later time. SELECT * FROM fulmar.history lists the available ones.")
}

/// The manifests that a replica has pinned, each with the time of its next renewal (monotonic
/// milliseconds).
#[derive(Default)]
pub struct Pins(Mutex<HashMap<ManifestName, u64>>);

impl Pins {
    /// Pins a manifest, unless its pin is still fresh. Returns false if the manifest no longer
    /// exists.
    pub async fn pin(&self, node: &Node, manifest: ManifestName) -> bool {
        let now_ms = node.clock.monotonic_ms();
        if self.0.lock().get(&manifest).is_some_and(|again_ms| now_ms < *again_ms) {
            return true;
        }
        let again = match node.store.pin(manifest, node.clock.unix_ms()).await {
            Ok(PinOutcome::Pinned) => PIN_RENEWAL_INTERVAL,
            Ok(PinOutcome::Deleted) => return false,
            Ok(PinOutcome::NotPermitted) => {
                tracing::warn!("cannot pin manifests: permission denied for the object store");
                PIN_RENEWAL_INTERVAL
            }
            Err(error) => {
                tracing::warn!(%error, "could not pin a manifest in use; will retry");
                RETRY_DELAY
            }
        };
        self.0.lock().insert(manifest, now_ms + again.as_millis() as u64);
        true
    }

    /// Renews the pins of the manifests in use and drops the others, whose pins expire in the
    /// store.
    pub async fn renew(&self, node: &Node, used: HashSet<ManifestName>) {
        self.0.lock().retain(|manifest, _| used.contains(manifest));
        let pinning = used.into_iter().map(|manifest| async move {
            if !self.pin(node, manifest).await {
                // A session that reads a missing object gets an error.
                tracing::warn!(?manifest, "a manifest in use has been deleted");
                self.0.lock().insert(manifest, u64::MAX);
            }
        });
        stream::iter(pinning.collect::<Vec<_>>()).buffer_unordered(MAX_CONCURRENT_PINS).collect::<()>().await;
    }
}
