//! Extracts the keys that a statement accesses: the values that it gives to the columns of a
//! table's primary key.
//!
//! | statement | keys |
//! | --- | --- |
//! | `SELECT`, `UPDATE`, `DELETE` of one table | equalities and IN lists that rows must satisfy |
//! | `INSERT ... VALUES` | the values of its rows |
//!
//! The scanner finds columns and values in the text ([`key_values`]). Which columns are the primary
//! key is known only to the schema ([`KeyValues::of_key`]). Anything unrecognised has no key.

use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::kind::StatementKind;
use super::shape::column_name;
use super::token::{Kind, Token};
use crate::Value;

/// Maximum number of keys of a statement. One with more counts as one without a key.
const MAX_KEYS: usize = 100;
/// Number of columns of an INSERT that are searched for the key.
const MAX_COLUMNS: usize = 100;
/// Maximum size of a literal that is a part of a key.
const MAX_LITERAL_BYTES: usize = 256;
/// Maximum depth of parentheses in which predicates are found.
const MAX_DEPTH: usize = 10;
/// A longer text in a shown key is truncated to this size.
const MAX_SHOWN_BYTES: usize = 64;

/// A value in the text of a statement.
#[derive(Clone, Debug, PartialEq)]
enum Operand {
    Parameter(u16),
    Literal(Value),
}

impl Operand {
    fn value<'a>(&'a self, parameters: &'a [Value]) -> Option<&'a Value> {
        match self {
            Operand::Literal(value) => Some(value),
            Operand::Parameter(number) => parameters.get(usize::from(*number) - 1),
        }
    }
}

/// The columns to which a statement gives values.
#[derive(Debug, PartialEq)]
pub struct KeyValues {
    /// The table, in lower case.
    pub table: String,
    columns: ColumnValues,
}

#[derive(Debug, PartialEq)]
enum ColumnValues {
    /// Columns with the values that they may have.
    Predicates(Vec<(String, Vec<Operand>)>),
    /// The columns of an INSERT, or none for all of the table, and its rows. A value that is an
    /// expression is `None`.
    Rows(Option<Vec<String>>, Vec<Vec<Option<Operand>>>),
}

/// The keys of a table that a statement accesses.
#[derive(Clone, Debug, PartialEq)]
pub struct AccessedKeys {
    table: Arc<str>,
    /// Each key has a value for each column of the primary key.
    keys: Box<[Box<[Operand]>]>,
}

impl AccessedKeys {
    /// The name of the table.
    pub fn table(&self) -> &Arc<str> {
        &self.table
    }

    /// The accessed keys, for these parameters. Those with NULLs are omitted: no row has them.
    pub fn keys<'a>(&'a self, parameters: &'a [Value]) -> impl Iterator<Item = Key<'a>> {
        let keys = self.keys.iter().map(move |operands| Key { table: &self.table, operands, parameters });
        keys.filter(|key| key.values().all(|value| value.is_some_and(|value| *value != Value::Null)))
    }

    /// The memory that it takes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let literal = |operand: &Operand| match operand {
            Operand::Literal(value) => value.bytes(),
            Operand::Parameter(_) => 0,
        };
        let key = |key: &[Operand]| {
            size_of::<Box<[Operand]>>() + size_of_val(key) + key.iter().map(literal).sum::<usize>()
        };
        self.keys.iter().map(|operands| key(operands)).sum::<usize>()
    }
}

/// A key that a statement accesses.
pub struct Key<'a> {
    table: &'a str,
    operands: &'a [Operand],
    parameters: &'a [Value],
}

