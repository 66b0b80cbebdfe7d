//! Who may use a manifest that is not the newest, and who may delete it: fates as objects,
//! `manifests/PARTITION/fate-EPOCH-NUMBER-TURN`, so that one listing finds them with the manifests.
//!
//! ```text
//!   turn 0   pinned until 12:30      a branch is made of it
//!   turn 1   pinned until 13:10      a reader beside the owner opens it
//!   turn 2   condemned               the collector, at 13:11; the manifest is deleted, and then its fates
//! ```
//!
//! The last turn counts, and each is created only if absent, so it is one's who decides: nobody condemns what is pinned (until the
//! pin's time is over), nobody pins what is condemned. Fates are deleted only behind their manifest, the first turn last: whoever pins a manifest
//! that is gone finds that out, since he looks for it afterwards.
//!
//! # Time
//! A pin's end is told by the clock of who pins, and judged by that of who condemns. So it is far away, and who needs the manifest
//! for longer pins it anew when a quarter of that is over; who makes something of it looks afterwards whether it is still there.

use std::time::Duration;

use fulmar_pages::PartitionId;
use fulmar_pages::fate::{Fate, StoredFate};

use super::{ManifestName, PageStore, StoreError, directory};
use crate::store::{FailureKind, Span};

const FATE: &str = "fate-";

/// How long a manifest is pinned.
const PIN: Duration = Duration::from_secs(4 * 3600);
/// Whoever still needs it then pins it anew.
pub const PIN_AGAIN: Duration = Duration::from_secs(3600);

/// Turns that others take meanwhile, before they are held to be in the way for good.
const MOST_ROUNDS: usize = 50;

/// Names a fate. In the order of a partition's manifests, and of each one's turns.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct FateName {
    /// Of which manifest.
    pub manifest: ManifestName,
    /// Which decision it is.
    pub turn: u32,
}

/// With what the names of a manifest's fates begin; they sort behind it.
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

    /// Whether an object of a store is one: what a process may put that only reads otherwise.
    pub fn is_one(object: &str) -> bool {
        FateName::parse(object).is_some()
    }
}

/// What came of pinning a manifest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pinned {
    /// It stays for longer than [`PIN_AGAIN`].
    Yes,
    /// It is condemned, or gone.
    Gone,
    /// This process may not write to the store.
    Refused,
}

impl PageStore {
    /// Keeps a manifest, and what it names, from being deleted for a while.
    pub async fn pin(&self, manifest: ManifestName, now_unix_ms: u64) -> Result<Pinned, StoreError> {
        let until_unix_ms = now_unix_ms.saturating_add(PIN.as_millis() as u64);
        // Another one's pin will do, too.
        let enough_ms = now_unix_ms.saturating_add(2 * PIN_AGAIN.as_millis() as u64);
        for _ in 0..MOST_ROUNDS {
            let last = self.last_fate(manifest, None).await?;
            match last.map(|last| last.fate) {
                Some(Fate::Condemned) => return Ok(Pinned::Gone),
                Some(Fate::Pinned { until_unix_ms }) if until_unix_ms >= enough_ms => {}
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
            // It may be that all of it is deleted by now, and the pin is one of nothing.
            return match self.read_manifest(manifest).await {
                Ok(_) => Ok(Pinned::Yes),
                Err(StoreError::Missing { .. }) => Ok(Pinned::Gone),
                Err(error) => Err(error),
            };
        }
        Err(self.contended(manifest))
    }

    /// Deletes a manifest, unless it is pinned. `known` are its fates as far as a listing has shown them. Answers whether it is gone.
    pub async fn condemn(
        &self,
        manifest: ManifestName,
        known: &[FateName],
        now_unix_ms: u64,
    ) -> Result<bool, StoreError> {
        let mut known = Some(known.iter().map(|fate| fate.turn).collect());
        for _ in 0..MOST_ROUNDS {
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

    /// Whether a manifest was condemned by somebody who has not come to delete it; `fates` are its.
    pub async fn is_condemned(&self, fates: &[FateName]) -> Result<bool, StoreError> {
        let Some(last) = fates.last() else { return Ok(false) };
        Ok(self.read_fate(*last).await?.is_some_and(|last| last.fate == Fate::Condemned))
    }

    /// Deletes the fates of a manifest that is not there, unless somebody may be about to find that out.
    pub async fn forget_fates(&self, fates: &[FateName], now_unix_ms: u64) -> Result<(), StoreError> {
        let Some(last) = fates.last() else { return Ok(()) };
        let is_over = match self.read_fate(*last).await?.map(|last| last.fate) {
            Some(Fate::Pinned { until_unix_ms }) => until_unix_ms <= now_unix_ms,
            Some(Fate::Condemned) | None => true,
        };
        match is_over {
            true => self.delete_fates(last.manifest, last.turn).await,
            false => Ok(()),
        }
    }

    /// Deletes a fate; no error if there is none. Only behind its manifest, and behind the turns after it.
    pub async fn delete_fate(&self, name: FateName) -> Result<(), StoreError> {
        self.delete(&name.object()).await
    }

    /// Checks that a fate is what was written.
    pub async fn verify_fate(&self, name: FateName) -> Result<(), StoreError> {
        self.read_fate(name).await.map(drop)
    }

    /// All up to this turn, the last one first, so that what is left has no gap.
    async fn delete_fates(&self, manifest: ManifestName, last: u32) -> Result<(), StoreError> {
        for turn in (0..=last).rev() {
            self.delete_fate(FateName { manifest, turn }).await?;
        }
        Ok(())
    }

    /// Whether it is decided so; `false` if somebody else has taken the turn.
    async fn decide(&self, manifest: ManifestName, turn: u32, fate: Fate) -> Result<bool, StoreError> {
        let ManifestName { partition, epoch, number } = manifest;
        let stored = StoredFate { partition, epoch, number, turn, by: rand::random(), fate };
        match self.put(&FateName { manifest, turn }.object(), stored.encode().into()).await {
            Ok(()) => Ok(true),
            Err(StoreError::Exists { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The last decision on a manifest, of these turns or of those that there are.
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
        // Behind those of other manifests: there may be many of these, and of what comes behind there is little.
        let listed = self.list_after(Some(manifest.partition), Some(fates_of(manifest))).await?;
        let of = listed.fates.iter().filter(|fate| fate.manifest == manifest);
        Ok(of.map(|fate| fate.turn).collect())
    }

    /// A decision, if it is there.
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
