//! A tenant's schema, out of SQLite's.
//!
//! A schema may have thousands of tables with thousands of columns each. Only its [`Outline`] is in memory as a whole: names
//! and numbers of tables, views, indexes and triggers, about as much as SQLite itself keeps. The rest is read in groups of
//! tables, one [`Schema`] for each group:
//!
//! ```text
//! Outline:  groups  [ a b c ][ d ][ v ][ e f ... ]     tables of 16 KiB of SQL together, or one; a view by itself
//!                                   `- Schema: columns, indexes, foreign keys, triggers, texts
//! ```
//!
//! The usual schema is one group, and read with one query for each kind of object.

use std::collections::HashMap;
use std::ops::Range;

use fulmar_engine::{Database, Value, ValueRef};

use crate::Result;
use crate::dialect::token::{Lexer, Token, quote_name};
use crate::types::{self, Declared, Type};

/// Objects are numbered from here, as Postgres numbers those of users.
const FIRST_OID: i64 = 16_384;
/// What is not in `sqlite_schema` is numbered beside what it belongs to: primary keys without an index, constraints.
pub(super) const KEY_OIDS: i64 = 0x2000_0000;
pub(super) const CONSTRAINT_OIDS: i64 = 0x4000_0000;
const OTHER_CONSTRAINT_OIDS: i64 = 0x6100_0000;
/// Numbers of a table's CHECKs, and as many of its foreign keys. If it had more, two of its neighbour's would have the same.
const CONSTRAINTS_PER_KIND: i64 = 2000;

/// The SQL texts of a group's tables have at most this many bytes together, unless the group is one table. The text bounds the
/// number of columns, and with it the rows of a group.
const GROUP_BYTES: i64 = 16 << 10;

/// Names and numbers of all objects.
#[derive(Default)]
pub(super) struct Outline {
    /// Tables and views, by name.
    relations: Vec<Head>,
    /// Indexes and triggers, by the relation that they belong to.
    owned: Vec<Owned>,
    /// Places in `relations`.
    groups: Vec<Range<usize>>,
    /// Places in `relations` by the numbers of relations, indexes and triggers.
    by_oid: HashMap<i64, usize>,
}

struct Head {
    oid: i64,
    name: String,
    is_view: bool,
    group: usize,
}

struct Owned {
    /// Its place in `relations`.
    relation: usize,
    oid: i64,
    name: String,
    is_index: bool,
}

impl Outline {
    /// Reads it.
    pub(super) fn read(database: &Database<'_>) -> Result<Outline> {
        let mut outline = Outline::default();
        let mut bytes = 0;
        let sql = "SELECT rowid, name, type = 'view', octet_length(sql) FROM sqlite_schema \
                   WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite~_%' ESCAPE '~' ORDER BY name";
        database.each(sql, &[], |row| {
            let [rowid, name, is_view, length] = row else { return };
            outline.add(
                FIRST_OID + number(*rowid),
                words(*name),
                number(*is_view) != 0,
                number(*length),
                &mut bytes,
            );
        })?;
        let sql = "SELECT rowid, name, tbl_name, type = 'index' FROM sqlite_schema WHERE type IN ('index', 'trigger')";
        database.each(sql, &[], |row| {
            let [rowid, name, table, is_index] = row else { return };
            let Some(relation) = outline.place(&words(*table)) else { return };
            let oid = FIRST_OID + number(*rowid);
            outline.by_oid.insert(oid, relation);
            outline.owned.push(Owned { relation, oid, name: words(*name), is_index: number(*is_index) != 0 });
        })?;
        outline.owned.sort_by_key(|owned| owned.relation);
        Ok(outline)
    }

