//! Statistics per statement: `fulmar.statements` and `fulmar.slow_statements`.
//!
//! ```text
//! run_plan --> note of the prepared statement --> StatementEntry: 3 to 5 relaxed additions
//!                 | unset, or its entry was evicted
//!                 v
//!              normalize, hash --> StatementTable of the tenant
//! ```
//!
//! Statements that differ only in their constants have one entry ([`normalize`]). The engine caches
//! prepared statements by their text and shares them between sessions, so the text is normalized
//! once, and executions take no lock. A text with constants that is executed once costs one pass of
//! the lexer and one map access.
//!
//! # Limits
//! A tenant has up to [`MAX_ENTRIES`] entries, a node up to [`MAX_NODE_BYTES`] of them. Beyond that the
//! least used entries are evicted: those with the fewest executions, where earlier ones count less with
//! every eviction.

mod normalize;
mod slow;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hashbrown::HashMap;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use self::normalize::normalize;
pub(crate) use self::slow::SlowStatements;

/// Maximum number of entries of a tenant.
const MAX_ENTRIES: usize = 500;
/// Maximum memory of the entries of all tenants.
pub(crate) const MAX_NODE_BYTES: u64 = 8 << 20;
/// An eviction removes this share of a table's entries.
const EVICTED_SHARE: usize = 16;
/// The weight of earlier executions at an eviction.
const DECAY: f64 = 0.9;

/// What a node has counted of statements.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StatementReport {
    /// The statistics of statements.
    pub statements: Vec<StatementCounts>,
    /// The newest slow statements, oldest first.
    pub slow: Vec<SlowStatement>,
}

/// The statistics of the statements with one normalized text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StatementCounts {
    /// The partition.
    pub partition: u64,
    /// The hash of the text.
    pub fingerprint: u64,
    /// The normalized text.
    pub text: String,
    /// Number of executions.
    pub calls: u64,
    /// Total execution time, in microseconds.
    pub time_us: u64,
    /// The longest execution time, in microseconds.
    pub max_us: u64,
    /// Number of rows.
    pub rows: u64,
    /// Number of executions that failed.
    pub errors: u64,
}

/// A slow statement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlowStatement {
    /// The partition.
    pub partition: u64,
    /// When it ended, in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// The user.
    pub user: String,
    /// Its execution time, in microseconds.
    pub time_us: u64,
    /// Number of rows.
    pub rows: u64,
    /// The error, if it failed.
    pub sqlstate: Option<String>,
    /// The hash of the text.
    pub fingerprint: u64,
    /// The normalized text.
    pub text: String,
}

/// The normalized text of a statement, and its hash.
pub(crate) fn identify(sql: &str) -> (u64, String) {
    let text = normalize(sql);
    (xxh3_64(text.as_bytes()), text)
}

/// The counters of the statements with one normalized text.
pub(crate) struct StatementEntry {
    fingerprint: u64,
    text: Box<str>,
    /// It is in its table.
    is_kept: AtomicBool,
    calls: AtomicU64,
    time_us: AtomicU64,
    max_us: AtomicU64,
    rows: AtomicU64,
    errors: AtomicU64,
}

impl StatementEntry {
    fn new(fingerprint: u64, text: &str) -> StatementEntry {
        StatementEntry {
            fingerprint,
            text: text.into(),
            is_kept: AtomicBool::new(true),
            calls: AtomicU64::new(0),
            time_us: AtomicU64::new(0),
            max_us: AtomicU64::new(0),
            rows: AtomicU64::new(0),
            errors: AtomicU64::new(0),
        }
    }

    /// Returns false if it was evicted: then its counters are not shown.
    pub(crate) fn is_kept(&self) -> bool {
        self.is_kept.load(Ordering::Relaxed)
    }

