//! `ALTER TABLE t ADD [CONSTRAINT c] PRIMARY KEY (...)`, which SQLite does not support.
//!
//! - In general the key becomes a unique index.
//! - If the key is a single integer column and equals the rowid of every row (true for an empty
//!   table, and for rows loaded in key order), no index is needed. The stored `CREATE TABLE` text
//!   is changed so that the column is the rowid (`INTEGER PRIMARY KEY`). Finding a row then takes
//!   one B-tree lookup instead of two. [`declare_rowid`] builds that text; the session checks the
//!   rows.

use crate::Result;
use crate::statement::Command;
use crate::syntax::{end, unexpected};
use crate::token::{Cursor, Lexer, TableName, Token, quote_name};

/// A primary key to be added to a table.
#[derive(Clone, Debug, PartialEq)]
pub struct PrimaryKey {
    /// The table.
    pub table: TableName,
    /// The name of the constraint, which is also the name of the index.
    pub name: String,
    /// The columns of the key.
    pub columns: Vec<String>,
}

impl PrimaryKey {
    /// The statement that creates the unique index.
    pub fn create_index_sql(&self) -> String {
        // An index is in its table's schema, which SQL writes before the index name.
        let index = TableName { schema: self.table.schema.clone(), name: self.name.clone() };
        let columns: Vec<String> = self.columns.iter().map(|column| quote_name(column)).collect();
        format!(
            "CREATE UNIQUE INDEX {} ON {} ({})",
            index.sql(),
            quote_name(&self.table.name),
            columns.join(", ")
        )
    }
}

/// Parses the statement after ALTER TABLE. Returns `None` if it is another change.
pub(super) fn parse(cursor: &mut Cursor<'_, '_>) -> Result<Option<Command>> {
    cursor.words(&["if", "exists"]);
    cursor.word("only");
    let Some(table) = cursor.table() else { return Ok(None) };
    if !cursor.word("add") {
        return Ok(None);
    }
    let mut name = format!("{}_pkey", table.name);
    if cursor.word("constraint") {
        name = cursor.name().ok_or_else(|| unexpected(cursor))?;
    }
    if !cursor.words(&["primary", "key"]) || !cursor.symbol('(') {
        return Ok(None);
    }
    let mut columns = Vec::new();
    loop {
        columns.push(cursor.name().ok_or_else(|| unexpected(cursor))?);
        if !cursor.symbol(',') {
            break;
        }
    }
    if !cursor.symbol(')') {
        return Err(unexpected(cursor));
    }
    end(cursor)?;
    Ok(Some(Command::AddPrimaryKey(PrimaryKey { table, name, columns })))
}

/// Returns true if the `CREATE TABLE` text declares a primary key.
pub fn has_primary_key(create: &str) -> bool {
    let tokens: Vec<Token<'_>> = Lexer::new(create).collect();
    tokens.windows(2).any(|pair| pair[0].is("primary") && pair[1].is("key"))
}

/// Returns the `CREATE TABLE` text, as SQLite stores it, with `column` declared as the rowid.
/// Returns `None` if the column cannot be the rowid, or if the text contains something whose
/// meaning would change: a default, a uniqueness constraint (whose index is found by its position
/// in the text), or a column with a name of the rowid.
pub fn declare_rowid(create: &str, column: &str) -> Option<String> {
    const INTEGER_TYPES: [&str; 8] =
        ["int", "integer", "bigint", "smallint", "int2", "int4", "int8", "mediumint"];
    const UNSUPPORTED_CLAUSES: [&str; 6] = ["default", "generated", "as", "unique", "primary", "collate"];
    const CLAUSES_AFTER_TYPE: [&str; 5] = ["not", "null", "constraint", "check", "references"];
    let tokens: Vec<Token<'_>> = Lexer::new(create).collect();
    let is_one_of = |token: &Token<'_>, words: &[&str]| words.iter().any(|word| token.is(word));
    let is_rowid_name = |token: &Token<'_>| {
        token.name().is_some_and(|name| ["rowid", "oid", "_rowid_"].contains(&name.to_lowercase().as_str()))
    };
    let is_unsupported =
        |token: &Token<'_>| is_one_of(token, &["unique", "primary", "without"]) || is_rowid_name(token);
    if !tokens.first()?.is("create") || !tokens.get(1)?.is("table") || tokens.iter().any(is_unsupported) {
        return None;
    }
    let is_column = |token: &Token<'_>| token.name().is_some_and(|name| name.eq_ignore_ascii_case(column));
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        let starts_column = depth == 1 && (tokens[at - 1].is_symbol('(') || tokens[at - 1].is_symbol(','));
        if starts_column && is_column(token) {
            let kind = tokens.get(at + 1).filter(|kind| is_one_of(kind, &INTEGER_TYPES))?;
            let rest = definition(&tokens[at + 2..])?;
            let supported = rest.first().is_none_or(|token| is_one_of(token, &CLAUSES_AFTER_TYPE))
                && !rest.iter().any(|token| is_one_of(token, &UNSUPPORTED_CLAUSES));
            return supported
                .then(|| format!("{}INTEGER PRIMARY KEY{}", &create[..kind.start], &create[kind.end()..]));
        }
        depth = depth_after(depth, token);
    }
    None
}

