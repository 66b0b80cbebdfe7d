//! The engine's view of the system catalog: dispatches requests for rows and calls of functions.

use fulmar_sqlite::{Database, Parts, System, SystemFunction, SystemTable, Value, ValueRef};
use parking_lot::Mutex;

use super::asked::{By, CatalogRequest, Fill, Rows, SchemaCache};
use super::functions;
use super::viewer::Viewer;
use crate::Result;

/// The system catalog as one session sees it.
pub struct Catalog<V> {
    viewer: V,
    schema: Mutex<SchemaCache>,
}

impl<V: Viewer> Catalog<V> {
    /// Creates the catalog for a viewer.
    pub fn new(viewer: V) -> Catalog<V> {
        Catalog { viewer, schema: Mutex::default() }
    }

    /// The session that queries the catalog.
    pub fn viewer(&self) -> &V {
        &self.viewer
    }

    fn asked<'a>(&'a self, database: &'a Database<'a>) -> CatalogRequest<'a> {
        CatalogRequest { viewer: &self.viewer, schema: &self.schema, database }
    }
}

impl<V: Viewer> System for Catalog<V> {
    fn tables(&self) -> &'static [SystemTable] {
        &self.viewer.tables().tables
    }

    fn functions(&self) -> &'static [SystemFunction] {
        functions::all()
    }

    fn begin(&self) {
        *self.schema.lock() = SchemaCache::default();
    }

    fn rows(&self, table: usize, part: usize, database: &Database<'_>) -> Result<Option<Rows>> {
        let Some((known, fill)) = self.viewer.tables().get(table) else {
            return Ok(None);
        };
        let asked = self.asked(database);
        let rows = match fill {
            Fill::Whole(fill) if part == 0 => fill(asked)?,
            Fill::Own(own) if part == 0 => self.viewer.rows(*own, database)?,
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
        let Some((known, Fill::ByGroup(columns, _))) = self.viewer.tables().get(table) else {
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
        let Some((known, Fill::ByGroup(columns, _))) = self.viewer.tables().get(table) else {
            return Ok(Parts::All);
        };
        let name = known.columns.get(column).map(|(name, _)| *name);
        let Some((_, by)) = columns.iter().find(|(known, _)| Some(*known) == name) else {
            return Ok(Parts::All);
        };
        let outline = self.asked(database).outline()?;
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
        functions::call(function, arguments, self.asked(database))
    }
}
