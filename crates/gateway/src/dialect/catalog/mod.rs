//! From Postgres's SQL into SQLite's, above all of questions to the system catalog.
//!
//! psql, drivers, object mappers and dashboards ask `pg_catalog` and `information_schema` what there is, in Postgres's
//! own SQL. The tables and functions that they name exist ([`crate::system`]); what SQLite does not understand of the
//! rest is put into its words:
//!
//! ```text
//! c.oid::pg_catalog.regclass                        pg_regclass(c.oid)
//! relname OPERATOR(pg_catalog.~) '^(t)$' COLLATE x  relname REGEXP '^(t)$'
//! relkind = ANY (ARRAY['r', 'v'])                   relkind IN ('r', 'v')
//! ARRAY(SELECT rolname FROM ...)                    (WITH t(c) AS (SELECT ...) SELECT array_agg(c) FROM t)
//! FROM unnest(conkey) WITH ORDINALITY AS a(n, at)   FROM (SELECT value AS n, key + 1 AS at FROM json_each(...)) AS a
//! information_schema.tables                         "information_schema.tables" AS tables
//! ```
//!
//! [`query`] knows the clauses of a SELECT, [`from`] what stands in its FROM, [`expression`] everything else.
//!
//! A statement of a user's comes here only if it says what SQLite has no words for and drivers write into every statement
//! (`$1::INTEGER`, `= ANY ($1)`, `CAST(x AS date)`). Then just these are put otherwise, and the rest stays what it is;
//! all other statements are SQLite's from the first to the last byte.

mod expression;
mod from;
mod query;

pub(super) use expression::type_name;
use fulmar_engine::{Error, sqlstate};

use super::token::{Kind, Lexer, Token};
use crate::{Result, system, types};

/// Schemas whose tables are known by both names.
const SCHEMAS: [&str; 2] = ["information_schema", "fulmar"];
/// Functions of the engine's, which need no more than that.
const OF_ENGINE: [&str; 4] =
    ["pg_array_json", "pg_current_xact_id", "pg_current_xact_id_if_assigned", "pg_xact_status"];

/// Types that SQLite would make numbers of.
const NOT_CAST: [&str; 10] =
    ["date", "time", "timestamp", "timestamptz", "uuid", "json", "jsonb", "interval", "regclass", "regtype"];

/// Each level of a question takes some stack here, before SQLite counts.
const DEEPEST: usize = 100;
/// Casts, subscripts and points without a comma or an operator between them.
const MOST_BEHIND: usize = 1000;

/// A statement in SQLite's words.
#[derive(Debug, PartialEq)]
pub(crate) struct Translated {
    pub(crate) sql: String,
    /// Whether it names system tables or functions.
    pub(crate) system: bool,
    /// Parameters whose types the text says, with their names; `[]` alone: an array of what it would be else.
    pub(crate) parameters: Vec<(u16, String)>,
}

/// Whether a statement says something in Postgres's way, or names anything of the catalog.
pub(super) fn concerns<'a>(tokens: impl Iterator<Item = Token<'a>>) -> bool {
    let any = |token: Option<Token<'_>>, words: &[&str]| token.is_some_and(|token| is_any(&token, words));
    let sign = |token: Option<Token<'_>>, sign| token.is_some_and(|token| token.is_sign(sign));
    with_next(tokens).any(|(token, next, third)| {
        names_system_at(&token, next)
            || token.is_sign(':') && next.is_some_and(|next| next.is_sign(':') && token.end() == next.start)
            // SQLite would take dates and the like for numbers.
            || token.is("as") && any(next, &NOT_CAST) && sign(third, ')')
            || is_comparison(&token) && any(next, &["any", "some", "all"]) && sign(third, '(')
    })
}

/// Each token with the two behind it.
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
    let next_is = |sign| next.is_some_and(|next| next.is_sign(sign));
    let (called, is_schema) = (next_is('('), next_is('.'));
    // Most words are none, and need not be copied to see that.
    let prefixed = || token.text.get(..3).is_some_and(|prefix| prefix.eq_ignore_ascii_case("pg_"));
    if token.kind == Kind::Word && !called && !is_schema && !prefixed() {
        return false;
    }
    let Some(name) = token.name() else { return false };
    name.starts_with("pg_") && !OF_ENGINE.contains(&name.as_str())
        || is_schema && SCHEMAS.contains(&name.as_str())
        || called && system::is_function(&name)
}

fn is_comparison(token: &Token<'_>) -> bool {
    ['=', '<', '>'].iter().any(|sign| token.is_sign(*sign))
}

