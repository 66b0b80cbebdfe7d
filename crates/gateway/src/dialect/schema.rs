//! Statements about tables that Postgres writes another way than SQLite.
//!
//! | Postgres | becomes |
//! | --- | --- |
//! | `CREATE TABLE t (...) WITH (fillfactor=90)` | the same without WITH: a hint about storage that is not ours |
//! | `DROP TABLE a, b` | one DROP each |
//! | `TRUNCATE a, b` | one DELETE each |
//! | `ALTER TABLE t ADD PRIMARY KEY (c)` | a unique index `t_pkey` |
//! | `VACUUM ANALYZE t` | `ANALYZE t` |
//! | `VACUUM t` | nothing: pages of one table are not vacuumed alone |

use fulmar_engine::{Error, sqlstate};

use super::token::{Cursor, Table, Token, quote_name};
use super::{Answer, Command, unexpected};
use crate::Result;

/// Parses a statement; `None` if it is SQLite's own.
pub(super) fn parse(cursor: &mut Cursor<'_, '_>, sql: &str) -> Result<Option<Answer>> {
    if cursor.word("create") {
        return Ok(create_table(cursor, sql).map(Answer::Rewritten));
    }
    let command = if cursor.words(&["drop", "table"]) {
        drop_several(cursor, "DROP TABLE")?
    } else if cursor.words(&["drop", "view"]) {
        drop_several(cursor, "DROP VIEW")?
    } else if cursor.word("truncate") {
        Some(truncate(cursor)?)
    } else if cursor.words(&["alter", "table"]) {
        add_primary_key(cursor)?
    } else if cursor.word("vacuum") {
        vacuum(cursor)?
    } else {
        None
    };
    Ok(command.map(Answer::Command))
}

fn create_table(cursor: &mut Cursor<'_, '_>, sql: &str) -> Option<String> {
    let start = cursor.peek()?.start;
    let unlogged = cursor.word("unlogged");
    let start = if unlogged { cursor.peek()?.start } else { start };
    if !cursor.word("table") {
        return None;
    }
    let tokens = cursor.rest();
    let end = tokens.last()?.end();
    match options(tokens) {
        Some((from, to)) => Some(format!("CREATE {}{}", &sql[start..from], &sql[to..end])),
        None if unlogged => Some(format!("CREATE {}", &sql[start..end])),
        None => None,
    }
}

/// Where `WITH (...)` stands behind the columns: first byte, and the byte after the last.
fn options(tokens: &[Token<'_>]) -> Option<(usize, usize)> {
    let mut depth = 0u32;
    let mut from = None;
    for (index, token) in tokens.iter().enumerate() {
        if token.is_sign('(') {
            depth += 1;
        } else if token.is_sign(')') {
            depth = depth.saturating_sub(1);
            if let (0, Some(from)) = (depth, from) {
                return Some((from, token.end()));
            }
        } else if depth == 0
            && token.is("with")
            && tokens.get(index + 1).is_some_and(|next| next.is_sign('('))
        {
            from = Some(token.start);
        }
    }
    None
}

fn tables(cursor: &mut Cursor<'_, '_>) -> Result<Vec<Table>> {
    let mut tables = Vec::new();
    loop {
        tables.push(cursor.table().ok_or_else(|| unexpected(cursor))?);
        cursor.sign('*');
        if !cursor.sign(',') {
            return Ok(tables);
        }
    }
}

/// `DROP TABLE a, b`; one table alone is SQLite's own.
fn drop_several(cursor: &mut Cursor<'_, '_>, tag: &'static str) -> Result<Option<Command>> {
    let condition = if cursor.words(&["if", "exists"]) { "IF EXISTS " } else { "" };
    let names = tables(cursor)?;
    let behaviour = cursor.word("cascade") || cursor.word("restrict");
    if !cursor.is_end() || (names.len() == 1 && !behaviour) {
        return Ok(None);
    }
    let statements = names.iter().map(|table| format!("{tag} {condition}{}", table.sql())).collect();
    Ok(Some(Command::Batch { statements, tag }))
}

fn truncate(cursor: &mut Cursor<'_, '_>) -> Result<Command> {
    cursor.word("table");
    cursor.word("only");
    let names = tables(cursor)?;
    if cursor.words(&["restart", "identity"]) {
        return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "RESTART IDENTITY is not supported")
            .hint("Delete the table's row in sqlite_sequence."));
    }
    cursor.words(&["continue", "identity"]);
    let _ = cursor.word("cascade") || cursor.word("restrict");
    super::end(cursor)?;
    let statements = names.iter().map(|table| format!("DELETE FROM {}", table.sql())).collect();
    Ok(Command::Batch { statements, tag: "TRUNCATE TABLE" })
}

fn add_primary_key(cursor: &mut Cursor<'_, '_>) -> Result<Option<Command>> {
    cursor.words(&["if", "exists"]);
    cursor.word("only");
    let Some(table) = cursor.table() else { return Ok(None) };
    if !cursor.word("add") {
        return Ok(None);
    }
    let mut index = format!("{}_pkey", table.name);
    if cursor.word("constraint") {
        index = cursor.name().ok_or_else(|| unexpected(cursor))?;
    }
    if !cursor.words(&["primary", "key"]) || !cursor.sign('(') {
        return Ok(None);
    }
    let mut columns = Vec::new();
    loop {
        columns.push(quote_name(&cursor.name().ok_or_else(|| unexpected(cursor))?));
        if !cursor.sign(',') {
            break;
        }
    }
    if !cursor.sign(')') {
        return Err(unexpected(cursor));
    }
    super::end(cursor)?;
    // An index lives in its table's schema, which is said before the index's name.
    let index = Table { schema: table.schema.clone(), name: index };
    let create = format!(
        "CREATE UNIQUE INDEX {} ON {} ({})",
        index.sql(),
        quote_name(&table.name),
        columns.join(", ")
    );
    Ok(Some(Command::Batch { statements: vec![create], tag: "ALTER TABLE" }))
}

/// `VACUUM` alone, of a schema, or INTO a file is SQLite's own (and what of it is allowed the engine's to say).
fn vacuum(cursor: &mut Cursor<'_, '_>) -> Result<Option<Command>> {
    let mut analyze = false;
    let mut options = false;
    if cursor.sign('(') {
        options = true;
        while let Some(token) = cursor.next().filter(|token| !token.is_sign(')')) {
            analyze |= token.is("analyze");
        }
    }
    while cursor.word("full") || cursor.word("freeze") || cursor.word("verbose") {
        options = true;
    }
    analyze |= cursor.word("analyze");
    let names = if cursor.is_end() { Vec::new() } else { tables(cursor)? };
    let schema = names.first().is_some_and(|table| matches!(table.name.as_str(), "main" | "temp" | "into"));
    if schema || !cursor.is_end() || (names.is_empty() && !analyze && !options) {
        return Ok(None);
    }
    let statements = match (analyze, names.is_empty()) {
        (true, true) => vec!["ANALYZE".to_owned()],
        (true, false) => names.iter().map(|table| format!("ANALYZE {}", table.sql())).collect(),
        (false, true) => vec!["VACUUM".to_owned()],
        (false, false) => Vec::new(),
    };
    Ok(Some(Command::Batch { statements, tag: "VACUUM" }))
}
