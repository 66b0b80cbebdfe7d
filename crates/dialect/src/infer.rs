//! Infers the types of expressions from the text of a SELECT.
//!
//! SQLite knows the declared type of a column that is selected directly. It knows nothing about
//! `count(*)` or `a + 1` before it has computed them. A client that describes a statement before
//! executing it (most drivers that use binary formats) needs a type at that point, and text for a
//! count would be inconvenient. The select list is therefore analyzed:
//!
//! ```text
//! SELECT count(*),  max(price) + 1,  'x' || name,  CAST(a AS REAL),  f(a)  FROM t WHERE ...
//!        bigint     as price         text          double precision  unknown: text
//! ```
//!
//! If the type depends on a column, SQLite is asked for the type of that column:
//! [`Inference::probe`] is a statement that selects only the columns from the same tables. It is
//! prepared and never executed.

use fulmar_pgwire::types::{self, Type};

use crate::token::{Lexer, Token, TokenKind};

/// Maximum depth to which expressions are analyzed.
const MAX_DEPTH: u32 = 40;

/// The result of analyzing a SELECT.
#[derive(Debug, Default, PartialEq)]
pub struct Inference {
    /// One for each column of the result.
    pub types: Vec<InferredType>,
    /// The columns that guesses refer to.
    columns: Vec<String>,
    logical: Option<Type>,
    /// Array-valued columns of subqueries.
    arrays: Vec<(String, Type)>,
    /// The text before the select list, and the text from FROM to the end of the conditions.
    surrounding: (String, String),
}

/// What is known about the type of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InferredType {
    /// Nothing is known.
    Unknown,
    /// This type.
    Known(Type),
    /// The type of a column of the probe.
    Column(usize),
    /// The numeric type that results from that column: float for a float column, integer for an
    /// integer one.
    NumericOf(usize),
    /// An array of that column's type.
    ArrayOf(usize),
    /// The type of that column, or this type if SQLite does not know it.
    ColumnOr(usize, Type),
}

impl InferredType {
    /// The type, given the types of the probe's columns.
    pub fn resolve(self, probed: &[Option<Type>]) -> Option<Type> {
        match self {
            InferredType::Unknown => None,
            InferredType::Known(kind) => Some(kind),
            InferredType::Column(column) => *probed.get(column)?,
            InferredType::ColumnOr(column, kind) => {
                Some(probed.get(column).copied().flatten().unwrap_or(kind))
            }
            InferredType::ArrayOf(column) => probed.get(column)?.unwrap_or(Type::Text).array(),
            InferredType::NumericOf(column) => match (*probed.get(column)?)? {
                Type::Int2 | Type::Int4 | Type::Int8 | Type::Bool => Some(Type::Int8),
                Type::Float4 | Type::Float8 => Some(Type::Float8),
                Type::Numeric => Some(Type::Numeric),
                _ => None,
            },
        }
    }
}

impl Inference {
    /// Analyzes a SELECT. Nothing is inferred for other statements, or if `*` hides the number of
    /// columns. `logical` is the type of comparisons: integer in SQLite, boolean in PostgreSQL.
    pub fn of(sql: &str, logical: Type) -> Inference {
        let tokens: Vec<Token<'_>> = Lexer::new(sql).collect();
        let top_level = TopLevel::of(&tokens);
        let Some(select) = top_level.find(&tokens, 0, &["select"]) else { return Inference::default() };
        let first = tokens[select + 1..].first().is_some_and(|token| token.is("distinct") || token.is("all"));
        let list = select + 1 + usize::from(first);
        let from = top_level.find(&tokens, list, &["from"]).unwrap_or(tokens.len());
        let end = top_level.find(&tokens, list, &CLAUSES_AFTER_CONDITIONS).unwrap_or(tokens.len());
        let mut inference = Inference { logical: Some(logical), ..Inference::default() };
        inference.find_arrays(&tokens);
        for item in top_level.split(&tokens, list..from.min(end)) {
            let item = without_alias(item);
            if item.last().is_none_or(|token| token.is_symbol('*')) {
                return Inference::default();
            }
            let inferred = inference.guess(item, MAX_DEPTH);
            inference.types.push(inferred);
        }
        let text = |range: std::ops::Range<usize>| match tokens.get(range.clone()) {
            Some([first, .., last]) => sql[first.start..last.end()].to_owned(),
            Some([only]) => only.text.to_owned(),
            _ => String::new(),
        };
        inference.surrounding = (text(0..list), if from < end { text(from..end) } else { String::new() });
        inference
    }

