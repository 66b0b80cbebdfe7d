//! Extracts the row that a statement names by equality, and the columns that its parameters belong
//! to.

use std::sync::Arc;

use hashbrown::HashSet;
use xxhash_rust::xxh3::Xxh3;

use super::key::{KeyValues, key_values};
use super::kind::StatementKind;
use super::token::{Kind, Token};
use crate::Value;

/// A row's name, hashed.
pub type RowName = u64;

/// The right-hand side of an equality predicate.
#[derive(Clone, Debug, PartialEq)]
enum Operand {
    Parameter(u16),
    Literal(String),
}

/// A row named by equality of columns: `WHERE w_id = $1 AND d_id = 3`.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedRow {
    table: String,
    /// Columns in alphabetical order, each with the operand it must equal.
    columns: Vec<(String, Operand)>,
}

impl NamedRow {
    /// The row's name for these parameters. None if one of them is NULL or missing.
    pub fn name(&self, parameters: &[Value]) -> Option<RowName> {
        let mut hash = Xxh3::new();
        hash.update(self.table.as_bytes());
        for (column, operand) in &self.columns {
            hash.update(&[0]);
            hash.update(column.as_bytes());
            hash.update(&[1]);
            match operand {
                Operand::Literal(text) => hash.update(text.as_bytes()),
                Operand::Parameter(number) => match parameters.get(*number as usize - 1)? {
                    // 5 and '5' name the same row of an integer column.
                    Value::Integer(i) => hash.update(i.to_string().as_bytes()),
                    Value::Text(t) => hash.update(t.as_bytes()),
                    Value::Real(r) => hash.update(r.to_string().as_bytes()),
                    Value::Blob(b) => hash.update(b),
                    Value::Null => return None,
                },
            }
        }
        Some(hash.digest())
    }
}

/// The column that a parameter is compared with or assigned to.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterColumn {
    /// The number of the parameter.
    pub number: u16,
    /// Shared, since thousands of parameters may be compared with one column.
    pub column: Arc<str>,
}

/// What the scanner extracts from a statement.
#[derive(Debug, Default, PartialEq)]
pub struct Shape {
    /// The tables named after FROM, JOIN, INTO and UPDATE, in lower case; the first [`MAX_TABLES`].
    pub tables: Vec<String>,
    /// The row that the statement names by equality.
    pub row: Option<NamedRow>,
    /// The columns to which it gives values, if they may be a primary key.
    pub keys: Option<KeyValues>,
    /// The columns that parameters are compared with or assigned to.
    pub parameters: Vec<ParameterColumn>,
    /// Byte offset of a trailing FOR UPDATE (or FOR SHARE, ...).
    pub for_update: Option<usize>,
}

