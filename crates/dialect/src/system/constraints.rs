//! `pg_constraint`: primary keys, foreign keys, `UNIQUE` and `CHECK` constraints.

use fulmar_sqlite::Value;

use super::asked::{CatalogRequest, Rows};
use super::relations::PUBLIC;
use super::schema::{CONSTRAINT_OID_BASE, ForeignKey, Relation, Schema, shown};
use crate::{Result, row};

fn numbers(numbers: impl Iterator<Item = i64>) -> String {
    format!("{{{}}}", numbers.map(|number| number.to_string()).collect::<Vec<_>>().join(","))
}

/// PostgreSQL's code for the action of a foreign key.
fn action(action: &str) -> &'static str {
    match action {
        "CASCADE" => "c",
        "SET NULL" => "n",
        "SET DEFAULT" => "d",
        "RESTRICT" => "r",
        _ => "a",
    }
}

/// A row of `pg_constraint`, without the columns that are the same in every row.
struct Constraint {
    oid: i64,
    name: String,
    kind: &'static str,
    table: i64,
    /// The index that enforces the constraint. Of a foreign key, the index on the referenced table.
    index: i64,
    to_table: i64,
    /// The codes of a foreign key's ON UPDATE action, ON DELETE action and match type.
    codes: [&'static str; 3],
    /// Arrays of column numbers.
    columns: Option<String>,
    to_columns: Option<String>,
    condition: Option<String>,
}

impl Constraint {
    fn new(oid: i64, name: String, kind: &'static str, table: i64) -> Constraint {
        let (codes, columns, to_columns, condition) = ([" "; 3], None, None, None);
        Constraint { oid, name, kind, table, index: 0, to_table: 0, codes, columns, to_columns, condition }
    }

    fn row(self) -> Vec<Value> {
        let Constraint { oid, name, kind, table, index, to_table, columns, to_columns, condition, .. } = self;
        let [update, delete, matching] = self.codes;
        let inherits = kind == "c";
        row![
            oid, name, PUBLIC, kind, false, false, true, table, 0i64, index, 0i64, to_table, update, delete,
            matching, true, 0i64, !inherits, columns, to_columns, condition,
        ]
    }
}

pub(crate) fn constraints(request: CatalogRequest<'_>, schema: &Schema) -> Result<Rows> {
    let mut constraints = Vec::new();
    for index in schema.indexes.iter().filter(|index| index.primary || index.constraint) {
        let kind = if index.primary { "p" } else { "u" };
        let key = Constraint::new(index.oid + CONSTRAINT_OID_BASE, index.name.clone(), kind, index.table);
        let columns = Some(numbers(index.keys.iter().map(|key| key.number)));
        constraints.push(Constraint { index: index.oid, columns, ..key });
    }
    for key in &schema.foreign_keys {
        constraints.push(foreign_key(request, key, schema)?);
    }
    for relation in &schema.relations {
        constraints.extend(relation.checks().into_iter().map(|check| Constraint {
            condition: Some(check.condition),
            ..Constraint::new(check.oid, check.name, "c", relation.oid)
        }));
    }
    Ok(constraints.into_iter().map(Constraint::row).collect())
}

fn foreign_key(request: CatalogRequest<'_>, key: &ForeignKey, schema: &Schema) -> Result<Constraint> {
    let group = request.group_of_name(&key.to_table)?;
    let referenced = group.as_deref().unwrap_or(schema);
    let (from, to) = (schema.relation_of(key.table), referenced.relation(&key.to_table));
    let number =
        |relation: Option<&Relation>, column: &String| relation.and_then(|table| table.number(column));
    let primary =
        to.and_then(|to| referenced.indexes.iter().find(|index| index.primary && index.table == to.oid));
    let to_columns = match key.to_columns.is_empty() {
        true => numbers(primary.into_iter().flat_map(|index| &index.keys).map(|key| key.number)),
        false => numbers(key.to_columns.iter().filter_map(|column| number(to, column))),
    };
    Ok(Constraint {
        index: primary.map_or(0, |index| index.oid),
        to_table: to.map_or(0, |to| to.oid),
        codes: [action(&key.on_update), action(&key.on_delete), "s"],
        columns: Some(numbers(key.columns.iter().filter_map(|column| number(from, column)))),
        to_columns: Some(to_columns),
        ..Constraint::new(key.oid, key.name(), "f", key.table)
    })
}

/// The result of `pg_get_constraintdef`.
pub(crate) fn constraint_definition(schema: &Schema, oid: i64) -> Option<String> {
    if let Some(key) = schema.foreign_keys.iter().find(|key| key.oid == oid) {
        return Some(key.definition());
    }
    if let Some(index) = schema.indexes.iter().find(|index| index.oid + CONSTRAINT_OID_BASE == oid) {
        let kind = if index.primary { "PRIMARY KEY" } else { "UNIQUE" };
        let columns: Vec<String> = index.keys.iter().map(|key| shown(&key.name)).collect();
        return Some(format!("{kind} ({})", columns.join(", ")));
    }
    let mut checks = schema.relations.iter().flat_map(Relation::checks);
    checks.find(|check| check.oid == oid).map(|check| format!("CHECK ({})", check.condition))
}
