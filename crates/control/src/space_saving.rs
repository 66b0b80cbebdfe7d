//! The most frequent items of a stream in bounded memory: SpaceSaving (Metwally, Agrawal and
//! El Abbadi, 2005).
//!
//! The sketch has a fixed number of counters. An item without a counter takes over the lowest one,
//! with its count, which is recorded as the item's error. For `n` items on `m` counters:
//!
//! - `count - error <= true count <= count` for each item that has a counter;
//! - `error <= n / m`;
//! - each item with a true count above `n / m` has a counter.
//!
//! The counters are a binary heap with the lowest count first, so an addition takes at most
//! `log2(m)` steps.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Counters of the most frequent items. Items are identified by a 64-bit hash.
#[derive(Debug)]
pub struct SpaceSaving<T> {
    capacity: usize,
    total: u64,
    heap: Vec<Entry<T>>,
    /// The place of each item's entry in the heap.
    places: HashMap<u64, usize, BuildHasherDefault<HashedKey>>,
}

#[derive(Debug)]
struct Entry<T> {
    id: u64,
    counter: Counter<T>,
}

/// The counter of an item.
#[derive(Clone, Debug, PartialEq)]
pub struct Counter<T> {
    /// The item.
    pub item: T,
    /// Upper bound of its count.
    pub count: u64,
    /// How much the count may be too high.
    pub error: u64,
}

/// Keys are hashes already.
#[derive(Default)]
struct HashedKey(u64);

impl Hasher for HashedKey {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

impl<T> SpaceSaving<T> {
    /// An empty sketch with this number of counters, at least 1. Their memory is allocated as items
    /// are added.
    pub fn new(capacity: usize) -> SpaceSaving<T> {
        SpaceSaving { capacity: capacity.max(1), total: 0, heap: Vec::new(), places: HashMap::default() }
    }

    /// Counts an item with the hash `id`. `item` is called if it has no counter yet.
    pub fn add(&mut self, id: u64, item: impl FnOnce() -> T) {
        self.total += 1;
        if let Some(place) = self.places.get(&id).copied() {
            self.heap[place].counter.count += 1;
            self.sift_down(place);
        } else if self.heap.len() < self.capacity {
            self.heap.push(Entry { id, counter: Counter { item: item(), count: 1, error: 0 } });
            self.places.insert(id, self.heap.len() - 1);
            self.sift_up(self.heap.len() - 1);
        } else {
            let lowest = self.heap[0].counter.count;
            let counter = Counter { item: item(), count: lowest + 1, error: lowest };
            let replaced = std::mem::replace(&mut self.heap[0], Entry { id, counter });
            self.places.remove(&replaced.id);
            self.places.insert(id, 0);
            self.sift_down(0);
        }
    }

    /// The number of items added.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The counters, in no order.
    pub fn counters(&self) -> impl Iterator<Item = &Counter<T>> {
        self.heap.iter().map(|entry| &entry.counter)
    }

    /// The counters, highest first.
    pub fn into_sorted(self) -> Vec<Counter<T>> {
        let mut counters: Vec<Counter<T>> = self.heap.into_iter().map(|entry| entry.counter).collect();
        counters.sort_unstable_by_key(|counter| Reverse(counter.count));
        counters
    }

    fn count_at(&self, place: usize) -> u64 {
        self.heap[place].counter.count
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        for place in [a, b] {
            self.places.insert(self.heap[place].id, place);
        }
    }

    fn sift_up(&mut self, mut place: usize) {
        while place > 0 {
            let parent = (place - 1) / 2;
            if self.count_at(parent) <= self.count_at(place) {
                return;
            }
            self.swap(parent, place);
            place = parent;
        }
    }

    fn sift_down(&mut self, mut place: usize) {
        loop {
            let left = 2 * place + 1;
            let children = left..(left + 2).min(self.heap.len());
            let Some(lower) = children.min_by_key(|child| self.count_at(*child)) else { return };
            if self.count_at(lower) >= self.count_at(place) {
                return;
            }
            self.swap(place, lower);
            place = lower;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hash(item: u32) -> u64 {
        u64::from(item).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }

    /// The sketch of a stream, and the true counts.
    fn count(stream: &[u32], capacity: usize) -> (SpaceSaving<u32>, HashMap<u32, u64>) {
        let mut sketch = SpaceSaving::new(capacity);
        let mut exact = HashMap::new();
        for item in stream {
            sketch.add(hash(*item), || *item);
            *exact.entry(*item).or_default() += 1;
        }
        (sketch, exact)
    }

    #[test]
    fn counts_are_exact_if_all_items_have_a_counter() {
        let (sketch, _) = count(&[1, 2, 1, 3, 1, 2], 3);
        assert_eq!(sketch.total(), 6);
        let counters = sketch.into_sorted();
        let found: Vec<_> = counters.iter().map(|c| (c.item, c.count, c.error)).collect();
        assert_eq!(found, [(1, 3, 0), (2, 2, 0), (3, 1, 0)]);
    }

    #[test]
    fn an_item_takes_over_the_lowest_counter_with_its_count_as_error() {
        let (sketch, _) = count(&[1, 1, 1, 2, 2, 3], 2);
        let found: Vec<_> = sketch.into_sorted().iter().map(|c| (c.item, c.count, c.error)).collect();
        assert_eq!(found.len(), 2);
        assert!(found.contains(&(1, 3, 0)) && found.contains(&(3, 3, 2)), "{found:?}");
    }

    proptest! {
        #[test]
        fn errors_are_within_the_bound(
            // Squares make low numbers frequent.
            stream in prop::collection::vec((0u32..30).prop_map(|root| root * root / 20), 0..600),
            capacity in 1usize..25,
        ) {
            let (sketch, exact) = count(&stream, capacity);
            let bound = sketch.total() / capacity as u64;
            prop_assert_eq!(sketch.total(), stream.len() as u64);
            prop_assert_eq!(sketch.counters().map(|counter| counter.count).sum::<u64>(), sketch.total());
            let counters = sketch.into_sorted();
            prop_assert!(counters.len() <= capacity);
            prop_assert!(counters.is_sorted_by(|a, b| a.count >= b.count));
            for Counter { item, count, error } in &counters {
                let exact = exact[item];
                prop_assert!(count - error <= exact && exact <= *count, "{item}: {exact}, {count}, {error}");
                prop_assert!(*error <= bound, "{item}: {error}, {bound}");
            }
            for (item, exact) in exact {
                let is_counted = counters.iter().any(|counter| counter.item == item);
                prop_assert!(is_counted || exact <= bound, "{item}: {exact}, {bound}");
            }
        }
    }
}
