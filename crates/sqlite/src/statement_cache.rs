//! Cache of prepared statements' descriptions, per partition and keyed by SQL text. Sessions that
//! send the same text share one description.

use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::Statement;
use crate::heap::{Charge, Heap};

/// Maximum number of cached texts per partition.
const MAX_STATEMENTS: usize = 500;
/// Maximum memory of those texts and their descriptions.
const MAX_BYTES: u64 = 2 << 20;

/// Longer texts and texts with more parameters (bulk INSERTs, for example) are rarely repeated, so
/// they are not cached.
const MAX_TEXT_BYTES: usize = 8 << 10;
const MAX_PARAMETERS: usize = 100;

#[derive(Default)]
struct Inner {
    statements: HashMap<Arc<str>, Arc<Statement>>,
    schema: u32,
    charge: Charge,
}

impl Inner {
    fn clear(&mut self, schema: u32) {
        *self = Inner { schema, ..Inner::default() };
    }
}

/// The descriptions of one partition's statements. A new schema cookie empties the cache.
#[derive(Default)]
pub struct StatementCache(Mutex<Inner>);

impl StatementCache {
    /// Returns the description of a text if it was made under this schema cookie.
    pub fn get(&self, text: &str, schema: u32) -> Option<Arc<Statement>> {
        // This runs for each statement of a script, with the whole remaining text. Long texts are
        // therefore rejected before they are hashed.
        if text.len() > MAX_TEXT_BYTES {
            return None;
        }
        let inner = self.0.lock();
        if inner.schema != schema {
            return None;
        }
        inner.statements.get(text).cloned()
    }

    /// Caches a description, unless the tenant is at its memory limit. A full cache is emptied
    /// first.
    pub fn put(&self, text: &str, schema: u32, statement: &Arc<Statement>, heap: &Arc<Heap>) {
        if text.len() > MAX_TEXT_BYTES || statement.parameters.len() > MAX_PARAMETERS {
            return;
        }
        let bytes = text.len() as u64 + statement.memory_bytes();
        let mut inner = self.0.lock();
        let is_full = inner.statements.len() >= MAX_STATEMENTS || inner.charge.bytes() + bytes > MAX_BYTES;
        if inner.schema != schema || is_full {
            inner.clear(schema);
        }
        if bytes <= MAX_BYTES && inner.charge.grow_by(bytes, heap) {
            inner.statements.insert(text.into(), statement.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::Plan;
    use crate::{ColumnInfo, StatementKind};

    fn statement(columns: usize) -> Arc<Statement> {
        let column = |_| ColumnInfo { name: "c".repeat(1000), declared_type: None };
        Arc::new(Statement {
            id: 1,
            sql: "SELECT 1".into(),
            kind: StatementKind::Query,
            read_only: true,
            parameters: Vec::new(),
            columns: (0..columns).map(column).collect(),
            plan: Plan::default(),
            note: std::sync::OnceLock::new(),
        })
    }

    #[test]
    fn descriptions_are_charged_to_the_heap_and_bounded_in_bytes() {
        let heap = Arc::new(Heap::of_partition(&Heap::of_node(0)));
        let cache = StatementCache::default();
        for number in 0..10 {
            cache.put(&format!("SELECT {number}"), 1, &statement(500), &heap);
            assert!(heap.used_bytes() <= MAX_BYTES);
        }
        assert!(cache.get("SELECT 9", 1).is_some() && cache.get("SELECT 0", 1).is_none());
        cache.put("SELECT 10", 1, &statement(3000), &heap);
        assert!(cache.get("SELECT 10", 1).is_none(), "a description above the limit is not cached");
        cache.put("SELECT 11", 2, &statement(1), &heap);
        assert!(cache.get("SELECT 11", 2).is_some() && heap.used_bytes() < 4000);
        drop(cache);
        assert_eq!(heap.used_bytes(), 0);
    }
}
