//! Pins and deletions of manifests that are not the newest: fates as objects, named
//! `manifests/PARTITION/fate-EPOCH-NUMBER-TURN`, so that one listing finds them with the manifests.
//!
//! ```text
//!   turn 0   pinned until 12:30      a branch is created from it
//!   turn 1   pinned until 13:10      a replica opens it
//!   turn 2   condemned               by the collector, at 13:11: deletes manifest, then fates
//! ```
//!
//! The last turn counts. Each turn is created only if absent, so exactly one process decides it: a
//! pinned manifest is not condemned before the pin expires, and a condemned manifest is not pinned.
//! Fates are deleted after their manifest, and the first turn last. A process that pins a deleted
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
use fulmar_pages::fate::{Fate, StoredFate};

use super::{ManifestName, PageStore, StoreError, directory};
use crate::store::{FailureKind, Span};

const FATE: &str = "fate-";

/// How long a pin is valid.
const PIN_DURATION: Duration = Duration::from_secs(4 * 3600);
/// A process that still needs the manifest after this time must pin it again.
pub const PIN_AGAIN: Duration = Duration::from_secs(3600);

/// Number of lost races for a turn after which an operation fails.
const MAX_ROUNDS: usize = 50;

/// Name of a fate. Names sort in the order of a partition's manifests, and of the turns of each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct FateName {
    /// The manifest.
    pub manifest: ManifestName,
    /// Number of the decision.
    pub turn: u32,
}

/// Common prefix of the names of a manifest's fates; they sort after it.
fn fates_of(manifest: ManifestName) -> String {
    let ManifestName { partition, epoch, number } = manifest;
    format!("{}/{FATE}{epoch:08x}-{number:016x}", directory(partition))
}

impl FateName {
    fn object(&self) -> String {
        format!("{}-{:08x}", fates_of(self.manifest), self.turn)
    }

    pub(super) fn parse(object: &str) -> Option<Self> {
        let (directory, fate) = object.rsplit_once('/')?;
        let (_, partition) = directory.rsplit_once('/')?;
        let mut parts = fate.strip_prefix(FATE)?.split('-');
        let mut next = || parts.next();
        let manifest = ManifestName {
            partition: PartitionId(u64::from_str_radix(partition, 16).ok()?),
            epoch: u32::from_str_radix(next()?, 16).ok()?,
            number: u64::from_str_radix(next()?, 16).ok()?,
        };
        let name = FateName { manifest, turn: u32::from_str_radix(next()?, 16).ok()? };
        (name.object() == object).then_some(name)
    }

    /// Returns true if this is the name of a fate, which read-only processes may put.
    pub fn is_one(object: &str) -> bool {
        FateName::parse(object).is_some()
    }
}

/// Result of pinning a manifest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pinned {
    /// The manifest is pinned for longer than [`PIN_AGAIN`].
    Yes,
    /// The manifest is condemned or deleted.
    Gone,
    /// This process may not write to the store.
    Refused,
}

