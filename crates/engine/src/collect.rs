//! Collection: manifests that have had their time, and then segments that nothing names, are deleted; and of the lists of hot
//! pages ([`crate::hot`]) all but the newest of each partition. It also names the newest manifests of partitions that are at rest once more
//! ([`fulmar_store`]'s `objects/anchors`).
//!
//! ```text
//!   which segments are there? -> whoever has one that nothing names yet comes to his end ([`crate::node::Naming`])
//!     -> which manifests are there? -> is the store still ours ([`crate::tenure`])? -> old manifests are condemned, and go
//!     ([`crate::history`]) -> what do the others name, and who reads what? -> the rest goes
//! ```
//!
//! It takes no lock that a commit or a flush waits for.
//!
//! # Why nothing is deleted that is needed
//! A segment is deleted if it was there in the beginning and nothing names it later, so it was named by then or will
//! never be by who stored it. Somebody else can name it only out of a manifest that does: a flush out of the newest of its
//! partition, which is never deleted; a branch or restore out of any, but then [`crate::node::Node::past`] is held from
//! the reading of that manifest to the storing of the new one, so the old one was deleted before, or the new one is
//! found. Who looks at the past ([`crate::past`]) holds it too, until what he reads is found among what is in use. A manifest
//! that is gone when it is to be read (its tenant was dropped) may have been branched in the meantime: all are listed anew.
//!
//! # Other processes
//! Only the owner of the store collects. When he has listed what there is, and knows what only logs name, he makes sure that the store is
//! still his: so of all that was listed he knew who needs it. What he then deletes, however long that takes, and whoever has taken the
//! store over meanwhile, stays garbage, since whoever comes later can name a segment only out of a manifest that names it, or one that
//! he has stored himself:
//! - A manifest that is to go is *condemned* first, if nobody has *pinned* it ([`fulmar_store`]'s `objects/fates`): whoever wants to read it
//!   beside its owner, or to make a branch of it, finds that out.
//! - Who makes a branch of a manifest looks, when the branch is stored, whether the manifest is still there. What names segments is
//!   listed after the last manifest was deleted: so it finds the branch, or the manifest.
//! - Segments of earlier terms stay until their processes are gone: a flush may be about to name one.
//!
//! # A damaged log in the store
//! A log that was refused at the start ([`crate::places`]) may name segments of large commits that no manifest names yet. The
//! operator can restore its damaged object, and the next start then needs these segments. So no segment is deleted in a process
//! that has refused the log. Manifests are deleted as usual: the records of a log continue from the newest one, which stays.
//!
//! # Damaged fates and manifests
//! A fate that cannot be read keeps its manifest, and a warning says so. As long as there is a manifest that cannot be read no segment is
//! deleted: what it names nobody knows. A warning says each time which it is, whose, and what to do.
//!
//! # Crashes
//! Manifests go before the segments that only they name: who dies in between leaves segments that nothing names,
//! and the next collection begins by looking which segments there are.

use std::collections::HashSet;
use std::time::Duration;

use fulmar_pages::{PartitionId, SegmentId};
use fulmar_store::{FateName, Listed, ManifestName, Store, StoreError};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt, TryStreamExt};
use hashbrown::HashMap;

use crate::branch::Era;
use crate::history;
use crate::marks::{Marks, together};
use crate::partition::store_error;
use crate::{Engine, Error, Result, sqlstate};

/// Bytes of segments written between two collections; where space is short they come at once.
const AFTER_BYTES: u64 = 256 << 20;
/// After so long they come anyway, and for the first time so long after the start: a crash may have left something.
const AFTER: Duration = Duration::from_secs(600);
const AFTER_START: Duration = Duration::from_secs(60);
/// Manifests that are deleted at the same time.
const AT_ONCE: usize = 16;
/// Manifests that are deleted while nobody else looks at the past.
const TOGETHER: usize = 256;

/// Partitions that a collection puts anchors of.
const MOST_ANCHORS: usize = 1000;
/// How often all manifests are listed, if some are gone each time.
const LISTINGS: usize = 20;

/// When to collect.
#[derive(Default)]
pub(crate) struct Schedule {
    /// Bytes of segments since the last collection.
    pub written_bytes: u64,
    /// A partition was dropped since.
    pub dropped: bool,
    /// When that was (monotonic milliseconds); none yet.
    last_ms: Option<u64>,
}

