//! Pins and deletions of manifests that are not the newest: holds as objects, named
//! `manifests/PARTITION/fate-EPOCH-NUMBER-SEQUENCE`, so that one listing finds them with the
//! manifests.
//!
//! ```text
//!   hold 0   pinned until 12:30      a branch is created from it
//!   hold 1   pinned until 13:10      a replica opens it
//!   hold 2   condemned               by the collector, at 13:11: deletes manifest, then holds
//! ```
//!
//! The last hold counts. Each hold is created only if absent, so exactly one process decides it: a
//! pinned manifest is not condemned before the pin expires, and a condemned manifest is not pinned.
//! Holds are deleted after their manifest, and the first hold last. A process that pins a deleted
//! manifest detects this, because it reads the manifest afterwards.
//!
//! # Time
//!
//! The expiry of a pin is set by the clock of the process that pins, and compared with the clock of
//! the process that condemns. Pins are therefore long, and a process that still needs the manifest
//! after a quarter of that time pins it again. A process that creates something from the manifest
//! checks afterwards that it still exists.

use std::time::Duration;

use fulmar_pages::PartitionId;
use fulmar_pages::manifest_hold::{HoldState, StoredHold};

use super::{ManifestName, PageStore, StoreError, directory};
use crate::store::{FailureKind, Span};

const HOLD_PREFIX: &str = "fate-";

/// How long a pin is valid.
const PIN_DURATION: Duration = Duration::from_secs(4 * 3600);
/// A process that still needs the manifest after this time must pin it again.
pub const PIN_RENEWAL_INTERVAL: Duration = Duration::from_secs(3600);

/// Number of lost races for a sequence number after which an operation fails.
const MAX_ROUNDS: usize = 50;

/// Name of a hold. Names sort in the order of a partition's manifests, and of the sequence numbers
/// of each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct HoldName {
    /// The manifest.
    pub manifest: ManifestName,
    /// Number of the decision.
    pub sequence: u32,
}

/// Common prefix of the names of a manifest's holds; they sort after it.
fn holds_prefix(manifest: ManifestName) -> String {
    let ManifestName { partition, epoch, number } = manifest;
    format!("{}/{HOLD_PREFIX}{epoch:08x}-{number:016x}", directory(partition))
}

impl HoldName {
    fn object(&self) -> String {
        format!("{}-{:08x}", holds_prefix(self.manifest), self.sequence)
    }

    pub(super) fn parse(object: &str) -> Option<Self> {
        let (directory, hold) = object.rsplit_once('/')?;
        let (_, partition) = directory.rsplit_once('/')?;
        let mut parts = hold.strip_prefix(HOLD_PREFIX)?.split('-');
        let mut next = || parts.next();
        let manifest = ManifestName {
            partition: PartitionId(u64::from_str_radix(partition, 16).ok()?),
            epoch: u32::from_str_radix(next()?, 16).ok()?,
            number: u64::from_str_radix(next()?, 16).ok()?,
        };
        let name = HoldName { manifest, sequence: u32::from_str_radix(next()?, 16).ok()? };
        (name.object() == object).then_some(name)
    }

    /// Returns true if this is the name of a hold, which read-only processes may put.
    pub fn is_valid(object: &str) -> bool {
        HoldName::parse(object).is_some()
    }
}

/// Result of pinning a manifest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PinOutcome {
    /// The manifest is pinned for longer than [`PIN_RENEWAL_INTERVAL`].
    Pinned,
    /// The manifest is condemned or deleted.
    Deleted,
    /// This process may not write to the store.
    NotPermitted,
}