    /// Adds a relation. Relations come in the order of their names. `bytes` is the size of the last group.
    fn add(&mut self, oid: i64, name: String, is_view: bool, length: i64, bytes: &mut i64) {
        let at = self.relations.len();
        let joins = self.relations.last().is_some_and(|last| !last.is_view && !is_view)
            && *bytes + length <= GROUP_BYTES;
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

    /// The place of a relation. Names differ by more than case.
    fn place(&self, name: &str) -> Option<usize> {
        let exact = self.relations.binary_search_by(|relation| relation.name.as_str().cmp(name));
        exact
            .ok()
            .or_else(|| self.relations.iter().position(|relation| relation.name.eq_ignore_ascii_case(name)))
    }

    /// How many groups there are.
    pub(super) fn groups(&self) -> usize {
        self.groups.len()
    }

    /// The group of the relation or index of that name.
    pub(super) fn group_of_name(&self, name: &str) -> Option<usize> {
        let owner = || {
            let named =
                self.owned.iter().find(|owned| owned.is_index && owned.name.eq_ignore_ascii_case(name));
            named.map(|owned| owned.relation)
        };
        // Of a key without an index.
        let keyed = || name.strip_suffix(KEY_SUFFIX).and_then(|table| self.place(table));
        let relation = self.place(name).or_else(owner).or_else(keyed)?;
        Some(self.relations[relation].group)
    }

    /// The group of the relation, index, trigger or constraint of that number.
    pub(super) fn group_of_oid(&self, oid: i64) -> Option<usize> {
        let object = match oid {
            OTHER_CONSTRAINT_OIDS.. => FIRST_OID + (oid - OTHER_CONSTRAINT_OIDS) / (2 * CONSTRAINTS_PER_KIND),
            CONSTRAINT_OIDS.. => oid - CONSTRAINT_OIDS,
            oid => oid,
        };
        let object = if object >= KEY_OIDS { object - KEY_OIDS } else { object };
        self.by_oid.get(&object).map(|relation| self.relations[*relation].group)
    }

    /// The number of a relation or index.
    pub(super) fn oid_of(&self, name: &str) -> Option<i64> {
        let index = || {
            let named = |owned: &&Owned| owned.is_index && owned.name.eq_ignore_ascii_case(name);
            self.owned.iter().find(named).map(|owned| owned.oid)
        };
        self.place(name).map(|relation| self.relations[relation].oid).or_else(index)
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

    /// Indexes and triggers of these relations.
    fn owned_by(&self, relations: Range<usize>) -> &[Owned] {
        let start = self.owned.partition_point(|owned| owned.relation < relations.start);
        let end = self.owned.partition_point(|owned| owned.relation < relations.end);
        &self.owned[start..end]
    }

    /// The rows of `sqlite_schema` that a group is made of, as an array of JSON's.
    fn rowids(&self, group: usize) -> String {
        let relations = self.groups[group].clone();
        let own = self.relations[relations.clone()].iter().map(|relation| relation.oid);
        let oids = own.chain(self.owned_by(relations).iter().map(|owned| owned.oid));
        let rowids: Vec<String> = oids.map(|oid| (oid - FIRST_OID).to_string()).collect();
        format!("[{}]", rowids.join(","))
    }
}

/// Suffix of the names of keys without an index.
const KEY_SUFFIX: &str = "_pkey";

/// A group of relations, and all that belongs to them.
pub(super) struct Schema {
    /// Tables and views, by name.
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
    /// The statement that made it.
    pub(super) sql: String,
    pub(super) columns: Vec<Column>,
}

pub(super) struct Column {
    pub(super) name: String,
    pub(super) declared: Declared,
    pub(super) not_null: bool,
    pub(super) default: Option<String>,
    /// Its place in the primary key, counted from 1; 0 if it has none.
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
    /// Whether a UNIQUE constraint made it.
    pub(super) constraint: bool,
    pub(super) keys: Vec<Key>,
    /// Columns and condition as they were written, in parentheses; empty if SQLite made it.
    written: String,
}

/// A column of an index; number 0 is an expression.
#[derive(Clone)]
pub(super) struct Key {
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
    /// Empty: the primary key.
    pub(super) to_columns: Vec<String>,
    pub(super) on_update: String,
    pub(super) on_delete: String,
}

/// A CHECK.
pub(super) struct Check {
    pub(super) oid: i64,
    pub(super) name: String,
    /// The condition, without its parentheses.
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
            let of_table = match columns.get_mut(&words(row[0])) {
                Some(of_table) => of_table,
                None => columns.entry(words(row[0])).or_default(),
            };
            of_table.push(column(&values));
        })?;
        let sql = format!("SELECT {COLUMNS} FROM pragma_table_xinfo(?1) AS x ORDER BY x.cid");
        for relation in &mut self.relations {
            relation.columns = match columns.remove(&relation.name) {
                Some(columns) => columns,
                // A view whose tables are gone has no columns to show; it is no reason to show nothing else.
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
            // The key of a table without row numbers is the table itself.
            let own = (relation.oid + KEY_OIDS, String::new());
            let (oid, written) = written.get(&name).cloned().unwrap_or(own);
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
        // The key of a table whose rows are numbered by it, or stand in its order: there is no index.
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
            keys.sort_by_key(|(place, _)| *place);
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
    // An INTEGER PRIMARY KEY is the row's number, which is never NULL; other keys may be, in SQLite.
    let is_row_number = key > 0 && declared.eq_ignore_ascii_case("INTEGER");
    Column {
        name: text(&row[0]),
        declared: types::declared(&declared).unwrap_or(Declared { kind: Type::Text, modifier: -1 }),
        not_null: integer(&row[2]) != 0 || is_row_number,
        default: (row[3] != Value::Null).then(|| text(&row[3])),
        key,
        generated: integer(&row[5]) > 1,
    }
}

impl Relation {
    /// The number of one of its constraints that is no key.
    fn constraint_oid(&self, number: i64) -> i64 {
        OTHER_CONSTRAINT_OIDS + (self.oid - FIRST_OID) * 2 * CONSTRAINTS_PER_KIND + number
    }

    /// The place of a column, counted from 1.
    pub(super) fn number(&self, column: &str) -> Option<i64> {
        (1..)
            .zip(&self.columns)
            .find(|(_, known)| known.name.eq_ignore_ascii_case(column))
            .map(|(number, _)| number)
    }

    /// Its CHECK constraints, which only its text has.
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
    /// Columns and condition.
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
        let place = tokens.iter().position(|token| {
            depth += i32::from(token.is_sign('(')) - i32::from(token.is_sign(')'));
            depth == 0 && token.is("where")
        })?;
        Some(self.written[tokens[place].end()..].trim().to_owned())
    }

    /// The statement that would make it.
    pub(super) fn sql(&self) -> String {
        let unique = if self.unique { "UNIQUE " } else { "" };
        let (name, table) = (shown(&self.name), shown(&self.table_name));
        format!("CREATE {unique}INDEX {name} ON {table} USING btree {}", self.definition())
    }
}

impl ForeignKey {
    /// A name in Postgres's manner: SQLite mostly knows none.
    pub(super) fn name(&self) -> String {
        format!("{}_{}_fkey", self.table_name, self.columns.join("_"))
    }

