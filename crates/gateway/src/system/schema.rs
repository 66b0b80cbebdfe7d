//! Reads a tenant's schema from SQLite's `sqlite_schema` and pragmas.
//!
//! A schema can have thousands of tables with thousands of columns each. Only its [`Outline`] is in
//! memory as a whole: the names and OIDs of tables, views, indexes and triggers, about as much as
//! SQLite itself caches. Everything else is read in groups of tables, one [`Schema`] per group:
//!
//! ```text
//! Outline:  groups  [ a b c ][ d ][ v ][ e f ... ]    tables with up to 16 KiB of SQL in total, or
//!                                   |                 one larger table; each view is its own group
//!                                   `- Schema: columns, indexes, foreign keys, triggers, SQL texts
//! ```
//!
//! A typical schema is one group. It is read with one query per kind of object.

use std::collections::HashMap;
use std::ops::Range;

use fulmar_engine::{Database, Value, ValueRef};

use crate::Result;
use crate::dialect::token::{Lexer, Token, quote_name};
use crate::types::{self, Declared, Type};

/// The OID of an object is its rowid in `sqlite_schema` plus this. PostgreSQL's user objects start
/// at the same OID.
const FIRST_OID: i64 = 16_384;
/// OID ranges of objects that are not in `sqlite_schema`. Primary keys without an index: the
/// table's OID plus this.
pub(super) const KEY_OIDS: i64 = 0x2000_0000;
/// PRIMARY KEY and UNIQUE constraints: the index's OID plus this.
pub(super) const CONSTRAINT_OIDS: i64 = 0x4000_0000;
/// CHECK constraints and foreign keys; see [`Relation::constraint_oid`].
const OTHER_CONSTRAINT_OIDS: i64 = 0x6100_0000;
/// OIDs reserved per table for CHECK constraints, and the same number for foreign keys. The OIDs of
/// further constraints would collide with those of the next table.
const CONSTRAINTS_PER_KIND: i64 = 2000;

/// Maximum total size of the SQL texts of a group's tables, unless the group is a single table. The
/// text size bounds the number of columns, and thereby the number of rows of a group.
const MAX_GROUP_BYTES: i64 = 16 << 10;

/// The names and OIDs of all objects.
#[derive(Default)]
pub(super) struct Outline {
    /// Tables and views, sorted by name.
    relations: Vec<Head>,
    /// Indexes and triggers, sorted by their relation.
    owned: Vec<Owned>,
    /// Ranges of indexes in `relations`.
    groups: Vec<Range<usize>>,
    /// Indexes in `relations` by the OID of a relation, index or trigger.
    by_oid: HashMap<i64, usize>,
}

/// A table or view in the outline.
struct Head {
    oid: i64,
    name: String,
    is_view: bool,
    group: usize,
}

/// An index or trigger in the outline.
struct Owned {
    /// The index of its table or view in `relations`.
    relation: usize,
    oid: i64,
    name: String,
    is_index: bool,
}

impl Outline {
    /// Reads the outline.
    pub(super) fn read(database: &Database<'_>) -> Result<Outline> {
        let mut outline = Outline::default();
        let mut bytes = 0;
        let sql = "SELECT rowid, name, type = 'view', octet_length(sql) FROM sqlite_schema \
                   WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite~_%' ESCAPE '~' ORDER BY name";
        database.each(sql, &[], |row| {
            let [rowid, name, is_view, length] = row else { return };
            outline.add(
                FIRST_OID + number(*rowid),
                text_of_ref(*name),
                number(*is_view) != 0,
                number(*length),
                &mut bytes,
            );
        })?;
        let sql = "SELECT rowid, name, tbl_name, type = 'index' FROM sqlite_schema WHERE type IN ('index', 'trigger')";
        database.each(sql, &[], |row| {
            let [rowid, name, table, is_index] = row else { return };
            let Some(relation) = outline.index_of(&text_of_ref(*table)) else { return };
            let oid = FIRST_OID + number(*rowid);
            outline.by_oid.insert(oid, relation);
            let (name, is_index) = (text_of_ref(*name), number(*is_index) != 0);
            outline.owned.push(Owned { relation, oid, name, is_index });
        })?;
        outline.owned.sort_by_key(|owned| owned.relation);
        Ok(outline)
    }