    /// Finds every `array_agg(...) AS name` in the text.
    fn find_arrays(&mut self, tokens: &[Token<'_>]) {
        /// Bounds the work: each may search the whole text.
        const MAX_ARRAYS: usize = 100;
        for at in (0..tokens.len()).filter(|at| tokens[*at].is("array_agg")).take(MAX_ARRAYS) {
            let mut depth = 0;
            let close = tokens[at + 1..].iter().position(|token| {
                depth += i32::from(token.is_symbol('(')) - i32::from(token.is_symbol(')'));
                depth <= 0
            });
            let Some(end) = close.map(|close| at + 1 + close) else { return };
            let [before, name, ..] = tokens.get(end + 1..).unwrap_or_default() else { return };
            let order =
                tokens[at..end].iter().position(|token| token.is("order")).map_or(end, |order| at + order);
            let argument = tokens.get(at + 2..order).unwrap_or_default();
            // If the argument names a column of a subquery, the subquery's expression determines
            // the type.
            let defined =
                argument.last().filter(|_| is_path(argument)).and_then(|name| definition(tokens, name));
            let kind = match self.guess(defined.unwrap_or(argument), MAX_DEPTH) {
                InferredType::Known(kind) => kind.array().unwrap_or(Type::TextArray),
                _ => Type::TextArray,
            };
            self.arrays.extend(name.name().filter(|_| before.is("as")).map(|name| (name, kind)));
        }
        // The columns found here are not columns of the result.
        self.columns.clear();
    }

    /// A statement whose columns are those that the guesses refer to. `None` if there are none.
    pub fn probe(&self) -> Option<String> {
        let (before, after) = &self.surrounding;
        (!self.columns.is_empty()).then(|| format!("{before} {} {after}", self.columns.join(", ")))
    }

    fn logical(&self) -> Type {
        self.logical.unwrap_or(Type::Int8)
    }

    fn guess(&mut self, tokens: &[Token<'_>], depth: u32) -> InferredType {
        let top_level = TopLevel::of(tokens);
        match tokens {
            _ if depth == 0 => InferredType::Unknown,
            [] => InferredType::Unknown,
            [literal] if literal.kind == TokenKind::String => InferredType::Known(Type::Text),
            [literal] if literal.kind == TokenKind::Number => number(literal.text),
            [word] if word.is("true") || word.is("false") => InferredType::Known(self.logical()),
            [word] if word.is("null") => InferredType::Unknown,
            [open, inner @ .., close]
                if open.is_symbol('(') && close.is_symbol(')') && top_level.encloses() =>
            {
                if inner.first().is_some_and(|token| token.is("select")) {
                    InferredType::Unknown
                } else {
                    self.guess(inner, depth - 1)
                }
            }
            [sign, rest @ ..] if sign.is_symbol('-') || sign.is_symbol('+') => self.guess(rest, depth - 1),
            [case, .., end] if case.is("case") && end.is("end") => self.guess_case(tokens, depth),
            _ if is_path(tokens) => {
                let name = tokens.last().and_then(Token::name);
                let array =
                    self.arrays.iter().find(|(known, _)| Some(known) == name.as_ref()).map(|(_, kind)| *kind);
                let column = self.column(tokens);
                array.map_or(InferredType::Column(column), |kind| InferredType::ColumnOr(column, kind))
            }
            _ => self.guess_composed(tokens, &top_level, depth),
        }
    }

    fn guess_composed(&mut self, tokens: &[Token<'_>], top_level: &TopLevel, depth: u32) -> InferredType {
        let is_top_level = |at: &usize| top_level.is_top_level(*at);
        let has = |test: &dyn Fn(&Token<'_>) -> bool| {
            (0..tokens.len()).filter(is_top_level).any(|at| test(&tokens[at]))
        };
        const LOGICAL_OPERATORS: [&str; 12] = [
            "and", "or", "not", "is", "in", "like", "glob", "between", "exists", "isnull", "notnull", "match",
        ];
        if has(&|token| {
            LOGICAL_OPERATORS.iter().any(|word| token.is(word))
                || ['=', '<', '>', '~'].iter().any(|sign| token.is_symbol(*sign))
        }) {
            return InferredType::Known(self.logical());
        }
        if has(&|token| token.is_symbol('|')) {
            return InferredType::Known(Type::Text);
        }
        let arithmetic = |at: usize| ['+', '-', '*', '/', '%'].iter().any(|sign| tokens[at].is_symbol(*sign));
        if let Some(at) = (1..tokens.len()).filter(is_top_level).find(|at| arithmetic(*at)) {
            let (left, right) =
                (self.guess(&tokens[..at], depth - 1), self.guess(&tokens[at + 1..], depth - 1));
            return arithmetic_type(left, right);
        }
        self.guess_call(tokens, depth)
    }

    fn guess_call(&mut self, tokens: &[Token<'_>], depth: u32) -> InferredType {
        let [name, open, inner @ .., close] = tokens else { return InferredType::Unknown };
        if name.kind != TokenKind::Word || !open.is_symbol('(') || !close.is_symbol(')') {
            return InferredType::Unknown;
        }
        if name.is("cast") {
            let after = inner.iter().rposition(|token| token.is("as")).map_or(inner.len(), |at| at + 1);
            let words: Vec<&str> = inner[after..].iter().map(|token| token.text).collect();
            return types::declared_type(&words.join(" "))
                .map_or(InferredType::Unknown, |known| InferredType::Known(known.kind));
        }
        let is = |names: &[&str]| names.iter().any(|known| name.is(known));
        let is_predicate = name.text.ends_with("_is_visible")
            || name.text.ends_with("_privilege")
            || is(&[
                "pg_try_advisory_lock",
                "pg_advisory_unlock",
                "pg_cancel_backend",
                "pg_terminate_backend",
                "pg_is_in_recovery",
            ]);
        if is_predicate {
            InferredType::Known(self.logical())
        } else if is(&["array_agg", "pg_array"]) {
            let first =
                TopLevel::of(inner).split(inner, 0..inner.len()).into_iter().next().unwrap_or_default();
            // Excludes ORDER BY after the argument.
            let order = first.iter().position(|token| token.is("order")).unwrap_or(first.len());
            match self.guess(without_distinct(&first[..order]), depth - 1) {
                InferredType::Known(kind) => InferredType::Known(kind.array().unwrap_or(Type::TextArray)),
                InferredType::Column(column) => InferredType::ArrayOf(column),
                _ => InferredType::Known(Type::TextArray),
            }
        } else if is(&INTEGER_FUNCTIONS) {
            InferredType::Known(Type::Int8)
        } else if is(&TEXT_FUNCTIONS) {
            InferredType::Known(Type::Text)
        } else if is(&["avg", "total", "julianday", "round", "sqrt", "pow", "power", "exp", "ln"]) {
            InferredType::Known(Type::Float8)
        } else if is(&["sum"]) {
            // An integer for integers and a float for floats. Numeric covers both, and is also
            // PostgreSQL's choice.
            InferredType::Known(Type::Numeric)
        } else if is(&["max", "min", "abs", "coalesce", "ifnull", "nullif"]) {
            let arguments: Vec<&[Token<'_>]> = TopLevel::of(inner).split(inner, 0..inner.len());
            let mut types =
                arguments.into_iter().map(|argument| self.guess(without_distinct(argument), depth - 1));
            types.find(|inferred| *inferred != InferredType::Unknown).unwrap_or(InferredType::Unknown)
        } else {
            InferredType::Unknown
        }
    }

    /// The type of a CASE is that of its first branch.
    fn guess_case(&mut self, tokens: &[Token<'_>], depth: u32) -> InferredType {
        let top_level = TopLevel::of(&tokens[1..]);
        let inner = &tokens[1..tokens.len() - 1];
        let Some(then) = top_level.find(inner, 0, &["then"]) else { return InferredType::Unknown };
        let end = top_level.find(inner, then, &["when", "else"]).unwrap_or(inner.len());
        self.guess(&inner[then + 1..end], depth - 1)
    }

    fn column(&mut self, path: &[Token<'_>]) -> usize {
        let text: String = path.iter().map(|token| token.text).collect();
        self.columns.iter().position(|known| *known == text).unwrap_or_else(|| {
            self.columns.push(text);
            self.columns.len() - 1
        })
    }
}

/// The expression that a SELECT in the text gives this name to.
fn definition<'a, 't>(tokens: &'t [Token<'a>], name: &Token<'_>) -> Option<&'t [Token<'a>]> {
    let wanted = name.name()?;
    let end =
        tokens.windows(2).position(|pair| pair[0].is("as") && pair[1].name().as_ref() == Some(&wanted))?;
    let mut depth = 0;
    let before = tokens[..end].iter().rposition(|token| {
        depth += i32::from(token.is_symbol(')')) - i32::from(token.is_symbol('('));
        depth < 0 || depth == 0 && (token.is_symbol(',') || token.is("select"))
    })?;
    Some(&tokens[before + 1..end])
}

/// Keywords that end the conditions, outside parentheses.
const CLAUSES_AFTER_CONDITIONS: [&str; 9] =
    ["group", "having", "window", "order", "limit", "union", "intersect", "except", "for"];

/// Functions that always return an integer.
const INTEGER_FUNCTIONS: [&str; 14] = [
    "count",
    "length",
    "instr",
    "unicode",
    "changes",
    "total_changes",
    "last_insert_rowid",
    "random",
    "row_number",
    "rank",
    "dense_rank",
    "sign",
    "octet_length",
    "unixepoch",
];

/// Functions that always return text.
const TEXT_FUNCTIONS: [&str; 22] = [
    "lower",
    "upper",
    "trim",
    "ltrim",
    "rtrim",
    "substr",
    "substring",
    "replace",
    "printf",
    "format",
    "hex",
    "quote",
    "typeof",
    "char",
    "date",
    "time",
    "datetime",
    "strftime",
    "group_concat",
    "string_agg",
    "concat",
    "sqlite_version",
];

fn number(text: &str) -> InferredType {
    let is_float = !text.starts_with("0x") && text.contains(['.', 'e', 'E']);
    InferredType::Known(if is_float { Type::Float8 } else { Type::Int8 })
}

/// The type of a sum or product.
fn arithmetic_type(left: InferredType, right: InferredType) -> InferredType {
    const FLOAT: InferredType = InferredType::Known(Type::Float8);
    const INTEGER: InferredType = InferredType::Known(Type::Int8);
    match (left, right) {
        (FLOAT, _) | (_, FLOAT) => FLOAT,
        (INTEGER, INTEGER) => INTEGER,
        (INTEGER, InferredType::Column(column) | InferredType::NumericOf(column)) => {
            InferredType::NumericOf(column)
        }
        (InferredType::Column(column) | InferredType::NumericOf(column), INTEGER) => {
            InferredType::NumericOf(column)
        }
        (
            InferredType::Column(a) | InferredType::NumericOf(a),
            InferredType::Column(b) | InferredType::NumericOf(b),
        ) if a == b => InferredType::NumericOf(a),
        (InferredType::Known(Type::Numeric), _) | (_, InferredType::Known(Type::Numeric)) => {
            InferredType::Known(Type::Numeric)
        }
        _ => InferredType::Unknown,
    }
}

fn is_path(tokens: &[Token<'_>]) -> bool {
    let name = |token: &Token<'_>| matches!(token.kind, TokenKind::Word | TokenKind::Quoted);
    let alternates =
        |(at, token): (usize, &Token<'_>)| if at % 2 == 1 { token.is_symbol('.') } else { name(token) };
    tokens.len() % 2 == 1 && tokens.iter().enumerate().all(alternates)
}

/// An item without its alias.
fn without_alias<'a, 't>(item: &'t [Token<'a>]) -> &'t [Token<'a>] {
    match item {
        [expression @ .., before, _] if before.is("as") => expression,
        [expression @ .., before, alias]
            if matches!(alias.kind, TokenKind::Word | TokenKind::Quoted)
                && !alias.is("end")
                && (before.is_symbol(')')
                    || before.is("end")
                    || before.kind != TokenKind::Symbol && before.kind != TokenKind::Word)
                && !expression.is_empty() =>
        {
            &item[..item.len() - 1]
        }
        item => item,
    }
}

fn without_distinct<'a, 't>(argument: &'t [Token<'a>]) -> &'t [Token<'a>] {
    match argument {
        [first, rest @ ..] if first.is("distinct") => rest,
        argument => argument,
    }
}

/// Which tokens are outside all parentheses and CASEs.
struct TopLevel(Vec<bool>);

impl TopLevel {
    fn of(tokens: &[Token<'_>]) -> TopLevel {
        let mut depth = 0u32;
        let at_top_level = |token: &Token<'_>| {
            if token.is_symbol(')') || token.is("end") {
                depth = depth.saturating_sub(1);
            }
            let is_top_level = depth == 0;
            if token.is_symbol('(') || token.is("case") {
                depth += 1;
            }
            is_top_level
        };
        TopLevel(tokens.iter().map(at_top_level).collect())
    }

    fn is_top_level(&self, at: usize) -> bool {
        self.0.get(at).copied().unwrap_or(false)
    }

    /// Returns true if the first token opens a pair of parentheses that the last one closes.
    fn encloses(&self) -> bool {
        self.0.iter().filter(|is_top_level| **is_top_level).count() == 2
    }

    fn find(&self, tokens: &[Token<'_>], from: usize, words: &[&str]) -> Option<usize> {
        (from..tokens.len()).find(|&at| self.is_top_level(at) && words.iter().any(|word| tokens[at].is(word)))
    }

    fn split<'a, 't>(&self, tokens: &'t [Token<'a>], range: std::ops::Range<usize>) -> Vec<&'t [Token<'a>]> {
        let mut pieces = Vec::new();
        let mut start = range.start;
        for at in range.clone().filter(|&at| self.is_top_level(at) && tokens[at].is_symbol(',')) {
            pieces.push(&tokens[start..at]);
            start = at + 1;
        }
        pieces.push(&tokens[start..range.end.max(start)]);
        pieces
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn guesses(sql: &str) -> Vec<InferredType> {
        Inference::of(sql, Type::Int8).types
    }

    #[test]
    fn infers_types_of_expressions() {
        use InferredType::{Column, Known, NumericOf, Unknown};
        let cases = [
            ("count(*)", Known(Type::Int8)),
            ("count(*) AS n", Known(Type::Int8)),
            ("count(*) n", Known(Type::Int8)),
            ("1", Known(Type::Int8)),
            ("-1.5", Known(Type::Float8)),
            ("'a' || b", Known(Type::Text)),
            ("CAST(a AS DOUBLE PRECISION)", Known(Type::Float8)),
            ("max(t.a)", Column(0)),
            ("coalesce(max(a), 0) + 1", NumericOf(0)),
            ("a + 1.0", Known(Type::Float8)),
            ("a = 1 AND b", Known(Type::Int8)),
            ("(a)", Column(0)),
            ("CASE WHEN a THEN 'x' ELSE 'y' END", Known(Type::Text)),
            ("CASE WHEN a = 1 THEN b END AS c", Column(0)),
            ("sum(a)", Known(Type::Numeric)),
            ("f(a)", Unknown),
            ("(SELECT 1)", Unknown),
            ("$1", Unknown),
        ];
        for (expression, inferred) in cases {
            assert_eq!(guesses(&format!("SELECT {expression} FROM t")), [inferred], "{expression}");
        }
        assert_eq!(guesses("SELECT a, *, count(*) FROM t"), []);
        assert_eq!(guesses("INSERT INTO t VALUES (1)"), []);
        assert_eq!(guesses("SELECT DISTINCT a, 1 FROM t"), [Column(0), Known(Type::Int8)]);
    }

    #[test]
    fn probe_selects_only_the_referenced_columns() {
        let sql = "WITH w AS (SELECT 1 AS a FROM x) SELECT max(t.a), min(b), max(t.a) + 1 FROM t, w WHERE t.a = $1 \
                   GROUP BY c ORDER BY 1";
        let expected = "WITH w AS (SELECT 1 AS a FROM x) SELECT t.a, b FROM t, w WHERE t.a = $1";
        assert_eq!(Inference::of(sql, Type::Int8).probe().as_deref(), Some(expected));
        assert_eq!(Inference::of("SELECT count(*) FROM t", Type::Int8).probe(), None);
    }

    #[test]
    fn numeric_guesses_resolve_to_their_column_type() {
        let probed = [Some(Type::Int2), Some(Type::Float4), Some(Type::Text), None];
        let number = |column| InferredType::NumericOf(column).resolve(&probed);
        assert_eq!(
            [number(0), number(1), number(2), number(3)],
            [Some(Type::Int8), Some(Type::Float8), None, None]
        );
        assert_eq!(InferredType::Column(2).resolve(&probed), Some(Type::Text));
        assert_eq!(InferredType::Column(9).resolve(&probed), None);
    }

    proptest! {
        #[test]
        fn guesses_refer_to_columns_of_the_probe(sql in "(select |case |end |from |[a-z0-9 (),.*'+|=]){0,40}") {
            let inference = Inference::of(&format!("SELECT {sql}"), Type::Int8);
            let columns = inference.columns.len();
            for inferred in &inference.types {
                match inferred {
                    InferredType::Unknown | InferredType::Known(_) => {}
                    InferredType::Column(column) | InferredType::NumericOf(column) | InferredType::ArrayOf(column) | InferredType::ColumnOr(column, _) => {
                        prop_assert!(*column < columns, "{:?} of {}", inferred, columns);
                    }
                }
            }
            prop_assert_eq!(inference.probe().is_some(), columns > 0);
        }
    }
}
