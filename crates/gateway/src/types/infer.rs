//! The types of expressions, as far as their text tells.
//!
//! SQLite knows the declared type of a column that is selected as it is, and nothing of `count(*)` or `a + 1` before it
//! has computed them. But a client that describes a statement before it runs it (most drivers with binary formats) is
//! told a type then, and text for a count is a nuisance. So the list of a SELECT is read here:
//!
//! ```text
//! SELECT count(*),  max(price) + 1,  'x' || name,  CAST(a AS REAL),  f(a)  FROM t WHERE ...
//!        bigint     as price is      text          double precision  not known: text
//! ```
//!
//! What an expression takes from a column is found by asking SQLite about that column: [`Inference::probe`] is a
//! statement that selects the columns alone from the same tables. It is prepared, never run.

use crate::dialect::token::{Kind, Lexer, Token};
use crate::types::{self, Type};

/// How deep expressions are followed.
const DEPTH: u32 = 40;

/// What the text of a SELECT tells.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Inference {
    /// For each column of the answer.
    pub(crate) guesses: Vec<Guess>,
    /// The columns that guesses refer to.
    columns: Vec<String>,
    logical: Option<Type>,
    /// Columns of sub-queries that are arrays.
    arrays: Vec<(String, Type)>,
    /// What stands before the list, and from FROM to the end of the conditions.
    frame: (String, String),
}

/// What is known of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Guess {
    Unknown,
    Known(Type),
    /// As a column of the probe.
    Like(usize),
    /// A number that is a float if that column is one, else an integer.
    Number(usize),
    /// An array of what that column holds.
    ArrayLike(usize),
    /// As that column, or this type if SQLite tells nothing of it.
    LikeOr(usize, Type),
}

impl Guess {
    /// The type, where `probed` are those of the probe's columns.
    pub(crate) fn resolve(self, probed: &[Option<Type>]) -> Option<Type> {
        match self {
            Guess::Unknown => None,
            Guess::Known(kind) => Some(kind),
            Guess::Like(column) => *probed.get(column)?,
            Guess::LikeOr(column, kind) => Some(probed.get(column).copied().flatten().unwrap_or(kind)),
            Guess::ArrayLike(column) => probed.get(column)?.unwrap_or(Type::Text).array(),
            Guess::Number(column) => match (*probed.get(column)?)? {
                Type::Int2 | Type::Int4 | Type::Int8 | Type::Bool => Some(Type::Int8),
                Type::Float4 | Type::Float8 => Some(Type::Float8),
                Type::Numeric => Some(Type::Numeric),
                _ => None,
            },
        }
    }
}

impl Inference {
    /// Reads a SELECT; nothing is known of other statements, nor where `*` hides how many columns there are.
    /// `logical` is what comparisons are: SQLite has numbers, Postgres truth values.
    pub(crate) fn of(sql: &str, logical: Type) -> Inference {
        let tokens: Vec<Token<'_>> = Lexer::new(sql).collect();
        let places = Places::of(&tokens);
        let Some(select) = places.find(&tokens, 0, &["select"]) else { return Inference::default() };
        let first = tokens[select + 1..].first().is_some_and(|token| token.is("distinct") || token.is("all"));
        let list = select + 1 + usize::from(first);
        let from = places.find(&tokens, list, &["from"]).unwrap_or(tokens.len());
        let end = places.find(&tokens, list, &ENDS).unwrap_or(tokens.len());
        let mut inference = Inference { logical: Some(logical), ..Inference::default() };
        inference.find_arrays(&tokens);
        for item in places.split(&tokens, list..from.min(end)) {
            let item = without_alias(item);
            if item.last().is_none_or(|token| token.is_sign('*')) {
                return Inference::default();
            }
            let guess = inference.guess(item, DEPTH);
            inference.guesses.push(guess);
        }
        let text = |range: std::ops::Range<usize>| match tokens.get(range.clone()) {
            Some([first, .., last]) => sql[first.start..last.end()].to_owned(),
            Some([only]) => only.text.to_owned(),
            _ => String::new(),
        };
        inference.frame = (text(0..list), if from < end { text(from..end) } else { String::new() });
        inference
    }

