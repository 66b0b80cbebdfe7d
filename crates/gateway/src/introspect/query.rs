//! Recognising a question about the catalog.

use fulmar_engine::{Error, sqlstate};

use super::filter::Filter;
use super::relations::Relation;
use crate::Result;
use crate::dialect::token::{Cursor, Kind, Token};
use crate::types::{Column, Type};

/// A question about the catalog.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CatalogQuery {
    pub(super) relation: Relation,
    items: Vec<Item>,
    filters: Vec<Filter>,
    limit: Option<usize>,
}

/// A column of the answer.
#[derive(Clone, Debug, PartialEq)]
struct Item {
    name: String,
    /// Which column of the relation; `None` is NULL.
    source: Option<usize>,
}

impl CatalogQuery {
    /// The columns of the answer.
    pub(crate) fn columns(&self) -> Vec<Column> {
        let kind = |item: &Item| item.source.map_or(Type::Text, |source| self.relation.columns()[source].1);
        self.items.iter().map(|item| Column::new(item.name.as_str(), kind(item))).collect()
    }

    /// The value that a column must have, if a filter says so: which object is asked for.
    pub(super) fn wanted(&self, column: &str) -> Option<&str> {
        self.filters.iter().find_map(|filter| match filter {
            Filter::OneOf(name, values) if name == column && values.len() == 1 => Some(values[0].as_str()),
            _ => None,
        })
    }

    /// The answer, out of all rows of the relation.
    pub(super) fn select(&self, rows: Vec<Vec<fulmar_engine::Value>>) -> Vec<Vec<fulmar_engine::Value>> {
        let columns = self.relation.columns();
        let position = |name: &str| columns.iter().position(|column| column.0 == name);
        let accepted = |row: &Vec<fulmar_engine::Value>| {
            self.filters.iter().all(|filter| match filter.column().and_then(position) {
                Some(at) => filter.accepts(&row[at]),
                None => true,
            })
        };
        let item = |row: &[fulmar_engine::Value], item: &Item| {
            item.source.map_or(fulmar_engine::Value::Null, |source| row[source].clone())
        };
        rows.iter()
            .filter(|row| accepted(row))
            .take(self.limit.unwrap_or(usize::MAX))
            .map(|row| self.items.iter().map(|column| item(row, column)).collect())
            .collect()
    }
}

/// The parts of a SELECT.
struct Parts<'a, 't> {
    items: Vec<&'t [Token<'a>]>,
    from: &'t [Token<'a>],
    conditions: Vec<&'t [Token<'a>]>,
    tail: &'t [Token<'a>],
}

