//! The primary keys of a partition's tables, for the statements that name rows by them.

use std::sync::Arc;

use fulmar_sqlite::sql::TableKey;
use hashbrown::HashMap;
use parking_lot::Mutex;

/// Maximum number of cached tables per partition.
const MAX_TABLES: usize = 200;
/// Maximum size of a cached table's name.
const MAX_NAME_BYTES: usize = 256;

/// Cache of primary keys. A new schema cookie empties it.
#[derive(Default)]
pub(crate) struct TableKeys(Mutex<Cached>);

#[derive(Default)]
struct Cached {
    schema: u32,
    keys: HashMap<Arc<str>, Arc<TableKey>>,
}

impl TableKeys {
    /// The primary key of a table under this schema cookie, if it is cached.
    pub(crate) fn get(&self, table: &str, schema: u32) -> Option<Arc<TableKey>> {
        let cached = self.0.lock();
        if cached.schema == schema { cached.keys.get(table).cloned() } else { None }
    }

    /// Caches a primary key. A full cache is emptied first.
    pub(crate) fn put(&self, schema: u32, key: Arc<TableKey>) {
        if key.table.len() > MAX_NAME_BYTES {
            return;
        }
        let mut cached = self.0.lock();
        if cached.schema != schema || cached.keys.len() >= MAX_TABLES {
            *cached = Cached { schema, keys: HashMap::new() };
        }
        cached.keys.insert(key.table.clone(), key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(table: &str) -> Arc<TableKey> {
        Arc::new(TableKey { table: table.into(), columns: vec![("id".to_owned(), 0)] })
    }

    #[test]
    fn a_new_schema_and_a_full_cache_empty_it() {
        let keys = TableKeys::default();
        keys.put(1, key("a"));
        assert_eq!(keys.get("a", 1), Some(key("a")));
        assert_eq!((keys.get("a", 2), keys.get("b", 1)), (None, None));
        keys.put(2, key("b"));
        assert_eq!((keys.get("a", 2), keys.get("b", 2)), (None, Some(key("b"))));
        for number in 0..MAX_TABLES {
            keys.put(2, key(&number.to_string()));
        }
        assert_eq!((keys.get("b", 2), keys.get("199", 2)), (None, Some(key("199"))));
        keys.put(2, key(&"x".repeat(MAX_NAME_BYTES + 1)));
        assert_eq!(keys.get(&"x".repeat(MAX_NAME_BYTES + 1), 2), None);
    }
}
