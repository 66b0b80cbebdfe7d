//! Translates PostgreSQL's SQL into SQLite's, mainly for queries of the system catalog.
//!
//! psql, drivers, ORMs and dashboards query `pg_catalog` and `information_schema` in PostgreSQL's
//! dialect. The tables and functions that they use exist ([`crate::system`]). The syntax that
//! SQLite does not have is translated:
//!
//! ```text
//! c.oid::pg_catalog.regclass                        pg_regclass(c.oid)
//! relname OPERATOR(pg_catalog.~) '^(t)$' COLLATE x  relname REGEXP '^(t)$'
//! relkind = ANY (ARRAY['r', 'v'])                   relkind IN ('r', 'v')
//! ARRAY(SELECT rolname FROM ...)                    (WITH t(c) AS (SELECT ...)
//!                                                    SELECT array_agg(c) FROM t)
//! FROM unnest(conkey) WITH ORDINALITY AS a(n, at)   FROM (SELECT value AS n, key + 1 AS at
//!                                                         FROM json_each(...)) AS a
//! information_schema.tables                         "information_schema.tables" AS tables
//! ```
//!
//! [`query`] translates the clauses of a SELECT, [`from`] its FROM clause, [`expression`]
//! everything else.
//!
//! A user's own statement is translated only if it contains PostgreSQL syntax that drivers generate
//! routinely (`$1::INTEGER`, `= ANY ($1)`, `CAST(x AS date)`). Then only that syntax is replaced.
//! All other statements are passed to SQLite byte for byte.

mod expression;
mod from;
mod query;

pub(super) use expression::type_name;
use fulmar_pgwire::types;
use fulmar_sqlite::{Error, sqlstate};

use crate::token::{Lexer, Token, TokenKind};
use crate::{Result, system};

/// Schemas that are part of a system table's name.
const SCHEMAS: [&str; 2] = ["information_schema", "fulmar"];
/// Functions that the engine implements. They need neither a translation nor the system tables.
const ENGINE_FUNCTIONS: [&str; 4] =
    ["pg_array_json", "pg_current_xact_id", "pg_current_xact_id_if_assigned", "pg_xact_status"];

/// Types that SQLite's CAST would turn into numbers.
const TYPES_WITHOUT_CAST: [&str; 10] =
    ["date", "time", "timestamp", "timestamptz", "uuid", "json", "jsonb", "interval", "regclass", "regtype"];

/// Maximum nesting of parentheses, and maximum number of set operations. Each level takes stack
/// here, before SQLite checks its own limit.
const MAX_NESTING: usize = 100;
/// Maximum length of a chain of casts, subscripts and dots without a separator.
const MAX_POSTFIX_CHAIN: usize = 1000;

/// A statement translated to SQLite's dialect.
#[derive(Debug, PartialEq)]
pub struct Translated {
    /// The text in SQLite's dialect.
    pub sql: String,
    /// Whether it uses system tables or functions.
    pub system: bool,
    /// Numbers and type names of the parameters whose types the text states. `[]` alone is an array
    /// of the type that the parameter would have otherwise.
    pub parameters: Vec<(u16, String)>,
}

/// Returns true if a statement uses PostgreSQL syntax or names part of the system catalog.
pub(super) fn needs_translation<'a>(tokens: impl Iterator<Item = Token<'a>>) -> bool {
    let any = |token: Option<Token<'_>>, words: &[&str]| token.is_some_and(|token| is_any(&token, words));
    let sign = |token: Option<Token<'_>>, sign| token.is_some_and(|token| token.is_symbol(sign));
    with_next(tokens).any(|(token, next, third)| {
        names_system_at(&token, next)
            || token.is_symbol(':') && next.is_some_and(|next| next.is_symbol(':') && token.end() == next.start)
            // SQLite would cast dates and similar types to numbers.
            || token.is("as") && any(next, &TYPES_WITHOUT_CAST) && sign(third, ')')
            || is_comparison(&token) && any(next, &["any", "some", "all"]) && sign(third, '(')
    })
}

/// Each token with its two successors.
fn with_next<'a>(
    mut tokens: impl Iterator<Item = Token<'a>>,
) -> impl Iterator<Item = (Token<'a>, Option<Token<'a>>, Option<Token<'a>>)> {
    let (mut first, mut second) = (tokens.next(), tokens.next());
    std::iter::from_fn(move || {
        let third = tokens.next();
        let token = std::mem::replace(&mut first, second)?;
        let next = std::mem::replace(&mut second, third);
        Some((token, next, third))
    })
}

fn names_system<'a>(tokens: impl Iterator<Item = Token<'a>>) -> bool {
    with_next(tokens).any(|(token, next, _)| names_system_at(&token, next))
}

fn names_system_at(token: &Token<'_>, next: Option<Token<'_>>) -> bool {
    let next_is = |sign| next.is_some_and(|next| next.is_symbol(sign));
    let (called, is_schema) = (next_is('('), next_is('.'));
    // Avoids copying the name of the tokens that cannot match, which are most.
    let prefixed = || token.text.get(..3).is_some_and(|prefix| prefix.eq_ignore_ascii_case("pg_"));
    if token.kind == TokenKind::Word && !called && !is_schema && !prefixed() {
        return false;
    }
    let Some(name) = token.name() else { return false };
    name.starts_with("pg_") && !ENGINE_FUNCTIONS.contains(&name.as_str())
        || is_schema && SCHEMAS.contains(&name.as_str())
        || called && system::is_function(&name)
}

fn is_comparison(token: &Token<'_>) -> bool {
    ['=', '<', '>'].iter().any(|sign| token.is_symbol(*sign))
}

