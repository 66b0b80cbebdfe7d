//! Compaction: a partition's segments are merged, so that they stay few and hold little that is dead.
//!
//! ```text
//!   named, the oldest first     [ 25,000 ] [ 900 ] [ 700 ] [ 800 ] [ 1,100 ]        pages
//!                                           '--------- like size ---------'
//!   merged                      [ 25,000 ] [ 2,400 ]                                 what was overwritten is gone
//! ```
//!
//! Segments are of one tier if their pages are within a factor of four of each other. When the newest four (or more, with what
//! is smaller among them) are of one tier, they become one: so a page is copied once for each tier that it climbs, a
//! logarithm of what there is, and a partition has at most three segments of a tier. When what is dead comes to three
//! quarters of what is alive, all become one: that copies no more than was written meanwhile.
//!
//! Only neighbours are merged, since later ones override earlier ones. Frames are copied from the store to the store as they
//! are, checked against their checksums and neither decompressed nor brought into the cache.
//!
//! # It holds up nobody
//! One partition is compacted at a time, by a task of its own ([`crate::maintenance`]), within a budget of bytes and of processor
//! time ([`crate::pace`]), unless the partition has become crowded ([`CROWD`]). Reading and writing take no lock. Meanwhile
//! flushes go on: they add to the end of what is named, and nothing but compaction and a restore takes anything away from it. So what was merged still stands there side by side, and is replaced by the merged
//! segment, in the partition's memory, by who holds the flushes' lock; the next manifest, written at once, has the
//! one and what was flushed meanwhile. Nothing that a flush has named is lost, since that manifest is made of the same
//! list. Where a restore has come first the partition is closed, and the merged segment is garbage.
//!
//! When that manifest is durable, the partition's frames are moved to the merged segment, so that what was merged can go though the
//! partition stays open.
//!
//! # Crashes
//! Before the manifest the merged segment is garbage; from it on the others are history.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;

use fulmar_pages::manifest::SegmentRef;
use fulmar_pages::segment::SegmentBuilder;
use fulmar_pages::{FrameLocation, PageNo, SegmentId};
use fulmar_store::{RawFrame, SegmentWriter, failpoint};
use futures::FutureExt;
use futures::future::{BoxFuture, try_join_all};

use crate::flush;
use crate::pace::{Pace, measured};
use crate::partition::{CopiedFrame, NamedSegment, Partition, store_error};
use crate::store::Frame;
use crate::{Engine, Result};

/// Beyond so many segments a partition is written faster than that, and is compacted as fast as it goes.
const CROWD: usize = 24;
/// Pages that are copied at once.
const PIECE_PAGES: usize = 256;
/// So many segments of a tier become one.
const FACTOR: u64 = 4;
/// Dead pages that are not worth a thought.
const SLACK_PAGES: u64 = 64;

/// Segments to merge: neighbours, the oldest first.
pub(crate) struct Work {
    pub sources: Vec<NamedSegment>,
    /// Pages that the partition had at the newest manifest: what is above is dead.
    pub page_count: u32,
    /// The partition has more segments than it should.
    pub crowded: bool,
}

impl Work {
    /// What there is to do for a partition of which these segments are named.
    pub(crate) fn of(named: &[NamedSegment], page_count: u32) -> Option<Work> {
        let pages: Vec<u64> = named.iter().map(|segment| segment.pages).collect();
        let sources = named.get(plan(&pages, page_count)?)?.to_vec();
        Some(Work { sources, page_count, crowded: named.len() > CROWD })
    }
}

/// Which of the segments with so many pages, the oldest first, are to be merged.
fn plan(pages: &[u64], page_count: u32) -> Option<Range<usize>> {
    let (all, alive): (u64, u64) = (pages.iter().sum(), page_count.into());
    if pages.len() > 1 && all > alive + alive / 4 * 3 + SLACK_PAGES {
        return Some(0..pages.len());
    }
    let tier = |pages: &u64| pages.max(&1).ilog(FACTOR);
    let highest = pages.iter().map(tier).max()?;
    (0..=highest).find_map(|wanted| {
        let begin = pages.iter().rposition(|pages| tier(pages) > wanted).map_or(0, |larger| larger + 1);
        let like = pages[begin..].iter().filter(|pages| tier(pages) == wanted).count();
        (like >= FACTOR as usize).then_some(begin..pages.len())
    })
}

