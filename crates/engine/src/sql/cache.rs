//! Statements that were prepared on a partition, by text: sessions that send the same text share its description.

use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::Statement;
use crate::heap::{Charge, Heap};

/// Texts kept for a partition.
const KEPT: usize = 500;
/// Bytes of them and of their descriptions.
const KEPT_BYTES: u64 = 2 << 20;

/// Longer texts, or more parameters (a bulk INSERT, say), hardly come twice.
const LONGEST_BYTES: usize = 8 << 10;
const MOST_PARAMETERS: usize = 100;

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

/// The descriptions of one partition's statements.
#[derive(Default)]
pub(crate) struct StatementCache(Mutex<Inner>);

impl StatementCache {
    /// A description that was made under the same schema cookie.
    pub(crate) fn get(&self, text: &str, schema: u32) -> Option<Arc<Statement>> {
        // A text of many statements is asked for at each of them: it is not even hashed.
        if text.len() > LONGEST_BYTES {
            return None;
        }
        let inner = self.0.lock();
        if inner.schema != schema {
            return None;
        }
        inner.statements.get(text).cloned()
    }

    /// Keeps a description, unless the tenant may hold no more memory.
    pub(crate) fn put(&self, text: &str, schema: u32, statement: &Arc<Statement>, heap: &Arc<Heap>) {
        if text.len() > LONGEST_BYTES || statement.parameters.len() > MOST_PARAMETERS {
            return;
        }
        let bytes = text.len() as u64 + statement.memory_bytes();
        let mut inner = self.0.lock();
        let is_full = inner.statements.len() >= KEPT || inner.charge.bytes() + bytes > KEPT_BYTES;
        if inner.schema != schema || is_full {
            inner.clear(schema);
        }
        if bytes <= KEPT_BYTES && inner.charge.grow_by(bytes, heap) {
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
        })
    }

    #[test]
    fn descriptions_are_charged_and_limited_in_bytes() {
        let heap = Arc::new(Heap::of_partition(&Heap::of_node(0)));
        let cache = StatementCache::default();
        for number in 0..10 {
            cache.put(&format!("SELECT {number}"), 1, &statement(500), &heap);
            assert!(heap.used_bytes() <= KEPT_BYTES);
        }
        assert!(cache.get("SELECT 9", 1).is_some() && cache.get("SELECT 0", 1).is_none());
        cache.put("SELECT 10", 1, &statement(3000), &heap);
        assert!(cache.get("SELECT 10", 1).is_none(), "one that is too large is not kept");
        cache.put("SELECT 11", 2, &statement(1), &heap);
        assert!(cache.get("SELECT 11", 2).is_some() && heap.used_bytes() < 4000);
        drop(cache);
        assert_eq!(heap.used_bytes(), 0);
    }
}
