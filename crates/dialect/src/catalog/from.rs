//! Translates FROM clauses: tables, subqueries, and functions that return rows.

use fulmar_sqlite::module_name;

use super::expression::expression;
use super::query::query;
use super::{SCHEMAS, begins_query, closing, find, is_alias, is_any, pieces};
use crate::token::{Token, quote_name};

/// Translates the part after FROM, up to the next clause.
pub(super) fn from_clause(tokens: &[Token<'_>]) -> String {
    let mut text = String::new();
    let mut at = 0;
    while at < tokens.len() {
        let (relation, end) = relation(tokens, at);
        text.push_str(&relation);
        // Copies `ON ...`, up to and including the word that precedes the next relation.
        let next = find(tokens, end, |token| token.is_symbol(',') || token.is("join"));
        let through = (next + 1).min(tokens.len());
        if end < through {
            text.push(' ');
            text.push_str(&expression(&tokens[end..through]));
            text.push(' ');
        }
        at = through.max(at + 1);
    }
    text
}

/// Translates the relation at `at`, with its alias. Returns its text and the position after it.
fn relation(tokens: &[Token<'_>], mut at: usize) -> (String, usize) {
    while tokens.get(at).is_some_and(|token| is_any(token, &["lateral", "only"])) {
        at += 1;
    }
    if tokens.get(at).is_some_and(|token| token.is_symbol('(')) {
        let end = closing(tokens, at);
        let inner = &tokens[(at + 1).min(end)..end];
        let (alias, end) = Alias::read(tokens, (end + 1).min(tokens.len()));
        if !begins_query(inner) {
            return (format!("({}){}", from_clause(inner), alias.text()), end);
        }
        let inner = query(inner);
        return match (&alias.name, alias.columns.as_slice()) {
            (Some(name), columns @ [_, ..]) => {
                let (name, columns) = (quote_name(name), names(columns));
                (format!("(WITH {name}({columns}) AS ({inner}) SELECT * FROM {name}) AS {name}"), end)
            }
            _ => (format!("({inner}){}", alias.text()), end),
        };
    }
    let mut path = Vec::new();
    while let Some(name) = tokens.get(at).and_then(Token::name) {
        path.push((name, tokens[at].text));
        at += 1;
        if !tokens.get(at).is_some_and(|token| token.is_symbol('.')) {
            break;
        }
        at += 1;
    }
    let Some((name, written)) = path.pop() else {
        let end = (at + 1).min(tokens.len());
        return (expression(&tokens[at.min(end)..end]), end);
    };
    if tokens.get(at).is_some_and(|token| token.is_symbol('(')) {
        let end = closing(tokens, at);
        let call = format!("{written}({})", expression(&tokens[(at + 1).min(end)..end]));
        return rows_of_function(&name, &call, tokens, (end + 1).min(tokens.len()));
    }
    let (alias, end) = Alias::read(tokens, at);
    let schema = path.pop().map(|(schema, _)| schema);
    let text = match schema.as_deref() {
        Some(schema) if SCHEMAS.contains(&schema) => {
            let table = quote_name(&module_name(&format!("{schema}.{name}")));
            // Columns may be qualified by the table's name.
            if alias.name.is_none() { format!("{table} AS {}", quote_name(&name)) } else { table }
        }
        Some("pg_catalog") | None => written.to_owned(),
        Some("public") => format!("main.{written}"),
        Some(schema) => format!("{}.{written}", quote_name(schema)),
    };
    (format!("{text}{}", alias.text()), end)
}

/// A set-returning function. The engine's function returns an array; the rows are its elements.
fn rows_of_function(name: &str, call: &str, tokens: &[Token<'_>], at: usize) -> (String, usize) {
    let ordinality = tokens.len() >= at + 2 && tokens[at].is("with") && tokens[at + 1].is("ordinality");
    let (alias, end) = Alias::read(tokens, if ordinality { at + 2 } else { at });
    // SQLite's own table-valued functions are left unchanged.
    if name.starts_with("pragma_") || name.starts_with("json_") {
        return (format!("{call}{}", alias.text()), end);
    }
    let relation_name = alias.name.clone().unwrap_or_else(|| name.to_owned());
    let default_column = if name == "pg_get_keywords" { "word" } else { relation_name.as_str() };
    let mut columns = alias.columns.iter().map(|column| quote_name(column));
    let value = columns.next().unwrap_or_else(|| quote_name(default_column));
    let ordinality_column = columns.next().unwrap_or_else(|| "ordinality".to_owned());
    let rows = format!(
        "SELECT value AS {value}, key + 1 AS {ordinality_column} FROM json_each(pg_array_json({call}))"
    );
    (format!("({rows}) AS {}", quote_name(&relation_name)), end)
}

/// `AS name (columns)`.
struct Alias {
    name: Option<String>,
    columns: Vec<String>,
}

impl Alias {
    fn read(tokens: &[Token<'_>], mut at: usize) -> (Alias, usize) {
        let mut alias = Alias { name: None, columns: Vec::new() };
        at += usize::from(tokens.get(at).is_some_and(|token| token.is("as")));
        let Some(name) = tokens.get(at).filter(|token| is_alias(token)) else { return (alias, at) };
        alias.name = name.name();
        at += 1;
        if tokens.get(at).is_some_and(|token| token.is_symbol('(')) {
            let end = closing(tokens, at);
            // A column's name, followed by its type if the function returns records.
            let columns = pieces(&tokens[(at + 1).min(end)..end]);
            alias.columns = columns.iter().filter_map(|column| column.first()?.name()).collect();
            at = (end + 1).min(tokens.len());
        }
        (alias, at)
    }

    fn text(&self) -> String {
        self.name.as_deref().map_or_else(String::new, |name| format!(" AS {}", quote_name(name)))
    }
}

fn names(columns: &[String]) -> String {
    columns.iter().map(|column| quote_name(column)).collect::<Vec<_>>().join(", ")
}