    /// Adds a relation. Relations must be added in the order of their names. `bytes` is the text
    /// size of the last group.
    fn add(&mut self, oid: i64, name: String, is_view: bool, length: i64, bytes: &mut i64) {
        let at = self.relations.len();
        let joins = self.relations.last().is_some_and(|last| !last.is_view && !is_view)
            && *bytes + length <= MAX_GROUP_BYTES;
        match self.groups.last_mut().filter(|_| joins) {
            Some(group) => {
                group.end = at + 1;
                *bytes += length;
            }
            None => {
                self.groups.push(at..at + 1);
                *bytes = length;
            }
        }
        self.by_oid.insert(oid, at);
        self.relations.push(Head { oid, name, is_view, group: self.groups.len() - 1 });
    }

    /// The index of a relation in `relations`. Names are compared case-insensitively.
    fn index_of(&self, name: &str) -> Option<usize> {
        let exact = self.relations.binary_search_by(|relation| relation.name.as_str().cmp(name));
        exact
            .ok()
            .or_else(|| self.relations.iter().position(|relation| relation.name.eq_ignore_ascii_case(name)))
    }

    /// The number of groups.
    pub(super) fn groups(&self) -> usize {
        self.groups.len()
    }

    /// The group of the relation or index with this name.
    pub(super) fn group_of_name(&self, name: &str) -> Option<usize> {
        let owner = || {
            let named =
                self.owned.iter().find(|owned| owned.is_index && owned.name.eq_ignore_ascii_case(name));
            named.map(|owned| owned.relation)
        };
        // The name of a primary key without an index.
        let keyed = || name.strip_suffix(KEY_SUFFIX).and_then(|table| self.index_of(table));
        let relation = self.index_of(name).or_else(owner).or_else(keyed)?;
        Some(self.relations[relation].group)
    }

    /// The group of the relation, index, trigger or constraint with this OID.
    pub(super) fn group_of_oid(&self, oid: i64) -> Option<usize> {
        let object = match oid {
            OTHER_CONSTRAINT_OIDS.. => FIRST_OID + (oid - OTHER_CONSTRAINT_OIDS) / (2 * CONSTRAINTS_PER_KIND),
            CONSTRAINT_OIDS.. => oid - CONSTRAINT_OIDS,
            oid => oid,
        };
        let object = if object >= KEY_OIDS { object - KEY_OIDS } else { object };
        self.by_oid.get(&object).map(|relation| self.relations[*relation].group)
    }

    /// The OID of a relation or index.
    pub(super) fn oid_of(&self, name: &str) -> Option<i64> {
        let index = || {
            let named = |owned: &&Owned| owned.is_index && owned.name.eq_ignore_ascii_case(name);
            self.owned.iter().find(named).map(|owned| owned.oid)
        };
        self.index_of(name).map(|relation| self.relations[relation].oid).or_else(index)
    }

    /// The name of a relation or index.
    pub(super) fn name_of(&self, oid: i64) -> Option<&str> {
        let relation = *self.by_oid.get(&oid)?;
        let head = &self.relations[relation];
        if head.oid == oid {
            return Some(&head.name);
        }
        let index =
            self.owned_by(relation..relation + 1).iter().find(|owned| owned.oid == oid && owned.is_index);
        index.map(|index| index.name.as_str())
    }

    /// The indexes and triggers of these relations.
    fn owned_by(&self, relations: Range<usize>) -> &[Owned] {
        let start = self.owned.partition_point(|owned| owned.relation < relations.start);
        let end = self.owned.partition_point(|owned| owned.relation < relations.end);
        &self.owned[start..end]
    }

    /// The rowids in `sqlite_schema` of a group's objects, as a JSON array.
    fn rowids(&self, group: usize) -> String {
        let relations = self.groups[group].clone();
        let own = self.relations[relations.clone()].iter().map(|relation| relation.oid);
        let oids = own.chain(self.owned_by(relations).iter().map(|owned| owned.oid));
        let rowids: Vec<String> = oids.map(|oid| (oid - FIRST_OID).to_string()).collect();
        format!("[{}]", rowids.join(","))
    }
}

/// The name suffix of primary keys without an index.
const KEY_SUFFIX: &str = "_pkey";

