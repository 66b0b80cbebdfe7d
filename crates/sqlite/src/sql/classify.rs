//! Classifies statements by their first words.

use super::kind::StatementKind;
use super::token::Token;

/// Options of a BEGIN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Begin {
    /// Acquire the partition's turn first.
    pub immediate: bool,
    /// Some for READ ONLY and READ WRITE, None if neither is given.
    pub read_only: Option<bool>,
}

/// Returns the kind of a statement, and the options of a BEGIN.
pub fn classify(tokens: &[Token<'_>]) -> (StatementKind, Begin) {
    let word = |i: usize| tokens.get(i).map(|t: &Token<'_>| t.text.to_ascii_uppercase()).unwrap_or_default();
    let kind = match word(0).as_str() {
        "" => StatementKind::Empty,
        "SELECT" | "VALUES" | "EXPLAIN" | "PRAGMA" => StatementKind::Query,
        "WITH" => classify_with(tokens),
        "INSERT" | "REPLACE" => StatementKind::Insert,
        "UPDATE" => StatementKind::Update,
        "DELETE" => StatementKind::Delete,
        "BEGIN" => return (StatementKind::Begin, begin(&tokens[1..])),
        "START" if word(1) == "TRANSACTION" => return (StatementKind::Begin, begin(&tokens[2..])),
        "COMMIT" | "END" => StatementKind::Commit,
        "ROLLBACK" | "ABORT" if tokens.iter().any(|t| t.is("TO")) => StatementKind::RollbackTo,
        "ROLLBACK" | "ABORT" => StatementKind::Rollback,
        "SAVEPOINT" => StatementKind::Savepoint,
        "RELEASE" => StatementKind::Release,
        "CREATE" => StatementKind::Utility(object(
            tokens,
            ["CREATE TABLE", "CREATE INDEX", "CREATE VIEW", "CREATE TRIGGER", "CREATE"],
        )),
        "DROP" => StatementKind::Utility(object(
            tokens,
            ["DROP TABLE", "DROP INDEX", "DROP VIEW", "DROP TRIGGER", "DROP"],
        )),
        "ALTER" => StatementKind::Utility("ALTER TABLE"),
        "VACUUM" => StatementKind::Utility("VACUUM"),
        "ANALYZE" => StatementKind::Utility("ANALYZE"),
        "CALL" => StatementKind::Call,
        "REINDEX" => StatementKind::Utility("REINDEX"),
        _ => StatementKind::Utility("OK"),
    };
    (kind, Begin::default())
}

/// The command tag of a CREATE or DROP: `tags` are those for tables, indexes, views, triggers and
/// everything else.
fn object(tokens: &[Token<'_>], tags: [&'static str; 5]) -> &'static str {
    let named = tokens
        .iter()
        .skip(1)
        .take(4)
        .find_map(|t| ["TABLE", "INDEX", "VIEW", "TRIGGER"].iter().position(|object| t.is(object)));
    tags[named.unwrap_or(4)]
}

/// The kind of a statement that starts with WITH: the first verb outside of parentheses decides.
fn classify_with(tokens: &[Token<'_>]) -> StatementKind {
    let mut depth = 0usize;
    for token in tokens {
        match token.text {
            "(" => depth += 1,
            ")" => depth = depth.saturating_sub(1),
            _ if depth > 0 => {}
            _ if token.is("INSERT") || token.is("REPLACE") => return StatementKind::Insert,
            _ if token.is("UPDATE") => return StatementKind::Update,
            _ if token.is("DELETE") => return StatementKind::Delete,
            _ if token.is("SELECT") || token.is("VALUES") => return StatementKind::Query,
            _ => {}
        }
    }
    StatementKind::Query
}

fn begin(tokens: &[Token<'_>]) -> Begin {
    let mut begin = Begin::default();
    for pair in tokens.windows(2) {
        if pair[0].is("READ") && pair[1].is("ONLY") {
            begin.read_only = Some(true);
        } else if pair[0].is("READ") && pair[1].is("WRITE") {
            begin.read_only = Some(false);
        }
    }
    begin.immediate = tokens.iter().any(|t| t.is("IMMEDIATE") || t.is("EXCLUSIVE"));
    begin
}

#[cfg(test)]
mod tests {
    use super::super::tokens;
    use super::*;

    fn kind(sql: &str) -> StatementKind {
        classify(&tokens(sql).collect::<Vec<_>>()).0
    }

    #[test]
    fn classifies_statements() {
        assert_eq!(kind(" -- nothing"), StatementKind::Empty);
        assert_eq!(kind("with x as (select 1) insert into t select * from x"), StatementKind::Insert);
        assert_eq!(kind("WITH x AS (DELETE FROM y) SELECT 1"), StatementKind::Query);
        assert_eq!(kind("rollback to savepoint a"), StatementKind::RollbackTo);
        assert_eq!(kind("create unique index i on t(a)"), StatementKind::Utility("CREATE INDEX"));
        assert_eq!(kind("create temp table table2(a)"), StatementKind::Utility("CREATE TABLE"));
        assert_eq!(kind("start transaction"), StatementKind::Begin);
        let begin = |sql| classify(&tokens(sql).collect::<Vec<_>>()).1;
        assert_eq!(begin("begin immediate"), Begin { immediate: true, read_only: None });
        assert_eq!(begin("BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY").read_only, Some(true));
        assert_eq!(begin("start transaction read write").read_only, Some(false));
    }
}