/// Translates a statement to SQLite's dialect.
pub(super) fn translate(tokens: &[Token<'_>]) -> Result<Translated> {
    let (mut depth, mut max_depth, mut set_operations, mut chain, mut max_chain) = (0usize, 0, 0, 0, 0);
    for token in tokens {
        if token.is_symbol('(') || token.is_symbol('[') {
            depth += 1;
            max_depth = max_depth.max(depth);
        } else if token.is_symbol(')') || token.is_symbol(']') {
            depth = depth.saturating_sub(1);
        }
        set_operations += usize::from(is_any(token, &["union", "intersect", "except", "recursive"]));
        // Each postfix copies the whole operand before it.
        let postfix = [':', '[', '.'].iter().any(|sign| token.is_symbol(*sign));
        let separates = token.kind == TokenKind::Symbol
            && !postfix
            && !token.is_symbol(']')
            && !token.is_symbol('(')
            && !token.is_symbol(')');
        chain = if separates { 0 } else { chain + usize::from(postfix) };
        max_chain = max_chain.max(chain);
    }
    if max_depth.max(set_operations) > MAX_NESTING || max_chain > MAX_POSTFIX_CHAIN {
        let message =
            format!("statement too complex: at most {MAX_NESTING} nested parentheses or set operations");
        return Err(
            Error::new(sqlstate::PROGRAM_LIMIT, message).hint("Use SQLite syntax, or split the statement.")
        );
    }
    let system = names_system(tokens.iter().copied());
    let sql = if system { query::query(tokens) } else { expression::user_statement(tokens) };
    // ARRAY[1, 2] and the like become calls of the system functions.
    let system = system || names_system(Lexer::new(&sql));
    Ok(Translated { system, parameters: parameters(tokens), sql })
}

/// The types of parameters in `$1::int8`, `CAST($1 AS int8)` and `= ANY ($1)`.
fn parameters(tokens: &[Token<'_>]) -> Vec<(u16, String)> {
    let mut parameters = Vec::new();
    for (at, token) in tokens.iter().enumerate().filter(|(_, token)| token.kind == TokenKind::Parameter) {
        let Some(number) = token.text.strip_prefix('$').and_then(|digits| digits.parse().ok()) else {
            continue;
        };
        let next = |ahead: usize| tokens.get(at + ahead);
        let before = |back: usize| at.checked_sub(back).and_then(|at| tokens.get(at));
        let is_cast =
            next(1).is_some_and(|token| token.is("as")) && before(2).is_some_and(|token| token.is("cast"));
        let is_of_array = before(1).is_some_and(|token| token.is_symbol('('))
            && before(2).is_some_and(|token| is_any(token, &["any", "some", "all"]));
        let kind = if next(1).zip(next(2)).is_some_and(|(a, b)| a.is_symbol(':') && b.is_symbol(':')) {
            expression::type_name(tokens, at + 3).0
        } else if is_cast {
            expression::type_name(tokens, at + 2).0
        } else if is_of_array {
            "[]".to_owned()
        } else if before(2).is_some_and(|token| is_any(token, &["pg_cancel_backend", "pg_terminate_backend"]))
        {
            "int4".to_owned()
        } else if before(2).is_some_and(|token| token.text.to_ascii_lowercase().contains("advisory")) {
            "int8".to_owned()
        } else {
            continue;
        };
        // A reference to a catalog object is sent as its name.
        let known = kind == "[]" || types::type_by_name(&kind).is_some();
        parameters.push((number, if known { kind } else { "text".to_owned() }));
    }
    parameters
}

/// The position of the bracket that closes the one at `open`, or the end of the tokens.
fn closing(tokens: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        if token.is_symbol('(') || token.is_symbol('[') {
            depth += 1;
        } else if token.is_symbol(')') || token.is_symbol(']') {
            depth = depth.saturating_sub(1);
            if depth == 0 {
                return at;
            }
        }
    }
    tokens.len()
}

/// The first position from `start` on, outside brackets, where `wanted` is true, or the end.
fn find(tokens: &[Token<'_>], start: usize, wanted: impl Fn(&Token<'_>) -> bool) -> usize {
    let mut at = start;
    while at < tokens.len() {
        let token = &tokens[at];
        if wanted(token) {
            return at;
        }
        at = if token.is_symbol('(') || token.is_symbol('[') { closing(tokens, at) + 1 } else { at + 1 };
    }
    tokens.len()
}

/// Splits at commas outside brackets.
fn pieces<'a, 't>(tokens: &'t [Token<'a>]) -> Vec<&'t [Token<'a>]> {
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < tokens.len() {
        let end = find(tokens, start, |token| token.is_symbol(','));
        pieces.push(&tokens[start..end]);
        start = end + 1;
    }
    pieces
}

fn is_any(token: &Token<'_>, words: &[&str]) -> bool {
    words.iter().any(|word| token.is(word))
}

/// Returns true if the tokens begin a query.
fn begins_query(tokens: &[Token<'_>]) -> bool {
    tokens.first().is_some_and(|token| is_any(token, &["select", "with", "values"]))
}

/// Returns true if a token can be a column name or alias, and is not a keyword that continues the
/// clause.
fn is_alias(token: &Token<'_>) -> bool {
    const KEYWORDS: [&str; 34] = [
        "as",
        "on",
        "using",
        "where",
        "group",
        "order",
        "having",
        "limit",
        "offset",
        "fetch",
        "union",
        "except",
        "intersect",
        "join",
        "inner",
        "left",
        "right",
        "full",
        "cross",
        "natural",
        "outer",
        "window",
        "with",
        "from",
        "and",
        "or",
        "not",
        "is",
        "in",
        "end",
        "then",
        "else",
        "when",
        "null",
    ];
    match token.kind {
        TokenKind::Word => !is_any(token, &KEYWORDS),
        TokenKind::Quoted => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