impl Engine {
    /// Merges what a partition has too many of.
    pub(crate) fn compact<'a>(
        &'a self,
        partition: &'a Arc<Partition>,
        pace: &'a mut Pace,
    ) -> BoxFuture<'a, Result<()>> {
        pace.begin();
        let spent = pace.spent();
        let merging = async move {
            while let Some(work) = partition.compaction() {
                // Where space is short there is none for copies.
                if self.node().disk.is_low() || !self.merge(partition, &work, pace).await? {
                    break;
                }
                pace.rest(0, work.crowded).await;
            }
            Ok(())
        };
        measured(spent, merging).boxed()
    }

    /// Answers whether the partition is as it should be now, as far as this work goes.
    async fn merge(&self, partition: &Arc<Partition>, work: &Work, pace: &mut Pace) -> Result<bool> {
        let entries = self.newest_frames(work).await?;
        let mut writer = self.node().store.segment_writer().await.map_err(store_error)?;
        if !self.copy_frames(partition, work, &entries, &mut writer, pace).await? {
            return Ok(false);
        }
        let _unnamed = self.node().naming.enter();
        let id = writer.finish().await.map_err(store_error)?;
        failpoint::hit(failpoint::COMPACT_AFTER_SEGMENT);
        let segment = SegmentRef { id, partition: partition.id };
        let merged = NamedSegment { segment, pages: entries.len() as u64 };
        let settled = flush::settled(self).await;
        if partition.is_unsure() {
            self.check_term().await?;
        }
        flush::settle_unsure(self, partition).await??;
        if partition.is_closed() || !partition.replace_named(&work.sources, merged) {
            return Ok(false);
        }
        flush::name_anew(self, partition.clone()).await?;
        drop(settled);
        failpoint::hit(failpoint::COMPACT_AFTER_MANIFEST);
        self.move_frames(partition, work, &entries, id).await?;
        Ok(true)
    }

    /// Lets the partition read what was merged from where it is now.
    async fn move_frames(
        &self,
        partition: &Partition,
        work: &Work,
        entries: &[Entry],
        merged: SegmentId,
    ) -> Result<()> {
        let index = self.node().store.segment_index(merged).await.map_err(store_error)?;
        let to = partition.segment_number(merged);
        let sources = work.sources.iter().map(|source| partition.segment_number(source.segment.id));
        let sources: Vec<u32> = sources.collect();
        let copied = |(page, place, location): &Entry| {
            Some(CopiedFrame {
                page: *page,
                old: Frame { segment: *sources.get(*place)?, location: *location },
                new: Frame { segment: to, location: index.frame(partition.id, *page)? },
            })
        };
        for piece in entries.chunks(PIECE_PAGES) {
            partition.move_frames(piece.iter().filter_map(copied));
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Writes the frames, as a segment. Answers whether all are; if not it was given up, since the node stops or the partition
    /// is gone.
    async fn copy_frames(
        &self,
        partition: &Partition,
        work: &Work,
        entries: &[Entry],
        writer: &mut SegmentWriter,
        pace: &mut Pace,
    ) -> Result<bool> {
        let mut builder = SegmentBuilder::new(writer.buffer());
        for piece in entries.chunks(PIECE_PAGES) {
            if self.maintenance.task.is_stopping() || partition.is_closed() {
                return Ok(false);
            }
            self.node().disk.admit(true)?;
            let before = builder.bytes();
            let frames = self.read_piece(work, piece).await?;
            for ((no, ..), frame) in piece.iter().zip(frames) {
                let location = builder.push_frame(partition.id, *no, &frame.bytes, writer.buffer());
                // What the disk cache has is soon asked for by its new name.
                if frame.is_cached {
                    writer.keep(location);
                }
            }
            writer.flush().await.map_err(store_error)?;
            pace.rest(builder.bytes() - before, work.crowded).await;
        }
        self.maintenance.count_written(builder.bytes());
        builder.finish(writer.buffer());
        Ok(true)
    }

    /// Where the newest frame of each page lies that is alive, in order: page, place of its segment in `work`, location.
    async fn newest_frames(&self, work: &Work) -> Result<Vec<Entry>> {
        let store = &self.node().store;
        let indexes = work.sources.iter().map(|source| store.segment_index(source.segment.id));
        let indexes = try_join_all(indexes).await.map_err(store_error)?;
        let mut entries: Vec<Entry> = Vec::new();
        for (place, (source, index)) in work.sources.iter().zip(&indexes).enumerate() {
            let frames = index.frames(source.segment.partition);
            entries
                .extend(frames.take_while(|(no, _)| *no <= work.page_count).map(|(no, at)| (no, place, at)));
        }
        entries.sort_unstable_by_key(|(no, place, _)| (*no, Reverse(*place)));
        entries.dedup_by_key(|(no, ..)| *no);
        Ok(entries)
    }

    /// The frames of some pages, in their order.
    async fn read_piece(&self, work: &Work, piece: &[Entry]) -> Result<Vec<RawFrame>> {
        let of = |place: usize| {
            let entries = piece.iter().enumerate().filter(move |(_, entry)| entry.1 == place);
            entries
                .map(|(at, (.., location))| (at, *location))
                .unzip::<_, _, Vec<usize>, Vec<FrameLocation>>()
        };
        let reads = work.sources.iter().enumerate().map(async |(place, source)| {
            let (at, locations) = of(place);
            let frames = self.node().store.read_frames(source.segment.id, &locations).await?;
            Ok(at.into_iter().zip(frames))
        });
        let mut frames = vec![RawFrame::default(); piece.len()];
        for (at, frame) in try_join_all(reads).await.map_err(store_error)?.into_iter().flatten() {
            frames[at] = frame;
        }
        Ok(frames)
    }
}

/// A page, the place of its segment, and where it lies there.
type Entry = (PageNo, usize, FrameLocation);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn like_neighbours_are_merged() {
        assert_eq!(plan(&[], 0), None);
        assert_eq!(plan(&[25_000, 900, 700], 25_000), None);
        assert_eq!(plan(&[25_000, 700, 800, 900, 1000], 25_000), Some(1..5));
        assert_eq!(
            plan(&[25_000, 700, 3, 800, 900, 1000], 25_000),
            Some(1..6),
            "with what is small among them"
        );
        assert_eq!(plan(&[25_000, 1, 1, 1], 25_000), None, "the large one is none of them");
        assert_eq!(plan(&[1, 2500, 2500, 2500, 2500], 10_001), Some(0..5));
    }

    #[test]
    fn what_is_dead_is_not_kept() {
        assert_eq!(plan(&[25_600, 25_600], 25_600), Some(0..2));
        assert_eq!(plan(&[25_600, 15_000], 25_600), None);
        assert_eq!(plan(&[25_600], 100), None, "nothing to merge it with");
        assert_eq!(plan(&[30, 30], 2), None);
    }

    /// Of a partition that grows by flushes of one size each page is copied a few times, and segments stay few.
    #[test]
    fn copies_and_segments_grow_as_a_logarithm() {
        let (mut named, mut written, mut copied, mut most) = (Vec::new(), 0, 0, 0);
        for _ in 0..4096 {
            named.push(16);
            written += 16;
            while let Some(range) = plan(&named, written as u32) {
                let merged = named[range.clone()].iter().sum::<u64>();
                copied += merged;
                named.splice(range, [merged]);
            }
            most = most.max(named.len());
        }
        assert!(copied <= 6 * written, "{copied} of {written}");
        assert!(most <= 3 * 7, "{most}");
    }

    /// The same of one that is overwritten all the time.
    #[test]
    fn what_is_overwritten_takes_little_space() {
        const ALIVE: u64 = 10_000;
        let (mut named, mut written, mut copied) = (vec![ALIVE], 0, 0);
        for _ in 0..1000 {
            named.push(500);
            written += 500;
            while let Some(range) = plan(&named, ALIVE as u32) {
                let merged = named[range.clone()].iter().sum::<u64>().min(ALIVE);
                copied += merged;
                named.splice(range, [merged]);
            }
            assert!(named.iter().sum::<u64>() <= ALIVE * 7 / 4 + SLACK_PAGES);
        }
        assert!(copied <= 5 * written, "{copied} of {written}");
    }
}
