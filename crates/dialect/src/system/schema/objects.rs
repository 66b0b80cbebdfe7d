//! The objects of a schema, and their definitions as PostgreSQL writes them.

use fulmar_pgwire::types::DeclaredType;

use super::outline::{CONSTRAINTS_PER_KIND, FIRST_OID, OTHER_CONSTRAINT_OIDS};
use crate::token::{Lexer, Token, quote_name};

/// A group of relations, with their indexes, foreign keys and triggers.
pub(crate) struct Schema {
    /// Tables and views, sorted by name.
    pub(crate) relations: Vec<Relation>,
    pub(crate) indexes: Vec<Index>,
    pub(crate) foreign_keys: Vec<ForeignKey>,
    pub(crate) triggers: Vec<Trigger>,
}

impl Schema {
    pub(crate) fn relation(&self, name: &str) -> Option<&Relation> {
        self.relations.iter().find(|relation| relation.name.eq_ignore_ascii_case(name))
    }

    pub(crate) fn relation_of(&self, oid: i64) -> Option<&Relation> {
        self.relations.iter().find(|relation| relation.oid == oid)
    }
}

/// A table or view.
pub(crate) struct Relation {
    pub(crate) oid: i64,
    pub(crate) name: String,
    pub(crate) is_view: bool,
    /// The CREATE statement.
    pub(crate) sql: String,
    pub(crate) columns: Vec<Column>,
}

pub(crate) struct Column {
    pub(crate) name: String,
    pub(crate) declared: DeclaredType,
    pub(crate) not_null: bool,
    pub(crate) default: Option<String>,
    /// The position in the primary key, starting at 1. 0 if the column is not part of it.
    pub(crate) key: i64,
    pub(crate) generated: bool,
}

#[derive(Clone)]
pub(crate) struct Index {
    pub(crate) oid: i64,
    pub(crate) name: String,
    pub(crate) table: i64,
    pub(crate) table_name: String,
    pub(crate) unique: bool,
    pub(crate) primary: bool,
    /// True if the index was created by a UNIQUE constraint.
    pub(crate) constraint: bool,
    pub(crate) keys: Vec<Key>,
    /// The columns in parentheses and the condition, as written in CREATE INDEX. Empty for an
    /// automatic index.
    pub(super) written: String,
}

/// A column of an index.
#[derive(Clone)]
pub(crate) struct Key {
    /// The column number in the table. 0 for an expression.
    pub(crate) number: i64,
    pub(crate) name: String,
    pub(crate) descending: bool,
}

pub(crate) struct ForeignKey {
    pub(crate) oid: i64,
    pub(crate) table: i64,
    pub(crate) table_name: String,
    pub(crate) columns: Vec<String>,
    pub(crate) to_table: String,
    /// Empty if the key references the primary key.
    pub(crate) to_columns: Vec<String>,
    pub(crate) on_update: String,
    pub(crate) on_delete: String,
}

/// A CHECK constraint.
pub(crate) struct Check {
    pub(crate) oid: i64,
    pub(crate) name: String,
    /// The condition, without the parentheses.
    pub(crate) condition: String,
}

pub(crate) struct Trigger {
    pub(crate) oid: i64,
    pub(crate) name: String,
    pub(crate) table: String,
    pub(crate) sql: String,
}

impl Relation {
    /// The OID of a CHECK constraint or foreign key. CHECK constraints are numbered from 0, foreign
    /// keys from [`CONSTRAINTS_PER_KIND`].
    pub(super) fn constraint_oid(&self, number: i64) -> i64 {
        OTHER_CONSTRAINT_OIDS + (self.oid - FIRST_OID) * 2 * CONSTRAINTS_PER_KIND + number
    }

    /// The number of a column, starting at 1.
    pub(crate) fn number(&self, column: &str) -> Option<i64> {
        (1..)
            .zip(&self.columns)
            .find(|(_, known)| known.name.eq_ignore_ascii_case(column))
            .map(|(number, _)| number)
    }

    /// The CHECK constraints. SQLite has no pragma for them, so they are parsed from the CREATE
    /// statement.
    pub(crate) fn checks(&self) -> Vec<Check> {
        let tokens: Vec<Token<'_>> = Lexer::new(&self.sql).collect();
        let mut checks = Vec::new();
        for at in 0..tokens.len() {
            let opens = tokens.get(at + 1).is_some_and(|token| token.is_symbol('('));
            if self.is_view || !tokens[at].is("check") || !opens {
                continue;
            }
            let mut depth = 0;
            let end = tokens[at + 1..].iter().position(|token| {
                depth += i32::from(token.is_symbol('(')) - i32::from(token.is_symbol(')'));
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
    pub(crate) fn definition(&self) -> String {
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
    pub(crate) fn condition(&self) -> Option<String> {
        let tokens: Vec<Token<'_>> = Lexer::new(&self.written).collect();
        let mut depth = 0;
        let condition = tokens.iter().position(|token| {
            depth += i32::from(token.is_symbol('(')) - i32::from(token.is_symbol(')'));
            depth == 0 && token.is("where")
        })?;
        Some(self.written[tokens[condition].end()..].trim().to_owned())
    }

    /// The CREATE INDEX statement, in PostgreSQL's syntax.
    pub(crate) fn sql(&self) -> String {
        let unique = if self.unique { "UNIQUE " } else { "" };
        let (name, table) = (shown(&self.name), shown(&self.table_name));
        format!("CREATE {unique}INDEX {name} ON {table} USING btree {}", self.definition())
    }
}

impl ForeignKey {
    /// The name that PostgreSQL would generate. SQLite does not report names of foreign keys.
    pub(crate) fn name(&self) -> String {
        format!("{}_{}_fkey", self.table_name, self.columns.join("_"))
    }

    /// The definition in SQL.
    pub(crate) fn definition(&self) -> String {
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

/// A name as PostgreSQL displays it: quoted if necessary.
pub(crate) fn shown(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    let is_plain = name.bytes().all(plain) && name.starts_with(|first: char| !first.is_ascii_digit());
    if is_plain { name.to_owned() } else { quote_name(name) }
}

pub(crate) fn list(names: &[String]) -> String {
    names.iter().map(|name| shown(name)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::read::written;
    use super::*;

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