impl PageStore {
    /// Protects a manifest and the segments that it references from deletion for some time.
    pub async fn pin(&self, manifest: ManifestName, now_unix_ms: u64) -> Result<Pinned, StoreError> {
        let until_unix_ms = now_unix_ms.saturating_add(PIN_DURATION.as_millis() as u64);
        // The pin of another process is sufficient, too.
        let sufficient_ms = now_unix_ms.saturating_add(2 * PIN_AGAIN.as_millis() as u64);
        for _ in 0..MAX_ROUNDS {
            let last = self.last_fate(manifest, None).await?;
            match last.map(|last| last.fate) {
                Some(Fate::Condemned) => return Ok(Pinned::Gone),
                Some(Fate::Pinned { until_unix_ms }) if until_unix_ms >= sufficient_ms => {}
                _ => {
                    let turn = last.map_or(0, |last| last.turn + 1);
                    match self.decide(manifest, turn, Fate::Pinned { until_unix_ms }).await {
                        Ok(true) => {}
                        Ok(false) => continue,
                        Err(StoreError::Failed { cause, .. }) if cause.kind() == FailureKind::Refused => {
                            return Ok(Pinned::Refused);
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
            // The manifest and its fates may have been deleted, so that the pin has no effect.
            return match self.read_manifest(manifest).await {
                Ok(_) => Ok(Pinned::Yes),
                Err(StoreError::Missing { .. }) => Ok(Pinned::Gone),
                Err(error) => Err(error),
            };
        }
        Err(self.contended(manifest))
    }

    /// Deletes a manifest unless it is pinned. `known` contains its fates according to a listing.
    /// Returns true if the manifest is deleted.
    pub async fn condemn(
        &self,
        manifest: ManifestName,
        known: &[FateName],
        now_unix_ms: u64,
    ) -> Result<bool, StoreError> {
        let mut known = Some(known.iter().map(|fate| fate.turn).collect());
        for _ in 0..MAX_ROUNDS {
            let last = self.last_fate(manifest, known.take()).await?;
            let turn = match last.map(|last| (last.turn, last.fate)) {
                Some((turn, Fate::Condemned)) => turn,
                Some((_, Fate::Pinned { until_unix_ms })) if until_unix_ms > now_unix_ms => return Ok(false),
                last => {
                    let turn = last.map_or(0, |(turn, _)| turn + 1);
                    if !self.decide(manifest, turn, Fate::Condemned).await? {
                        continue;
                    }
                    turn
                }
            };
            self.delete_manifest(manifest).await?;
            self.delete_fates(manifest, turn).await?;
            return Ok(true);
        }
        Err(self.contended(manifest))
    }

    /// Returns true if a manifest with these fates was condemned but not yet deleted.
    pub async fn is_condemned(&self, fates: &[FateName]) -> Result<bool, StoreError> {
        let Some(last) = fates.last() else { return Ok(false) };
        Ok(self.read_fate(*last).await?.is_some_and(|last| last.fate == Fate::Condemned))
    }

    /// Deletes the fates of a manifest that does not exist, unless a process that has pinned it may
    /// not have noticed that yet.
    pub async fn forget_fates(&self, fates: &[FateName], now_unix_ms: u64) -> Result<(), StoreError> {
        let Some(last) = fates.last() else { return Ok(()) };
        let is_expired = match self.read_fate(*last).await?.map(|last| last.fate) {
            Some(Fate::Pinned { until_unix_ms }) => until_unix_ms <= now_unix_ms,
            Some(Fate::Condemned) | None => true,
        };
        match is_expired {
            true => self.delete_fates(last.manifest, last.turn).await,
            false => Ok(()),
        }
    }

    /// Deletes a fate. Succeeds if it does not exist. Only allowed after its manifest and all later
    /// turns have been deleted.
    pub async fn delete_fate(&self, name: FateName) -> Result<(), StoreError> {
        self.delete(&name.object()).await
    }

    /// Checks that a fate is not damaged.
    pub async fn verify_fate(&self, name: FateName) -> Result<(), StoreError> {
        self.read_fate(name).await.map(drop)
    }

    /// Deletes all turns up to `last`, the last one first, so that the remaining ones have no gap.
    async fn delete_fates(&self, manifest: ManifestName, last: u32) -> Result<(), StoreError> {
        for turn in (0..=last).rev() {
            self.delete_fate(FateName { manifest, turn }).await?;
        }
        Ok(())
    }

    /// Puts a decision. Returns false if another process has taken the turn.
    async fn decide(&self, manifest: ManifestName, turn: u32, fate: Fate) -> Result<bool, StoreError> {
        let ManifestName { partition, epoch, number } = manifest;
        let stored = StoredFate { partition, epoch, number, turn, by: rand::random(), fate };
        match self.put(&FateName { manifest, turn }.object(), stored.encode().into()).await {
            Ok(()) => Ok(true),
            Err(StoreError::Exists { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Reads the last decision on a manifest, out of `turns` or of the existing ones.
    async fn last_fate(
        &self,
        manifest: ManifestName,
        turns: Option<Vec<u32>>,
    ) -> Result<Option<StoredFate>, StoreError> {
        let turns = match turns {
            Some(turns) => turns,
            None => self.turns(manifest).await?,
        };
        match turns.last() {
            Some(turn) => self.read_fate(FateName { manifest, turn: *turn }).await,
            None => Ok(None),
        }
    }

    async fn turns(&self, manifest: ManifestName) -> Result<Vec<u32>, StoreError> {
        // The listing starts after the manifests, of which there may be many. Few objects follow.
        let listed = self.list_after(Some(manifest.partition), Some(fates_of(manifest))).await?;
        let of = listed.fates.iter().filter(|fate| fate.manifest == manifest);
        Ok(of.map(|fate| fate.turn).collect())
    }

    /// Reads a decision, if it exists.
    async fn read_fate(&self, name: FateName) -> Result<Option<StoredFate>, StoreError> {
        let object = name.object();
        let bytes = match self.get(&object, Span::Whole).await {
            Ok(piece) => piece.bytes,
            Err(StoreError::Missing { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let fate = StoredFate::decode(&bytes).map_err(|cause| self.damaged_at(&object, 0, cause))?;
        let ManifestName { partition, epoch, number } = name.manifest;
        match (fate.partition, fate.epoch, fate.number, fate.turn) == (partition, epoch, number, name.turn) {
            true => Ok(Some(fate)),
            false => Err(StoreError::Misnamed { object, store: self.store.to_string() }),
        }
    }

    fn contended(&self, manifest: ManifestName) -> StoreError {
        let object = FateName { manifest, turn: 0 }.object();
        StoreError::Contended { object, store: self.store.to_string() }
    }
}
