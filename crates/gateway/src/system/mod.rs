//! The system catalog: `pg_catalog`, `information_schema` and `fulmar.*`, as tables and functions of SQL.
//!
//! The engine knows how to put such tables into a connection ([`fulmar_engine::System`]); what stands in them is said
//! here, for the session that asks ([`Viewer`]):
//!
//! | module | what it has |
//! | --- | --- |
//! | [`schema`] | a tenant's tables, columns, indexes, constraints, out of SQLite's own schema |
//! | [`relations`], [`constraints`] | `pg_class`, `pg_attribute`, `pg_index`, `pg_constraint` ...: the schema, as Postgres has it |
//! | [`cluster`] | `pg_database`, `pg_roles`, `pg_settings` ...: what is not a tenant's |
//! | [`statistics`] | `pg_stat_activity`, `pg_stat_database`, `fulmar.limits`, `fulmar.history` |
//! | [`figures`] | `fulmar.tenant_stats`, `fulmar.partition_stats`, `fulmar.latency_histogram` |
//! | [`journal`] | `fulmar.events`, `fulmar.tokens` |
//! | [`types`] | `pg_type`, and names of types |
//! | [`information`] | `information_schema` |
//! | [`nothing`] | what Fulmar has none of: policies, publications, inheritance; clients ask all the same |
//! | [`functions`], [`arrays`] | functions that clients call in these questions |
//!
//! Questions come in Postgres's SQL: [`crate::dialect`] puts them into SQLite's. Objects are numbered from their rows in
//! `sqlite_schema`; the numbers last until a VACUUM.

mod arrays;
mod cells;
mod cluster;
mod constraints;
mod figures;
mod functions;
mod information;
mod journal;
mod nothing;
mod relations;
mod schema;
mod statistics;
mod types;

use std::sync::{Arc, LazyLock};

use fulmar_engine::{Database, System, SystemFunction, SystemTable, Value, ValueRef};

use parking_lot::Mutex;

use crate::Result;
use crate::gateway::Shared;
use crate::session::{Identity, Settings};
use schema::Schema;

pub(crate) use functions::is_function;
pub(crate) use statistics::moment;

/// Who asks: a session, as it is now.
pub(crate) struct Viewer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) identity: Identity,
    pid: i32,
    pub(crate) settings: Settings,
    /// What `set_config` wants of them: name, value, and whether only for the transaction.
    pub(crate) changes: Mutex<Vec<(String, String, bool)>>,
    schema: Mutex<Option<Arc<Schema>>>,
}

impl Viewer {
    /// A session that asks now.
    pub(crate) fn new(shared: Arc<Shared>, identity: Identity, pid: i32, settings: Settings) -> Viewer {
        Viewer { shared, identity, pid, settings, changes: Mutex::default(), schema: Mutex::default() }
    }
}

/// A question to a table or function: who asks, and where.
#[derive(Clone, Copy)]
struct Asked<'a> {
    viewer: &'a Viewer,
    database: &'a Database<'a>,
}

impl Asked<'_> {
    /// The tenant's schema: read once for a statement, however many of its rows ask for a name.
    fn schema(&self) -> Result<Arc<Schema>> {
        if let Some(schema) = &*self.viewer.schema.lock() {
            return Ok(schema.clone());
        }
        // Not under the lock: it runs queries.
        let schema = Arc::new(Schema::read(self.database)?);
        *self.viewer.schema.lock() = Some(schema.clone());
        Ok(schema)
    }
}

type Rows = Vec<Vec<Value>>;

/// A table with what fills it.
type Filled = (SystemTable, fn(Asked<'_>) -> Result<Rows>);

const fn table(name: &'static str, columns: &'static [(&'static str, &'static str)]) -> SystemTable {
    SystemTable { name, columns }
}

/// All tables.
static TABLES: LazyLock<Tables> = LazyLock::new(|| {
    let all = [
        relations::TABLES,
        cluster::TABLES,
        statistics::TABLES,
        figures::TABLES,
        types::TABLES,
        information::TABLES,
        journal::TABLES,
        nothing::TABLES,
    ]
    .concat();
    let (tables, rows) = all.into_iter().unzip();
    Tables { tables, rows }
});

struct Tables {
    tables: Vec<SystemTable>,
    rows: Vec<fn(Asked<'_>) -> Result<Rows>>,
}

impl System for Viewer {
    fn tables(&self) -> &'static [SystemTable] {
        &TABLES.tables
    }

    fn functions(&self) -> &'static [SystemFunction] {
        functions::all()
    }

    fn begin(&self) {
        *self.schema.lock() = None;
    }

    fn rows(&self, table: usize, database: &Database<'_>) -> Result<Rows> {
        let (Some(fill), Some(known)) = (TABLES.rows.get(table), TABLES.tables.get(table)) else {
            return Ok(Vec::new());
        };
        let rows = fill(Asked { viewer: self, database })?;
        debug_assert!(rows.iter().all(|row| row.len() == known.columns.len()), "{}", known.name);
        Ok(rows)
    }

    fn call(&self, function: usize, arguments: &[ValueRef<'_>], database: &Database<'_>) -> Result<Value> {
        functions::call(function, arguments, Asked { viewer: self, database })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<&str> = TABLES.tables.iter().map(|table| table.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
