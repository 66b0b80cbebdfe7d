//! The statistics of a tenant's statements.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::StatementCounts;
use super::texts::{StatementText, StatementTexts};

/// Maximum number of statements of a tenant.
const MAX_ROWS: usize = 500;
/// An eviction removes this share of a table's rows.
const EVICTED_SHARE: usize = 16;
/// The weight of earlier executions at an eviction.
const DECAY: f32 = 0.9;

/// An execution of a statement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Execution {
    pub(crate) time: Duration,
    /// Number of rows.
    pub(crate) rows: u64,
    pub(crate) has_failed: bool,
}

/// The statistics of the statements with one text.
struct Row {
    fingerprint: u64,
    text: Arc<StatementText>,
    calls: u64,
    time_us: u64,
    rows: u64,
    errors: u32,
    max_us: u32,
    /// The calls since the last eviction.
    recent_calls: u32,
    /// Those before that; earlier ones count less.
    score: f32,
}

impl Row {
    /// What it takes, with space for growth.
    const BYTES: u64 = 2 * size_of::<Row>() as u64;

    fn new(text: Arc<StatementText>) -> Row {
        let fingerprint = text.fingerprint;
        let (errors, max_us, recent_calls, score) = (0, 0, 0, 0.0);
        Row { fingerprint, text, calls: 0, time_us: 0, rows: 0, errors, max_us, recent_calls, score }
    }

    fn add(&mut self, execution: Execution) {
        let time_us = execution.time.as_micros() as u64;
        self.calls += 1;
        self.time_us += time_us;
        self.rows += execution.rows;
        self.errors = self.errors.saturating_add(u32::from(execution.has_failed));
        self.max_us = self.max_us.max(u32::try_from(time_us).unwrap_or(u32::MAX));
        self.recent_calls = self.recent_calls.saturating_add(1);
    }

    fn counts(&self, partition: u64) -> StatementCounts {
        StatementCounts {
            partition,
            fingerprint: self.fingerprint,
            text: self.text.text.to_string(),
            calls: self.calls,
            time_us: self.time_us,
            max_us: u64::from(self.max_us),
            rows: self.rows,
            errors: u64::from(self.errors),
        }
    }
}

/// The statistics of a tenant's statements.
#[derive(Default)]
pub(crate) struct StatementTable {
    /// By fingerprint.
    rows: Mutex<Vec<Row>>,
    /// The texts of all tenants.
    texts: Arc<StatementTexts>,
}

impl StatementTable {
    /// Creates a table of statements with these texts.
    pub(crate) fn new(texts: Arc<StatementTexts>) -> StatementTable {
        StatementTable { rows: Mutex::default(), texts }
    }

    /// Counts an execution. Returns true if the statement was not in the table.
    pub(crate) fn add(&self, text: &Arc<StatementText>, execution: Execution) -> bool {
        let mut rows = self.rows.lock();
        let place = rows.binary_search_by_key(&text.fingerprint, |row| row.fingerprint);
        let index = match place {
            Ok(index) => index,
            Err(_) => self.insert(&mut rows, text.clone()),
        };
        rows[index].add(execution);
        place.is_err()
    }

    #[cold]
    fn insert(&self, rows: &mut Vec<Row>, text: Arc<StatementText>) -> usize {
        if rows.len() >= MAX_ROWS {
            self.evict_from(rows, 0);
        }
        if rows.len() == rows.capacity() {
            // Most tenants have few: one or two rows take no space for four.
            rows.reserve_exact(rows.len().max(1));
        }
        self.texts.add_row(Row::BYTES, &text);
        let index = rows.partition_point(|row| row.fingerprint < text.fingerprint);
        rows.insert(index, Row::new(text));
        index
    }

    /// Evicts the least used statements: a share of them. `turn` increases from one call to the next,
    /// so that of few statements one is evicted in some of the calls.
    pub(crate) fn evict(&self, turn: u64) {
        self.evict_from(&mut self.rows.lock(), turn as usize % EVICTED_SHARE);
    }

