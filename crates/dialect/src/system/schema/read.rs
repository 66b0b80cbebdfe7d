//! Reads a group of a schema's objects from SQLite.

use std::collections::HashMap;

use fulmar_pgwire::types::{self, DeclaredType, Type};
use fulmar_sqlite::{Database, Value, ValueRef};

use super::objects::{Column, ForeignKey, Index, Key, Relation, Schema, Trigger};
use super::outline::{CONSTRAINTS_PER_KIND, FIRST_OID, KEY_OID_BASE, KEY_SUFFIX, Outline};
use super::values::{integer, text, text_of_ref};
use crate::Result;
use crate::token::Lexer;

impl Schema {
    /// Reads a group of the outline.
    pub(crate) fn read(outline: &Outline, group: usize, database: &Database<'_>) -> Result<Schema> {
        let rowids = &outline.rowids(group);
        let sql = "SELECT rowid, type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema \
                   WHERE rowid IN (SELECT value FROM json_each(?1)) ORDER BY name";
        let mut schema = Schema {
            relations: Vec::new(),
            indexes: Vec::new(),
            foreign_keys: Vec::new(),
            triggers: Vec::new(),
        };
        let mut indexes = HashMap::new();
        for row in database.query(sql, &[rowids])? {
            let [rowid, kind, name, table, sql] = &row[..] else { continue };
            let (oid, name, sql) = (FIRST_OID + integer(rowid), text(name), text(sql));
            match text(kind).as_str() {
                "index" => drop(indexes.insert(name, (oid, written(&sql)))),
                "trigger" => schema.triggers.push(Trigger { oid, name, table: text(table), sql }),
                kind => {
                    let is_view = kind == "view";
                    schema.relations.push(Relation { oid, name, is_view, sql, columns: Vec::new() });
                }
            }
        }
        schema.read_columns(rowids, database)?;
        schema.read_indexes(rowids, &indexes, database)?;
        schema.read_foreign_keys(rowids, database)?;
        Ok(schema)
    }

    fn read_columns(&mut self, rowids: &str, database: &Database<'_>) -> Result<()> {
        const COLUMNS: &str = "x.name, x.type, x.\"notnull\", x.dflt_value, x.pk, x.hidden";
        let sql = format!(
            "SELECT m.name, {COLUMNS} FROM sqlite_schema AS m, pragma_table_xinfo(m.name) AS x \
             WHERE m.rowid IN (SELECT value FROM json_each(?1)) AND m.type = 'table' AND x.hidden <> 1 \
             ORDER BY m.name, x.cid"
        );
        let mut columns: HashMap<String, Vec<Column>> = HashMap::new();
        database.each(&sql, &[rowids], |row| {
            let values: Vec<Value> = row[1..].iter().map(|value| ValueRef::to_owned(*value)).collect();
            let of_table = match columns.get_mut(&text_of_ref(row[0])) {
                Some(of_table) => of_table,
                None => columns.entry(text_of_ref(row[0])).or_default(),
            };
            of_table.push(column(&values));
        })?;
        let sql = format!("SELECT {COLUMNS} FROM pragma_table_xinfo(?1) AS x ORDER BY x.cid");
        for relation in &mut self.relations {
            relation.columns = match columns.remove(&relation.name) {
                Some(columns) => columns,
                // A view whose tables no longer exist is shown without columns. The error must not
                // hide the rest of the schema.
                None => database
                    .query(&sql, &[&relation.name])
                    .unwrap_or_default()
                    .iter()
                    .map(|row| column(row))
                    .collect(),
            };
        }
        Ok(())
    }

