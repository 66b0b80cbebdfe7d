//! SQLite's schema, read through the client's own session.

use std::collections::HashMap;

use fulmar_engine::Value;

use crate::Result;
use crate::dialect::token::{Lexer, quote_name};
use crate::session::Link;

/// Objects are numbered from here, as Postgres numbers those of users.
const FIRST_OID: i64 = 16_384;

/// A table, view, index or trigger.
#[derive(Clone, Debug)]
pub(super) struct Object {
    pub(super) oid: i64,
    /// `table`, `view`, `index`, `trigger`.
    pub(super) kind: String,
    pub(super) name: String,
    pub(super) table: String,
    /// The statement that made it; empty for what SQLite made by itself.
    pub(super) sql: String,
}

impl Object {
    /// Postgres's letter for what it is.
    pub(super) fn letter(&self) -> &'static str {
        match self.kind.as_str() {
            "table" => "r",
            "view" => "v",
            "index" => "i",
            _ => "",
        }
    }

    /// Whether SQLite made it for its own use.
    pub(super) fn is_internal(&self) -> bool {
        self.name.starts_with("sqlite_")
    }

    /// What the statement says behind the table's name (of an index: columns and condition).
    pub(super) fn definition(&self) -> Option<&str> {
        let mut tokens = Lexer::new(&self.sql);
        tokens.by_ref().find(|token| token.is("on"))?;
        let start = tokens.find(|token| token.is_sign('('))?.start;
        Some(&self.sql[start..])
    }
}

/// A column of a table or view.
pub(super) struct TableColumn {
    pub(super) name: String,
    pub(super) declared: String,
    pub(super) not_null: bool,
    pub(super) default: Option<String>,
    /// Its place in the primary key, counted from 1; 0 if it has none.
    pub(super) key: i64,
    pub(super) generated: bool,
}

/// An index of a table.
pub(super) struct Index {
    pub(super) name: String,
    pub(super) unique: bool,
    /// Whether it is the primary key.
    pub(super) primary: bool,
    /// Whether a UNIQUE constraint made it.
    pub(super) constraint: bool,
    /// Columns and condition, in parentheses as SQL has them.
    pub(super) definition: String,
}

/// A foreign key.
pub(super) struct ForeignKey {
    pub(super) table: String,
    pub(super) columns: Vec<String>,
    pub(super) to_table: String,
    /// Empty: the primary key.
    pub(super) to_columns: Vec<String>,
    pub(super) on_update: String,
    pub(super) on_delete: String,
}

impl ForeignKey {
    /// A name in Postgres's manner: SQLite mostly knows none.
    pub(super) fn name(&self) -> String {
        format!("{}_{}_fkey", self.table, self.columns.join("_"))
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

/// A name as Postgres shows it: quoted where it must be.
pub(super) fn shown(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    if name.bytes().all(plain) && !name.starts_with(|first: char| first.is_ascii_digit()) && !name.is_empty()
    {
        name.to_owned()
    } else {
        quote_name(name)
    }
}

fn list(names: &[String]) -> String {
    names.iter().map(|name| shown(name)).collect::<Vec<_>>().join(", ")
}

/// All objects of the schema, by name.
pub(super) async fn objects(link: &mut Link) -> Result<Vec<Object>> {
    let sql = "SELECT rowid, type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema ORDER BY name";
    let rows = link.collect(sql, &[]).await?;
    Ok(rows
        .into_iter()
        .map(|row| Object {
            oid: FIRST_OID + integer(&row[0]),
            kind: text(&row[1]),
            name: text(&row[2]),
            table: text(&row[3]),
            sql: text(&row[4]),
        })
        .collect())
}

/// The columns of a table or view, in order.
pub(super) async fn columns(link: &mut Link, table: &str) -> Result<Vec<TableColumn>> {
    let sql = "SELECT name, type, \"notnull\", dflt_value, pk, hidden FROM pragma_table_xinfo($1) \
               WHERE hidden <> 1 ORDER BY cid";
    let rows = link.collect(sql, &[Value::Text(table.to_owned())]).await?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let (declared, key) = (text(&row[1]), integer(&row[4]));
            // An INTEGER PRIMARY KEY is the row's number, which is never NULL; other keys may be, in SQLite.
            let is_row_number = key > 0 && declared.eq_ignore_ascii_case("INTEGER");
            TableColumn {
                name: text(&row[0]),
                not_null: integer(&row[2]) != 0 || is_row_number,
                default: (row[3] != Value::Null).then(|| text(&row[3])),
                key,
                generated: integer(&row[5]) > 1,
                declared,
            }
        })
        .collect())
}

