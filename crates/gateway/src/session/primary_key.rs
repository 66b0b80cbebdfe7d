//! `ALTER TABLE t ADD PRIMARY KEY (...)`; see [`fulmar_dialect::primary_key`].
//!
//! If the key is one column whose value equals the rowid in every row, the table's schema text is
//! changed to declare the column as the rowid. Otherwise a unique index is created.
//!
//! - Everything runs in one transaction. The check that the column equals the rowid is an ordinary
//!   read, so a row that another transaction inserts concurrently causes a conflict.
//! - Changing the schema text rewrites no rows. Records that still store the column's value remain
//!   valid, because SQLite reads the column from the rowid.

use fulmar_dialect::primary_key::{PrimaryKey, declare_rowid, has_primary_key};
use fulmar_dialect::token::quote_name;
use fulmar_engine::{Error, Scope, StatementContext, Value};

use super::rows::Collector;
use super::state::Session;
use crate::Result;

/// Reads a table's schema text. Returns nothing if a temporary table of the same name hides it.
const SCHEMA_TEXT: &str = "SELECT sql FROM main.sqlite_schema \
    WHERE type = 'table' AND name = $1 COLLATE NOCASE \
    AND NOT EXISTS (SELECT 1 FROM sqlite_temp_schema WHERE name = $1 COLLATE NOCASE)";
const DECLARE: &str =
    "UPDATE main.sqlite_schema SET sql = $2 WHERE type = 'table' AND name = $1 COLLATE NOCASE";

impl Session {
    pub(super) async fn add_primary_key(&mut self, key: &PrimaryKey) -> Result<()> {
        let text = self.text_of_main_table(key).await?;
        if text.as_deref().is_some_and(has_primary_key) {
            const INVALID_TABLE_DEFINITION: &str = "42P16";
            let message = format!("multiple primary keys for table \"{}\" are not allowed", key.table.name);
            return Err(Error::new(INVALID_TABLE_DEFINITION, message).hint("Create a unique index instead."));
        }
        let numbered = match (text, key.columns.as_slice()) {
            (Some(text), [column]) => declare_rowid(&text, column),
            _ => None,
        };
        match numbered {
            Some(text) if self.key_is_rowid(key).await? => self.declare(key, text).await,
            _ => self.link.collect(&key.create_index_sql(), &[]).await.map(drop),
        }
    }

    async fn text_of_main_table(&mut self, key: &PrimaryKey) -> Result<Option<String>> {
        if key.table.schema.as_deref().is_some_and(|schema| schema != "main") {
            return Ok(None);
        }
        let rows = self.link.collect(SCHEMA_TEXT, &[Value::Text(key.table.name.clone())]).await?;
        Ok(rows.into_iter().flatten().find_map(|value| match value {
            Value::Text(text) => Some(text),
            _ => None,
        }))
    }

    /// Returns true if the key column equals the rowid in every row.
    async fn key_is_rowid(&mut self, key: &PrimaryKey) -> Result<bool> {
        let (table, column) = (quote_name(&key.table.name), quote_name(&key.columns[0]));
        let sql = format!("SELECT 1 FROM main.{table} WHERE {column} IS NOT rowid LIMIT 1");
        Ok(self.link.collect(&sql, &[]).await?.is_empty())
    }

    async fn declare(&mut self, key: &PrimaryKey, text: String) -> Result<()> {
        let known = StatementContext { declares: true, once: true, ..StatementContext::default() };
        let statement = self.link.prepare_as(DECLARE, known).await?;
        let values = [Value::Text(key.table.name.clone()), Value::Text(text)];
        self.link.execute(&statement, &values, Scope::Implicit, &mut Collector::default()).await.map(drop)
    }
}
