//! Conditions on catalog rows.

use fulmar_engine::Value;

use crate::dialect::token::{Cursor, Kind, Token};

/// A condition that a row must meet.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Filter {
    /// `column IN (...)`, or `column = value` with one.
    OneOf(String, Vec<String>),
    /// `column <> value`.
    Not(String, String),
    /// `column ~ pattern`, or `!~`.
    Matches { column: String, pattern: String, negated: bool },
    /// Always met here: joins, visibility, dropped columns.
    Always,
}

impl Filter {
    /// Parses one condition of a WHERE; `None` if it is of no known form.
    pub(super) fn parse(tokens: &[Token<'_>]) -> Option<Filter> {
        let mut cursor = Cursor::new(tokens);
        // `(NOT t.tgisinternal OR (...))`: none of ours is.
        if cursor.sign('(') && cursor.word("not") && path(&mut cursor).as_deref() == Some("tgisinternal") {
            return Some(Filter::Always);
        }
        let mut cursor = Cursor::new(tokens);
        if cursor.word("not") {
            let column = path(&mut cursor)?;
            return cursor.is_end().then(|| Filter::OneOf(column, vec!["0".into()]));
        }
        let column = path(&mut cursor)?;
        if cursor.is_end() {
            return Some(Filter::OneOf(column, vec!["1".into()]));
        }
        if cursor.sign('(') {
            let visible = column.starts_with("pg_") && column.ends_with("_is_visible");
            return visible.then_some(Filter::Always);
        }
        if cursor.word("in") {
            return one_of(column, &mut cursor);
        }
        if cursor.words(&["is", "not", "null"]) {
            return cursor.is_end().then_some(Filter::Always); // what is left out of a left join, never of ours
        }
        let filter = if cursor.word("operator") {
            let matches =
                cursor.sign('(') && path(&mut cursor).is_none() && cursor.sign('~') && cursor.sign(')');
            let pattern = cursor.string().filter(|_| matches)?;
            if cursor.word("collate") {
                path(&mut cursor)?;
            }
            Filter::Matches { column, pattern, negated: false }
        } else if cursor.sign('!') && cursor.sign('~') {
            Filter::Matches { column, pattern: cursor.string()?, negated: true }
        } else if cursor.sign('<') {
            cursor.sign('>').then_some(())?;
            Filter::Not(column, literal(&mut cursor)?)
        } else if cursor.sign('>') {
            cursor.next()?; // `attnum > 0`: all of ours are
            Filter::Always
        } else {
            cursor.sign('=').then_some(())?;
            equal(column, &mut cursor)?
        };
        cursor.is_end().then_some(filter)
    }

    /// The column that it looks at.
    pub(super) fn column(&self) -> Option<&str> {
        match self {
            Filter::OneOf(column, _) | Filter::Not(column, _) | Filter::Matches { column, .. } => {
                Some(column)
            }
            Filter::Always => None,
        }
    }

    /// Whether a row whose column holds `value` meets it.
    pub(super) fn accepts(&self, value: &Value) -> bool {
        let text = match value {
            Value::Text(text) => text.clone(),
            Value::Integer(integer) => integer.to_string(),
            _ => return false,
        };
        match self {
            Filter::OneOf(_, values) => values.contains(&text),
            Filter::Not(_, value) => text != *value,
            Filter::Matches { pattern, negated, .. } => matches(pattern, &text) != *negated,
            Filter::Always => true,
        }
    }
}

/// A name with what stands before it: `c.relname` and `pg_catalog.pg_table_is_visible` are their last part. Stops
/// before the `~` of `pg_catalog.~`, having taken the rest, and is nothing then.
fn path(cursor: &mut Cursor<'_, '_>) -> Option<String> {
    let mut name = cursor.name()?;
    while cursor.sign('.') {
        name = cursor.name()?;
    }
    Some(name)
}

fn literal(cursor: &mut Cursor<'_, '_>) -> Option<String> {
    let token = cursor.next()?;
    match token.kind {
        Kind::String => token.string(),
        Kind::Number => Some(token.text.to_owned()),
        Kind::Word if token.is("true") => Some("1".into()),
        Kind::Word if token.is("false") => Some("0".into()),
        _ => None,
    }
}

fn equal(column: String, cursor: &mut Cursor<'_, '_>) -> Option<Filter> {
    match literal(&mut Cursor::new(cursor.rest())) {
        Some(value) => {
            cursor.next();
            Some(Filter::OneOf(column, vec![value]))
        }
        // A column of another relation: a join.
        None => path(cursor).map(|_| Filter::Always),
    }
}

/// `IN ('a', 'b')`; or the sub-select with which psql asks for a table and its partitioned ancestors, of which there
/// are none, so that the table alone is left.
fn one_of(column: String, cursor: &mut Cursor<'_, '_>) -> Option<Filter> {
    cursor.sign('(').then_some(())?;
    if cursor.peek()?.is("select") {
        let mut literals = cursor.rest().iter().filter_map(|token| token.string());
        let ancestors = cursor.rest().iter().any(|token| token.is("pg_partition_ancestors"));
        return literals.next().filter(|_| ancestors).map(|oid| Filter::OneOf(column, vec![oid]));
    }
    let mut values = Vec::new();
    loop {
        values.push(literal(cursor)?);
        if !cursor.sign(',') {
            break;
        }
    }
    (cursor.sign(')') && cursor.is_end()).then_some(Filter::OneOf(column, values))
}

/// Whether `text` matches a pattern as psql makes them: `^(name.*)$` with `.`, `.*` and escaped characters. Names are
/// compared as SQLite does, without regard to case. A pattern with anything else in it matches nothing.
fn matches(pattern: &str, text: &str) -> bool {
    let anchored = pattern.strip_prefix('^').unwrap_or(pattern);
    let (inner, whole) = match anchored.strip_suffix('$') {
        Some(inner) => (inner, true),
        None => (anchored, false),
    };
    let inner = inner.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')).unwrap_or(inner);
    let Some(steps) = steps(inner) else { return false };
    let text: Vec<char> = text.chars().flat_map(char::to_lowercase).collect();
    run(&steps, &text, whole)
}

/// A step of a pattern; `None` is any character.
struct Step {
    character: Option<char>,
    repeated: bool,
}

fn steps(pattern: &str) -> Option<Vec<Step>> {
    let mut steps: Vec<Step> = Vec::new();
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        let character = match character {
            '\\' => Some(characters.next()?),
            '.' => None,
            '*' => {
                steps.last_mut()?.repeated = true;
                continue;
            }
            '[' | ']' | '(' | ')' | '{' | '}' | '|' | '+' | '?' | '^' => return None,
            other => Some(other),
        };
        let character = character.map(|character| character.to_lowercase().next().unwrap_or(character));
        steps.push(Step { character, repeated: false });
    }
    Some(steps)
}