    /// Counts an execution.
    pub(crate) fn record(&self, time: Duration, rows: u64, is_error: bool) {
        let time_us = time.as_micros() as u64;
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.time_us.fetch_add(time_us, Ordering::Relaxed);
        if time_us > self.max_us.load(Ordering::Relaxed) {
            self.max_us.fetch_max(time_us, Ordering::Relaxed);
        }
        if rows > 0 {
            self.rows.fetch_add(rows, Ordering::Relaxed);
        }
        if is_error {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn counts(&self, partition: u64) -> StatementCounts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StatementCounts {
            partition,
            fingerprint: self.fingerprint,
            text: self.text.to_string(),
            calls: load(&self.calls),
            time_us: load(&self.time_us),
            max_us: load(&self.max_us),
            rows: load(&self.rows),
            errors: load(&self.errors),
        }
    }

    /// The memory that it takes, with its place in the table.
    fn bytes(&self) -> u64 {
        const FIXED_BYTES: usize = size_of::<StatementEntry>() + 2 * size_of::<(u64, Kept)>();
        (FIXED_BYTES + self.text.len()) as u64
    }
}

/// An entry in a table.
struct Kept {
    entry: Arc<StatementEntry>,
    /// Its calls at the last eviction.
    seen: u64,
    /// Its calls before that; earlier ones count less.
    score: f64,
}

type Entries = HashMap<u64, Kept>;

/// The entries of a tenant.
#[derive(Default)]
pub(crate) struct StatementTable {
    entries: Mutex<Entries>,
    /// The memory of the entries of all tenants.
    node_bytes: Arc<AtomicU64>,
}

impl StatementTable {
    /// Creates a table whose memory is added to `node_bytes`.
    pub(crate) fn new(node_bytes: Arc<AtomicU64>) -> StatementTable {
        StatementTable { entries: Mutex::default(), node_bytes }
    }

    /// The entry of a statement.
    pub(crate) fn entry(&self, sql: &str) -> Arc<StatementEntry> {
        let (fingerprint, text) = identify(sql);
        self.find(fingerprint, || Arc::new(StatementEntry::new(fingerprint, &text)))
    }

    /// The entry that replaces an evicted one: another one of the same text, or itself.
    pub(crate) fn keep_again(&self, evicted: &Arc<StatementEntry>) -> Arc<StatementEntry> {
        self.find(evicted.fingerprint, || {
            evicted.is_kept.store(true, Ordering::Relaxed);
            evicted.clone()
        })
    }

    fn find(&self, fingerprint: u64, create: impl FnOnce() -> Arc<StatementEntry>) -> Arc<StatementEntry> {
        let mut entries = self.entries.lock();
        if let Some(kept) = entries.get(&fingerprint) {
            return kept.entry.clone();
        }
        if entries.len() >= MAX_ENTRIES {
            self.evict_from(&mut entries);
        }
        let entry = create();
        self.node_bytes.fetch_add(entry.bytes(), Ordering::Relaxed);
        let seen = entry.calls.load(Ordering::Relaxed);
        entries.insert(fingerprint, Kept { entry: entry.clone(), seen, score: 0.0 });
        entry
    }

    /// Evicts the least used entries.
    pub(crate) fn evict(&self) {
        self.evict_from(&mut self.entries.lock());
    }