/// A group of relations, with their indexes, foreign keys and triggers.
pub(super) struct Schema {
    /// Tables and views, sorted by name.
    pub(super) relations: Vec<Relation>,
    pub(super) indexes: Vec<Index>,
    pub(super) foreign_keys: Vec<ForeignKey>,
    pub(super) triggers: Vec<Trigger>,
}

/// A table or view.
pub(super) struct Relation {
    pub(super) oid: i64,
    pub(super) name: String,
    pub(super) is_view: bool,
    /// The CREATE statement.
    pub(super) sql: String,
    pub(super) columns: Vec<Column>,
}

pub(super) struct Column {
    pub(super) name: String,
    pub(super) declared: Declared,
    pub(super) not_null: bool,
    pub(super) default: Option<String>,
    /// The position in the primary key, starting at 1. 0 if the column is not part of it.
    pub(super) key: i64,
    pub(super) generated: bool,
}

#[derive(Clone)]
pub(super) struct Index {
    pub(super) oid: i64,
    pub(super) name: String,
    pub(super) table: i64,
    pub(super) table_name: String,
    pub(super) unique: bool,
    pub(super) primary: bool,
    /// True if the index was created by a UNIQUE constraint.
    pub(super) constraint: bool,
    pub(super) keys: Vec<Key>,
    /// The columns in parentheses and the condition, as written in CREATE INDEX. Empty for an
    /// automatic index.
    written: String,
}

/// A column of an index.
#[derive(Clone)]
pub(super) struct Key {
    /// The column number in the table. 0 for an expression.
    pub(super) number: i64,
    pub(super) name: String,
    pub(super) descending: bool,
}

pub(super) struct ForeignKey {
    pub(super) oid: i64,
    pub(super) table: i64,
    pub(super) table_name: String,
    pub(super) columns: Vec<String>,
    pub(super) to_table: String,
    /// Empty if the key references the primary key.
    pub(super) to_columns: Vec<String>,
    pub(super) on_update: String,
    pub(super) on_delete: String,
}

/// A CHECK constraint.
pub(super) struct Check {
    pub(super) oid: i64,
    pub(super) name: String,
    /// The condition, without the parentheses.
    pub(super) condition: String,
}

pub(super) struct Trigger {
    pub(super) oid: i64,
    pub(super) name: String,
    pub(super) table: String,
    pub(super) sql: String,
}

impl Schema {
    /// Reads a group of the outline.
    pub(super) fn read(outline: &Outline, group: usize, database: &Database<'_>) -> Result<Schema> {
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

    pub(super) fn relation(&self, name: &str) -> Option<&Relation> {
        self.relations.iter().find(|relation| relation.name.eq_ignore_ascii_case(name))
    }

    pub(super) fn relation_of(&self, oid: i64) -> Option<&Relation> {
        self.relations.iter().find(|relation| relation.oid == oid)
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
            let default = (relation.oid + KEY_OIDS, String::new());
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
                oid: relation.oid + KEY_OIDS,
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
        declared: types::declared(&declared).unwrap_or(Declared { kind: Type::Text, modifier: -1 }),
        not_null: integer(&row[2]) != 0 || is_rowid,
        default: (row[3] != Value::Null).then(|| text(&row[3])),
        key,
        generated: integer(&row[5]) > 1,
    }
}

impl Relation {
    /// The OID of a CHECK constraint or foreign key. CHECK constraints are numbered from 0, foreign
    /// keys from [`CONSTRAINTS_PER_KIND`].
    fn constraint_oid(&self, number: i64) -> i64 {
        OTHER_CONSTRAINT_OIDS + (self.oid - FIRST_OID) * 2 * CONSTRAINTS_PER_KIND + number
    }

    /// The number of a column, starting at 1.
    pub(super) fn number(&self, column: &str) -> Option<i64> {
        (1..)
            .zip(&self.columns)
            .find(|(_, known)| known.name.eq_ignore_ascii_case(column))
            .map(|(number, _)| number)
    }

