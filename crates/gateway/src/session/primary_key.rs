//! `ALTER TABLE t ADD PRIMARY KEY (...)`; see [`crate::dialect::primary_key`].
//!
//! All of it is one transaction: whether the rows are numbered by the column is a read like any other, so a row that
//! somebody else puts in meanwhile is a conflict, not a surprise. Changing the table's text changes no row; records
//! that hold the column's value beside their number are as good as those that do not, since SQLite takes it from
//! the number.

use fulmar_engine::{Error, Known, Scope, Value};

use super::Session;
use super::rows::Collector;
use crate::Result;
use crate::dialect::primary_key::{PrimaryKey, has_primary_key, numbered_by};
use crate::dialect::token::quote_name;

/// A temporary table of the same name stands before it.
const TEXT: &str = "SELECT sql FROM main.sqlite_schema WHERE type = 'table' AND name = $1 COLLATE NOCASE \
    AND NOT EXISTS (SELECT 1 FROM sqlite_temp_schema WHERE name = $1 COLLATE NOCASE)";
const DECLARE: &str =
    "UPDATE main.sqlite_schema SET sql = $2 WHERE type = 'table' AND name = $1 COLLATE NOCASE";

impl Session {
    pub(super) async fn add_primary_key(&mut self, key: &PrimaryKey) -> Result<()> {
        let text = self.text_of_main_table(key).await?;
        if text.as_deref().is_some_and(has_primary_key) {
            const INVALID_TABLE_DEFINITION: &str = "42P16";
            let message = format!("multiple primary keys for table \"{}\" are not allowed", key.table.name);
            return Err(Error::new(INVALID_TABLE_DEFINITION, message)
                .hint("A table has one primary key. Make a unique index for another one."));
        }
        let numbered = match (text, key.columns.as_slice()) {
            (Some(text), [column]) => numbered_by(&text, column),
            _ => None,
        };
        match numbered {
            Some(text) if self.are_numbered(key).await? => self.declare(key, text).await,
            _ => self.link.collect(&key.index(), &[]).await.map(drop),
        }
    }

    async fn text_of_main_table(&mut self, key: &PrimaryKey) -> Result<Option<String>> {
        if key.table.schema.as_deref().is_some_and(|schema| schema != "main") {
            return Ok(None);
        }
        let rows = self.link.collect(TEXT, &[Value::Text(key.table.name.clone())]).await?;
        Ok(rows.into_iter().flatten().find_map(|value| match value {
            Value::Text(text) => Some(text),
            _ => None,
        }))
    }

    /// Whether the key of each row is its number.
    async fn are_numbered(&mut self, key: &PrimaryKey) -> Result<bool> {
        let (table, column) = (quote_name(&key.table.name), quote_name(&key.columns[0]));
        let sql = format!("SELECT 1 FROM main.{table} WHERE {column} IS NOT rowid LIMIT 1");
        Ok(self.link.collect(&sql, &[]).await?.is_empty())
    }

    async fn declare(&mut self, key: &PrimaryKey, text: String) -> Result<()> {
        let known = Known { declares: true, once: true, ..Known::default() };
        let statement = self.link.prepare_as(DECLARE, known).await?;
        let values = [Value::Text(key.table.name.clone()), Value::Text(text)];
        self.link.execute(&statement, &values, Scope::Implicit, &mut Collector::default()).await.map(drop)
    }
}
