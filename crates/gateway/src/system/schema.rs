//! A tenant's schema, out of SQLite's.

use std::collections::HashMap;

use fulmar_engine::{Database, Value};

use crate::Result;
use crate::dialect::token::{Lexer, Token, quote_name};
use crate::types::{self, Declared, Type};

/// Objects are numbered from here, as Postgres numbers those of users.
const FIRST_OID: i64 = 16_384;
/// What is not in `sqlite_schema` is numbered beside what it belongs to: primary keys without an index, constraints.
pub(super) const KEY_OIDS: i64 = 0x2000_0000;
pub(super) const CONSTRAINT_OIDS: i64 = 0x4000_0000;
const OTHER_CONSTRAINT_OIDS: i64 = 0x6000_0000;

/// All that there is.
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
    /// Reads it.
    pub(super) fn read(database: &Database<'_>) -> Result<Schema> {
        let sql = "SELECT rowid, type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema \
                   WHERE name NOT LIKE 'sqlite~_%' ESCAPE '~' OR type = 'index' ORDER BY name";
        let mut schema = Schema {
            relations: Vec::new(),
            indexes: Vec::new(),
            foreign_keys: Vec::new(),
            triggers: Vec::new(),
        };
        let mut indexes = HashMap::new();
        for row in database.query(sql, &[])? {
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
        schema.read_columns(database)?;
        schema.read_indexes(database, &indexes)?;
        schema.read_foreign_keys(database)?;
        Ok(schema)
    }

    pub(super) fn relation(&self, name: &str) -> Option<&Relation> {
        self.relations.iter().find(|relation| relation.name.eq_ignore_ascii_case(name))
    }

    pub(super) fn relation_of(&self, oid: i64) -> Option<&Relation> {
        self.relations.iter().find(|relation| relation.oid == oid)
    }

    fn read_columns(&mut self, database: &Database<'_>) -> Result<()> {
        const COLUMNS: &str = "x.name, x.type, x.\"notnull\", x.dflt_value, x.pk, x.hidden";
        let sql = format!(
            "SELECT m.name, {COLUMNS} FROM sqlite_schema AS m, pragma_table_xinfo(m.name) AS x \
             WHERE m.type = 'table' AND x.hidden <> 1 ORDER BY m.name, x.cid"
        );
        let mut columns: HashMap<String, Vec<Column>> = HashMap::new();
        for row in database.query(&sql, &[])? {
            columns.entry(text(&row[0])).or_default().push(column(&row[1..]));
        }
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
        database: &Database<'_>,
        written: &HashMap<String, (i64, String)>,
    ) -> Result<()> {
        let sql = "SELECT m.name, l.name, l.\"unique\", l.origin, x.cid, x.name, x.\"desc\" \
                   FROM sqlite_schema AS m, pragma_index_list(m.name) AS l, pragma_index_xinfo(l.name) AS x \
                   WHERE m.type = 'table' AND x.key ORDER BY m.name, l.name, x.seqno";
        for row in database.query(sql, &[])? {
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
                name: format!("{}_pkey", relation.name),
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

    fn read_foreign_keys(&mut self, database: &Database<'_>) -> Result<()> {
        let sql = "SELECT m.name, f.id, f.\"table\", f.\"from\", f.\"to\", f.on_update, f.on_delete \
                   FROM sqlite_schema AS m, pragma_foreign_key_list(m.name) AS f \
                   WHERE m.type = 'table' ORDER BY m.name, f.id, f.seq";
        let mut last = None;
        for row in database.query(sql, &[])? {
            let (table, id) = (text(&row[0]), integer(&row[1]));
            if last.as_ref() != Some(&(id, table.clone())) {
                let Some(relation) = self.relation(&table) else { continue };
                let key = ForeignKey {
                    oid: OTHER_CONSTRAINT_OIDS + self.foreign_keys.len() as i64,
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
            // A table has no thousand of them; if it had, two of its neighbour's would have the same number.
            let oid = OTHER_CONSTRAINT_OIDS + 0x100_0000 + (self.oid - FIRST_OID) * 1000 + number;
            checks.push(Check { oid, name, condition });
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

#[cfg(test)]
mod tests {
    use super::*;

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