/// Recognises a question about the catalog; `None` if the statement is about something else.
pub(crate) fn recognise(tokens: &[Token<'_>]) -> Result<Option<CatalogQuery>> {
    if !tokens.first().is_some_and(|token| token.is("select")) {
        return Ok(None);
    }
    if let Some(query) = view_definition(tokens) {
        return Ok(Some(query));
    }
    let Some(relation) = Relation::find(tokens) else { return Ok(None) };
    let parts = split(&tokens[1..]);
    let unsupported = |what: &[Token<'_>]| {
        let text: Vec<&str> = what.iter().take(12).map(|token| token.text).collect();
        Error::new(
            sqlstate::FEATURE_NOT_SUPPORTED,
            format!("this question to the Postgres catalog is not supported: {}", text.join(" ")),
        )
        .hint("There is no pg_catalog here: the questions of psql's \\l, \\d, \\dt, \\di, \\dv, \\du and \\dn are \
               answered, and plain SELECTs from pg_database. sqlite_schema and the pragma_ functions have the rest.")
    };
    if relation == Relation::Nothing {
        let items = parts.items.iter().map(|item| Item { name: item_name(item), source: None }).collect();
        return Ok(Some(CatalogQuery { relation, items, filters: Vec::new(), limit: None }));
    }
    let columns = relation.columns();
    let mut items = Vec::new();
    for item in &parts.items {
        if matches!(item, [star] if star.is_sign('*')) {
            let all = columns.iter().take(relation.stored_columns()).enumerate();
            items.extend(all.map(|(at, column)| Item { name: column.0.to_owned(), source: Some(at) }));
            continue;
        }
        let name = item_name(item);
        let source = [&name, &source_name(item)]
            .into_iter()
            .find_map(|name| columns.iter().position(|column| column.0 == name));
        if !is_whole(item) || (source.is_none() && !is_known_call(item)) {
            return Err(unsupported(item));
        }
        items.push(Item { name, source });
    }
    let mut filters = Vec::new();
    for condition in parts.conditions {
        let filter = Filter::parse(condition).ok_or_else(|| unsupported(condition))?;
        if filter.column().is_some_and(|name| !columns.iter().any(|column| column.0 == name)) {
            return Err(unsupported(condition));
        }
        filters.push(filter);
    }
    let limit = limit(parts.tail, relation).ok_or_else(|| unsupported(parts.tail))?;
    if parts.from.iter().any(|token| token.is("select") && relation != Relation::Partitions) {
        return Err(unsupported(parts.from));
    }
    Ok(Some(CatalogQuery { relation, items, filters, limit }))
}

/// `SELECT pg_catalog.pg_get_viewdef('16400'::pg_catalog.oid, true)`.
fn view_definition(tokens: &[Token<'_>]) -> Option<CatalogQuery> {
    let mut cursor = Cursor::new(tokens);
    let called = cursor.words(&["select"])
        && (!cursor.word("pg_catalog") || cursor.sign('.'))
        && cursor.word("pg_get_viewdef")
        && cursor.sign('(');
    let oid = cursor.string().filter(|_| called)?;
    let item = Item { name: "pg_get_viewdef".into(), source: Some(1) };
    let filters = vec![Filter::OneOf("oid".into(), vec![oid])];
    Some(CatalogQuery { relation: Relation::ViewDefinition, items: vec![item], filters, limit: None })
}

/// Splits what follows SELECT at the keywords that stand outside of all parentheses.
fn split<'a, 't>(tokens: &'t [Token<'a>]) -> Parts<'a, 't> {
    let mut depth = 0u32;
    let mut marks: Vec<usize> = Vec::new();
    let outside: Vec<bool> = tokens
        .iter()
        .map(|token| {
            if token.is_sign(')') {
                depth = depth.saturating_sub(1);
            }
            let outside = depth == 0;
            if token.is_sign('(') {
                depth += 1;
            }
            outside
        })
        .collect();
    let find = |words: &[&str], from: usize| {
        (from..tokens.len())
            .find(|&at| outside[at] && words.iter().any(|word| tokens[at].is(word)))
            .unwrap_or(tokens.len())
    };
    let from = find(&["from"], 0);
    let tail = find(&["group", "order", "limit", "offset", "union", "having", "fetch"], from);
    let condition = find(&["where"], from).min(tail);
    marks.push(from);
    let pieces = |range: std::ops::Range<usize>, ends: &dyn Fn(&Token<'_>) -> bool| {
        let mut pieces = Vec::new();
        let mut start = range.start;
        for at in range.clone() {
            if outside[at] && ends(&tokens[at]) {
                pieces.push(&tokens[start..at]);
                start = at + 1;
            }
        }
        if start < range.end {
            pieces.push(&tokens[start..range.end]);
        }
        pieces
    };
    Parts {
        items: pieces(0..from, &|token| token.is_sign(',')),
        from: &tokens[(from + 1).min(condition)..condition],
        conditions: pieces((condition + 1).min(tail)..tail, &|token| token.is("and")),
        tail: &tokens[tail..],
    }
}

/// What the answer calls an item.
fn item_name(item: &[Token<'_>]) -> String {
    match item {
        [.., before, name] if before.is("as") => name.name().unwrap_or_default(),
        _ => source_name(item),
    }
}

/// The column or function that an item takes: `c.relname` is `relname`, `pg_catalog.format_type(...)` is `format_type`,
/// and a sub-select is what it selects.
fn source_name(item: &[Token<'_>]) -> String {
    let mut cursor = Cursor::new(item);
    while cursor.sign('(') {
        cursor.word("select");
    }
    let mut name = cursor.name();
    while name.is_some() && cursor.sign('.') {
        name = cursor.name();
    }
    name.unwrap_or_else(|| "?column?".into())
}

/// Whether an item is one thing (a column, a constant, a call, a cast; something in parentheses or a CASE, which only
/// psql writes), with a name behind it perhaps. A computation is not what its first column is.
fn is_whole(item: &[Token<'_>]) -> bool {
    let item = match item {
        [item @ .., before, _] if before.is("as") => item,
        item => item,
    };
    let composed = ["case", "array", "not"];
    match item {
        [first, ..] if first.is_sign('(') || composed.iter().any(|word| first.is(word)) => true,
        [_] => true,
        [path @ .., last] if last.is_sign(')') => {
            let opening = path.iter().position(|token| token.is_sign('('));
            opening.is_some_and(|at| is_path(&path[..at]))
        }
        item => {
            let cast = item.windows(2).position(|pair| pair[0].is_sign(':') && pair[1].is_sign(':'));
            is_path(&item[..cast.unwrap_or(item.len())])
        }
    }
}

/// `c.relname`.
fn is_path(tokens: &[Token<'_>]) -> bool {
    tokens.iter().enumerate().all(|(at, token)| token.is_sign('.') == (at % 2 == 1)) && tokens.len() % 2 == 1
}

/// Whether an item that the relation has no column for may be NULL: a plain column or constant, or a call of a
/// function with which psql decorates its lists. An aggregate would be a wrong answer.
fn is_known_call(item: &[Token<'_>]) -> bool {
    const CALLS: [&str; 8] = [
        "array_to_string",
        "col_description",
        "obj_description",
        "shobj_description",
        "pg_size_pretty",
        "pg_get_expr",
        "case",
        "array",
    ];
    let name = source_name(item);
    let is_call = item.iter().any(|token| token.is_sign('('));
    let is_column = !is_call && item.iter().all(|token| token.kind != Kind::Sign || token.is_sign('.'));
    is_column || CALLS.contains(&name.as_str())
}

/// What follows the conditions: an order, which is that of the rows anyway, and a limit. `None` if there is more.
fn limit(tail: &[Token<'_>], relation: Relation) -> Option<Option<usize>> {
    if relation == Relation::Partitions {
        return Some(Some(1));
    }
    let at = tail.iter().position(|token| token.is("limit")).unwrap_or(tail.len());
    let (order, limit) = tail.split_at(at);
    let is_order = order.first().is_none_or(|token| token.is("order"));
    if !is_order || order.iter().any(|token| token.is("union")) {
        return None;
    }
    match limit {
        [] => Some(None),
        [_, count] => count.text.parse().ok().map(Some),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use fulmar_engine::Value;

    use super::*;
    use crate::dialect::token::first_statement;

    fn query(sql: &str) -> Result<Option<CatalogQuery>> {
        recognise(&first_statement(sql).0)
    }

    fn names(query: &CatalogQuery) -> Vec<String> {
        query.columns().into_iter().map(|column| column.name).collect()
    }

    #[test]
    fn lists_databases() {
        let sql = "SELECT d.datname as \"Name\", pg_catalog.pg_get_userbyid(d.datdba) as \"Owner\",
            CASE d.datlocprovider WHEN 'c' THEN 'libc' END AS \"Locale Provider\",
            pg_catalog.array_to_string(d.datacl, E'\\n') AS \"Access privileges\"
            FROM pg_catalog.pg_database d WHERE d.datname OPERATOR(pg_catalog.~) '^(be.*)$' ORDER BY 1;";
        let query = query(sql).unwrap().unwrap();
        assert_eq!(names(&query), ["Name", "Owner", "Locale Provider", "Access privileges"]);
        assert_eq!(query.relation, Relation::Databases);
    }

    #[test]
    fn plain_selects() {
        let query = query("SELECT datname FROM pg_database WHERE datname = 'a' LIMIT 1").unwrap().unwrap();
        let width = Relation::Databases.columns().len();
        let row = |name: &str| {
            let mut row = vec![Value::Null; width];
            row[1] = Value::Text(name.into());
            row
        };
        assert_eq!(query.select(vec![row("b"), row("a")]), [[Value::Text("a".into())]]);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for sql in [
            "SELECT count(*) FROM pg_database",
            "SELECT datname FROM pg_database WHERE datname LIKE 'a%'",
            "SELECT datname FROM pg_database WHERE nothing = 1",
            "SELECT datname FROM pg_database GROUP BY 1",
            "SELECT datname || 'x' FROM pg_database",
            "SELECT datname || 'x' AS \"Name\" FROM pg_database",
            "SELECT max(oid) || datname(1) FROM pg_database",
            "SELECT oid FROM pg_class c, (SELECT 1) d",
        ] {
            assert_eq!(query(sql).unwrap_err().state(), sqlstate::FEATURE_NOT_SUPPORTED, "{sql}");
        }
        assert_eq!(query("SELECT pg_current_xact_id()").unwrap(), None);
        assert_eq!(query("SELECT * FROM my_table").unwrap(), None);
    }

    #[test]
    fn pgbench_asks_for_partitions() {
        let sql = "select o.n, p.partstrat, pg_catalog.count(i.inhparent) from pg_catalog.pg_class as c join
            pg_catalog.pg_namespace as n on (n.oid = c.relnamespace) cross join lateral (select
            pg_catalog.array_position(pg_catalog.current_schemas(true), n.nspname)) as o(n) left join
            pg_catalog.pg_partitioned_table as p on (p.partrelid = c.oid) left join pg_catalog.pg_inherits as i on
            (c.oid = i.inhparent) where c.relname = 'pgbench_accounts' and o.n is not null group by 1, 2
            order by 1 asc limit 1";
        let query = query(sql).unwrap().unwrap();
        assert_eq!(query.relation, Relation::Partitions);
        assert_eq!(names(&query), ["n", "partstrat", "count"]);
    }
}