/// The indexes of a table, the primary key first, even where SQLite needs none for it.
pub(super) async fn indexes(link: &mut Link, objects: &[Object], table: &str) -> Result<Vec<Index>> {
    let sql = "SELECT l.name, l.\"unique\", l.origin, i.name, i.\"desc\" FROM pragma_index_list($1) AS l, \
               pragma_index_xinfo(l.name) AS i WHERE i.key ORDER BY l.origin <> 'pk', l.name, i.seqno";
    let rows = link.collect(sql, &[Value::Text(table.to_owned())]).await?;
    let by_name: HashMap<&str, &Object> =
        objects.iter().map(|object| (object.name.as_str(), object)).collect();
    let mut indexes: Vec<(Index, Vec<String>)> = Vec::new();
    for row in rows {
        let name = text(&row[0]);
        if indexes.last().is_none_or(|(index, _)| index.name != name) {
            let origin = text(&row[2]);
            let (primary, constraint) = (origin == "pk", origin == "u");
            let definition = String::new();
            let index = Index { name, unique: integer(&row[1]) != 0, primary, constraint, definition };
            indexes.push((index, Vec::new()));
        }
        let descending = if integer(&row[4]) != 0 { " DESC" } else { "" };
        if let Some((_, columns)) = indexes.last_mut() {
            columns.push(format!("{}{descending}", shown(&text(&row[3]))));
        }
    }
    let mut indexes: Vec<Index> = indexes
        .into_iter()
        .map(|(index, columns)| {
            let definition = by_name.get(index.name.as_str()).and_then(|object| object.definition());
            let definition = definition.map_or_else(|| format!("({})", columns.join(", ")), String::from);
            Index { definition, ..index }
        })
        .collect();
    if !indexes.iter().any(|index| index.primary) {
        indexes.splice(0..0, row_number_key(link, table).await?);
    }
    Ok(indexes)
}

/// The primary key of a table whose key is the row's number (or whose rows stand in its order): there is no index.
async fn row_number_key(link: &mut Link, table: &str) -> Result<Option<Index>> {
    let mut key: Vec<TableColumn> = columns(link, table).await?;
    key.retain(|column| column.key > 0);
    key.sort_by_key(|column| column.key);
    let names: Vec<String> = key.into_iter().map(|column| column.name).collect();
    Ok((!names.is_empty()).then(|| Index {
        name: format!("{table}_pkey"),
        unique: true,
        primary: true,
        constraint: false,
        definition: format!("({})", list(&names)),
    }))
}

/// The foreign keys of all tables.
pub(super) async fn foreign_keys(link: &mut Link) -> Result<Vec<ForeignKey>> {
    let sql = "SELECT m.name, f.id, f.\"table\", f.\"from\", f.\"to\", f.on_update, f.on_delete \
               FROM sqlite_schema AS m, pragma_foreign_key_list(m.name) AS f \
               WHERE m.type = 'table' ORDER BY m.name, f.id, f.seq";
    let mut keys: Vec<(i64, ForeignKey)> = Vec::new();
    for row in link.collect(sql, &[]).await? {
        let (table, id) = (text(&row[0]), integer(&row[1]));
        if keys.last().is_none_or(|(last, key)| *last != id || key.table != table) {
            let key = ForeignKey {
                table,
                columns: Vec::new(),
                to_table: text(&row[2]),
                to_columns: Vec::new(),
                on_update: text(&row[5]),
                on_delete: text(&row[6]),
            };
            keys.push((id, key));
        }
        if let Some((_, key)) = keys.last_mut() {
            key.columns.push(text(&row[3]));
            if row[4] != Value::Null {
                key.to_columns.push(text(&row[4]));
            }
        }
    }
    Ok(keys.into_iter().map(|(_, key)| key).collect())
}

fn text(value: &Value) -> String {
    match value {
        Value::Text(text) => text.clone(),
        Value::Integer(integer) => integer.to_string(),
        _ => String::new(),
    }
}

fn integer(value: &Value) -> i64 {
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
        let object = |sql: &str| Object {
            oid: 1,
            kind: "index".into(),
            name: "i".into(),
            table: "t".into(),
            sql: sql.into(),
        };
        let index = object("CREATE INDEX \"on (\" ON t (a DESC, lower(b)) WHERE a > 1");
        assert_eq!(index.definition(), Some("(a DESC, lower(b)) WHERE a > 1"));
        assert_eq!(object("").definition(), None);
    }

    #[test]
    fn foreign_keys_as_postgres_shows_them() {
        let key = ForeignKey {
            table: "c".into(),
            columns: vec!["pid".into()],
            to_table: "Order".into(),
            to_columns: vec!["id".into()],
            on_update: "NO ACTION".into(),
            on_delete: "SET NULL".into(),
        };
        assert_eq!(key.name(), "c_pid_fkey");
        assert_eq!(key.definition(), "FOREIGN KEY (pid) REFERENCES \"Order\"(id) ON DELETE SET NULL");
    }
}