impl Schedule {
    /// Whether a collection is due. Then it counts as begun.
    pub(crate) fn take(&mut self, now_ms: u64, disk_is_low: bool) -> bool {
        let waited = match self.last_ms {
            None => now_ms > AFTER_START.as_millis() as u64,
            Some(last_ms) => now_ms.saturating_sub(last_ms) > AFTER.as_millis() as u64,
        };
        let something = self.written_bytes > 0 || self.dropped;
        let due = self.written_bytes > AFTER_BYTES || waited || (disk_is_low && something);
        if due {
            *self = Schedule { last_ms: Some(now_ms), ..Schedule::default() };
        }
        due
    }
}

/// Segments that were there in the beginning, sorted, and which of them are needed.
struct Segments {
    there: Vec<SegmentId>,
    needed: Vec<bool>,
}

impl Segments {
    fn new(mut there: Vec<SegmentId>) -> Self {
        there.sort_unstable();
        Segments { needed: vec![false; there.len()], there }
    }

    fn need(&mut self, segments: impl IntoIterator<Item = SegmentId>) {
        for segment in segments {
            if let Ok(at) = self.there.binary_search(&segment) {
                self.needed[at] = true;
            }
        }
    }

    fn unneeded(&self) -> impl Iterator<Item = SegmentId> {
        self.there.iter().zip(&self.needed).filter(|(_, needed)| !**needed).map(|(segment, _)| *segment)
    }
}

impl Engine {
    /// Deletes what nobody needs any more.
    pub(crate) fn delete_unneeded<'a>(&'a self, marks: &'a mut Marks) -> BoxFuture<'a, Result<()>> {
        async move {
            let (node, store) = (self.node(), &self.node().store);
            let mut segments = Segments::new(store.list_segments().await.map_err(store_error)?);
            // Before any manifest is listed: of what is above them nothing is believed, even if a restore comes to its end meanwhile.
            let eras = self.eras();
            let is_begun = |name: &ManifestName| name.epoch <= epoch_in(&eras, name.partition);
            node.naming.settled().await;
            let listed = store.list_partitions(None).await.map_err(store_error)?;
            // Of what nothing names but a log: known while the store is known to be ours.
            segments.need(self.segments_in_use());
            self.check_term().await?;
            self.delete_old_hot_pages(&listed).await?;
            self.anchor_those_at_rest(&listed, &is_begun).await?;
            self.delete_old_manifests(&listed, marks, &is_begun).await?;
            if self.places.check().is_err() {
                // Segments that only the refused log names are in none of the sets above.
                return Ok(());
            }
            segments.need(self.segments_in_use());
            self.need_named_segments(marks, &mut segments, &is_begun).await?;
            let now_ms = node.clock.monotonic_ms();
            let may_delete =
                |segment| node.tenure.as_ref().is_none_or(|tenure| tenure.may_delete(segment, now_ms));
            for segment in segments.unneeded().filter(|segment| may_delete(*segment)) {
                store.delete_segment(segment).await.map_err(store_error)?;
            }
            Ok(())
        }
        .boxed()
    }

    async fn delete_old_manifests(
        &self,
        listed: &Listed,
        marks: &mut Marks,
        is_begun: &(impl Fn(&ManifestName) -> bool + Sync),
    ) -> Result<()> {
        let (node, store) = (self.node(), &self.node().store);
        let condemned = self.condemned(listed).await?;
        // If history lies on the disk that is nearly full: below the data directory.
        let sparsely = node.disk.is_low() && node.tenure.is_none() && store.store().directory().is_some();
        let mut thinned = 0;
        for several in together(&listed.manifests) {
            // What is missing, or damaged, is looked for once more behind this.
            marks.learn(store, several).await?;
            for names in several.chunk_by(|a, b| a.partition == b.partition) {
                let (now_ms, retention) = (node.clock.unix_ms(), (self.retention)(names[0].partition));
                let begun = &names[..names.partition_point(is_begun)];
                let points = marks.points(begun);
                let over = |sparsely| history::over(&points, now_ms, retention, sparsely);
                let mut old = over(sparsely);
                if sparsely {
                    thinned += old.len() - over(false).len();
                }
                old.extend(begun.iter().rev().skip(1).filter(|name| condemned.contains(*name)));
                marks.forget(&names[begun.len()..]);
                // Where nothing has begun the catalog is older than the store.
                if !begun.is_empty() && begun.len() < names.len() {
                    self.condemn_unbegun(&names[begun.len()..], listed).await?;
                }
                if names.len() > 1 {
                    // What was condemned may be over by itself.
                    old.sort_unstable();
                    old.dedup();
                    marks.forget(&old);
                    self.condemn_all(&old, listed).await?;
                }
            }
            marks.make_room(several);
        }
        if thinned > 0 {
            tracing::warn!(
                manifests = thinned,
                "the disk is nearly full: restore points that are older than an hour have been thinned"
            );
        }
        self.forget_fates(listed).await
    }