/// The rest of a column definition, up to its comma or the end of the column list.
fn definition<'a, 't>(tokens: &'t [Token<'a>]) -> Option<&'t [Token<'a>]> {
    let mut depth = 1;
    let end = tokens.iter().position(|token| {
        let over = depth == 1 && (token.is_symbol(',') || token.is_symbol(')'));
        depth = depth_after(depth, token);
        over
    })?;
    Some(&tokens[..end])
}

fn depth_after(depth: u32, token: &Token<'_>) -> u32 {
    if token.is_symbol('(') {
        depth + 1
    } else if token.is_symbol(')') {
        depth.saturating_sub(1)
    } else {
        depth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declares_a_column_as_the_rowid() {
        let numbered = |create, column| declare_rowid(create, column).unwrap_or_default();
        assert_eq!(
            numbered("CREATE TABLE t(aid    int not null,bid int,filler char(84))", "aid"),
            "CREATE TABLE t(aid    INTEGER PRIMARY KEY not null,bid int,filler char(84))"
        );
        assert_eq!(
            numbered("CREATE TABLE t(a TEXT DEFAULT (1), \"Id\" BIGINT)", "id"),
            "CREATE TABLE t(a TEXT DEFAULT (1), \"Id\" INTEGER PRIMARY KEY)"
        );
        assert_eq!(
            numbered("CREATE TABLE t(a INT CHECK (a IN (1, 2)) REFERENCES u(b), CHECK (a > 0)) STRICT", "a"),
            "CREATE TABLE t(a INTEGER PRIMARY KEY CHECK (a IN (1, 2)) REFERENCES u(b), CHECK (a > 0)) STRICT"
        );
    }

    #[test]
    fn leaves_tables_whose_meaning_would_change() {
        for create in [
            "CREATE TABLE t(a TEXT)",
            "CREATE TABLE t(a)",
            "CREATE TABLE t(a INT UNSIGNED)",
            "CREATE TABLE t(a INT(4))",
            "CREATE TABLE t(a INT DEFAULT 5)",
            "CREATE TABLE t(a INT UNIQUE)",
            "CREATE TABLE t(a INT, b INT UNIQUE)",
            "CREATE TABLE t(a INT, UNIQUE (a))",
            "CREATE TABLE t(a INT, b INT PRIMARY KEY)",
            "CREATE TABLE t(a INT, rowid TEXT)",
            "CREATE TABLE t(a INT, \"OID\" TEXT)",
            "CREATE TABLE t(a INT AS (b), b INT)",
            "CREATE TABLE t(b INT CHECK (a, 1), c INT)",
            "CREATE TABLE t(b INT",
            "CREATE VIRTUAL TABLE t USING fts5(a int)",
            "CREATE",
            "",
        ] {
            assert_eq!(declare_rowid(create, "a"), None, "{create}");
        }
        assert!(has_primary_key("CREATE TABLE t(a, primary /* */ KEY (a))"));
        assert!(!has_primary_key("CREATE TABLE t(a, \"primary\" key, b DEFAULT 'primary key')"));
    }
}