/// Runs all steps side by side over the text, so that its time is their product at most.
fn run(steps: &[Step], text: &[char], whole: bool) -> bool {
    let close = |active: &mut Vec<bool>| {
        for at in 0..steps.len() {
            if active[at] && steps[at].repeated {
                active[at + 1] = true;
            }
        }
    };
    let mut active = vec![false; steps.len() + 1];
    active[0] = true;
    close(&mut active);
    for &character in text {
        if active[steps.len()] && !whole {
            return true;
        }
        let mut next = vec![false; steps.len() + 1];
        for (at, step) in steps.iter().enumerate() {
            if active[at] && step.character.is_none_or(|wanted| wanted == character) {
                next[if step.repeated { at } else { at + 1 }] = true;
            }
        }
        close(&mut next);
        active = next;
    }
    active[steps.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::token::first_statement;

    fn parse(sql: &str) -> Option<Filter> {
        Filter::parse(&first_statement(sql).0)
    }

    #[test]
    fn patterns_as_psql_makes_them() {
        assert!(matches("^(be.*)$", "Bench"));
        assert!(matches("^(a.c)$", "abc"));
        assert!(matches("^(a\\.c)$", "a.c"));
        assert!(!matches("^(a\\.c)$", "abc"));
        assert!(!matches("^(be)$", "bench"));
        assert!(matches("^pg_", "pg_x"));
        assert!(!matches("^pg_", "public"));
        assert!(!matches("^(a|b)$", "a"));
        // Backtracking would take for ever.
        assert!(!matches(&format!("^({}b)$", ".*".repeat(40)), &"a".repeat(5000)));
    }

    #[test]
    fn conditions_as_psql_writes_them() {
        let one_of = |column: &str, values: &[&str]| {
            Some(Filter::OneOf(column.into(), values.iter().map(|value| value.to_string()).collect()))
        };
        assert_eq!(parse("c.relkind IN ('r','p','')"), one_of("relkind", &["r", "p", ""]));
        assert_eq!(parse("a.attrelid = '16425'"), one_of("attrelid", &["16425"]));
        assert_eq!(parse("conparentid = 0"), one_of("conparentid", &["0"]));
        assert_eq!(parse("pg_catalog.pg_table_is_visible(c.oid)"), Some(Filter::Always));
        assert_eq!(parse("i.indexrelid = c2.oid"), Some(Filter::Always));
        assert_eq!(
            parse("n.nspname <> 'pg_catalog'"),
            Some(Filter::Not("nspname".into(), "pg_catalog".into()))
        );
        let matches = parse("c.relname OPERATOR(pg_catalog.~) '^(c)$' COLLATE pg_catalog.default");
        let expected = Filter::Matches { column: "relname".into(), pattern: "^(c)$".into(), negated: false };
        assert_eq!(matches, Some(expected));
        assert_eq!(
            parse(
                "confrelid IN (SELECT pg_catalog.pg_partition_ancestors('7') UNION ALL VALUES ('7'::regclass))"
            ),
            one_of("confrelid", &["7"])
        );
        assert_eq!(parse("datname LIKE 'x%'"), None);
        assert_eq!(parse("datname = 'a' OR datname = 'b'"), None);
        assert_eq!(parse("length(datname) = 3"), None);
    }
}