    /// `rest` is added to the number of rows before it is divided, and rounded down.
    fn evict_from(&self, rows: &mut Vec<Row>, rest: usize) {
        let mut scores = Vec::with_capacity(rows.len());
        for row in rows.iter_mut() {
            row.score = row.score * DECAY + row.recent_calls as f32;
            row.recent_calls = 0;
            scores.push(row.score);
        }
        let count = (scores.len() + rest) / EVICTED_SHARE;
        if count == 0 {
            return;
        }
        let (below, threshold, _) = scores.select_nth_unstable_by(count - 1, f32::total_cmp);
        let threshold = *threshold;
        // Of those with the score of the threshold, some are kept; of those below it none.
        let mut at_threshold = count - below.iter().filter(|score| **score < threshold).count();
        rows.retain(|row| {
            if row.score > threshold || row.score == threshold && at_threshold == 0 {
                return true;
            }
            at_threshold -= usize::from(row.score == threshold);
            self.texts.remove_row(Row::BYTES, &row.text);
            false
        });
        if rows.capacity() > 4 * rows.len() {
            rows.shrink_to_fit();
        }
    }

    /// The statistics of all statements.
    pub(crate) fn counts(&self, partition: u64) -> Vec<StatementCounts> {
        self.rows.lock().iter().map(|row| row.counts(partition)).collect()
    }
}

impl Drop for StatementTable {
    fn drop(&mut self) {
        self.rows.get_mut().iter().for_each(|row| self.texts.remove_row(Row::BYTES, &row.text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn execution(time_us: u64, rows: u64) -> Execution {
        Execution { time: Duration::from_micros(time_us), rows, has_failed: rows == 0 }
    }

    fn add(table: &StatementTable, sql: &str, execution: Execution) {
        table.add(&table.texts.get(sql), execution);
    }

    #[test]
    fn executions_are_counted_by_text() {
        let table = StatementTable::default();
        add(&table, "SELECT v FROM t WHERE id = 1", execution(20, 1));
        add(&table, "SELECT v FROM t WHERE id = 2", execution(60, 2));
        add(&table, "SELECT v FROM u WHERE id = 1", execution(20, 0));
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
    fn least_used_statements_are_evicted() {
        let table = StatementTable::default();
        let sql = |number: usize| format!("SELECT a FROM t{number}");
        (0..10).for_each(|_| add(&table, &sql(0), execution(20, 1)));
        for number in 1..20 * MAX_ROWS {
            add(&table, &sql(number), execution(20, 1));
            if number % 100 == 0 {
                add(&table, &sql(0), execution(20, 1));
            }
        }
        let counts = table.counts(1);
        assert!(counts.len() <= MAX_ROWS && counts.len() > MAX_ROWS / 2, "{}", counts.len());
        let calls = |number| {
            let text = table.texts.get(&sql(number));
            counts.iter().find(|counts| counts.fingerprint == text.fingerprint).map(|counts| counts.calls)
        };
        assert!(calls(0).is_some_and(|calls| calls > 100) && calls(1).is_none());
    }

    #[test]
    fn memory_is_counted_for_the_node() {
        let texts = Arc::new(StatementTexts::default());
        let [one, other] = [0, 1].map(|_| StatementTable::new(texts.clone()));
        let sql = |number| format!("SELECT c{number}");
        (0..100).for_each(|number| add(&one, &sql(number), execution(20, 1)));
        let of_one = texts.bytes();
        let text_bytes: usize = (0..100).map(|number| sql(number).len()).sum();
        assert!(of_one > 100 * Row::BYTES + text_bytes as u64);
        (0..100).for_each(|number| add(&other, &sql(number), execution(20, 1)));
        assert_eq!(texts.bytes(), of_one + 100 * Row::BYTES, "texts are counted once");
        other.evict(0);
        assert!(texts.bytes() < of_one + 100 * Row::BYTES);
        drop(other);
        assert_eq!(texts.bytes(), of_one);
        drop(one);
        assert_eq!(texts.bytes(), 0);
    }

    #[test]
    fn few_statements_are_evicted_in_some_turns() {
        let table = StatementTable::default();
        let left = |turns: std::ops::Range<usize>| {
            turns.for_each(|turn| table.evict(turn as u64));
            table.counts(1).len()
        };
        (0..2).for_each(|number| add(&table, &format!("SELECT c{number}"), execution(20, 1)));
        assert_eq!((left(0..EVICTED_SHARE - 2), left(EVICTED_SHARE - 2..EVICTED_SHARE - 1)), (2, 1));
        assert_eq!(left(EVICTED_SHARE..2 * EVICTED_SHARE), 0);
    }
}