/// The statement in SQLite's words.
pub(super) fn translate(tokens: &[Token<'_>]) -> Result<Translated> {
    let (mut depth, mut deepest, mut parts, mut behind, mut most_behind) = (0usize, 0, 0, 0, 0);
    for token in tokens {
        if token.is_sign('(') || token.is_sign('[') {
            depth += 1;
            deepest = deepest.max(depth);
        } else if token.is_sign(')') || token.is_sign(']') {
            depth = depth.saturating_sub(1);
        }
        parts += usize::from(is_any(token, &["union", "intersect", "except", "recursive"]));
        // Each takes all that it stands behind with it.
        let postfix = [':', '[', '.'].iter().any(|sign| token.is_sign(*sign));
        let separates = token.kind == Kind::Sign
            && !postfix
            && !token.is_sign(']')
            && !token.is_sign('(')
            && !token.is_sign(')');
        behind = if separates { 0 } else { behind + usize::from(postfix) };
        most_behind = most_behind.max(behind);
    }
    if deepest.max(parts) > DEEPEST || most_behind > MOST_BEHIND {
        let message = format!("a statement in Postgres's SQL nests {DEEPEST} parentheses or queries at most");
        return Err(Error::new(sqlstate::PROGRAM_LIMIT, message)
            .hint("say it in SQLite's SQL, or in several statements"));
    }
    let system = names_system(tokens.iter().copied());
    let sql = if system { query::query(tokens) } else { expression::of_user(tokens) };
    // ARRAY[1, 2] and the like are functions of the catalog's.
    let system = system || names_system(Lexer::new(&sql));
    Ok(Translated { system, parameters: parameters(tokens), sql })
}

/// `$1::int8`, `CAST($1 AS int8)`, `= ANY ($1)`.
fn parameters(tokens: &[Token<'_>]) -> Vec<(u16, String)> {
    let mut parameters = Vec::new();
    for (at, token) in tokens.iter().enumerate().filter(|(_, token)| token.kind == Kind::Parameter) {
        let Some(number) = token.text.strip_prefix('$').and_then(|digits| digits.parse().ok()) else {
            continue;
        };
        let next = |ahead: usize| tokens.get(at + ahead);
        let before = |back: usize| at.checked_sub(back).and_then(|at| tokens.get(at));
        let is_cast =
            next(1).is_some_and(|token| token.is("as")) && before(2).is_some_and(|token| token.is("cast"));
        let is_of_array = before(1).is_some_and(|token| token.is_sign('('))
            && before(2).is_some_and(|token| is_any(token, &["any", "some", "all"]));
        let kind = if next(1).zip(next(2)).is_some_and(|(a, b)| a.is_sign(':') && b.is_sign(':')) {
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
        // What stands for something in the catalog comes as its name.
        let known = kind == "[]" || types::named(&kind).is_some();
        parameters.push((number, if known { kind } else { "text".to_owned() }));
    }
    parameters
}

/// The place of the sign that closes what opens at `open`; the end, if nothing does.
fn closing(tokens: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        if token.is_sign('(') || token.is_sign('[') {
            depth += 1;
        } else if token.is_sign(')') || token.is_sign(']') {
            depth = depth.saturating_sub(1);
            if depth == 0 {
                return at;
            }
        }
    }
    tokens.len()
}

/// The first place from `start` on, outside of all parentheses, where `wanted` holds; the end, if there is none.
fn find(tokens: &[Token<'_>], start: usize, wanted: impl Fn(&Token<'_>) -> bool) -> usize {
    let mut at = start;
    while at < tokens.len() {
        let token = &tokens[at];
        if wanted(token) {
            return at;
        }
        at = if token.is_sign('(') || token.is_sign('[') { closing(tokens, at) + 1 } else { at + 1 };
    }
    tokens.len()
}

/// What stands between commas, outside of all parentheses.
fn pieces<'a, 't>(tokens: &'t [Token<'a>]) -> Vec<&'t [Token<'a>]> {
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < tokens.len() {
        let end = find(tokens, start, |token| token.is_sign(','));
        pieces.push(&tokens[start..end]);
        start = end + 1;
    }
    pieces
}

fn is_any(token: &Token<'_>, words: &[&str]) -> bool {
    words.iter().any(|word| token.is(word))
}

/// Whether a query begins here.
fn begins_query(tokens: &[Token<'_>]) -> bool {
    tokens.first().is_some_and(|token| is_any(token, &["select", "with", "values"]))
}

/// Whether a word can be a name, of a column or an alias: it is no keyword that goes on with the clause.
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
        Kind::Word => !is_any(token, &KEYWORDS),
        Kind::Quoted => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