    /// Deletes a partition's manifests of restores that did not come to their end. These are of an epoch that had not begun when they were listed.
    async fn condemn_unbegun(&self, names: &[ManifestName], listed: &Listed) -> Result<()> {
        let _past = self.node().past.write().await;
        // No restore is going on now; one that has come to its end meanwhile has begun its epoch, if it is known how it has ended.
        let id = names[0].partition;
        let epoch = if self.is_undecided(id) { u32::MAX } else { self.era(id).epoch };
        for name in names.iter().filter(|name| name.epoch > epoch) {
            self.condemn(*name, fates_of(listed, *name)).await?;
        }
        Ok(())
    }

    /// Deletes manifests that have had their time, if they are not pinned. Others may look at the past in between: they may be many.
    async fn condemn_all(&self, names: &[ManifestName], listed: &Listed) -> Result<()> {
        for several in names.chunks(TOGETHER) {
            let _past = self.node().past.write().await;
            let condemning = several.iter().map(|name| self.condemn(*name, fates_of(listed, *name)));
            let condemning = stream::iter(condemning.collect::<Vec<_>>()).buffer_unordered(AT_ONCE);
            condemning.try_collect::<()>().await?;
        }
        Ok(())
    }

    /// Deletes a manifest, if it is not pinned. What cannot be told keeps it.
    async fn condemn(&self, manifest: ManifestName, fates: &[FateName]) -> Result<()> {
        let (node, store) = (self.node(), &self.node().store);
        unless_damaged(store.condemn(manifest, fates, node.clock.unix_ms()).await.map(drop))
    }

    /// Manifests that somebody has condemned who did not come to delete them.
    async fn condemned(&self, listed: &Listed) -> Result<HashSet<ManifestName>> {
        let mut condemned = HashSet::new();
        for fates in listed.fates.chunk_by(|a, b| a.manifest == b.manifest) {
            let is_condemned = self.node().store.is_condemned(fates).await;
            unless_damaged(is_condemned.map(|is_condemned| {
                condemned.extend(is_condemned.then_some(fates[0].manifest));
            }))?;
        }
        Ok(condemned)
    }

    /// Fates whose manifest has gone without them: a crash has come between.
    async fn forget_fates(&self, listed: &Listed) -> Result<()> {
        let (node, store) = (self.node(), &self.node().store);
        for fates in listed.fates.chunk_by(|a, b| a.manifest == b.manifest) {
            if listed.manifests.binary_search(&fates[0].manifest).is_err() {
                unless_damaged(store.forget_fates(fates, node.clock.unix_ms()).await)?;
            }
        }
        Ok(())
    }

    /// Lists of hot pages that no partition will open with: there is a newer one, or a newer epoch, or no such partition any
    /// more. One that has a list has a manifest, and had it before.
    async fn delete_old_hot_pages(&self, listed: &Listed) -> Result<()> {
        for lists in listed.hot_pages.chunk_by(|a, b| a.partition == b.partition) {
            let id = lists[0].partition;
            let exists = listed.manifests.binary_search_by_key(&id, |name| name.partition).is_ok();
            let epoch = self.era(id).epoch;
            let newest = lists.iter().rfind(|list| list.epoch == epoch).filter(|_| exists);
            for list in lists.iter().filter(|list| Some(*list) != newest) {
                self.node().store.delete_hot_pages(*list).await.map_err(store_error)?;
            }
        }
        Ok(())
    }