/// Scans a statement.
pub fn shape(kind: StatementKind, tokens: &[Token<'_>]) -> Shape {
    let for_update = match kind {
        StatementKind::Query => trailing_for_update(tokens),
        _ => None,
    };
    let tokens = match for_update {
        Some(start) => &tokens[..tokens.iter().take_while(|t| t.start < start).count()],
        None => tokens,
    };
    let tables = tables(tokens);
    let row = named_row(kind, tokens, &tables);
    let keys = key_values(kind, tokens, &tables);
    let mut parameters = compared_parameters(tokens);
    parameters.extend(inserted_parameters(tokens));
    Shape { tables, row, keys, parameters, for_update }
}

/// Finds a trailing `FOR UPDATE`, `FOR NO KEY UPDATE` or `FOR SHARE` outside of parentheses, with
/// `OF t`, `NOWAIT` and similar words after it.
fn trailing_for_update(tokens: &[Token<'_>]) -> Option<usize> {
    let tail = &tokens[tokens.len().saturating_sub(8)..];
    let at = tail.iter().rposition(|t| t.is("FOR"))?;
    let strength = tail[at + 1..].iter().find(|t| !t.is("NO") && !t.is("KEY"))?;
    let closed = tail[at..].iter().any(|t| t.is_symbol(")"));
    ((strength.is("UPDATE") || strength.is("SHARE")) && !closed).then_some(tail[at].start)
}

/// Maximum number of recorded tables: SQLite joins at most 64.
const MAX_TABLES: usize = 64;

fn tables(tokens: &[Token<'_>]) -> Vec<String> {
    let mut tables = Vec::new();
    let mut i = 0;
    while i + 1 < tokens.len() && tables.len() < MAX_TABLES {
        let introduces = ["FROM", "JOIN", "INTO", "UPDATE"].iter().any(|word| tokens[i].is(word));
        i += 1;
        if !introduces {
            continue;
        }
        // UPDATE OR IGNORE t
        while tokens.get(i).is_some_and(|t| t.is("OR")) {
            i += 2;
        }
        // schema.table
        if tokens.get(i + 1).is_some_and(|t| t.is_symbol(".")) {
            i += 2;
        }
        if let Some(name) = tokens.get(i).and_then(Token::name) {
            tables.push(name);
        }
    }
    tables
}

fn named_row(kind: StatementKind, tokens: &[Token<'_>], tables: &[String]) -> Option<NamedRow> {
    if !matches!(kind, StatementKind::Query | StatementKind::Update | StatementKind::Delete) {
        return None;
    }
    // Supported: one table, one WHERE, no subquery.
    let [table] = tables else { return None };
    if tokens.iter().filter(|t| t.is("WHERE")).count() != 1 || tokens.iter().skip(1).any(|t| t.is("SELECT")) {
        return None;
    }
    let start = tokens.iter().position(|t| t.is("WHERE"))? + 1;
    let mut rest = &tokens[start..];
    let mut columns = Vec::new();
    loop {
        let (column, after) = column_name(rest)?;
        let [equals, operand, after @ ..] = after else { return None };
        if !(equals.is_symbol("=") || equals.is_symbol("==")) {
            return None;
        }
        columns.push((column, self::operand(operand)?));
        match after.first() {
            None => break,
            Some(t) if t.is("AND") => rest = &after[1..],
            Some(t) if t.is("RETURNING") || t.is("LIMIT") || t.is_symbol(";") => break,
            Some(_) => return None,
        }
    }
    columns.sort_by(|a, b| a.0.cmp(&b.0));
    Some(NamedRow { table: table.clone(), columns })
}

/// A column name without its table, and the tokens after it.
pub(super) fn column_name<'a, 'b>(tokens: &'b [Token<'a>]) -> Option<(String, &'b [Token<'a>])> {
    match tokens {
        [_, dot, name, rest @ ..] if dot.is_symbol(".") => Some((name.name()?, rest)),
        [name, rest @ ..] => Some((name.name()?, rest)),
        [] => None,
    }
}

fn operand(token: &Token<'_>) -> Option<Operand> {
    match token.kind {
        Kind::Parameter => parameter_number(token).map(Operand::Parameter),
        Kind::Number => Some(Operand::Literal(token.text.to_owned())),
        Kind::Text => {
            token.text.strip_prefix('\'')?.strip_suffix('\'').map(|t| Operand::Literal(t.replace("''", "'")))
        }
        _ => None,
    }
}

fn parameter_number(token: &Token<'_>) -> Option<u16> {
    (token.kind == Kind::Parameter).then(|| token.text[1..].parse().ok()).flatten().filter(|n| *n > 0)
}

/// Parameters in comparisons, assignments and arithmetic: `column = $1`, `column < $1`, `SET column
/// = column + $1`, `$1 = column`, `column BETWEEN $1 AND $2`, `[NOT] IN ($1, $2)`.
fn compared_parameters(tokens: &[Token<'_>]) -> Vec<ParameterColumn> {
    const COMPARES: [&str; 14] = ["=", "==", "<", ">", "<=", ">=", "<>", "!=", "+", "-", "*", "/", "%", "||"];
    let compares = |t: &Token<'_>| {
        COMPARES.iter().any(|c| t.is_symbol(c)) || t.is("LIKE") || t.is("IS") || t.is("BETWEEN")
    };
    let mut places = Vec::new();
    let mut between: Option<Arc<str>> = None;
    let mut within: Option<Arc<str>> = None;
    // Only the first occurrence of a parameter counts.
    let mut placed = HashSet::new();
    for (i, token) in tokens.iter().enumerate() {
        if token.is_symbol(")") {
            within = None;
        } else if token.is("IN") && i > 0 {
            let negated = tokens[i - 1].is("NOT");
            within = i.checked_sub(1 + usize::from(negated)).and_then(|at| tokens[at].name()).map(Arc::from);
        }
        let Some(number) = parameter_number(token).filter(|number| !placed.contains(number)) else {
            continue;
        };
        let before = i.checked_sub(2).filter(|_| compares(&tokens[i - 1])).and_then(|at| tokens[at].name());
        let before: Option<Arc<str>> = before.map(Arc::from);
        let column = if let Some(column) = before {
            if tokens[i - 1].is("BETWEEN") {
                between = Some(column.clone());
            }
            Some(column)
        } else if i > 0 && tokens[i - 1].is("AND") && between.is_some() {
            between.take()
        } else if within.is_some() {
            within.clone()
        } else {
            match tokens.get(i + 1..i + 3) {
                Some([operator, name]) if compares(operator) && name.kind != Kind::Number => {
                    name.name().map(Arc::from)
                }
                _ => None,
            }
        };
        if let Some(column) = column {
            placed.insert(number);
            places.push(ParameterColumn { number, column });
        }
    }
    places
}

/// Parameters of `INSERT INTO t (a, b) VALUES ($1, $2), ($3, $4)`. Without a column list the
/// columns are named by position: `#0`, `#1`.
fn inserted_parameters(tokens: &[Token<'_>]) -> Vec<ParameterColumn> {
    let Some(into) = tokens.iter().position(|t| t.is("INTO")) else { return Vec::new() };
    let Some(values) = tokens.iter().position(|t| t.is("VALUES")) else { return Vec::new() };
    if values < into {
        return Vec::new();
    }
    let columns: Option<Vec<Arc<str>>> =
        tokens[into..values].iter().position(|t| t.is_symbol("(")).map(|open| {
            tokens[into + open + 1..values]
                .iter()
                .take_while(|t| !t.is_symbol(")"))
                .filter_map(|token| token.name().map(Arc::from))
                .collect()
        });
    let mut places = Vec::new();
    let mut placed = HashSet::new();
    let (mut depth, mut position) = (0, 0);
    for (i, token) in tokens[values + 1..].iter().enumerate() {
        match token.text {
            "(" if token.kind == Kind::Symbol => {
                depth += 1;
                if depth == 1 {
                    position = 0;
                }
            }
            ")" if token.kind == Kind::Symbol => depth -= 1,
            "," if depth == 1 => position += 1,
            _ if depth == 1 && parameter_number(token).is_some() => {
                // Includes parameters inside expressions: in `($1, $2 + 1)`, `$2` belongs to the
                // second column too.
                let _ = i;
                let column = match &columns {
                    Some(columns) => columns.get(position).cloned(),
                    None => Some(format!("#{position}").into()),
                };
                if let (Some(number), Some(column)) = (parameter_number(token), column)
                    && placed.insert(number)
                {
                    places.push(ParameterColumn { number, column });
                }
            }
            _ if depth == 0 && token.kind == Kind::Word => break,
            _ => {}
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::super::{classify, tokens};
    use super::*;

    fn of(sql: &str) -> Shape {
        let tokens: Vec<_> = tokens(sql).collect();
        shape(classify(&tokens).0, &tokens)
    }

    #[test]
    fn names_rows_by_equality() {
        let update = of("UPDATE pgbench_accounts SET abalance = abalance + $1 WHERE aid = $2;").row.unwrap();
        let select = of("SELECT abalance FROM pgbench_accounts a WHERE a.AID = 7 FOR UPDATE").row.unwrap();
        assert_eq!(update.name(&[Value::Integer(1), Value::Integer(7)]), select.name(&[]));
        assert_ne!(update.name(&[Value::Integer(1), Value::Integer(8)]), select.name(&[]));
        let two = of("select * from d where d_id = $1 and d_w_id = '3'").row.unwrap();
        let swapped = of("select * from d where d_w_id = $2 and d_id = $1").row.unwrap();
        let parameters = [Value::Text("5".into()), Value::Text("3".into())];
        assert_eq!(two.name(&parameters), swapped.name(&parameters));
        assert_eq!(two.name(&[Value::Null]), None);
        for none in [
            "select * from a, b where a.x = 1",
            "select * from a where x = 1 or y = 2",
            "select * from a where x > 1",
            "select * from a where x = (select 1)",
            "delete from a",
        ] {
            let shape = of(none);
            assert!(shape.row.is_none() || none.contains("a, b"), "{none}");
        }
    }

    #[test]
    fn for_update_is_recognised_only_at_the_end() {
        let sql = "select * from t where a = 1 for no key update of t nowait";
        assert_eq!(of(sql).for_update, sql.find("for no"));
        assert_eq!(of("select 'for update'").for_update, None);
        assert_eq!(of("select * from (select 1 for update)").for_update, None);
    }

    #[test]
    fn assigns_parameters_to_columns() {
        let place = |sql| {
            let mut found: Vec<_> =
                of(sql).parameters.into_iter().map(|p| (p.number, p.column.to_string())).collect();
            found.sort();
            found
        };
        let expect =
            |list: &[(u16, &str)]| list.iter().map(|(n, c)| (*n, (*c).to_owned())).collect::<Vec<_>>();
        assert_eq!(
            place("update t set a = a + $1, b = $2 where c between $3 and $4"),
            expect(&[(1, "a"), (2, "b"), (3, "c"), (4, "c")])
        );
        assert_eq!(
            place("insert into t (a, \"B\") values ($1, $2), ($3, $4)"),
            expect(&[(1, "a"), (2, "b"), (3, "a"), (4, "b")])
        );
        assert_eq!(place("insert into t values ($2, $1)"), expect(&[(1, "#1"), (2, "#0")]));
        assert_eq!(
            place("select * from t where x in ($1, $2) and $3 < y"),
            expect(&[(1, "x"), (2, "x"), (3, "y")])
        );
    }
}
