//! What each mechanism copies before the handover. `flush` copies nothing.

use fulmar_engine::Result;
use fulmar_pages::{PAGE_SIZE, PageNo};
use hashbrown::HashSet;
use tokio::time::Instant;

use crate::pace::{Pace, Throttle};
use crate::prediction::Predictor;
use crate::report::{Prediction, Round};
use crate::{PageSource, Source, rounds};

/// Number of pages in a request to the destination.
const BATCH_PAGES: usize = 512;
/// Number of pages, the hottest first, that are sorted by page number before they are copied. The store
/// has adjacent pages next to each other, and the destination reads them with one request. Requests to
/// the store are most of a copy's cost.
const SORTED_PAGES: usize = 16 * BATCH_PAGES;

/// What was copied.
#[derive(Clone, Debug, Default)]
pub struct Copied {
    /// The rounds, oldest first.
    pub rounds: Vec<Round>,
    /// What was expected after the pages had been listed.
    pub prediction: Prediction,
}

impl Copied {
    /// The bytes of all rounds.
    pub fn bytes(&self) -> u64 {
        self.rounds.iter().map(|round| round.bytes).sum()
    }
}

/// Albatross (ElasTraS 6): the destination reads the pages that the source has cached, the hottest
/// [`SORTED_PAGES`] first, and then, in rounds, those that have changed or were cached meanwhile.
pub async fn albatross(source: &impl Source, throttle: &Throttle, predictor: Predictor) -> Result<Copied> {
    let mut copied = Copied::default();
    let mut pace = Pace::new(throttle);
    let mut sent: HashSet<PageNo> = HashSet::new();
    // The newest version in the store during the previous round.
    let mut stored = 0;
    while !rounds::are_enough(&copied.rounds) {
        let begun = Instant::now();
        let listed = source.flush_and_list().await?;
        let is_new = |page: PageNo, number: u64| number > stored || !sent.contains(&page);
        let pages = listed.pages.iter().filter(|cached| is_new(cached.page, cached.number));
        let mut pages: Vec<PageNo> = pages.map(|cached| cached.page).collect();
        pages.chunks_mut(SORTED_PAGES).for_each(<[PageNo]>::sort_unstable);
        if copied.rounds.is_empty() {
            let bytes = (pages.len() * PAGE_SIZE) as u64;
            copied.prediction = predictor.predict(bytes, throttle.max_bytes_per_s());
        }
        let mut round = Round { pages: pages.len() as u64, ..Round::default() };
        // Also without pages: the destination opens the newest version.
        let batches = pages.chunks(BATCH_PAGES).chain(pages.is_empty().then_some(&[][..]));
        for batch in batches {
            let bytes = source.warm(batch).await? * PAGE_SIZE as u64;
            round.bytes += bytes;
            pace.copied(bytes).await;
        }
        round.ms = begun.elapsed().as_millis() as u64;
        copied.rounds.push(round);
        source.round_ended(&copied.rounds).await;
        sent.extend(pages);
        stored = listed.stored;
    }
    Ok(copied)
}

/// ShuttleDB (3.1): the destination stores all pages, and then, in rounds, those that have changed
/// meanwhile. The pages that change after the last round are copied during the handover.
pub async fn live(source: &mut impl PageSource, throttle: &Throttle, predictor: Predictor) -> Result<Copied> {
    let mut copied = Copied::default();
    while !rounds::are_enough(&copied.rounds) {
        copy_round(source, &mut copied, throttle, predictor).await?;
    }
    Ok(copied)
}

/// One round of [`live`]; the only one of `bulk`.
pub async fn copy_round(
    source: &mut impl PageSource,
    copied: &mut Copied,
    throttle: &Throttle,
    predictor: Predictor,
) -> Result<()> {
    let begun = Instant::now();
    let mut pace = Pace::new(throttle);
    let mut round = Round { pages: source.begin_round().await?, ..Round::default() };
    if copied.rounds.is_empty() {
        let bytes = round.pages * PAGE_SIZE as u64;
        copied.prediction = predictor.predict(bytes, throttle.max_bytes_per_s());
    }
    while let Some(bytes) = source.send().await? {
        round.bytes += bytes;
        pace.copied(bytes).await;
    }
    round.ms = begun.elapsed().as_millis() as u64;
    copied.rounds.push(round);
    source.end_round(&copied.rounds).await
}

#[cfg(test)]
mod tests {
    use fulmar_engine::CachedPages;
    use parking_lot::Mutex;

    use super::*;
    use crate::prediction::Predictors;

    /// The stored version, and the cached pages with their versions.
    type Listing = (u64, Vec<(PageNo, u64)>);

    /// A source that changes some pages between two listings.
    struct Changing {
        listings: Mutex<Vec<Listing>>,
        warmed: Mutex<Vec<Vec<PageNo>>>,
        shown: Mutex<usize>,
    }

    impl Changing {
        fn new(mut listings: Vec<Listing>) -> Changing {
            listings.reverse();
            Changing { listings: Mutex::new(listings), warmed: Mutex::default(), shown: Mutex::default() }
        }
    }

    impl Source for Changing {
        async fn flush_and_list(&self) -> Result<CachedPages> {
            let (stored, pages) = self.listings.lock().pop().expect("one more round than expected");
            let pages =
                pages.into_iter().map(|(page, number)| fulmar_engine::CachedPage { page, number }).collect();
            Ok(CachedPages { stored, pages, page_count: 1 << 20 })
        }

        async fn warm(&self, pages: &[PageNo]) -> Result<u64> {
            self.warmed.lock().push(pages.to_vec());
            Ok(pages.len() as u64)
        }

        async fn round_ended(&self, rounds: &[Round]) {
            *self.shown.lock() = rounds.len();
        }
    }

    fn pages(range: std::ops::Range<PageNo>, number: u64) -> Vec<(PageNo, u64)> {
        range.map(|page| (page, number)).collect()
    }

    #[tokio::test]
    async fn later_rounds_copy_pages_that_changed_or_were_cached_meanwhile() {
        let all = pages(2..2002, 5);
        // Version 7 changed 100 pages; 20 others were cached.
        let second = [pages(2..102, 7), pages(102..2002, 5), pages(3000..3020, 4)].concat();
        // Version 9 changed one page.
        let third = [vec![(2, 9)], pages(3..102, 7), pages(102..2002, 5), pages(3000..3020, 4)].concat();
        let source = Changing::new(vec![(5, all), (8, second), (9, third)]);
        let copied =
            albatross(&source, &Throttle::new(None), Predictors::default().link(false)).await.unwrap();
        let counts: Vec<u64> = copied.rounds.iter().map(|round| round.pages).collect();
        assert_eq!(counts, [2000, 120, 1]);
        assert_eq!(*source.shown.lock(), 3);
        assert_eq!(copied.bytes(), 2121 * PAGE_SIZE as u64);
        assert_eq!(copied.prediction.bytes, 2000 * PAGE_SIZE as u64);
        let warmed = source.warmed.lock();
        assert_eq!(warmed.iter().map(Vec::len).collect::<Vec<_>>(), [512, 512, 512, 464, 120, 1]);
        assert_eq!(warmed.last().unwrap(), &[2]);
    }

    #[tokio::test]
    async fn destination_opens_a_partition_without_cached_pages() {
        let source = Changing::new(vec![(5, vec![])]);
        let copied =
            albatross(&source, &Throttle::new(None), Predictors::default().link(false)).await.unwrap();
        assert_eq!((copied.rounds.len(), source.warmed.lock().len()), (1, 1));
    }
}