    /// Names the newest manifests of partitions that are closed, and so need no log, so that they are missed if they are gone, as far as that
    /// was not done when they were closed. A few at a time: that of thousands takes some collections. Anchors of older ones go, and those that
    /// have come after their partition was dropped.
    async fn anchor_those_at_rest(
        &self,
        listed: &Listed,
        is_begun: &(impl Fn(&ManifestName) -> bool + Sync),
    ) -> Result<()> {
        let store = &self.node().store;
        let is_dropped = |anchor: &&ManifestName| self.check_not_dropped(anchor.partition).is_err();
        for anchor in listed.anchors.iter().filter(is_dropped) {
            store.delete_anchor(*anchor).await.map_err(store_error)?;
        }
        let mut left = MOST_ANCHORS;
        for names in listed.manifests.chunk_by(|a, b| a.partition == b.partition) {
            let id = names[0].partition;
            let Some(newest) = names.iter().rfind(|name| is_begun(name)) else { continue };
            let anchors = listed.anchors_of(id);
            if anchors.last() != Some(newest) {
                if left == 0 || self.may_be_dirty(id) {
                    continue;
                }
                store.put_anchor(*newest).await.map_err(store_error)?;
                left -= 1;
            }
            for older in anchors.iter().filter(|anchor| *anchor < newest) {
                store.delete_anchor(*older).await.map_err(store_error)?;
            }
        }
        Ok(())
    }

    /// Segments of which somebody here reads pages, or that only records name.
    fn segments_in_use(&self) -> HashSet<SegmentId> {
        // In this order: a partition that is being opened is not yet in the one, or still in the other.
        let mut segments: HashSet<SegmentId> = self.unopened_segments().into_iter().collect();
        segments.extend(self.node().exported_segments());
        for partition in self.open_partitions().into_iter().chain(self.past.open()) {
            segments.extend(partition.frame_segments());
            segments.extend(partition.named_segments().iter().map(|named| named.segment.id));
        }
        segments
    }

    /// Finds all segments that manifests name.
    async fn need_named_segments(
        &self,
        marks: &mut Marks,
        segments: &mut Segments,
        is_begun: &(impl Fn(&ManifestName) -> bool + Sync),
    ) -> Result<()> {
        let store = &self.node().store;
        'listing: for _ in 0..LISTINGS {
            let names = store.list_manifests(None).await.map_err(store_error)?;
            marks.keep_only(&names);
            for several in together(&names) {
                let unlearned = marks.learn(store, several).await?;
                if let Some(damaged) = unlearned.damaged {
                    return Err(store_error(damaged));
                }
                if unlearned.missing {
                    continue 'listing;
                }
                for names in several.chunk_by(|a, b| a.partition == b.partition) {
                    segments.need(marks.segments(names[0].partition));
                    marks.forget(&names[names.partition_point(is_begun)..]);
                }
                marks.make_room(several);
            }
            return Ok(());
        }
        Err(Error::new(sqlstate::INTERNAL, "databases are dropped faster than what they leave is collected")
            .hint("it is tried again"))
    }
}

/// Where a partition stood.
fn epoch_in(eras: &HashMap<PartitionId, Era>, id: PartitionId) -> u32 {
    eras.get(&id).copied().unwrap_or(Era::first(id)).epoch
}

/// What was decided of a manifest, as far as it was listed.
fn fates_of(listed: &Listed, manifest: ManifestName) -> &[FateName] {
    let begin = listed.fates.partition_point(|fate| fate.manifest < manifest);
    let count = listed.fates[begin..].iter().take_while(|fate| fate.manifest == manifest).count();
    &listed.fates[begin..begin + count]
}

/// What is damaged keeps what it is about, and nobody else from being tidied.
fn unless_damaged(result: std::result::Result<(), StoreError>) -> Result<()> {
    match result {
        Err(error @ (StoreError::Damaged { .. } | StoreError::Misnamed { .. })) => {
            let partition = error.partition().map(tracing::field::display);
            tracing::warn!(%error, partition, "a manifest is kept: what was decided of it cannot be read");
            Ok(())
        }
        result => result.map_err(store_error),
    }
}
