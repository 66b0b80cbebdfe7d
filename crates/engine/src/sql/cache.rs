//! Statements that were prepared on a partition, by text: sessions that send the same text share its description.

use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::Statement;

/// Texts kept for a partition.
const KEPT: usize = 500;

/// Longer texts, or more parameters (a bulk INSERT, say), hardly come twice.
const LONGEST_BYTES: usize = 8 << 10;
const MOST_PARAMETERS: usize = 100;

#[derive(Default)]
struct Inner {
    statements: HashMap<Arc<str>, Arc<Statement>>,
    schema: u32,
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

    pub(crate) fn put(&self, text: &str, schema: u32, statement: &Arc<Statement>) {
        if text.len() > LONGEST_BYTES || statement.parameters.len() > MOST_PARAMETERS {
            return;
        }
        let mut inner = self.0.lock();
        if inner.schema != schema || inner.statements.len() >= KEPT {
            inner.statements.clear();
            inner.schema = schema;
        }
        inner.statements.insert(text.into(), statement.clone());
    }
}
