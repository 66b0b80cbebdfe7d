//! The system catalog: the tables and functions of `pg_catalog`, `information_schema` and
//! `fulmar.*`.
//!
//! The engine provides these tables in each connection ([`fulmar_engine::System`]). This module
//! produces their rows for the querying session ([`Viewer`]):
//!
//! | module | contents |
//! | --- | --- |
//! | [`schema`] | a tenant's tables, columns, indexes and constraints, read from SQLite's schema |
//! | [`relations`], [`constraints`] | `pg_class`, `pg_attribute`, `pg_index`, `pg_constraint` ... |
//! | [`cluster`] | server-wide tables: `pg_database`, `pg_roles`, `pg_settings`, ... |
//! | [`statistics`] | `pg_stat_activity`, `pg_stat_database`, `fulmar.limits`, `fulmar.history` |
//! | [`figures`] | statistics: `fulmar.tenant_stats`, `fulmar.partition_stats`, ... |
//! | [`journal`] | `fulmar.events`, `fulmar.tokens` |
//! | [`types`] | `pg_type`, and names of types |
//! | [`information`] | `information_schema` |
//! | [`nothing`] | always empty: tables of unsupported features (policies, inheritance, ...) |
//! | [`functions`], [`arrays`] | functions that clients call in catalog queries |
//!
//! Clients query the catalog in PostgreSQL's SQL, which [`crate::dialect`] translates to SQLite's.
//! The OID of an object is derived from its rowid in `sqlite_schema` and can change with a VACUUM.

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

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock};

use fulmar_engine::{Database, Parts, System, SystemFunction, SystemTable, Value, ValueRef};

use parking_lot::Mutex;

use crate::Result;
use crate::gateway::Shared;
use crate::session::{Identity, Settings};
use schema::{Outline, Schema};

pub(crate) use functions::is_function;
pub(crate) use statistics::moment;

/// The session that queries the catalog: a snapshot of its state.
pub(crate) struct Viewer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) identity: Identity,
    pid: i32,
    pub(crate) settings: Settings,
    /// The changes that `set_config` requested: name, value, and whether the change is local to the
    /// transaction.
    pub(crate) changes: Mutex<Vec<(String, String, bool)>>,
    schema: Mutex<SchemaCache>,
}

/// The parts of the tenant's schema that the statement has read so far.
#[derive(Default)]
struct SchemaCache {
    outline: Option<Arc<Outline>>,
    /// The most recently used groups, the newest last.
    groups: VecDeque<(usize, Arc<Schema>)>,
}

/// Maximum number of cached groups. More than one is needed, because foreign keys reference tables
/// of other groups.
const MAX_CACHED_GROUPS: usize = 8;

impl Viewer {
    /// Creates a viewer of a session's current state.
    pub(crate) fn new(shared: Arc<Shared>, identity: Identity, pid: i32, settings: Settings) -> Viewer {
        Viewer { shared, identity, pid, settings, changes: Mutex::default(), schema: Mutex::default() }
    }
}

/// The context of a request for a table's rows or a function call.
#[derive(Clone, Copy)]
struct Asked<'a> {
    viewer: &'a Viewer,
    database: &'a Database<'a>,
}

impl Asked<'_> {
    /// The outline of the tenant's schema. It is read once per statement.
    fn outline(&self) -> Result<Arc<Outline>> {
        if let Some(outline) = &self.viewer.schema.lock().outline {
            return Ok(outline.clone());
        }
        // The lock is not held, because this runs queries.
        let outline = Arc::new(Outline::read(self.database)?);
        self.viewer.schema.lock().outline = Some(outline.clone());
        Ok(outline)
    }

    /// A group of the schema's relations.
    fn group(&self, group: usize) -> Result<Arc<Schema>> {
        {
            let groups = &mut self.viewer.schema.lock().groups;
            if let Some(at) = groups.iter().rposition(|(cached, _)| *cached == group)
                && let Some(found) = groups.remove(at)
            {
                groups.push_back(found.clone());
                return Ok(found.1);
            }
            while groups.len() >= MAX_CACHED_GROUPS {
                groups.pop_front();
            }
        }
        let outline = self.outline()?;
        let schema = Arc::new(Schema::read(&outline, group, self.database)?);
        self.viewer.schema.lock().groups.push_back((group, schema.clone()));
        Ok(schema)
    }

    /// The group of the relation or index with this name.
    fn group_of_name(&self, name: &str) -> Result<Option<Arc<Schema>>> {
        self.outline()?.group_of_name(name).map(|group| self.group(group)).transpose()
    }

    /// The group of the object with this OID.
    fn group_of_oid(&self, oid: i64) -> Result<Option<Arc<Schema>>> {
        self.outline()?.group_of_oid(oid).map(|group| self.group(group)).transpose()
    }
}

type Rows = Vec<Vec<Value>>;

