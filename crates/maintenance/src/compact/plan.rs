//! Chooses the segments of a partition to merge.

use std::ops::Range;

use fulmar_mvcc::{NamedSegment, Partition};
use fulmar_pages::SegmentId;

/// A partition with more segments than this is written faster than paced compaction can follow, and
/// is compacted at full speed.
pub(super) const MAX_PACED_SEGMENTS: usize = 24;
/// Number of segments in a tier that triggers a merge, and the size ratio of tiers.
const TIER_FACTOR: u64 = 4;
/// Dead pages that are always tolerated.
const TOLERATED_DEAD_PAGES: u64 = 64;

/// Neighbouring segments to merge, oldest first.
pub(crate) struct Work {
    pub sources: Vec<NamedSegment>,
    /// Page count of the newest manifest. Pages above it are dead.
    pub page_count: u32,
    /// The partition has more segments than [`MAX_PACED_SEGMENTS`].
    pub crowded: bool,
    /// The merge copies segments of another node.
    pub is_pull: bool,
}

impl Work {
    /// Returns the merge that a partition needs, if any.
    pub(crate) fn of(partition: &Partition) -> Option<Work> {
        partition.with_named(Work::of_segments)
    }

    /// Returns the merge of all segments that are not in this node's store, and of those between them.
    pub(crate) fn of_missing(partition: &Partition, is_own: impl Fn(SegmentId) -> bool) -> Option<Work> {
        partition.with_named(|named, page_count| {
            let is_missing = |named: &NamedSegment| !is_own(named.segment.id);
            let (first, last) = (named.iter().position(is_missing)?, named.iter().rposition(is_missing)?);
            Some(Work { sources: named[first..=last].to_vec(), page_count, crowded: false, is_pull: true })
        })
    }

    fn of_segments(named: &[NamedSegment], page_count: u32) -> Option<Work> {
        let pages: Vec<u64> = named.iter().map(|segment| segment.pages).collect();
        let sources = named.get(plan(&pages, page_count)?)?.to_vec();
        Some(Work { sources, page_count, crowded: named.len() > MAX_PACED_SEGMENTS, is_pull: false })
    }
}

/// Returns the range of segments to merge, given their page counts, oldest first.
fn plan(pages: &[u64], page_count: u32) -> Option<Range<usize>> {
    let (all, alive): (u64, u64) = (pages.iter().sum(), page_count.into());
    if pages.len() > 1 && all > alive + alive / 4 * 3 + TOLERATED_DEAD_PAGES {
        return Some(0..pages.len());
    }
    let tier = |pages: &u64| pages.max(&1).ilog(TIER_FACTOR);
    let highest = pages.iter().map(tier).max()?;
    (0..=highest).find_map(|wanted| {
        let begin = pages.iter().rposition(|pages| tier(pages) > wanted).map_or(0, |larger| larger + 1);
        let like = pages[begin..].iter().filter(|pages| tier(pages) == wanted).count();
        (like >= TIER_FACTOR as usize).then_some(begin..pages.len())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_tier_are_merged() {
        assert_eq!(plan(&[], 0), None);
        assert_eq!(plan(&[25_000, 900, 700], 25_000), None);
        assert_eq!(plan(&[25_000, 700, 800, 900, 1000], 25_000), Some(1..5));
        assert_eq!(
            plan(&[25_000, 700, 3, 800, 900, 1000], 25_000),
            Some(1..6),
            "smaller segments in between are included"
        );
        assert_eq!(plan(&[25_000, 1, 1, 1], 25_000), None, "the large segment is in a higher tier");
        assert_eq!(plan(&[1, 2500, 2500, 2500, 2500], 10_001), Some(0..5));
    }

    #[test]
    fn all_segments_are_merged_when_many_pages_are_dead() {
        assert_eq!(plan(&[25_600, 25_600], 25_600), Some(0..2));
        assert_eq!(plan(&[25_600, 15_000], 25_600), None);
        assert_eq!(plan(&[25_600], 100), None, "a single segment is not rewritten");
        assert_eq!(plan(&[30, 30], 2), None);
    }

    /// A partition that grows by flushes of equal size: each page is copied a few times, and
    /// segments stay few.
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

    /// The same for a partition that is overwritten continuously.
    #[test]
    fn dead_pages_stay_bounded_under_overwrites() {
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
            assert!(named.iter().sum::<u64>() <= ALIVE * 7 / 4 + TOLERATED_DEAD_PAGES);
        }
        assert!(copied <= 5 * written, "{copied} of {written}");
    }
}
