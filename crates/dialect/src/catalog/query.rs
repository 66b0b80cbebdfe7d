//! Translates whole queries: set operations, select lists, clauses.

use super::expression::expression;
use super::from::from_clause;
use super::{begins_query, closing, find, is_alias, is_any, pieces};
use crate::token::{Token, TokenKind, quote_name};

const CLAUSE_KEYWORDS: [&str; 10] =
    ["from", "where", "group", "having", "window", "order", "limit", "offset", "fetch", "for"];

/// Translates a query, or the expressions of another statement.
pub(super) fn query(tokens: &[Token<'_>]) -> String {
    if tokens.first().is_some_and(|token| token.is("with")) {
        let main =
            find(tokens, 1, |token| is_any(token, &["select", "values", "insert", "update", "delete"]));
        return format!("{} {}", expression(&tokens[..main]), query(&tokens[main..]));
    }
    let operation = find(tokens, 0, |token| is_any(token, &["union", "intersect", "except"]));
    if operation == tokens.len() {
        return select(tokens);
    }
    let all = tokens.get(operation + 1).is_some_and(|token| is_any(token, &["all", "distinct"]));
    let (word, rest) = (tokens[operation].text, operation + 1 + usize::from(all));
    let all = if all && tokens[operation + 1].is("all") { " ALL" } else { "" };
    format!("{} {word}{all} {}", select(&tokens[..operation]), query(&tokens[rest..]))
}

fn select(tokens: &[Token<'_>]) -> String {
    // SQLite does not accept parentheses around an operand of a set operation.
    if tokens.first().is_some_and(|token| token.is_symbol('('))
        && closing(tokens, 0) + 1 == tokens.len()
        && begins_query(&tokens[1..])
    {
        return format!("SELECT * FROM ({})", query(&tokens[1..tokens.len() - 1]));
    }
    if !tokens.first().is_some_and(|token| token.is("select")) {
        return expression(tokens);
    }
    let start = 1 + usize::from(tokens.get(1).is_some_and(|token| is_any(token, &["all", "distinct"])));
    let end = find(tokens, start, |token| is_any(token, &CLAUSE_KEYWORDS));
    let mut sets = Vec::new();
    let items: Vec<String> =
        pieces(&tokens[start..end]).into_iter().map(|piece| item(piece, &mut sets)).collect();
    let mut text = expression(&tokens[..start]);
    text.push(' ');
    // `EXISTS (SELECT FROM t)`: PostgreSQL accepts an empty list.
    text.push_str(&if items.is_empty() { "NULL".to_owned() } else { items.join(", ") });
    let mut rest = end;
    if tokens.get(end).is_some_and(|token| token.is("from")) {
        rest = find(tokens, end + 1, |token| is_any(token, &CLAUSE_KEYWORDS[1..]));
        text.push_str(" FROM ");
        text.push_str(&from_clause(&tokens[end + 1..rest]));
    }
    for (number, set) in sets.iter().enumerate() {
        let rows = format!("json_each(pg_array_json({set})) AS set_{number}");
        // Several set-returning functions advance in parallel.
        text.push_str(&match number {
            0 if rest == end => format!(" FROM {rows}"),
            0 => format!(", {rows}"),
            _ => format!(" LEFT JOIN {rows} ON set_{number}.key = set_0.key"),
        });
    }
    if rest < tokens.len() {
        text.push(' ');
        text.push_str(&expression(&tokens[rest..]));
    }
    text
}

/// Maximum number of set-returning functions in a select list. SQLite joins fewer tables than that.
const MAX_SETS: usize = 100;

/// Translates an item of a select list, and names it as PostgreSQL would where SQLite would use its
/// text. Set-returning calls (`unnest(x)`) are replaced by a column of a joined array, which is
/// appended to `sets`.
fn item(tokens: &[Token<'_>], sets: &mut Vec<String>) -> String {
    let (value, alias) = match tokens {
        [value @ .., before, alias] if before.is("as") => (value, alias.name()),
        [value @ .., alias] if is_alias(alias) && value.last().is_some_and(ends_operand) => {
            (value, alias.name())
        }
        _ => (tokens, None),
    };
    let text = match set_of(value).filter(|_| sets.len() < MAX_SETS) {
        Some((set, part)) => {
            let set = expression(set);
            let number = sets.iter().position(|known| *known == set).unwrap_or_else(|| {
                sets.push(set);
                sets.len() - 1
            });
            part.sql(number)
        }
        None => expression(value),
    };
    match alias.or_else(|| default_name(value)) {
        Some(name) => format!("{text} AS {}", quote_name(&name)),
        None => text,
    }
}

/// The part of an array's elements that a set-returning function returns.
enum ElementPart {
    Value,
    Ordinality,
    /// A record of `x` and `n`.
    Record,
}

impl ElementPart {
    fn sql(&self, set: usize) -> String {
        match self {
            ElementPart::Value => format!("set_{set}.value"),
            ElementPart::Ordinality => format!("(set_{set}.key + 1)"),
            ElementPart::Record => format!("json_object('x', set_{set}.value, 'n', set_{set}.key + 1)"),
        }
    }
}

/// Recognizes `unnest(x)`, `generate_subscripts(x, 1)`, `_pg_expandarray(x)` and
/// `(_pg_expandarray(x)).n`. Returns the array, and the part of its elements that is returned.
fn set_of<'a, 't>(tokens: &'t [Token<'a>]) -> Option<(&'t [Token<'a>], ElementPart)> {
    let tokens = match tokens {
        [schema, dot, rest @ ..]
            if (schema.is("pg_catalog") || schema.is("information_schema")) && dot.is_symbol('.') =>
        {
            rest
        }
        _ => tokens,
    };
    if let [open, record @ .., close, dot, field] = tokens
        && (open.is_symbol('(') && close.is_symbol(')') && dot.is_symbol('.'))
        && let (array, ElementPart::Record) = set_of(record)?
    {
        return Some((array, if field.is("x") { ElementPart::Value } else { ElementPart::Ordinality }));
    }
    let [name, open, inner @ .., _] = tokens else { return None };
    if !open.is_symbol('(') || closing(tokens, 1) + 1 != tokens.len() {
        return None;
    }
    let part = match name.name()?.as_str() {
        "unnest" => ElementPart::Value,
        "generate_subscripts" => ElementPart::Ordinality,
        "_pg_expandarray" => ElementPart::Record,
        _ => return None,
    };
    Some((pieces(inner).into_iter().next()?, part))
}

/// Returns true if a token can be the last one of an operand.
fn ends_operand(token: &Token<'_>) -> bool {
    match token.kind {
        TokenKind::Symbol => token.is_symbol(')') || token.is_symbol(']'),
        TokenKind::Word => is_alias(token) || is_any(token, &["end", "null"]),
        _ => true,
    }
}

/// The name that PostgreSQL gives to a column without an alias. `None` where SQLite's name is the
/// same.
fn default_name(tokens: &[Token<'_>]) -> Option<String> {
    let path = |tokens: &[Token<'_>]| {
        tokens.len() % 2 == 1
            && tokens.iter().enumerate().all(|(at, token)| {
                if at % 2 == 1 {
                    token.is_symbol('.')
                } else {
                    token.name().is_some() || token.is_symbol('*')
                }
            })
    };
    if path(tokens) {
        // An explicit alias, so that ORDER BY resolves to it before a column of that name.
        let last = tokens.last().filter(|_| tokens.len() > 1)?;
        return last.name();
    }
    // `a.b::text` has the name of `a.b`.
    let cast = tokens.windows(2).position(|pair| pair[0].is_symbol(':') && pair[1].is_symbol(':'));
    let value = &tokens[..cast.unwrap_or(tokens.len())];
    if path(value) {
        return value.last()?.name();
    }
    let first = value.first()?;
    if first.is("case") || first.is("array") || first.is("exists") {
        return Some(first.text.to_ascii_lowercase());
    }
    if first.is_symbol('(') && begins_query(&value[1..]) {
        let end = find(value, 2, |token| is_any(token, &CLAUSE_KEYWORDS) || token.is_symbol(','));
        let item = &value[2..end.min(value.len())];
        return match item {
            [.., before, alias] if before.is("as") => alias.name(),
            item if path(item) => item.last()?.name(),
            item => default_name(item),
        };
    }
    if first.is("cast") {
        let end = find(value, 2, |token| token.is("as"));
        return default_name(value.get(2..end)?).or_else(|| value.get(2..end)?.last()?.name());
    }
    let open = value.iter().position(|token| token.is_symbol('('));
    let called = open.filter(|open| path(&value[..*open]) && closing(value, *open) + 1 == value.len());
    Some(called.and_then(|open| value[open - 1].name()).unwrap_or_else(|| "?column?".to_owned()))
}