impl PageStore {
    /// Protects a manifest and the segments that it references from deletion for some time.
    pub async fn pin(&self, manifest: ManifestName, now_unix_ms: u64) -> Result<PinOutcome, StoreError> {
        let until_unix_ms = now_unix_ms.saturating_add(PIN_DURATION.as_millis() as u64);
        // The pin of another process is sufficient, too.
        let sufficient_ms = now_unix_ms.saturating_add(2 * PIN_RENEWAL_INTERVAL.as_millis() as u64);
        for _ in 0..MAX_ROUNDS {
            let last = self.last_hold(manifest, None).await?;
            match last.map(|last| last.state) {
                Some(HoldState::Condemned) => return Ok(PinOutcome::Deleted),
                Some(HoldState::Pinned { until_unix_ms }) if until_unix_ms >= sufficient_ms => {}
                _ => {
                    let sequence = last.map_or(0, |last| last.sequence + 1);
                    match self.decide(manifest, sequence, HoldState::Pinned { until_unix_ms }).await {
                        Ok(true) => {}
                        Ok(false) => continue,
                        Err(StoreError::Failed { cause, .. }) if cause.kind() == FailureKind::Refused => {
                            return Ok(PinOutcome::NotPermitted);
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
            // The manifest and its holds may have been deleted, so that the pin has no effect.
            return match self.read_manifest(manifest).await {
                Ok(_) => Ok(PinOutcome::Pinned),
                Err(StoreError::Missing { .. }) => Ok(PinOutcome::Deleted),
                Err(error) => Err(error),
            };
        }
        Err(self.contended(manifest))
    }

    /// Deletes a manifest unless it is pinned. `known` contains its holds according to a listing.
    /// Returns true if the manifest is deleted.
    pub async fn condemn(
        &self,
        manifest: ManifestName,
        known: &[HoldName],
        now_unix_ms: u64,
    ) -> Result<bool, StoreError> {
        let mut known = Some(known.iter().map(|hold| hold.sequence).collect());
        for _ in 0..MAX_ROUNDS {
            let last = self.last_hold(manifest, known.take()).await?;
            let sequence = match last.map(|last| (last.sequence, last.state)) {
                Some((sequence, HoldState::Condemned)) => sequence,
                Some((_, HoldState::Pinned { until_unix_ms })) if until_unix_ms > now_unix_ms => {
                    return Ok(false);
                }
                last => {
                    let sequence = last.map_or(0, |(sequence, _)| sequence + 1);
                    if !self.decide(manifest, sequence, HoldState::Condemned).await? {
                        continue;
                    }
                    sequence
                }
            };
            self.delete_manifest(manifest).await?;
            self.delete_holds(manifest, sequence).await?;
            return Ok(true);
        }
        Err(self.contended(manifest))
    }

    /// Returns true if a manifest with these holds was condemned but not yet deleted.
    pub async fn is_condemned(&self, holds: &[HoldName]) -> Result<bool, StoreError> {
        let Some(last) = holds.last() else { return Ok(false) };
        Ok(self.read_hold(*last).await?.is_some_and(|last| last.state == HoldState::Condemned))
    }

    /// Deletes the holds of a manifest that does not exist, unless a process that has pinned it may
    /// not have noticed that yet.
    pub async fn delete_orphaned_holds(
        &self,
        holds: &[HoldName],
        now_unix_ms: u64,
    ) -> Result<(), StoreError> {
        let Some(last) = holds.last() else { return Ok(()) };
        let is_expired = match self.read_hold(*last).await?.map(|last| last.state) {
            Some(HoldState::Pinned { until_unix_ms }) => until_unix_ms <= now_unix_ms,
            Some(HoldState::Condemned) | None => true,
        };
        match is_expired {
            true => self.delete_holds(last.manifest, last.sequence).await,
            false => Ok(()),
        }
    }

    /// Deletes a hold. Succeeds if it does not exist. Only allowed after its manifest and all later
    /// holds have been deleted.
    pub async fn delete_hold(&self, name: HoldName) -> Result<(), StoreError> {
        self.delete(&name.object()).await
    }

    /// Checks that a hold is not damaged.
    pub async fn verify_hold(&self, name: HoldName) -> Result<(), StoreError> {
        self.read_hold(name).await.map(drop)
    }

    /// Deletes all holds up to `last`, the last one first, so that the remaining ones have no gap.
    async fn delete_holds(&self, manifest: ManifestName, last: u32) -> Result<(), StoreError> {
        for sequence in (0..=last).rev() {
            self.delete_hold(HoldName { manifest, sequence }).await?;
        }
        Ok(())
    }

    /// Puts a decision. Returns false if another process has taken the number.
    async fn decide(
        &self,
        manifest: ManifestName,
        sequence: u32,
        state: HoldState,
    ) -> Result<bool, StoreError> {
        let ManifestName { partition, epoch, number } = manifest;
        let stored = StoredHold { partition, epoch, number, sequence, by: rand::random(), state };
        match self.put(&HoldName { manifest, sequence }.object(), stored.encode().into()).await {
            Ok(()) => Ok(true),
            Err(StoreError::Exists { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Reads the last decision on a manifest, out of `sequences` or of the existing ones.
    async fn last_hold(
        &self,
        manifest: ManifestName,
        turns: Option<Vec<u32>>,
    ) -> Result<Option<StoredHold>, StoreError> {
        let turns = match turns {
            Some(turns) => turns,
            None => self.sequences(manifest).await?,
        };
        match turns.last() {
            Some(sequence) => self.read_hold(HoldName { manifest, sequence: *sequence }).await,
            None => Ok(None),
        }
    }

    async fn sequences(&self, manifest: ManifestName) -> Result<Vec<u32>, StoreError> {
        // The listing starts after the manifests, of which there may be many. Few objects follow.
        let listed = self.list_after(Some(manifest.partition), Some(holds_prefix(manifest))).await?;
        let of = listed.holds.iter().filter(|hold| hold.manifest == manifest);
        Ok(of.map(|hold| hold.sequence).collect())
    }

    /// Reads a decision, if it exists.
    async fn read_hold(&self, name: HoldName) -> Result<Option<StoredHold>, StoreError> {
        let object = name.object();
        let bytes = match self.get(&object, Span::Whole).await {
            Ok(piece) => piece.bytes,
            Err(StoreError::Missing { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let hold = StoredHold::decode(&bytes).map_err(|cause| self.damaged_at(&object, 0, cause))?;
        let ManifestName { partition, epoch, number } = name.manifest;
        match (hold.partition, hold.epoch, hold.number, hold.sequence)
            == (partition, epoch, number, name.sequence)
        {
            true => Ok(Some(hold)),
            false => Err(StoreError::WrongIdentity { object, store: self.store.to_string() }),
        }
    }

    fn contended(&self, manifest: ManifestName) -> StoreError {
        let object = HoldName { manifest, sequence: 0 }.object();
        StoreError::Contended { object, store: self.store.to_string() }
    }
}