    /// Finds `array_agg(...) AS name`, wherever it stands.
    fn find_arrays(&mut self, tokens: &[Token<'_>]) {
        /// Each may be searched for in the whole text.
        const ARRAYS: usize = 100;
        for at in (0..tokens.len()).filter(|at| tokens[*at].is("array_agg")).take(ARRAYS) {
            let mut depth = 0;
            let close = tokens[at + 1..].iter().position(|token| {
                depth += i32::from(token.is_sign('(')) - i32::from(token.is_sign(')'));
                depth <= 0
            });
            let Some(end) = close.map(|close| at + 1 + close) else { return };
            let [before, name, ..] = tokens.get(end + 1..).unwrap_or_default() else { return };
            let order =
                tokens[at..end].iter().position(|token| token.is("order")).map_or(end, |order| at + order);
            let argument = tokens.get(at + 2..order).unwrap_or_default();
            // What a sub-query computes: by what it says of it.
            let defined =
                argument.last().filter(|_| is_path(argument)).and_then(|name| definition(tokens, name));
            let kind = match self.guess(defined.unwrap_or(argument), DEPTH) {
                Guess::Known(kind) => kind.array().unwrap_or(Type::TextArray),
                _ => Type::TextArray,
            };
            self.arrays.extend(name.name().filter(|_| before.is("as")).map(|name| (name, kind)));
        }
        // What was looked at for its type is no column of the answer.
        self.columns.clear();
    }

    /// A statement whose columns are those that the guesses refer to; `None` if they refer to none.
    pub(crate) fn probe(&self) -> Option<String> {
        let (before, after) = &self.frame;
        (!self.columns.is_empty()).then(|| format!("{before} {} {after}", self.columns.join(", ")))
    }

    fn logical(&self) -> Type {
        self.logical.unwrap_or(Type::Int8)
    }

    fn guess(&mut self, tokens: &[Token<'_>], depth: u32) -> Guess {
        let places = Places::of(tokens);
        match tokens {
            _ if depth == 0 => Guess::Unknown,
            [] => Guess::Unknown,
            [literal] if literal.kind == Kind::String => Guess::Known(Type::Text),
            [literal] if literal.kind == Kind::Number => number(literal.text),
            [word] if word.is("true") || word.is("false") => Guess::Known(self.logical()),
            [word] if word.is("null") => Guess::Unknown,
            [open, inner @ .., close] if open.is_sign('(') && close.is_sign(')') && places.encloses() => {
                if inner.first().is_some_and(|token| token.is("select")) {
                    Guess::Unknown
                } else {
                    self.guess(inner, depth - 1)
                }
            }
            [sign, rest @ ..] if sign.is_sign('-') || sign.is_sign('+') => self.guess(rest, depth - 1),
            [case, .., end] if case.is("case") && end.is("end") => self.guess_case(tokens, depth),
            _ if is_path(tokens) => {
                let name = tokens.last().and_then(Token::name);
                let array =
                    self.arrays.iter().find(|(known, _)| Some(known) == name.as_ref()).map(|(_, kind)| *kind);
                let column = self.column(tokens);
                array.map_or(Guess::Like(column), |kind| Guess::LikeOr(column, kind))
            }
            _ => self.guess_composed(tokens, &places, depth),
        }
    }

    fn guess_composed(&mut self, tokens: &[Token<'_>], places: &Places, depth: u32) -> Guess {
        let outside = |at: &usize| places.outside(*at);
        let has =
            |test: &dyn Fn(&Token<'_>) -> bool| (0..tokens.len()).filter(outside).any(|at| test(&tokens[at]));
        const LOGICAL: [&str; 12] = [
            "and", "or", "not", "is", "in", "like", "glob", "between", "exists", "isnull", "notnull", "match",
        ];
        if has(&|token| {
            LOGICAL.iter().any(|word| token.is(word))
                || ['=', '<', '>', '~'].iter().any(|sign| token.is_sign(*sign))
        }) {
            return Guess::Known(self.logical());
        }
        if has(&|token| token.is_sign('|')) {
            return Guess::Known(Type::Text);
        }
        let arithmetic = |at: usize| ['+', '-', '*', '/', '%'].iter().any(|sign| tokens[at].is_sign(*sign));
        if let Some(at) = (1..tokens.len()).filter(outside).find(|at| arithmetic(*at)) {
            let (left, right) =
                (self.guess(&tokens[..at], depth - 1), self.guess(&tokens[at + 1..], depth - 1));
            return sum(left, right);
        }
        self.guess_call(tokens, depth)
    }

    fn guess_call(&mut self, tokens: &[Token<'_>], depth: u32) -> Guess {
        let [name, open, inner @ .., close] = tokens else { return Guess::Unknown };
        if name.kind != Kind::Word || !open.is_sign('(') || !close.is_sign(')') {
            return Guess::Unknown;
        }
        if name.is("cast") {
            let after = inner.iter().rposition(|token| token.is("as")).map_or(inner.len(), |at| at + 1);
            let words: Vec<&str> = inner[after..].iter().map(|token| token.text).collect();
            return types::declared(&words.join(" "))
                .map_or(Guess::Unknown, |known| Guess::Known(known.kind));
        }
        let is = |names: &[&str]| names.iter().any(|known| name.is(known));
        let asks = name.text.ends_with("_is_visible")
            || name.text.ends_with("_privilege")
            || is(&[
                "pg_try_advisory_lock",
                "pg_advisory_unlock",
                "pg_cancel_backend",
                "pg_terminate_backend",
                "pg_is_in_recovery",
            ]);
        if asks {
            Guess::Known(self.logical())
        } else if is(&["array_agg", "pg_array"]) {
            let first = Places::of(inner).split(inner, 0..inner.len()).into_iter().next().unwrap_or_default();
            // What is behind the argument is its order.
            let order = first.iter().position(|token| token.is("order")).unwrap_or(first.len());
            match self.guess(without_distinct(&first[..order]), depth - 1) {
                Guess::Known(kind) => Guess::Known(kind.array().unwrap_or(Type::TextArray)),
                Guess::Like(column) => Guess::ArrayLike(column),
                _ => Guess::Known(Type::TextArray),
            }
        } else if is(&INTEGERS) {
            Guess::Known(Type::Int8)
        } else if is(&TEXTS) {
            Guess::Known(Type::Text)
        } else if is(&["avg", "total", "julianday", "round", "sqrt", "pow", "power", "exp", "ln"]) {
            Guess::Known(Type::Float8)
        } else if is(&["sum"]) {
            // Of integers an integer, of floats a float: this type takes either, and is Postgres's own.
            Guess::Known(Type::Numeric)
        } else if is(&["max", "min", "abs", "coalesce", "ifnull", "nullif"]) {
            let arguments: Vec<&[Token<'_>]> = Places::of(inner).split(inner, 0..inner.len());
            let mut guesses =
                arguments.into_iter().map(|argument| self.guess(without_distinct(argument), depth - 1));
            guesses.find(|guess| *guess != Guess::Unknown).unwrap_or(Guess::Unknown)
        } else {
            Guess::Unknown
        }
    }

    /// A CASE is what its first branch is.
    fn guess_case(&mut self, tokens: &[Token<'_>], depth: u32) -> Guess {
        let places = Places::of(&tokens[1..]);
        let inner = &tokens[1..tokens.len() - 1];
        let Some(then) = places.find(inner, 0, &["then"]) else { return Guess::Unknown };
        let end = places.find(inner, then, &["when", "else"]).unwrap_or(inner.len());
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

/// The expression that some SELECT of the text calls by that name.
fn definition<'a, 't>(tokens: &'t [Token<'a>], name: &Token<'_>) -> Option<&'t [Token<'a>]> {
    let wanted = name.name()?;
    let end =
        tokens.windows(2).position(|pair| pair[0].is("as") && pair[1].name().as_ref() == Some(&wanted))?;
    let mut depth = 0;
    let before = tokens[..end].iter().rposition(|token| {
        depth += i32::from(token.is_sign(')')) - i32::from(token.is_sign('('));
        depth < 0 || depth == 0 && (token.is_sign(',') || token.is("select"))
    })?;
    Some(&tokens[before + 1..end])
}

/// What ends the conditions, outside of parentheses.
const ENDS: [&str; 9] =
    ["group", "having", "window", "order", "limit", "union", "intersect", "except", "for"];

/// Functions that always answer an integer.
const INTEGERS: [&str; 14] = [
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

/// Functions that always answer text.
const TEXTS: [&str; 22] = [
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

fn number(text: &str) -> Guess {
    let is_float = !text.starts_with("0x") && text.contains(['.', 'e', 'E']);
    Guess::Known(if is_float { Type::Float8 } else { Type::Int8 })
}

/// The type of a sum or product.
fn sum(left: Guess, right: Guess) -> Guess {
    const FLOAT: Guess = Guess::Known(Type::Float8);
    const INTEGER: Guess = Guess::Known(Type::Int8);
    match (left, right) {
        (FLOAT, _) | (_, FLOAT) => FLOAT,
        (INTEGER, INTEGER) => INTEGER,
        (INTEGER, Guess::Like(column) | Guess::Number(column)) => Guess::Number(column),
        (Guess::Like(column) | Guess::Number(column), INTEGER) => Guess::Number(column),
        (Guess::Like(a) | Guess::Number(a), Guess::Like(b) | Guess::Number(b)) if a == b => Guess::Number(a),
        (Guess::Known(Type::Numeric), _) | (_, Guess::Known(Type::Numeric)) => Guess::Known(Type::Numeric),
        _ => Guess::Unknown,
    }
}

fn is_path(tokens: &[Token<'_>]) -> bool {
    let name = |token: &Token<'_>| matches!(token.kind, Kind::Word | Kind::Quoted);
    let alternates =
        |(at, token): (usize, &Token<'_>)| if at % 2 == 1 { token.is_sign('.') } else { name(token) };
    tokens.len() % 2 == 1 && tokens.iter().enumerate().all(alternates)
}

/// An item without the name that it is given.
fn without_alias<'a, 't>(item: &'t [Token<'a>]) -> &'t [Token<'a>] {
    match item {
        [expression @ .., before, _] if before.is("as") => expression,
        [expression @ .., before, alias]
            if matches!(alias.kind, Kind::Word | Kind::Quoted)
                && !alias.is("end")
                && (before.is_sign(')')
                    || before.is("end")
                    || before.kind != Kind::Sign && before.kind != Kind::Word)
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

/// Which tokens stand outside of all parentheses and CASEs.
struct Places(Vec<bool>);

impl Places {
    fn of(tokens: &[Token<'_>]) -> Places {
        let mut depth = 0u32;
        let place = |token: &Token<'_>| {
            if token.is_sign(')') || token.is("end") {
                depth = depth.saturating_sub(1);
            }
            let outside = depth == 0;
            if token.is_sign('(') || token.is("case") {
                depth += 1;
            }
            outside
        };
        Places(tokens.iter().map(place).collect())
    }

    fn outside(&self, at: usize) -> bool {
        self.0.get(at).copied().unwrap_or(false)
    }

    /// Whether the first token opens a pair of parentheses that the last one closes.
    fn encloses(&self) -> bool {
        self.0.iter().filter(|outside| **outside).count() == 2
    }

    fn find(&self, tokens: &[Token<'_>], from: usize, words: &[&str]) -> Option<usize> {
        (from..tokens.len()).find(|&at| self.outside(at) && words.iter().any(|word| tokens[at].is(word)))
    }

    fn split<'a, 't>(&self, tokens: &'t [Token<'a>], range: std::ops::Range<usize>) -> Vec<&'t [Token<'a>]> {
        let mut pieces = Vec::new();
        let mut start = range.start;
        for at in range.clone().filter(|&at| self.outside(at) && tokens[at].is_sign(',')) {
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

    fn guesses(sql: &str) -> Vec<Guess> {
        Inference::of(sql, Type::Int8).guesses
    }

    #[test]
    fn expressions() {
        use Guess::{Known, Like, Number, Unknown};
        let cases = [
            ("count(*)", Known(Type::Int8)),
            ("count(*) AS n", Known(Type::Int8)),
            ("count(*) n", Known(Type::Int8)),
            ("1", Known(Type::Int8)),
            ("-1.5", Known(Type::Float8)),
            ("'a' || b", Known(Type::Text)),
            ("CAST(a AS DOUBLE PRECISION)", Known(Type::Float8)),
            ("max(t.a)", Like(0)),
            ("coalesce(max(a), 0) + 1", Number(0)),
            ("a + 1.0", Known(Type::Float8)),
            ("a = 1 AND b", Known(Type::Int8)),
            ("(a)", Like(0)),
            ("CASE WHEN a THEN 'x' ELSE 'y' END", Known(Type::Text)),
            ("CASE WHEN a = 1 THEN b END AS c", Like(0)),
            ("sum(a)", Known(Type::Numeric)),
            ("f(a)", Unknown),
            ("(SELECT 1)", Unknown),
            ("$1", Unknown),
        ];
        for (expression, guess) in cases {
            assert_eq!(guesses(&format!("SELECT {expression} FROM t")), [guess], "{expression}");
        }
        assert_eq!(guesses("SELECT a, *, count(*) FROM t"), []);
        assert_eq!(guesses("INSERT INTO t VALUES (1)"), []);
        assert_eq!(guesses("SELECT DISTINCT a, 1 FROM t"), [Like(0), Known(Type::Int8)]);
    }

    #[test]
    fn a_probe_selects_the_columns_alone() {
        let sql = "WITH w AS (SELECT 1 AS a FROM x) SELECT max(t.a), min(b), max(t.a) + 1 FROM t, w WHERE t.a = $1 \
                   GROUP BY c ORDER BY 1";
        let expected = "WITH w AS (SELECT 1 AS a FROM x) SELECT t.a, b FROM t, w WHERE t.a = $1";
        assert_eq!(Inference::of(sql, Type::Int8).probe().as_deref(), Some(expected));
        assert_eq!(Inference::of("SELECT count(*) FROM t", Type::Int8).probe(), None);
    }

    #[test]
    fn numbers_follow_their_column() {
        let probed = [Some(Type::Int2), Some(Type::Float4), Some(Type::Text), None];
        let number = |column| Guess::Number(column).resolve(&probed);
        assert_eq!(
            [number(0), number(1), number(2), number(3)],
            [Some(Type::Int8), Some(Type::Float8), None, None]
        );
        assert_eq!(Guess::Like(2).resolve(&probed), Some(Type::Text));
        assert_eq!(Guess::Like(9).resolve(&probed), None);
    }

    proptest! {
        #[test]
        fn guesses_refer_to_columns_of_the_probe(sql in "(select |case |end |from |[a-z0-9 (),.*'+|=]){0,40}") {
            let inference = Inference::of(&format!("SELECT {sql}"), Type::Int8);
            let columns = inference.columns.len();
            for guess in &inference.guesses {
                match guess {
                    Guess::Unknown | Guess::Known(_) => {}
                    Guess::Like(column) | Guess::Number(column) | Guess::ArrayLike(column) | Guess::LikeOr(column, _) => {
                        prop_assert!(*column < columns, "{:?} of {}", guess, columns);
                    }
                }
            }
            prop_assert_eq!(inference.probe().is_some(), columns > 0);
        }
    }
}
