//! The context in which rows are produced and functions are called, and the declarations of tables.

use std::collections::VecDeque;
use std::sync::Arc;

use fulmar_sqlite::{Database, SystemTable, Value};
use parking_lot::Mutex;

use super::schema::{Outline, Schema};
use super::viewer::Viewer;
use crate::Result;

/// The parts of the tenant's schema that the statement has read so far.
#[derive(Default)]
pub(crate) struct SchemaCache {
    outline: Option<Arc<Outline>>,
    /// The most recently used groups, the newest last.
    groups: VecDeque<(usize, Arc<Schema>)>,
}

/// Maximum number of cached groups. More than one is needed, because foreign keys reference tables
/// of other groups.
const MAX_CACHED_GROUPS: usize = 8;

/// The context of a request for a table's rows or a function call.
#[derive(Clone, Copy)]
pub(crate) struct CatalogRequest<'a> {
    pub(crate) viewer: &'a dyn Viewer,
    pub(crate) schema: &'a Mutex<SchemaCache>,
    pub(crate) database: &'a Database<'a>,
}

impl CatalogRequest<'_> {
    /// The outline of the tenant's schema. It is read once per statement.
    pub(crate) fn outline(&self) -> Result<Arc<Outline>> {
        if let Some(outline) = &self.schema.lock().outline {
            return Ok(outline.clone());
        }
        // The lock is not held, because this runs queries.
        let outline = Arc::new(Outline::read(self.database)?);
        self.schema.lock().outline = Some(outline.clone());
        Ok(outline)
    }

    /// A group of the schema's relations.
    pub(crate) fn group(&self, group: usize) -> Result<Arc<Schema>> {
        {
            let groups = &mut self.schema.lock().groups;
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
        self.schema.lock().groups.push_back((group, schema.clone()));
        Ok(schema)
    }

    /// The group of the relation or index with this name.
    pub(crate) fn group_of_name(&self, name: &str) -> Result<Option<Arc<Schema>>> {
        self.outline()?.group_of_name(name).map(|group| self.group(group)).transpose()
    }

    /// The group of the object with this OID.
    pub(crate) fn group_of_oid(&self, oid: i64) -> Result<Option<Arc<Schema>>> {
        self.outline()?.group_of_oid(oid).map(|group| self.group(group)).transpose()
    }
}

/// The rows of a table.
pub type Rows = Vec<Vec<Value>>;

/// A table, and the function that produces its rows.
pub(crate) type Filled = (SystemTable, fn(CatalogRequest<'_>) -> Result<Rows>);

/// A table about the tenant's schema, the columns that determine a row's relation, and the function
/// that produces the rows of a group of relations.
pub(crate) type TableByGroup = (SystemTable, &'static [(&'static str, By)], FillGroup);
pub(crate) type FillGroup = fn(CatalogRequest<'_>, &Schema) -> Result<Rows>;

/// How a column determines the relation that a row belongs to.
#[derive(Clone, Copy)]
pub(crate) enum By {
    /// The name of the relation, or of one of its indexes.
    Name,
    /// The OID of the relation, or of an object that belongs to it.
    Oid,
}

/// The function that produces the rows of a table.
#[derive(Clone, Copy)]
pub(crate) enum Fill {
    /// All rows in one part.
    Whole(fn(CatalogRequest<'_>) -> Result<Rows>),
    /// One part per group of relations.
    ByGroup(&'static [(&'static str, By)], FillGroup),
    /// The viewer's own table with this index.
    Own(usize),
}

/// The declaration of a table.
pub const fn table(name: &'static str, columns: &'static [(&'static str, &'static str)]) -> SystemTable {
    SystemTable { name, columns }
}

/// The tables of the system catalog.
pub struct Tables {
    pub(crate) tables: Vec<SystemTable>,
    pub(crate) fills: Vec<Fill>,
}

impl Tables {
    /// The names of the tables.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.tables.iter().map(|table| table.name)
    }

    pub(crate) fn get(&self, table: usize) -> Option<(&SystemTable, &Fill)> {
        self.tables.get(table).zip(self.fills.get(table))
    }
}