    /// The CHECK constraints. SQLite has no pragma for them, so they are parsed from the CREATE
    /// statement.
    pub(super) fn checks(&self) -> Vec<Check> {
        let tokens: Vec<Token<'_>> = Lexer::new(&self.sql).collect();
        let mut checks = Vec::new();
        for at in 0..tokens.len() {
            let opens = tokens.get(at + 1).is_some_and(|token| token.is_sign('('));
            if self.is_view || !tokens[at].is("check") || !opens {
                continue;
            }
            let mut depth = 0;
            let end = tokens[at + 1..].iter().position(|token| {
                depth += i32::from(token.is_sign('(')) - i32::from(token.is_sign(')'));
                depth == 0
            });
            let Some(end) = end else { break };
            let condition = self.sql[tokens[at + 1].end()..tokens[at + 1 + end].start].trim().to_owned();
            let named = at >= 2 && tokens[at - 2].is("constraint");
            let number = checks.len() as i64;
            let name = named.then(|| tokens[at - 1].name()).flatten();
            let name = name.unwrap_or_else(|| match number {
                0 => format!("{}_check", self.name),
                number => format!("{}_check{number}", self.name),
            });
            checks.push(Check { oid: self.constraint_oid(number), name, condition });
        }
        checks
    }
}

impl Index {
    /// The columns and the condition, as in CREATE INDEX.
    pub(super) fn definition(&self) -> String {
        if !self.written.is_empty() {
            return self.written.clone();
        }
        let keys: Vec<String> = self
            .keys
            .iter()
            .map(|key| format!("{}{}", shown(&key.name), if key.descending { " DESC" } else { "" }))
            .collect();
        format!("({})", keys.join(", "))
    }

    /// The condition of a partial index.
    pub(super) fn condition(&self) -> Option<String> {
        let tokens: Vec<Token<'_>> = Lexer::new(&self.written).collect();
        let mut depth = 0;
        let condition = tokens.iter().position(|token| {
            depth += i32::from(token.is_sign('(')) - i32::from(token.is_sign(')'));
            depth == 0 && token.is("where")
        })?;
        Some(self.written[tokens[condition].end()..].trim().to_owned())
    }

    /// The CREATE INDEX statement, in PostgreSQL's syntax.
    pub(super) fn sql(&self) -> String {
        let unique = if self.unique { "UNIQUE " } else { "" };
        let (name, table) = (shown(&self.name), shown(&self.table_name));
        format!("CREATE {unique}INDEX {name} ON {table} USING btree {}", self.definition())
    }
}

impl ForeignKey {
    /// The name that PostgreSQL would generate. SQLite does not report names of foreign keys.
    pub(super) fn name(&self) -> String {
        format!("{}_{}_fkey", self.table_name, self.columns.join("_"))
    }