    fn evict_from(&self, entries: &mut Entries) {
        let mut scores = Vec::with_capacity(entries.len());
        for kept in entries.values_mut() {
            let calls = kept.entry.calls.load(Ordering::Relaxed);
            kept.score = kept.score * DECAY + calls.saturating_sub(kept.seen) as f64;
            kept.seen = calls;
            scores.push(kept.score);
        }
        let count = scores.len().div_ceil(EVICTED_SHARE);
        if count == 0 {
            return;
        }
        let (below, threshold, _) = scores.select_nth_unstable_by(count - 1, f64::total_cmp);
        let threshold = *threshold;
        // Of those with the score of the threshold, some are kept; of those below it none.
        let mut at_threshold = count - below.iter().filter(|score| **score < threshold).count();
        let mut bytes = 0;
        entries.retain(|_, kept| {
            if kept.score > threshold || kept.score == threshold && at_threshold == 0 {
                return true;
            }
            at_threshold -= usize::from(kept.score == threshold);
            kept.entry.is_kept.store(false, Ordering::Relaxed);
            bytes += kept.entry.bytes();
            false
        });
        if entries.capacity() > 4 * entries.len() {
            entries.shrink_to_fit();
        }
        self.node_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The statistics of all entries.
    pub(crate) fn counts(&self, partition: u64) -> Vec<StatementCounts> {
        self.entries.lock().values().map(|kept| kept.entry.counts(partition)).collect()
    }
}

impl Drop for StatementTable {
    fn drop(&mut self) {
        let bytes: u64 = self.entries.get_mut().values().map(|kept| kept.entry.bytes()).sum();
        self.node_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_micros(20);

    #[test]
    fn statements_with_other_constants_have_one_entry() {
        let table = StatementTable::default();
        table.entry("SELECT v FROM t WHERE id = 1").record(SHORT, 1, false);
        table.entry("SELECT v FROM t WHERE id = 'secret'").record(3 * SHORT, 2, false);
        table.entry("SELECT v FROM u WHERE id = 1").record(SHORT, 0, true);
        let mut counts = table.counts(7);
        counts.sort_by_key(|counts| counts.calls);
        let [one, two] = counts.as_slice() else { panic!("{counts:?}") };
        let expected = StatementCounts {
            partition: 7,
            fingerprint: two.fingerprint,
            text: "SELECT v FROM t WHERE id = ?".to_owned(),
            calls: 2,
            time_us: 80,
            max_us: 60,
            rows: 3,
            errors: 0,
        };
        assert_eq!(two, &expected);
        assert_eq!((one.calls, one.errors, &*one.text), (1, 1, "SELECT v FROM u WHERE id = ?"));
        assert_ne!(one.fingerprint, two.fingerprint);
    }

    #[test]
    fn least_used_entries_are_evicted() {
        let table = StatementTable::default();
        let sql = |number: usize| format!("SELECT a FROM t{number}");
        let used = table.entry(&sql(0));
        (0..10).for_each(|_| used.record(SHORT, 1, false));
        let first = table.entry(&sql(1));
        for number in 2..20 * MAX_ENTRIES {
            table.entry(&sql(number)).record(SHORT, 1, false);
            if number % 100 == 0 {
                used.record(SHORT, 1, false);
            }
        }
        let counts = table.counts(1);
        assert!(counts.len() <= MAX_ENTRIES && counts.len() > MAX_ENTRIES / 2, "{}", counts.len());
        assert!(used.is_kept() && !first.is_kept());
        assert!(counts.iter().any(|counts| counts.fingerprint == used.fingerprint && counts.calls > 100));
        // The prepared statement still has the evicted entry.
        assert!(Arc::ptr_eq(&table.keep_again(&first), &first) && first.is_kept());
        assert!(Arc::ptr_eq(&table.entry(&sql(1)), &first));
    }

    #[test]
    fn evicted_entry_is_replaced_by_the_one_that_is_kept() {
        let table = StatementTable::default();
        let evicted = table.entry("SELECT 1");
        table.evict();
        assert!(!evicted.is_kept());
        let new = table.entry("SELECT 2");
        assert!(!Arc::ptr_eq(&new, &evicted));
        assert!(Arc::ptr_eq(&table.keep_again(&evicted), &new));
    }

    #[test]
    fn memory_is_counted_for_the_node() {
        let node_bytes = Arc::new(AtomicU64::new(0));
        let bytes = || node_bytes.load(Ordering::Relaxed);
        let table = StatementTable::new(node_bytes.clone());
        let text_bytes: usize =
            (0..100).map(|number| table.entry(&format!("SELECT c{number}")).text.len()).sum();
        assert!(bytes() > text_bytes as u64);
        let before = bytes();
        table.evict();
        assert!(bytes() < before);
        drop(table);
        assert_eq!(bytes(), 0);
    }
}