/// A table, and the function that produces its rows.
type Filled = (SystemTable, fn(Asked<'_>) -> Result<Rows>);

/// A table about the tenant's schema, the columns that determine a row's relation, and the function
/// that produces the rows of a group of relations.
type FilledByGroup = (SystemTable, &'static [(&'static str, By)], FillGroup);
type FillGroup = fn(Asked<'_>, &Schema) -> Result<Rows>;

/// How a column determines the relation that a row belongs to.
#[derive(Clone, Copy)]
enum By {
    /// The name of the relation, or of one of its indexes.
    Name,
    /// The OID of the relation, or of an object that belongs to it.
    Oid,
}

/// The function that produces the rows of a table.
#[derive(Clone, Copy)]
enum Fill {
    /// All rows in one part.
    Whole(fn(Asked<'_>) -> Result<Rows>),
    /// One part per group of relations.
    ByGroup(&'static [(&'static str, By)], FillGroup),
}

const fn table(name: &'static str, columns: &'static [(&'static str, &'static str)]) -> SystemTable {
    SystemTable { name, columns }
}

/// All system tables.
static TABLES: LazyLock<Tables> = LazyLock::new(|| {
    let whole = [
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
    let by_group = [relations::BY_GROUP, statistics::BY_GROUP, information::BY_GROUP].concat();
    let whole = whole.into_iter().map(|(table, fill)| (table, Fill::Whole(fill)));
    let by_group = by_group.into_iter().map(|(table, columns, fill)| (table, Fill::ByGroup(columns, fill)));
    let (tables, fills) = whole.chain(by_group).unzip();
    Tables { tables, fills }
});

struct Tables {
    tables: Vec<SystemTable>,
    fills: Vec<Fill>,
}

impl System for Viewer {
    fn tables(&self) -> &'static [SystemTable] {
        &TABLES.tables
    }

    fn functions(&self) -> &'static [SystemFunction] {
        functions::all()
    }

    fn begin(&self) {
        *self.schema.lock() = SchemaCache::default();
    }

    fn rows(&self, table: usize, part: usize, database: &Database<'_>) -> Result<Option<Rows>> {
        let (Some(fill), Some(known)) = (TABLES.fills.get(table), TABLES.tables.get(table)) else {
            return Ok(None);
        };
        let asked = Asked { viewer: self, database };
        let rows = match fill {
            Fill::Whole(fill) if part == 0 => fill(asked)?,
            Fill::ByGroup(_, fill) if part < asked.outline()?.groups() => {
                let schema = asked.group(part)?;
                fill(asked, &schema)?
            }
            _ => return Ok(None),
        };
        debug_assert!(rows.iter().all(|row| row.len() == known.columns.len()), "{}", known.name);
        Ok(Some(rows))
    }

    fn narrowing_columns(&self, table: usize) -> Vec<usize> {
        let (Some(Fill::ByGroup(columns, _)), Some(known)) =
            (TABLES.fills.get(table), TABLES.tables.get(table))
        else {
            return Vec::new();
        };
        let narrows = |name: &str| columns.iter().any(|(column, _)| *column == name);
        (0..known.columns.len()).filter(|column| narrows(known.columns[*column].0)).collect()
    }

    fn parts_with(
        &self,
        table: usize,
        column: usize,
        value: ValueRef<'_>,
        database: &Database<'_>,
    ) -> Result<Parts> {
        let (Some(Fill::ByGroup(columns, _)), Some(known)) =
            (TABLES.fills.get(table), TABLES.tables.get(table))
        else {
            return Ok(Parts::All);
        };
        let name = known.columns.get(column).map(|(name, _)| *name);
        let Some((_, by)) = columns.iter().find(|(known, _)| Some(*known) == name) else {
            return Ok(Parts::All);
        };
        let outline = Asked { viewer: self, database }.outline()?;
        let text = match value {
            ValueRef::Text(text) => std::str::from_utf8(text).ok(),
            _ => None,
        };
        let group = match (by, value, text) {
            (By::Oid, ValueRef::Integer(oid), _) => outline.group_of_oid(oid),
            (By::Name, _, Some(name)) => outline.group_of_name(name),
            // An OID given as text is equal to the number.
            (By::Oid, _, Some(text)) => match text.parse() {
                Ok(oid) => outline.group_of_oid(oid),
                Err(_) => return Ok(Parts::All),
            },
            _ => return Ok(Parts::All),
        };
        Ok(group.map_or(Parts::None, Parts::One))
    }

    fn call(&self, function: usize, arguments: &[ValueRef<'_>], database: &Database<'_>) -> Result<Value> {
        functions::call(function, arguments, Asked { viewer: self, database })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrowing_columns_exist() {
        for (table, columns, _) in [relations::BY_GROUP, statistics::BY_GROUP, information::BY_GROUP].concat()
        {
            for (column, _) in columns {
                let exists = table.columns.iter().any(|(name, _)| name == column);
                assert!(exists, "{} has no column {column}", table.name);
            }
        }
    }

    #[test]
    fn table_names_are_unique() {
        let mut names: Vec<&str> = TABLES.tables.iter().map(|table| table.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