    /// The definition in SQL.
    pub(super) fn definition(&self) -> String {
        let mut text = format!("FOREIGN KEY ({}) REFERENCES {}", list(&self.columns), shown(&self.to_table));
        if !self.to_columns.is_empty() {
            text.push_str(&format!("({})", list(&self.to_columns)));
        }
        for (event, action) in [("UPDATE", &self.on_update), ("DELETE", &self.on_delete)] {
            if action != "NO ACTION" {
                text.push_str(&format!(" ON {event} {action}"));
            }
        }
        text
    }
}

/// The part of a CREATE INDEX statement after the table's name.
fn written(sql: &str) -> String {
    let mut tokens = Lexer::new(sql);
    let found = tokens.by_ref().any(|token| token.is("on"));
    let start = tokens.find(|token| token.is_sign('(')).filter(|_| found).map(|token| token.start);
    start.map_or_else(String::new, |start| sql[start..].to_owned())
}

/// A name as PostgreSQL displays it: quoted if necessary.
pub(super) fn shown(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    let is_plain = name.bytes().all(plain) && name.starts_with(|first: char| !first.is_ascii_digit());
    if is_plain { name.to_owned() } else { quote_name(name) }
}

pub(super) fn list(names: &[String]) -> String {
    names.iter().map(|name| shown(name)).collect::<Vec<_>>().join(", ")
}

pub(super) fn text(value: &Value) -> String {
    match value {
        Value::Text(text) => text.clone(),
        Value::Integer(integer) => integer.to_string(),
        _ => String::new(),
    }
}

pub(super) fn integer(value: &Value) -> i64 {
    match value {
        Value::Integer(integer) => *integer,
        _ => 0,
    }
}

fn text_of_ref(value: ValueRef<'_>) -> String {
    match value {
        ValueRef::Text(text) => String::from_utf8_lossy(text).into_owned(),
        _ => String::new(),
    }
}

fn number(value: ValueRef<'_>) -> i64 {
    match value {
        ValueRef::Integer(integer) => integer,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outline_groups_tables_up_to_the_size_limit() {
        let mut outline = Outline::default();
        let mut bytes = 0;
        let relations =
            [("a", false, 8 << 10), ("b", false, 8 << 10), ("c", false, 1), ("d", true, 1), ("e", false, 1)];
        for (oid, (name, is_view, length)) in (FIRST_OID + 1..).zip(relations) {
            outline.add(oid, name.into(), is_view, length, &mut bytes);
        }
        outline.owned.push(Owned { relation: 1, oid: FIRST_OID + 9, name: "b_i".into(), is_index: true });
        outline.by_oid.insert(FIRST_OID + 9, 1);
        assert_eq!(outline.groups, [0..2, 2..3, 3..4, 4..5]);
        assert_eq!(outline.rowids(0), "[1,2,9]");
        assert_eq!(outline.rowids(3), "[5]");
        let names = ["B", "b_i", "c_pkey", "nothing"].map(|name| outline.group_of_name(name));
        assert_eq!(names, [Some(0), Some(0), Some(1), None]);
        let c = Relation {
            oid: FIRST_OID + 3,
            name: "c".into(),
            is_view: false,
            sql: "".into(),
            columns: vec![],
        };
        let oids = [
            FIRST_OID + 9,
            FIRST_OID + 9 + CONSTRAINT_OIDS,
            c.oid + KEY_OIDS,
            c.oid + KEY_OIDS + CONSTRAINT_OIDS,
            c.constraint_oid(0),
            c.constraint_oid(2 * CONSTRAINTS_PER_KIND - 1),
            FIRST_OID,
        ];
        let groups = oids.map(|oid| outline.group_of_oid(oid));
        assert_eq!(groups, [Some(0), Some(0), Some(1), Some(1), Some(1), Some(1), None]);
        assert_eq!(outline.name_of(FIRST_OID + 9), Some("b_i"));
        assert_eq!([outline.oid_of("C"), outline.oid_of("b_i")], [Some(c.oid), Some(FIRST_OID + 9)]);
    }

    #[test]
    fn index_definition_is_taken_from_the_create_statement() {
        let index = |sql: &str| Index {
            oid: 1,
            name: "i".into(),
            table: 1,
            table_name: "t".into(),
            unique: true,
            primary: false,
            constraint: false,
            keys: vec![Key { number: 1, name: "A".into(), descending: true }],
            written: written(sql),
        };
        let partial = index("CREATE INDEX \"on (\" ON t (a DESC, lower(b)) WHERE a > 1");
        assert_eq!(partial.definition(), "(a DESC, lower(b)) WHERE a > 1");
        assert_eq!(partial.condition().as_deref(), Some("a > 1"));
        assert_eq!(index("").sql(), "CREATE UNIQUE INDEX i ON t USING btree (\"A\" DESC)");
        assert_eq!(index("").condition(), None);
    }

    #[test]
    fn foreign_key_definitions_match_postgres() {
        let key = ForeignKey {
            oid: 1,
            table: 1,
            table_name: "c".into(),
            columns: vec!["pid".into()],
            to_table: "Order".into(),
            to_columns: vec!["id".into()],
            on_update: "NO ACTION".into(),
            on_delete: "SET NULL".into(),
        };
        assert_eq!(key.name(), "c_pid_fkey");
        assert_eq!(key.definition(), "FOREIGN KEY (pid) REFERENCES \"Order\"(id) ON DELETE SET NULL");
    }

    #[test]
    fn check_constraints_are_parsed_from_the_create_statement() {
        let sql = "CREATE TABLE t (a CHECK (a > (1)), b TEXT, CONSTRAINT \"B\" CHECK (b <> ')'))";
        let relation =
            Relation { oid: 16385, name: "t".into(), is_view: false, sql: sql.into(), columns: Vec::new() };
        let checks: Vec<(String, String)> =
            relation.checks().into_iter().map(|check| (check.name, check.condition)).collect();
        let pair = |name: &str, condition: &str| (name.to_owned(), condition.to_owned());
        assert_eq!(checks, [pair("t_check", "a > (1)"), pair("B", "b <> ')'")]);
    }
}