impl<'a> Key<'a> {
    fn values(&self) -> impl Iterator<Item = Option<&'a Value>> {
        let (operands, parameters) = (self.operands, self.parameters);
        operands.iter().map(move |operand| operand.value(parameters))
    }

    /// Identifies the key among those of all tables of a partition. The number 5 and the text '5'
    /// are the same key, as they are in a column of integers.
    pub fn hash(&self, seed: u64) -> u64 {
        let mut hash = Xxh3::with_seed(seed);
        hash.update(self.table.as_bytes());
        for value in self.values().flatten() {
            let integer = match value {
                Value::Integer(integer) => Some(*integer),
                Value::Text(text) if text.len() <= 20 => text.parse().ok(),
                _ => None,
            };
            match (integer, value) {
                (Some(integer), _) => {
                    hash.update(&[1]);
                    hash.update(&integer.to_le_bytes());
                }
                (None, Value::Text(text)) => {
                    hash.update(&[2]);
                    hash.update(&(text.len() as u64).to_le_bytes());
                    hash.update(text.as_bytes());
                }
                (None, Value::Blob(blob)) => {
                    hash.update(&[3]);
                    hash.update(&(blob.len() as u64).to_le_bytes());
                    hash.update(blob);
                }
                (None, Value::Real(real)) => {
                    hash.update(&[4]);
                    hash.update(&real.to_bits().to_le_bytes());
                }
                (None, _) => hash.update(&[0]),
            }
        }
        hash.digest()
    }
}

/// SQL literals, separated by `, `. Long texts are truncated.
impl std::fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, value) in self.values().flatten().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            match value {
                Value::Null => f.write_str("NULL")?,
                Value::Integer(integer) => write!(f, "{integer}")?,
                Value::Real(real) => write!(f, "{real:?}")?,
                Value::Text(text) => {
                    let shown = &text[..text.floor_char_boundary(MAX_SHOWN_BYTES)];
                    let dots = if shown.len() < text.len() { "..." } else { "" };
                    write!(f, "'{}{dots}'", shown.replace('\'', "''"))?;
                }
                Value::Blob(blob) => {
                    f.write_str("x'")?;
                    for byte in blob.iter().take(MAX_SHOWN_BYTES / 2) {
                        write!(f, "{byte:02x}")?;
                    }
                    f.write_str(if blob.len() > MAX_SHOWN_BYTES / 2 { "...'" } else { "'" })?;
                }
            }
        }
        Ok(())
    }
}

/// The primary key of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct TableKey {
    /// The name of the table, in lower case.
    pub table: Arc<str>,
    /// The columns of its primary key: name in lower case, and position in the table.
    pub columns: Vec<(String, usize)>,
}

impl KeyValues {
    /// The keys, if the statement gives a value to each column of the primary key.
    pub fn of_key(self, key: &TableKey) -> Option<AccessedKeys> {
        if key.columns.is_empty() {
            return None;
        }
        let keys = match self.columns {
            ColumnValues::Predicates(predicates) => {
                let mut keys: Vec<Vec<Operand>> = vec![Vec::new()];
                for (column, _) in &key.columns {
                    let (_, values) = predicates.iter().find(|(name, _)| name == column)?;
                    if keys.len() * values.len() > MAX_KEYS {
                        return None;
                    }
                    let extended = |(key, value): (&Vec<Operand>, &Operand)| {
                        key.iter().chain([value]).cloned().collect::<Vec<_>>()
                    };
                    let pairs = keys.iter().flat_map(|key| values.iter().map(move |value| (key, value)));
                    keys = pairs.map(extended).collect();
                }
                keys
            }
            ColumnValues::Rows(names, rows) => {
                let place = |(column, position): &(String, usize)| match &names {
                    Some(names) => names.iter().position(|name| name == column),
                    None => Some(*position),
                };
                let places: Vec<usize> = key.columns.iter().map(place).collect::<Option<_>>()?;
                let key = |row: &Vec<Option<Operand>>| {
                    places.iter().map(|place| row.get(*place).cloned().flatten()).collect::<Option<Vec<_>>>()
                };
                rows.iter().map(key).collect::<Option<Vec<_>>>()?
            }
        };
        let keys = keys.into_iter().map(Vec::into_boxed_slice).collect();
        Some(AccessedKeys { table: key.table.clone(), keys })
    }
}

