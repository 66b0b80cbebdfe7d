//! The normalized texts of the statements of all tenants.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use super::normalize::normalize;

/// Maximum memory of the statistics of all tenants.
const MAX_NODE_BYTES: u64 = 8 << 20;
/// Unused texts are removed after new ones of this size.
const PURGE_BYTES: u64 = 1 << 20;
/// What a text takes in the table of texts.
const FIXED_BYTES: usize = size_of::<StatementText>() + 2 * size_of::<(u64, Arc<StatementText>)>();

/// A normalized text.
pub(crate) struct StatementText {
    pub(crate) fingerprint: u64,
    pub(crate) text: Box<str>,
    /// How many tenants have it in their tables.
    tables: AtomicU64,
}

impl StatementText {
    /// The normalized text of a statement.
    pub(crate) fn of(sql: &str) -> StatementText {
        let text = normalize(sql).into_boxed_str();
        StatementText { fingerprint: xxh3_64(text.as_bytes()), text, tables: AtomicU64::new(0) }
    }

    fn bytes(&self) -> u64 {
        (FIXED_BYTES + self.text.len()) as u64
    }
}

/// The texts of all tenants' statements.
#[derive(Default)]
pub(crate) struct StatementTexts {
    state: Mutex<State>,
    /// The memory of all tables, and of the texts in them.
    bytes: AtomicU64,
}

#[derive(Default)]
struct State {
    texts: HashMap<u64, Arc<StatementText>>,
    /// The size of the texts that were added since unused ones were removed.
    added_bytes: u64,
}

impl StatementTexts {
    /// The text of a statement.
    pub(crate) fn get(&self, sql: &str) -> Arc<StatementText> {
        let text = StatementText::of(sql);
        let mut state = self.state.lock();
        match state.texts.get(&text.fingerprint) {
            Some(known) if known.text == text.text => return known.clone(),
            // A tenant must not see another one's text because the hashes are equal.
            Some(_) => return Arc::new(text),
            None => {}
        }
        if state.added_bytes >= PURGE_BYTES {
            state.texts.retain(|_, text| Arc::strong_count(text) > 1);
            state.texts.shrink_to_fit();
            state.added_bytes = 0;
        }
        state.added_bytes += text.bytes();
        let text = Arc::new(text);
        state.texts.insert(text.fingerprint, text.clone());
        text
    }

    /// The memory of all tables, and of the texts in them.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns true if the tables take too much memory.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes() > MAX_NODE_BYTES
    }

    /// Counts a row of a table.
    pub(super) fn add_row(&self, row_bytes: u64, text: &StatementText) {
        let is_first = text.tables.fetch_add(1, Ordering::Relaxed) == 0;
        let bytes = row_bytes + if is_first { text.bytes() } else { 0 };
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts a row of a table no more.
    pub(super) fn remove_row(&self, row_bytes: u64, text: &StatementText) {
        let was_last = text.tables.fetch_sub(1, Ordering::Relaxed) == 1;
        let bytes = row_bytes + if was_last { text.bytes() } else { 0 };
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_with_other_constants_have_one_text() {
        let texts = StatementTexts::default();
        let text = texts.get("SELECT v FROM t WHERE id = 1");
        assert_eq!(&*text.text, "SELECT v FROM t WHERE id = ?");
        assert!(Arc::ptr_eq(&text, &texts.get("SELECT v FROM t WHERE id = 'secret'")));
        assert!(!Arc::ptr_eq(&text, &texts.get("SELECT v FROM u WHERE id = 1")));
    }

    #[test]
    fn texts_with_equal_hashes_are_not_shared() {
        let texts = StatementTexts::default();
        let other = Arc::new(StatementText { text: "SELECT 2".into(), ..StatementText::of("SELECT a") });
        texts.state.lock().texts.insert(other.fingerprint, other);
        assert_eq!(&*texts.get("SELECT a").text, "SELECT a");
    }

    #[test]
    fn unused_texts_are_removed() {
        let texts = StatementTexts::default();
        let used = texts.get("SELECT used");
        let column = "c".repeat(500);
        (0..100_000).for_each(|number| drop(texts.get(&format!("SELECT {column}{number}"))));
        let count = texts.state.lock().texts.len() as u64;
        assert!(count < 2 * PURGE_BYTES / 500, "{count} texts");
        assert!(Arc::ptr_eq(&used, &texts.get("SELECT used")));
    }
}
