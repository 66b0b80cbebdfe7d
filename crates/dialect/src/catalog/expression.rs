//! Translates expressions: casts, operators, arrays.

use std::borrow::Cow;

use fulmar_pgwire::protocol::Format;
use fulmar_pgwire::types::{self, Type, decode};
use fulmar_sqlite::{Value, module_name};

use super::query::query;
use super::{SCHEMAS, TYPES_WITHOUT_CAST, begins_query, closing, find, is_any, pieces};
use crate::token::{Lexer, Token, TokenKind, quote_name, quote_text};

/// Translates tokens that are not a whole query: expressions and clauses.
pub(super) fn expression(tokens: &[Token<'_>]) -> String {
    write(tokens, false)
}

/// Translates a user's own statement: only casts and comparisons with arrays.
pub(super) fn user_statement(tokens: &[Token<'_>]) -> String {
    write(tokens, true)
}

fn write(tokens: &[Token<'_>], user_statement: bool) -> String {
    let mut output = Output { pieces: Vec::new(), gap: false, user_statement };
    let mut at = 0;
    while at < tokens.len() {
        at = output.take(tokens, at).max(at + 1);
    }
    output.text()
}

/// The translated text so far. An expression in parentheses is one piece.
struct Output<'a> {
    pieces: Vec<Piece<'a>>,
    /// Whether the tokens left out were preceded by a blank.
    gap: bool,
    /// Whether this is a user's statement, in which only syntax unknown to SQLite is replaced.
    user_statement: bool,
}

struct Piece<'a> {
    /// Borrowed from the statement for most pieces, which are unchanged tokens.
    text: Cow<'a, str>,
    kind: PieceKind,
    /// Whether a blank precedes it.
    spaced: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum PieceKind {
    Name,
    Group,
    Literal,
    Other,
}

impl<'a> Output<'a> {
    fn push(&mut self, text: impl Into<Cow<'a, str>>, kind: PieceKind, spaced: bool) {
        let spaced = std::mem::take(&mut self.gap) || spaced;
        self.pieces.push(Piece { text: text.into(), kind, spaced });
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for piece in &self.pieces {
            if piece.spaced && !text.is_empty() {
                text.push(' ');
            }
            text.push_str(&piece.text);
        }
        text
    }

    /// Translates the tokens at `at` that belong together. Returns the position after them.
    fn take(&mut self, tokens: &[Token<'a>], at: usize) -> usize {
        let token = &tokens[at];
        let next_is = |ahead: usize, sign| tokens.get(at + ahead).is_some_and(|next| next.is_symbol(sign));
        let spaced = at > 0 && token.start > tokens[at - 1].end();
        if token.kind == TokenKind::Word || token.kind == TokenKind::Quoted {
            return self.take_word(tokens, at, spaced);
        }
        if token.kind == TokenKind::String {
            let plain = self.user_statement || token.text.starts_with('\'');
            let text = if plain { Cow::Borrowed(token.text) } else { Cow::Owned(string(token)) };
            self.push(text, PieceKind::Literal, spaced);
        } else if token.kind != TokenKind::Symbol {
            self.push(token.text, PieceKind::Literal, spaced);
        } else if token.is_symbol('(') {
            let end = closing(tokens, at);
            let inner = inside(tokens, at, end);
            if let Some((name, columns, next)) =
                named_values(tokens, inner, end + 1).filter(|_| self.user_statement)
            {
                let rows = self.inner(inner);
                let text = format!("(WITH {name}({columns}) AS ({rows}) SELECT * FROM {name}) AS {name}");
                self.push(text, PieceKind::Group, spaced);
                return next;
            }
            let text =
                if !self.user_statement && begins_query(inner) { query(inner) } else { self.inner(inner) };
            self.push(format!("({text})"), PieceKind::Group, spaced);
            return end + 1;
        } else if token.is_symbol(':') && next_is(1, ':') {
            let (kind, end) = type_name(tokens, at + 2);
            let operand = self.take_operand();
            self.push(self.cast(&operand, &kind), PieceKind::Group, true);
            return end;
        } else if token.is_symbol('[') && !self.user_statement {
            let end = closing(tokens, at);
            let (operand, index) = (self.take_operand(), expression(inside(tokens, at, end)));
            self.push(format!("pg_array_item({operand}, {index})"), PieceKind::Group, true);
            return end + 1;
        } else if !self.user_statement
            && (token.is_symbol('~') || token.is_symbol('!') && next_is(1, '~'))
            && self.ends_in_operand()
        {
            let length = tokens[at..].iter().take_while(|sign| is_match(sign)).count();
            let signs: String = tokens[at..at + length].iter().map(|sign| sign.text).collect();
            self.push(matching(&signs), PieceKind::Other, true);
            return at + length;
        } else {
            self.push(token.text, PieceKind::Other, spaced);
        }
        at + 1
    }

    fn take_word(&mut self, tokens: &[Token<'a>], at: usize, spaced: bool) -> usize {
        let token = &tokens[at];
        let next_is = |ahead: usize, sign| tokens.get(at + ahead).is_some_and(|next| next.is_symbol(sign));
        let after_dot = self.pieces.last().is_some_and(|piece| piece.text == ".");
        let name = token.name().unwrap_or_default();
        if self.user_statement {
            return self.take_user_word(tokens, at, spaced, &name);
        }
        if after_dot {
            let is_field =
                self.pieces.iter().rev().nth(1).is_some_and(|piece| piece.kind == PieceKind::Group);
            if is_field {
                self.pieces.pop();
                let record = self.take_operand();
                self.push(
                    format!("json_extract({record}, {})", quote_text(&format!("$.{name}"))),
                    PieceKind::Group,
                    true,
                );
            } else {
                let text = match RESERVED.contains(&name.as_str()) {
                    true => Cow::Owned(quote_name(&name)),
                    false => Cow::Borrowed(token.text),
                };
                self.push(text, PieceKind::Name, spaced);
            }
            return at + 1;
        }
        if next_is(1, '.') && name == "pg_catalog" {
            self.gap |= spaced;
            return at + 2;
        }
        if next_is(1, '.') && SCHEMAS.contains(&name.as_str()) {
            return self.take_schema_name(tokens, at, &name, spaced);
        }
        if next_is(1, '(') {
            let end = closing(tokens, at + 1);
            let inner = inside(tokens, at + 1, end);
            match name.as_str() {
                "cast" => {
                    let split = find(inner, 0, |token| token.is("as"));
                    let (kind, _) = type_name(inner, split + 1);
                    self.push(self.cast(&expression(&inner[..split]), &kind), PieceKind::Group, spaced);
                    return end + 1;
                }
                "operator" => {
                    let signs: String =
                        inner.iter().filter(|sign| is_operator(sign)).map(|sign| sign.text).collect();
                    self.push(matching(&signs), PieceKind::Other, true);
                    return end + 1;
                }
                "any" | "some" | "all" if self.take_membership(inner, name == "all") => return end + 1,
                "trim" | "substring" | "position" => {
                    self.push(with_keywords(&name, inner), PieceKind::Group, spaced);
                    return end + 1;
                }
                "array" => {
                    let text = format!(
                        "(WITH array_rows(c) AS ({}) SELECT array_agg(c) FROM array_rows)",
                        query(inner)
                    );
                    self.push(text, PieceKind::Group, spaced);
                    return end + 1;
                }
                _ => {}
            }
        }
        if name == "array" && next_is(1, '[') {
            let end = closing(tokens, at + 1);
            let items = expression(inside(tokens, at + 1, end));
            self.push(format!("pg_array({items})"), PieceKind::Group, spaced);
            return end + 1;
        }
        if token.is("collate") {
            self.gap = true;
            return type_name(tokens, at + 1).1;
        }
        let kind = if is_any(token, &["and", "or", "not", "in", "is", "like", "then", "when", "else", "case"])
        {
            PieceKind::Other
        } else {
            PieceKind::Name
        };
        let text = match name.as_str() {
            "ilike" => "LIKE",
            called if next_is(1, '(') => engine_name(called).unwrap_or(token.text),
            _ => token.text,
        };
        self.push(text, kind, spaced);
        at + 1
    }

    /// `information_schema.x`: a table, a qualifier of a column, or a function.
    fn take_schema_name(&mut self, tokens: &[Token<'a>], at: usize, schema: &str, spaced: bool) -> usize {
        let Some(name) = tokens.get(at + 2).and_then(Token::name) else { return at + 2 };
        let is_qualifier = tokens.get(at + 3).is_some_and(|next| next.is_symbol('.') || next.is_symbol('('));
        let text = match is_qualifier {
            true => name,
            false => quote_name(&module_name(&format!("{schema}.{name}"))),
        };
        self.push(text, PieceKind::Name, spaced);
        at + 3
    }

    /// Translates a word of a user's statement. Only `CAST` to a type of [`TYPES_WITHOUT_CAST`] and
    /// `= ANY (...)` are replaced.
    fn take_user_word(&mut self, tokens: &[Token<'a>], at: usize, spaced: bool, name: &str) -> usize {
        let token = &tokens[at];
        let after_dot = self.pieces.last().is_some_and(|piece| piece.text == ".");
        if tokens.get(at + 1).is_some_and(|next| next.is_symbol('(')) && !after_dot {
            let end = closing(tokens, at + 1);
            let inner = inside(tokens, at + 1, end);
            if name == "cast" {
                let split = find(inner, 0, |token| token.is("as"));
                let (kind, _) = type_name(inner, split + 1);
                if TYPES_WITHOUT_CAST.contains(&kind.as_str()) {
                    let operand = self.inner(&inner[..split]);
                    self.push(self.cast(&operand, &kind), PieceKind::Group, spaced);
                    return end + 1;
                }
            }
            if matches!(name, "any" | "some" | "all") && self.take_membership(inner, name == "all") {
                return end + 1;
            }
        }
        let operator =
            ["and", "or", "not", "in", "is", "like", "then", "when", "else", "case", "values", "select"];
        self.push(
            token.text,
            if is_any(token, &operator) { PieceKind::Other } else { PieceKind::Name },
            spaced,
        );
        at + 1
    }

    /// Translates the content of parentheses in the mode of the whole statement.
    fn inner(&self, tokens: &[Token<'_>]) -> String {
        write(tokens, self.user_statement)
    }

    /// Translates `= ANY (...)` and `<> ALL (...)` of a list, a query, or the elements of an array.
    /// Returns false for any other comparison, which cannot be expressed with IN.
    fn take_membership(&mut self, inner: &[Token<'_>], all: bool) -> bool {
        let is_sign = |piece: &&Piece<'_>| matches!(&*piece.text, "=" | "<" | ">" | "!");
        let signs: Vec<&str> =
            self.pieces.iter().rev().take_while(is_sign).map(|piece| &*piece.text).collect();
        let is_membership = match signs.as_slice() {
            ["="] => !all,
            [">", "<"] | ["=", "!"] => all,
            _ => false,
        };
        if !is_membership {
            return false;
        }
        let signs = signs.len();
        self.pieces.truncate(self.pieces.len() - signs);
        self.push(if all { "NOT IN" } else { "IN" }, PieceKind::Other, true);
        let text = match listed(inner) {
            Some(items) => {
                let mut text = String::new();
                for item in pieces(items) {
                    text.push_str(if text.is_empty() { "" } else { ", " });
                    text.push_str(&self.inner(item));
                }
                text
            }
            None if begins_query(inner) && !self.user_statement => query(inner),
            None if begins_query(inner) => self.inner(inner),
            None => format!("SELECT value FROM json_each(pg_array_json({}))", self.inner(inner)),
        };
        self.push(format!("({text})"), PieceKind::Group, true);
        true
    }

    fn ends_in_operand(&self) -> bool {
        self.pieces.last().is_some_and(|piece| piece.kind != PieceKind::Other)
    }

    /// Removes and returns the last operand: a literal, a path, parentheses, or a call.
    fn take_operand(&mut self) -> String {
        let Some(last) = self.pieces.pop() else { return "NULL".to_owned() };
        let mut text = last.text.into_owned();
        if last.kind == PieceKind::Group {
            let is_call =
                self.pieces.last().is_some_and(|piece| piece.kind == PieceKind::Name) && !last.spaced;
            if !is_call {
                return text;
            }
            let name = self.pieces.pop().map_or(Cow::Borrowed(""), |piece| piece.text);
            text.insert_str(0, &name);
        }
        while self.pieces.last().is_some_and(|piece| piece.text == ".") {
            self.pieces.pop();
            let before = self.pieces.pop().map_or(Cow::Borrowed(""), |piece| piece.text);
            text = format!("{before}.{text}");
        }
        text
    }
}

/// Names that PostgreSQL accepts unquoted after a dot, and SQLite does not.
const RESERVED: [&str; 20] = [
    "select",
    "update",
    "insert",
    "delete",
    "table",
    "where",
    "order",
    "group",
    "index",
    "default",
    "check",
    "references",
    "from",
    "to",
    "values",
    "primary",
    "unique",
    "constraint",
    "transaction",
    "when",
];

/// The engine's name for a PostgreSQL function.
fn engine_name(name: &str) -> Option<&'static str> {
    Some(match name {
        "json_build_object" | "jsonb_build_object" => "json_object",
        "json_agg" | "jsonb_agg" => "json_group_array",
        "bool_and" | "every" => "min",
        "bool_or" => "max",
        "char_length" | "character_length" => "length",
        "format" => "pg_format",
        _ => return None,
    })
}

/// `trim(BOTH x FROM y)`, `substring(x FROM a FOR b)`, `position(x IN y)`: arguments separated by
/// keywords.
fn with_keywords(name: &str, inner: &[Token<'_>]) -> String {
    let between = |words: &[&str]| find(inner, 0, |token| is_any(token, words));
    let (from, length_at, in_at) = (between(&["from"]), between(&["for"]), between(&["in"]));
    let part = |from: usize, to: usize| expression(inner.get(from..to).unwrap_or_default());
    let end = inner.len();
    match name {
        "trim" if from < end => {
            let side = inner.first().filter(|token| is_any(token, &["both", "leading", "trailing"]));
            let function = match side {
                Some(token) if token.is("leading") => "ltrim",
                Some(token) if token.is("trailing") => "rtrim",
                _ => "trim",
            };
            let start = usize::from(side.is_some());
            let characters = if start < from { format!(", {}", part(start, from)) } else { String::new() };
            format!("{function}({}{characters})", part(from + 1, end))
        }
        "substring" if from < end && length_at < end => {
            format!("substr({}, {}, {})", part(0, from), part(from + 1, length_at), part(length_at + 1, end))
        }
        "substring" if from < end => format!("substr({}, {})", part(0, from), part(from + 1, end)),
        "position" if in_at < end => format!("instr({}, {})", part(in_at + 1, end), part(0, in_at)),
        _ => format!("{name}({})", expression(inner)),
    }
}

/// The tokens between the brackets at `open` and `close`.
fn inside<'a, 't>(tokens: &'t [Token<'a>], open: usize, close: usize) -> &'t [Token<'a>] {
    &tokens[(open + 1).min(close)..close]
}

/// `(VALUES ...) AS name (columns)`: the name, the columns, and the position after them. SQLite has
/// no column names there.
fn named_values(tokens: &[Token<'_>], inner: &[Token<'_>], mut at: usize) -> Option<(String, String, usize)> {
    inner.first().filter(|token| token.is("values"))?;
    at += usize::from(tokens.get(at)?.is("as"));
    let name = tokens.get(at).filter(|token| super::is_alias(token))?;
    tokens.get(at + 1).filter(|token| token.is_symbol('('))?;
    let end = closing(tokens, at + 1);
    let columns: Vec<&str> = inside(tokens, at + 1, end).iter().map(|token| token.text).collect();
    Some((name.text.to_owned(), columns.concat(), end + 1))
}

/// The items of `ARRAY[a, b]`, optionally in parentheses or cast to an array type. `None` for
/// anything else.
fn listed<'a, 't>(tokens: &'t [Token<'a>]) -> Option<&'t [Token<'a>]> {
    match tokens {
        [open, inner @ .., close]
            if open.is_symbol('(') && close.is_symbol(')') && closing(tokens, 0) + 1 == tokens.len() =>
        {
            listed(inner)
        }
        [array, bracket, rest @ ..] if array.is("array") && bracket.is_symbol('[') => {
            let end = closing(tokens, 1);
            let behind = tokens.get(end + 1..).unwrap_or_default();
            let is_cast = match behind {
                [] => true,
                [a, b, ..] if a.is_symbol(':') && b.is_symbol(':') => type_name(behind, 2).1 == behind.len(),
                _ => false,
            };
            (is_cast && !rest.is_empty()).then(|| inside(tokens, 1, end))
        }
        _ => None,
    }
}

fn string(token: &Token<'_>) -> String {
    quote_text(&token.string().unwrap_or_default())
}

fn is_match(token: &Token<'_>) -> bool {
    ['~', '!', '*'].iter().any(|sign| token.is_symbol(*sign))
}

fn is_operator(token: &Token<'_>) -> bool {
    token.kind == TokenKind::Symbol && !token.is_symbol('.')
}

/// SQLite's operator for a PostgreSQL pattern operator. Other operators are unchanged.
fn matching(signs: &str) -> String {
    match signs {
        "~" => "REGEXP".into(),
        "~*" => "REGEXP '(?i)' ||".into(),
        "!~" => "NOT REGEXP".into(),
        "!~*" => "NOT REGEXP '(?i)' ||".into(),
        "~~" | "~~*" => "LIKE".into(),
        "!~~" | "!~~*" => "NOT LIKE".into(),
        other => other.into(),
    }
}

/// The type at `at`: its last name in lower case, followed by `[]` for an array. Also returns the
/// position after it.
pub(crate) fn type_name(tokens: &[Token<'_>], mut at: usize) -> (String, usize) {
    let (mut name, start) = (String::new(), at.min(tokens.len()));
    while let Some(next) = tokens.get(at).and_then(Token::name) {
        name = next;
        at += 1;
        if !tokens.get(at).is_some_and(|token| token.is_symbol('.')) {
            break;
        }
        at += 1;
    }
    let words: &[&str] = match name.as_str() {
        "double" => &["precision"],
        "character" => &["varying"],
        "timestamp" | "time" => &["with", "without", "time", "zone"],
        _ => &[],
    };
    while tokens.get(at).is_some_and(|token| is_any(token, words)) {
        at += 1;
    }
    if tokens.get(at).is_some_and(|token| token.is_symbol('(')) {
        at = (closing(tokens, at) + 1).min(tokens.len());
        // TIMESTAMP(3) WITH TIME ZONE
        while tokens.get(at).is_some_and(|token| is_any(token, words)) {
            at += 1;
        }
    }
    // Normalizes multi-word spellings to one word.
    let written = &tokens[start..at.min(tokens.len())];
    let has = |word: &str| written.iter().any(|token| token.is(word));
    match name.as_str() {
        "timestamp" if has("with") => "timestamptz".clone_into(&mut name),
        "character" if has("varying") => "varchar".clone_into(&mut name),
        "double" => "float8".clone_into(&mut name),
        _ => {}
    }
    while tokens.get(at).is_some_and(|token| token.is_symbol('[')) {
        name.push_str("[]");
        at = (closing(tokens, at) + 1).min(tokens.len());
    }
    (name, at)
}

impl Output<'_> {
    /// Casts an operand to a type. A parameter is decoded as that type and needs no cast. The type
    /// is added as a comment, since the same text with another type is a different statement.
    fn cast(&self, operand: &str, kind: &str) -> String {
        let is_parameter =
            operand.strip_prefix('$').is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
        let known = types::type_by_name(kind);
        if is_parameter && known.is_some() {
            return format!("{operand}/*{kind}*/");
        }
        if let Some(literal) = known.and_then(|known| literal(operand, known)) {
            return literal;
        }
        match kind {
            // Types that reference catalog objects are shown by name.
            "regclass" | "regtype" | "regnamespace" | "regrole" => format!("pg_{kind}({operand})"),
            "regproc" | "regprocedure" | "regoper" | "regoperator" => format!("pg_regproc({operand})"),
            // Shown as the object's name, although it compares as its number.
            "text" | "varchar" | "name" if operand.starts_with("pg_reg") => {
                operand.replacen('(', "_name(", 1)
            }
            "text" | "varchar" | "character" | "char" | "bpchar" | "name" => {
                format!("CAST({operand} AS TEXT)")
            }
            "oid" | "xid" | "int" | "integer" | "int2" | "int4" | "int8" | "bigint" | "smallint" => {
                format!("CAST({operand} AS INTEGER)")
            }
            "real" | "float" | "float4" | "float8" | "double" => format!("CAST({operand} AS REAL)"),
            "numeric" | "decimal" => format!("CAST({operand} AS NUMERIC)"),
            "bytea" => format!("CAST({operand} AS BLOB)"),
            "date" => format!("date({operand})"),
            "time" => format!("time({operand})"),
            _ => format!("({operand})"),
        }
    }
}

/// A literal as a value of a type, in its stored form. `None` if the operand is not a literal of
/// that type.
fn literal(operand: &str, kind: Type) -> Option<String> {
    let token = Lexer::new(operand)
        .next()
        .filter(|token| token.kind == TokenKind::String && token.text == operand)?;
    let value = decode::value(token.string()?.as_bytes(), kind, Format::Text).ok()?;
    Some(match value {
        Value::Null => "NULL".to_owned(),
        Value::Integer(integer) => integer.to_string(),
        Value::Real(real) if real.is_finite() => format!("{real:?}"),
        Value::Real(_) => return None,
        Value::Text(text) => quote_text(&text),
        Value::Blob(bytes) => {
            let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("x'{digits}'")
        }
    })
}