/// Finds the columns to which a statement gives values. `tables` are those that it names.
pub fn key_values(kind: StatementKind, tokens: &[Token<'_>], tables: &[String]) -> Option<KeyValues> {
    let table = match (kind, tables) {
        // ON CONFLICT DO UPDATE SET seems to name another table.
        (StatementKind::Insert, [table, ..]) | (_, [table]) => table,
        _ => return None,
    };
    // A subquery may access other rows.
    if tokens.iter().skip(1).any(|token| token.is("SELECT")) || tokens.first()?.is("EXPLAIN") {
        return None;
    }
    let columns = match kind {
        StatementKind::Query | StatementKind::Update | StatementKind::Delete => {
            ColumnValues::Predicates(predicates(tokens)?)
        }
        StatementKind::Insert => {
            let (names, rows) = inserted_rows(tokens)?;
            ColumnValues::Rows(names, rows)
        }
        _ => return None,
    };
    Some(KeyValues { table: table.clone(), columns })
}

/// The predicates `column = value` and `column IN (values)` that every row must satisfy.
fn predicates(tokens: &[Token<'_>]) -> Option<Vec<(String, Vec<Operand>)>> {
    const ENDS: [&str; 7] = ["GROUP", "HAVING", "WINDOW", "ORDER", "LIMIT", "OFFSET", "RETURNING"];
    const COMBINES: [&str; 4] = ["JOIN", "UNION", "INTERSECT", "EXCEPT"];
    let mut wheres = tokens.iter().enumerate().filter(|(_, token)| token.is("WHERE"));
    let (at, None) = (wheres.next()?.0, wheres.next()) else { return None };
    if tokens.iter().any(|token| COMBINES.iter().any(|word| token.is(word))) {
        return None;
    }
    // FROM a, b
    let from = tokens[..at].iter().rposition(|token| token.is("FROM"));
    if from.is_some_and(|from| tokens[from..at].iter().any(|token| token.is_symbol(","))) {
        return None;
    }
    let condition = &tokens[at + 1..];
    let levels = Levels::default().of(condition);
    let is_end = |token: &Token<'_>| ENDS.iter().any(|end| token.is(end));
    let end = levels.zip(condition).position(|(level, token)| level == 0 && is_end(token));
    let mut found = Vec::new();
    add_predicates(&condition[..end.unwrap_or(condition.len())], MAX_DEPTH, &mut found);
    Some(found)
}

/// Adds the predicates of a condition.
fn add_predicates(condition: &[Token<'_>], max_depth: usize, found: &mut Vec<(String, Vec<Operand>)>) {
    let mut ands = Vec::new();
    let mut is_between = false;
    for (at, (level, token)) in Levels::default().of(condition).zip(condition).enumerate() {
        match level {
            0 if token.is("OR") => return,
            0 if token.is("BETWEEN") => is_between = true,
            0 if token.is("AND") && !std::mem::take(&mut is_between) => ands.push(at),
            _ => {}
        }
    }
    let mut start = 0;
    for end in ands.into_iter().chain([condition.len()]) {
        let conjunct = &condition[start..end];
        start = end + 1;
        match conjunct {
            [open, inner @ .., _] if open.is_symbol("(") && closing(&conjunct[1..]) == Some(inner.len()) => {
                if max_depth > 0 {
                    add_predicates(inner, max_depth - 1, found);
                }
            }
            conjunct => found.extend(predicate(conjunct)),
        }
    }
}

/// The nesting of tokens in parentheses and CASEs.
#[derive(Default)]
struct Levels(usize);

impl Levels {
    fn of(mut self, tokens: &[Token<'_>]) -> impl Iterator<Item = usize> {
        tokens.iter().map(move |token| {
            if token.is_symbol("(") || token.is("CASE") {
                self.0 += 1;
                return self.0;
            }
            let level = self.0;
            if token.is_symbol(")") || token.is("END") {
                self.0 = self.0.saturating_sub(1);
            }
            level
        })
    }
}

fn predicate(tokens: &[Token<'_>]) -> Option<(String, Vec<Operand>)> {
    if let Some((column, [operator, rest @ ..])) = column_name(tokens) {
        if operator.is_symbol("=") || operator.is_symbol("==") {
            return Some((column, vec![whole_operand(rest)?]));
        }
        if let [open, list @ .., close] = rest
            && operator.is("IN")
            && open.is_symbol("(")
            && close.is_symbol(")")
        {
            let values = list.split(|token| token.is_symbol(","));
            let values: Vec<Operand> = values.map(whole_operand).take(MAX_KEYS + 1).collect::<Option<_>>()?;
            return (values.len() <= MAX_KEYS).then_some((column, values));
        }
    }
    // 5 = column
    let (value, rest) = operand(tokens)?;
    let [equals, rest @ ..] = rest else { return None };
    let (column, []) = column_name(rest)? else { return None };
    (equals.is_symbol("=") || equals.is_symbol("==")).then(|| (column, vec![value]))
}

fn whole_operand(tokens: &[Token<'_>]) -> Option<Operand> {
    match operand(tokens)? {
        (value, []) => Some(value),
        _ => None,
    }
}

/// The value at the start, and the tokens after it: a parameter, a literal, or a cast of one.
fn operand<'a, 'b>(tokens: &'b [Token<'a>]) -> Option<(Operand, &'b [Token<'a>])> {
    let [first, rest @ ..] = tokens else { return None };
    if first.text.len() > MAX_LITERAL_BYTES {
        return None;
    }
    let value = match first.kind {
        Kind::Parameter => {
            let number: u16 = first.text[1..].parse().ok()?;
            Operand::Parameter((number > 0).then_some(number)?)
        }
        Kind::Number => Operand::Literal(number(first.text)?),
        Kind::Text => {
            let text = first.text.strip_prefix('\'')?.strip_suffix('\'')?;
            Operand::Literal(Value::Text(text.replace("''", "'")))
        }
        Kind::Symbol if first.is_symbol("-") => {
            let [digits, rest @ ..] = rest else { return None };
            if digits.kind != Kind::Number || digits.text.len() > MAX_LITERAL_BYTES {
                return None;
            }
            return Some((Operand::Literal(number(&format!("-{}", digits.text))?), rest));
        }
        Kind::Word if first.is("CAST") => {
            let [open, rest @ ..] = rest else { return None };
            // Nested casts are not searched: their depth is not bounded.
            let is_value = open.is_symbol("(") && !rest.first()?.is("CAST");
            let (value, rest) = if is_value { operand(rest)? } else { return None };
            let end = rest.iter().position(|token| token.is_symbol(")"))?;
            let is_cast = rest.first()?.is("AS") && !rest[..end].iter().any(|token| token.is_symbol("("));
            return is_cast.then_some((value, &rest[end + 1..]));
        }
        _ => return None,
    };
    Some((value, rest))
}

fn number(text: &str) -> Option<Value> {
    let integer = text.parse().ok().map(Value::Integer);
    integer.or_else(|| text.parse().ok().map(Value::Real))
}

type InsertedRows = (Option<Vec<String>>, Vec<Vec<Option<Operand>>>);

/// The columns and rows of `INSERT INTO t [(a, b)] VALUES (1, $1), (2, $2)`.
fn inserted_rows(tokens: &[Token<'_>]) -> Option<InsertedRows> {
    let into = tokens.iter().position(|token| token.is("INTO"))?;
    let values = tokens.iter().position(|token| token.is("VALUES")).filter(|values| *values > into)?;
    let open = tokens[into..values].iter().position(|token| token.is_symbol("("));
    let names = open.map(|open| {
        let names = tokens[into + open + 1..values].iter().take_while(|token| !token.is_symbol(")"));
        names.filter(|token| !token.is_symbol(",")).map(Token::name).collect::<Option<Vec<String>>>()
    });
    let mut rows = Vec::new();
    let mut rest = &tokens[values + 1..];
    while let [open, after @ ..] = rest
        && open.is_symbol("(")
    {
        if rows.len() == MAX_KEYS {
            return None;
        }
        let end = closing(after)?;
        rows.push(row(&after[..end]));
        rest = match &after[end + 1..] {
            [comma, rest @ ..] if comma.is_symbol(",") => rest,
            rest => rest,
        };
    }
    Some((names.map_or(Some(None), |names| names.map(Some))?, rows)).filter(|(_, rows)| !rows.is_empty())
}

/// The position of the parenthesis that closes one that is open at the start.
fn closing(tokens: &[Token<'_>]) -> Option<usize> {
    let mut depth = 1;
    tokens.iter().position(|token| {
        depth += i32::from(token.is_symbol("(")) - i32::from(token.is_symbol(")"));
        depth == 0
    })
}

/// The values of a row.
fn row(tokens: &[Token<'_>]) -> Vec<Option<Operand>> {
    let mut depth = 0;
    let values = tokens.split(|token| {
        depth += i32::from(token.is_symbol("(")) - i32::from(token.is_symbol(")"));
        depth == 0 && token.is_symbol(",")
    });
    values.map(whole_operand).take(MAX_COLUMNS).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{classify, shape, tokens};
    use super::*;

    /// The keys of a statement on `t`, whose primary key are these columns. The table's columns are
    /// a, b and c.
    fn keys_of(sql: &str, key: &[&str], parameters: &[Value]) -> Vec<String> {
        let tokens: Vec<_> = tokens(sql).collect();
        let kind = classify(&tokens).0;
        let position = |column: &&str| ["a", "b", "c"].iter().position(|name| name == column).unwrap();
        let columns = key.iter().map(|column| ((*column).to_owned(), position(column))).collect();
        let key = TableKey { table: "t".into(), columns };
        let values = key_values(kind, &tokens, &shape(kind, &tokens).tables);
        let Some(accessed) = values.and_then(|values| values.of_key(&key)) else { return Vec::new() };
        accessed.keys(parameters).map(|key| key.to_string()).collect()
    }

    #[test]
    fn finds_keys_of_queries_updates_and_deletes() {
        let parameters = [Value::Integer(7), Value::Text("it's".into())];
        for (sql, key) in [
            ("SELECT * FROM t WHERE a = $1", "7"),
            ("select * from main.t as x where x.A == 5 limit 1", "5"),
            ("SELECT * FROM t WHERE \"a\" = -5 AND b > 3 ORDER BY c", "-5"),
            ("SELECT * FROM t WHERE b BETWEEN 1 AND 2 AND 6 = a", "6"),
            ("SELECT * FROM t WHERE (b = 1 OR c = 2) AND a = $2", "'it''s'"),
            ("SELECT * FROM t WHERE a = CAST($1 AS INTEGER) AND f(b, c)", "7"),
            ("UPDATE t SET b = b + 1 WHERE a = 'x''y' RETURNING b", "'x''y'"),
            ("UPDATE OR IGNORE t SET a = 3 WHERE a = 1.5", "1.5"),
            ("DELETE FROM t WHERE a = $1", "7"),
            ("SELECT * FROM t WHERE ((\"t\".\"a\" = 5) AND b)", "5"),
            ("SELECT CASE WHEN a = 1 AND b = 2 THEN 1 END FROM t WHERE a = 5", "5"),
            ("SELECT a FROM t WHERE a = $1 GROUP BY b HAVING c = 1 OR c = 2", "7"),
        ] {
            assert_eq!(keys_of(sql, &["a"], &parameters), [key], "{sql}");
        }
    }

    #[test]
    fn finds_composite_keys_and_lists() {
        let parameters = [Value::Integer(1), Value::Integer(2)];
        let found = |sql| keys_of(sql, &["a", "b"], &parameters);
        assert_eq!(found("SELECT * FROM t WHERE b = $2 AND a = $1"), ["1, 2"]);
        assert_eq!(
            found("SELECT * FROM t WHERE a IN (1, 3) AND b IN ($2, 'x')"),
            ["1, 2", "1, 'x'", "3, 2", "3, 'x'"]
        );
        assert_eq!(found("INSERT INTO t VALUES ($1, $2, f(1, 2)), (3, -4, NULL)"), ["1, 2", "3, -4"]);
        assert_eq!(
            found("INSERT INTO t (c, b, a) VALUES (1, 2, 3) ON CONFLICT DO NOTHING RETURNING a"),
            ["3, 2"]
        );
        assert_eq!(
            found("INSERT INTO t VALUES (1, 2) ON CONFLICT (a) DO UPDATE SET c = excluded.c"),
            ["1, 2"]
        );
        assert_eq!(keys_of("REPLACE INTO t(b, a) VALUES (1, 2)", &["a"], &[]), ["2"]);
        assert_eq!(found("SELECT * FROM t WHERE a = $1"), [""; 0], "a part of a key is no key");
    }

    #[test]
    fn other_statements_have_no_key() {
        for sql in [
            "SELECT * FROM t",
            "SELECT * FROM t WHERE b = 1",
            "SELECT * FROM t WHERE a > 1",
            "SELECT * FROM t WHERE a = 1 OR b = 2",
            "SELECT * FROM t WHERE NOT a = 1",
            "SELECT * FROM t WHERE a NOT IN (1)",
            "SELECT * FROM t WHERE a = b",
            "SELECT * FROM t WHERE a = 1 + 1",
            "SELECT * FROM t WHERE a = $1 + 1",
            "SELECT * FROM t WHERE a = f(1)",
            "SELECT * FROM t WHERE a = CAST(CAST(1 AS TEXT) AS INT)",
            "SELECT * FROM t WHERE a = (SELECT 1)",
            "SELECT * FROM t WHERE a IN (SELECT b FROM t)",
            "SELECT * FROM t, u WHERE a = 1",
            "SELECT * FROM t JOIN u ON t.a = u.a WHERE t.a = 1",
            "SELECT * FROM t WHERE a = $2",
            "SELECT * FROM t WHERE a = ?",
            "SELECT * FROM t WHERE a = 1 UNION VALUES (1)",
            "SELECT * FROM t WHERE a BETWEEN 1 AND a = 1",
            "SELECT * FROM t WHERE CASE WHEN b AND a = 1 AND c THEN 1 END",
            "SELECT * FROM t WHERE (a = 1 OR b)",
            "SELECT * FROM t WHERE a = 1 AND b OR c",
            "EXPLAIN SELECT * FROM t WHERE a = 1",
            "INSERT INTO t (b) VALUES (1)",
            "INSERT INTO t (a) VALUES (f(1))",
            "INSERT INTO t SELECT 1",
            "INSERT INTO t DEFAULT VALUES",
            "CREATE TABLE t (a)",
            "",
        ] {
            assert_eq!(keys_of(sql, &["a"], &[Value::Null]), [""; 0], "{sql}");
        }
        assert_eq!(keys_of("SELECT * FROM t WHERE a = 1", &[], &[]), [""; 0], "the table has no key");
        assert_eq!(keys_of("SELECT * FROM t WHERE a = $1", &["a"], &[Value::Null]), [""; 0]);
        let many = format!("SELECT * FROM t WHERE a IN ({})", ["1"; MAX_KEYS + 1].join(", "));
        assert_eq!(keys_of(&many, &["a"], &[]), [""; 0]);
        let all = format!("SELECT * FROM t WHERE a IN ({})", ["1"; MAX_KEYS].join(", "));
        assert_eq!(keys_of(&all, &["a"], &[]).len(), MAX_KEYS);
    }

    #[test]
    fn numbers_and_their_texts_are_the_same_key() {
        let hash = |table: &str, parameters: &[Value]| {
            let columns = vec![("a".to_owned(), 0)];
            let tokens: Vec<_> = tokens("SELECT 1 FROM t WHERE a = $1").collect();
            let values = key_values(StatementKind::Query, &tokens, &["t".to_owned()]).unwrap();
            let accessed = values.of_key(&TableKey { table: table.into(), columns }).unwrap();
            accessed.keys(parameters).next().unwrap().hash(1)
        };
        let of = |value| hash("t", &[value]);
        assert_eq!(of(Value::Integer(5)), of(Value::Text("5".into())));
        let different = [
            of(Value::Integer(5)),
            of(Value::Integer(6)),
            of(Value::Text("a".into())),
            of(Value::Blob(b"a".to_vec())),
            of(Value::Real(5.5)),
            hash("u", &[Value::Integer(5)]),
        ];
        for (at, one) in different.iter().enumerate() {
            assert!(!different[at + 1..].contains(one), "{at}");
        }
    }

    #[test]
    fn long_values_are_truncated() {
        let text = "\u{e9}".repeat(100);
        let shown = keys_of("SELECT 1 FROM t WHERE a = $1", &["a"], &[Value::Text(text)]);
        assert_eq!(shown, [format!("'{}...'", "\u{e9}".repeat(MAX_SHOWN_BYTES / 2))]);
        let shown = keys_of("SELECT 1 FROM t WHERE a = $1", &["a"], &[Value::Blob(vec![10; 100])]);
        assert_eq!(shown, [format!("x'{}...'", "0a".repeat(MAX_SHOWN_BYTES / 2))]);
    }
}