    fn read_indexes(
        &mut self,
        rowids: &str,
        written: &HashMap<String, (i64, String)>,
        database: &Database<'_>,
    ) -> Result<()> {
        let sql = "SELECT m.name, l.name, l.\"unique\", l.origin, x.cid, x.name, x.\"desc\" \
                   FROM sqlite_schema AS m, pragma_index_list(m.name) AS l, pragma_index_xinfo(l.name) AS x \
                   WHERE m.rowid IN (SELECT value FROM json_each(?1)) AND m.type = 'table' AND x.key \
                   ORDER BY m.name, l.name, x.seqno";
        for row in database.query(sql, &[rowids])? {
            let (table, name) = (text(&row[0]), text(&row[1]));
            let key = Key {
                number: (integer(&row[4]) + 1).max(0),
                name: text(&row[5]),
                descending: integer(&row[6]) != 0,
            };
            if let Some(index) = self.indexes.last_mut().filter(|index| index.name == name) {
                index.keys.push(key);
                continue;
            }
            let Some(relation) = self.relation(&table) else { continue };
            let origin = text(&row[3]);
            // An index without an entry in `sqlite_schema` is the primary key of a WITHOUT ROWID
            // table, which is the table itself.
            let default = (relation.oid + KEY_OID_BASE, String::new());
            let (oid, written) = written.get(&name).cloned().unwrap_or(default);
            let index = Index {
                oid,
                name,
                table: relation.oid,
                table_name: relation.name.clone(),
                unique: integer(&row[2]) != 0,
                primary: origin == "pk",
                constraint: origin == "u",
                keys: vec![key],
                written,
            };
            self.indexes.push(index);
        }
        // Primary keys without an index: INTEGER PRIMARY KEY, which is the rowid, and the keys of
        // WITHOUT ROWID tables.
        for relation in &self.relations {
            let mut keys: Vec<(i64, Key)> = (1..)
                .zip(&relation.columns)
                .filter(|(_, column)| column.key > 0)
                .map(|(number, column)| {
                    (column.key, Key { number, name: column.name.clone(), descending: false })
                })
                .collect();
            let known = self.indexes.iter().any(|index| index.primary && index.table == relation.oid);
            if keys.is_empty() || known {
                continue;
            }
            keys.sort_by_key(|(position, _)| *position);
            self.indexes.push(Index {
                oid: relation.oid + KEY_OID_BASE,
                name: format!("{}{KEY_SUFFIX}", relation.name),
                table: relation.oid,
                table_name: relation.name.clone(),
                unique: true,
                primary: true,
                constraint: false,
                keys: keys.into_iter().map(|(_, key)| key).collect(),
                written: String::new(),
            });
        }
        Ok(())
    }

    fn read_foreign_keys(&mut self, rowids: &str, database: &Database<'_>) -> Result<()> {
        let sql = "SELECT m.name, f.id, f.\"table\", f.\"from\", f.\"to\", f.on_update, f.on_delete \
                   FROM sqlite_schema AS m, pragma_foreign_key_list(m.name) AS f \
                   WHERE m.rowid IN (SELECT value FROM json_each(?1)) AND m.type = 'table' \
                   ORDER BY m.name, f.id, f.seq";
        let mut last = None;
        for row in database.query(sql, &[rowids])? {
            let (table, id) = (text(&row[0]), integer(&row[1]));
            if last.as_ref() != Some(&(id, table.clone())) {
                let Some(relation) = self.relation(&table) else { continue };
                let key = ForeignKey {
                    oid: relation.constraint_oid(CONSTRAINTS_PER_KIND + id),
                    table: relation.oid,
                    table_name: relation.name.clone(),
                    columns: Vec::new(),
                    to_table: text(&row[2]),
                    to_columns: Vec::new(),
                    on_update: text(&row[5]),
                    on_delete: text(&row[6]),
                };
                self.foreign_keys.push(key);
                last = Some((id, table));
            }
            if let Some(key) = self.foreign_keys.last_mut() {
                key.columns.push(text(&row[3]));
                key.to_columns.extend((row[4] != Value::Null).then(|| text(&row[4])));
            }
        }
        Ok(())
    }
}

fn column(row: &[Value]) -> Column {
    let (declared, key) = (text(&row[1]), integer(&row[4]));
    // An INTEGER PRIMARY KEY is the rowid, which is never NULL. In SQLite, other primary keys can
    // be.
    let is_rowid = key > 0 && declared.eq_ignore_ascii_case("INTEGER");
    Column {
        name: text(&row[0]),
        declared: types::declared_type(&declared).unwrap_or(DeclaredType { kind: Type::Text, modifier: -1 }),
        not_null: integer(&row[2]) != 0 || is_rowid,
        default: (row[3] != Value::Null).then(|| text(&row[3])),
        key,
        generated: integer(&row[5]) > 1,
    }
}

/// The part of a CREATE INDEX statement after the table's name.
pub(crate) fn written(sql: &str) -> String {
    let mut tokens = Lexer::new(sql);
    let found = tokens.by_ref().any(|token| token.is("on"));
    let start = tokens.find(|token| token.is_symbol('(')).filter(|_| found).map(|token| token.start);
    start.map_or_else(String::new, |start| sql[start..].to_owned())
}