    /// As SQL has it.
    pub(super) fn definition(&self) -> String {
        let mut text = format!("FOREIGN KEY ({}) REFERENCES {}", list(&self.columns), shown(&self.to_table));
        if !self.to_columns.is_empty() {
            text.push_str(&format!("({})", list(&self.to_columns)));
        }
        for (what, action) in [("UPDATE", &self.on_update), ("DELETE", &self.on_delete)] {
            if action != "NO ACTION" {
                text.push_str(&format!(" ON {what} {action}"));
            }
        }
        text
    }
}

/// What a CREATE INDEX says behind the table's name.
fn written(sql: &str) -> String {
    let mut tokens = Lexer::new(sql);
    let found = tokens.by_ref().any(|token| token.is("on"));
    let start = tokens.find(|token| token.is_sign('(')).filter(|_| found).map(|token| token.start);
    start.map_or_else(String::new, |start| sql[start..].to_owned())
}

/// A name as Postgres shows it: quoted where it must be.
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

fn words(value: ValueRef<'_>) -> String {
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
    fn tables_are_read_in_groups_of_bounded_size() {
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
    fn an_index_is_defined_behind_its_table() {
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
    fn foreign_keys_as_postgres_shows_them() {
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
    fn checks_out_of_the_text() {
        let sql = "CREATE TABLE t (a CHECK (a > (1)), b TEXT, CONSTRAINT \"B\" CHECK (b <> ')'))";
        let relation =
            Relation { oid: 16385, name: "t".into(), is_view: false, sql: sql.into(), columns: Vec::new() };
        let checks: Vec<(String, String)> =
            relation.checks().into_iter().map(|check| (check.name, check.condition)).collect();
        let pair = |name: &str, condition: &str| (name.to_owned(), condition.to_owned());
        assert_eq!(checks, [pair("t_check", "a > (1)"), pair("B", "b <> ')'")]);
    }
}
