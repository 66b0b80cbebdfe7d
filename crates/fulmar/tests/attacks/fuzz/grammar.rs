//! Generates random programs: nested, deep and wide statements, calls of all functions, large
//! values.
//!
//! Most programs have one dimension with a log-uniform distribution, so that small programs succeed
//! and large ones reach a limit: a depth up to [`MAX_DEPTH`], a width up to [`MAX_WIDTH`], or a
//! value size up to [`MAX_VALUE_BYTES`].

use rand::RngExt;
use rand::rngs::StdRng;

const MAX_DEPTH: usize = 3000;
const MAX_WIDTH: usize = 30_000;
const MAX_VALUE_BYTES: usize = 200_000_000;
/// Limit on the length of wide statements.
const MAX_STATEMENT_BYTES: usize = 4 << 20;

pub const SCHEMA: &[&str] = &[
    "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT, c BLOB, d REAL)",
    "INSERT INTO t WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100)
        SELECT i, 'text ' || i, zeroblob(i), i / 3.0 FROM n",
    "CREATE INDEX i ON t(b)",
    "CREATE TABLE j(a INTEGER PRIMARY KEY, b TEXT REFERENCES u(b))",
    "CREATE TABLE u(b TEXT UNIQUE)",
    "INSERT INTO u VALUES ('{\"a\":[1,{\"b\":2},[3,4]]}'), ('[1,2,3]'), (NULL)",
    "INSERT INTO j SELECT rowid, b FROM u",
    "CREATE VIRTUAL TABLE f5 USING fts5(a, b)",
    "INSERT INTO f5 VALUES ('ab ab ab', 'a b c'), (replace(hex(zeroblob(2000)), '00', 'ab '), 'x')",
    "CREATE VIRTUAL TABLE f3 USING fts3(a, b)",
    "INSERT INTO f3 SELECT a, b FROM f5",
];

/// An SQL function and its number of arguments. A negative number means any.
pub struct Function {
    pub name: String,
    pub arguments: i64,
}

pub struct Grammar {
    functions: Vec<Function>,
}

impl Grammar {
    pub fn new(functions: Vec<Function>) -> Grammar {
        Grammar { functions }
    }

    /// Generates the statements of a program.
    pub fn program(&self, random: &mut StdRng) -> Vec<String> {
        let mut generator = Generator { functions: &self.functions, random, budget: 60 };
        match generator.below(10) {
            0 => vec![format!("SELECT {} FROM t", generator.deep_expression())],
            1 => vec![format!("SELECT * FROM {}", generator.deep_table())],
            2 => vec![generator.wide()],
            3 | 4 => vec![generator.call_statement()],
            5 => vec![generator.full_text()],
            6 => generator.views(),
            7 => generator.table(),
            8 => generator.writes(),
            _ => vec![generator.select()],
        }
    }
}

struct Generator<'a> {
    functions: &'a [Function],
    random: &'a mut StdRng,
    /// Remaining number of syntax tree nodes for random nesting.
    budget: usize,
}

/// Prefix and suffix of a nested expression.
const EXPRESSIONS: [(&str, &str); 26] = [
    ("(", ")"),
    ("NOT ", ""),
    ("- ", ""),
    ("", " + 1"),
    ("", " || 'x'"),
    ("", " IS NULL"),
    ("", " COLLATE NOCASE"),
    ("1 + (", ")"),
    ("abs(", ")"),
    ("coalesce(NULL, ", ")"),
    ("json_array(", ")"),
    ("max(1, ", ")"),
    ("iif(1, ", ", 2)"),
    ("CASE WHEN ", " THEN 1 ELSE 2 END"),
    ("CASE ", " WHEN 1 THEN 2 END"),
    ("CAST(", " AS TEXT)"),
    ("(", ")::text"),
    ("(SELECT ", ")"),
    ("EXISTS (SELECT ", ")"),
    ("(SELECT max(a) FROM t AS s WHERE s.a = ", ")"),
    ("(SELECT sum(", ") OVER (ORDER BY a) FROM t)"),
    ("1 IN (1, ", ")"),
    ("1 IN (SELECT ", ")"),
    ("1 BETWEEN 0 AND ", ""),
    ("'a' LIKE ", ""),
    ("(1, ", ") = (1, 2)"),
];

/// Prefix and suffix of a nested table.
const TABLES: [(&str, &str); 11] = [
    ("(SELECT * FROM ", ")"),
    ("(SELECT a + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 AS a FROM ", ")"),
    ("(t JOIN ", ")"),
    ("(t NATURAL LEFT JOIN ", ")"),
    ("(SELECT a, count(*) AS n FROM ", " GROUP BY a)"),
    ("(SELECT DISTINCT a FROM ", " ORDER BY a LIMIT 3)"),
    ("(SELECT a FROM t UNION ALL SELECT a FROM ", ")"),
    ("(SELECT a FROM t EXCEPT SELECT a FROM ", ")"),
    ("(WITH x AS (SELECT a FROM ", ") SELECT x.a FROM x, x AS y)"),
    ("(SELECT a FROM t WHERE a IN (SELECT a FROM ", "))"),
    ("(SELECT sum(a) OVER (PARTITION BY a) AS a FROM ", ")"),
];

/// Texts that are meaningful to at least one function.
const TEXTS: [&str; 18] = [
    "",
    "a",
    "ab ",
    "%a",
    "*a",
    "[a-",
    "$.a",
    "$[#-1]",
    "{\"a\":1}",
    "[[",
    "{1,2}",
    "%d%s%Q%w",
    "%.99999999f",
    "2024-01-02 03:04:05",
    "+1 month",
    "pg_class",
    "(a OR ",
    "\u{1f980}",
];

const NUMBERS: [&str; 14] = [
    "0",
    "1",
    "-1",
    "7",
    "64",
    "1000",
    "65536",
    "1e308",
    "-0.0",
    "2147483647",
    "2147483648",
    "9223372036854775807",
    "-9223372036854775808",
    "NULL",
];

impl Generator<'_> {
    fn below(&mut self, end: usize) -> usize {
        self.random.random_range(0..end)
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Returns a number from 1 to `max`, with a log-uniform distribution.
    fn size(&mut self, max: usize) -> usize {
        let exponent = self.random.random_range(0.0..=(max as f64).ln());
        (exponent.exp() as usize).clamp(1, max)
    }

    /// Wraps `inner` in up to [`MAX_DEPTH`] layers of one or several kinds.
    fn nest(&mut self, inner: &str, layers: &[(&str, &str)]) -> String {
        let depth = self.size(MAX_DEPTH);
        let kinds: Vec<(&str, &str)> = (0..=self.below(3)).map(|_| self.one_of(layers)).collect();
        let layers: Vec<(&str, &str)> = (0..depth).map(|_| self.one_of(&kinds)).collect();
        let before: String = layers.iter().map(|layer| layer.0).collect();
        let after: String = layers.iter().rev().map(|layer| layer.1).collect();
        format!("{before}{inner}{after}")
    }

    fn deep_expression(&mut self) -> String {
        let inner = self.expression();
        self.nest(&inner, &EXPRESSIONS)
    }

    fn deep_table(&mut self) -> String {
        let inner = if self.below(2) == 0 { "t".to_owned() } else { format!("({})", self.select()) };
        self.nest(&inner, &TABLES)
    }

    /// Repeats `unit` a random number of times, within the maximum length of a statement.
    fn repeat(&mut self, unit: &str, separator: &str) -> String {
        let max = (MAX_STATEMENT_BYTES / (unit.len() + separator.len())).clamp(1, MAX_WIDTH);
        vec![unit; self.size(max)].join(separator)
    }

    fn wide(&mut self) -> String {
        let inner = self.expression();
        let (before, unit, separator, after) = match self.below(16) {
            0 => ("SELECT 1 IN (", &*inner, ", ", ")"),
            1 => ("SELECT ", &*inner, ", ", ""),
            2 => ("VALUES ", "(1, 2)", ", ", ""),
            3 => ("SELECT ", "1", " UNION ALL SELECT ", ""),
            4 => ("SELECT ", "a", " EXCEPT SELECT a FROM t UNION SELECT ", " FROM t"),
            5 => ("SELECT count(*) FROM ", "t", ", ", ""),
            6 => ("SELECT count(*) FROM ", "t", " NATURAL JOIN ", ""),
            7 => ("SELECT a FROM t WHERE ", "a = 1", " OR ", ""),
            8 => ("SELECT a FROM t WHERE ", "b LIKE '%a%'", " AND ", ""),
            9 => ("SELECT json_array(", &*inner, ", ", ")"),
            10 => ("SELECT CASE", " WHEN a THEN 1", "", " END FROM t"),
            11 => ("SELECT a FROM t ORDER BY ", "a + 1", ", ", ""),
            12 => ("SELECT a FROM t GROUP BY ", "a + 1", ", ", ""),
            13 => ("SELECT ", "sum(a) OVER (ORDER BY b)", ", ", " FROM t"),
            14 => ("SELECT b = any(ARRAY[", "1", ",", "]) FROM t"),
            _ => ("SELECT 1 /*", "x", " ", "*/"),
        };
        format!("{before}{}{after}", self.repeat(unit, separator))
    }

    /// Returns a value, in one of twelve cases a large one.
    fn value(&mut self) -> String {
        let text = self.one_of(&TEXTS).replace('\'', "''");
        match self.below(12) {
            0..=3 => self.one_of(&NUMBERS).to_owned(),
            4..=7 => format!("'{text}'"),
            8 => self.one_of(&["a", "b", "c", "d"]).to_owned(),
            9 => "(SELECT b FROM u)".to_owned(),
            10 => format!("x'{:02x}ff'", self.below(256)),
            _ => self.large_value(&text),
        }
    }

    fn large_value(&mut self, text: &str) -> String {
        let bytes = self.size(MAX_VALUE_BYTES);
        let count = (bytes / text.len().max(1)).max(1);
        match self.below(7) {
            0 => format!("zeroblob({bytes})"),
            1 => format!("hex(zeroblob({}))", bytes / 2),
            2 => format!("replace(hex(zeroblob({count})), '00', '{text}')"),
            3 => format!("printf('%{bytes}d', 1)"),
            4 => format!("(SELECT group_concat(b || zeroblob({}), '{text}') FROM t)", bytes / 100),
            5 => format!("(SELECT json_group_array(hex(zeroblob({}))) FROM t)", bytes / 200),
            _ => {
                let rows = self.size(100_000);
                format!(
                    "(WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows}) SELECT json_group_object('k' || i, i) FROM n)"
                )
            }
        }
    }

    fn call(&mut self) -> String {
        let function = &self.functions[self.below(self.functions.len())];
        let (name, fixed) = (function.name.clone(), usize::try_from(function.arguments));
        let count = fixed.unwrap_or_else(|_| self.below(6));
        let arguments: Vec<String> = (0..count).map(|_| self.argument()).collect();
        match name.as_str() {
            "->" | "->>" => arguments.join(&name),
            _ => format!("\"{name}\"({})", arguments.join(", ")),
        }
    }

    fn argument(&mut self) -> String {
        match self.budget > 0 && self.below(5) == 0 {
            true => self.expression(),
            false => self.value(),
        }
    }

    /// Returns one call, as a scalar, an aggregate or a window function.
    fn call_statement(&mut self) -> String {
        let call = self.call();
        match self.below(4) {
            0 => format!("SELECT length({call}) FROM t"),
            1 => format!("SELECT length({call} OVER (ORDER BY a ROWS 3 PRECEDING)) FROM t"),
            2 => format!("SELECT count({call} FILTER (WHERE a > 3)) FROM t"),
            _ => format!("SELECT length({call}) FROM t LIMIT 1"),
        }
    }

    fn expression(&mut self) -> String {
        if self.budget == 0 {
            return self.value();
        }
        self.budget -= 1;
        match self.below(6) {
            0 => self.call(),
            1 => {
                let (before, after) = self.one_of(&EXPRESSIONS);
                format!("{before}{}{after}", self.expression())
            }
            2 => {
                let operator =
                    self.one_of(&["+", "||", "<", "IS", "AND", "OR", "LIKE", "GLOB", "->", "->>", "<<", "%"]);
                format!("({} {operator} {})", self.expression(), self.expression())
            }
            3 => format!("({} LIMIT 1)", self.select_one()),
            _ => self.value(),
        }
    }

    /// Returns a query with one column.
    fn select_one(&mut self) -> String {
        format!("SELECT {} FROM {} {}", self.expression(), self.source(), self.clauses())
    }

    fn select(&mut self) -> String {
        let with = match self.below(4) {
            0 => format!("WITH w(a, b) AS (SELECT a, {} FROM t) ", self.expression()),
            1 => format!(
                "WITH RECURSIVE w(a, b) AS (SELECT 1, {} UNION {}SELECT a + 1, {} FROM w WHERE a < {}) ",
                self.value(),
                self.one_of(&["", "ALL "]),
                self.expression(),
                self.size(100_000)
            ),
            _ => "WITH w(a, b) AS (SELECT 1, 2) ".to_owned(),
        };
        let (columns, source, clauses) = (self.expression(), self.source(), self.clauses());
        let window = match self.below(3) {
            0 => format!(", max({}) OVER (PARTITION BY 1 ORDER BY 1)", self.value()),
            _ => String::new(),
        };
        let compound = match self.below(5) {
            0 => format!(" UNION SELECT {}", self.expression()),
            _ => String::new(),
        };
        if compound.is_empty() || !window.is_empty() {
            return format!("{with}SELECT {columns} AS a{window} FROM {source} {clauses}");
        }
        format!("{with}SELECT {columns} AS a FROM {source}{compound}")
    }

    fn source(&mut self) -> String {
        let table =
            self.one_of(&["t", "j", "u", "f5", "f3", "t, j", "t NATURAL JOIN j", "json_each('[1,2]')"]);
        if self.budget == 0 {
            return table.to_owned();
        }
        self.budget -= 1;
        match self.below(6) {
            0 => format!("({})", self.select_one()),
            1 => format!("{table} JOIN ({}) AS s{} ON 1", self.select_one(), self.budget),
            2 => format!("json_tree({})", self.value()),
            3 => format!("{table}, json_each({})", self.expression()),
            _ => table.to_owned(),
        }
    }

    fn clauses(&mut self) -> String {
        let mut clauses = String::new();
        if self.below(3) == 0 {
            clauses += &format!(" WHERE {}", self.expression());
        }
        if self.below(4) == 0 {
            clauses += &format!(" GROUP BY {}", self.value());
        }
        if self.below(4) == 0 {
            clauses += &format!(" ORDER BY {}", self.expression());
        }
        clauses
    }

    fn full_text(&mut self) -> String {
        let table = self.one_of(&["f5", "f3"]);
        let operators =
            ["(", "NOT ", "a OR ", "a AND ", "a NEAR ", "\"a b\" ", "a* ", "a:", "^a ", "NEAR(a b, 5) "];
        let unit = self.one_of(&operators);
        let count = self.size(100_000);
        let closing = if unit == "(" { ')' } else { ' ' };
        let function =
            self.one_of(&["1", "length(snippet(%))", "length(highlight(%, 0, '<', '>'))", "bm25(%)"]);
        let function = match (table, function) {
            ("f5", "length(snippet(%))") => "length(snippet(f5, 0, '<', '>', '.', 64))".to_owned(),
            ("f3", "bm25(%)") => "length(offsets(f3)), length(matchinfo(f3, 'pcxnals'))".to_owned(),
            (table, function) => function.replace('%', table),
        };
        let repeated = |text: char| format!("replace(hex(zeroblob({count})), '00', '{text}')");
        format!(
            "SELECT {function} FROM {table} WHERE {table} MATCH replace(hex(zeroblob({count})), '00', '{unit}') || 'ab' || {}",
            repeated(closing)
        )
    }

    /// Returns a chain of views and a query of the last one.
    fn views(&mut self) -> Vec<String> {
        let length = self.size(300);
        let column = match self.below(3) {
            0 => format!("a{}", "+1".repeat(self.size(190))),
            1 => format!("coalesce(a, {})", self.value()),
            _ => "a".to_owned(),
        };
        let sources = self.one_of(&[
            "@",
            "@ JOIN t USING (a)",
            "@ AS x JOIN @ AS y USING (a)",
            "(SELECT a FROM @ GROUP BY 1)",
        ]);
        let mut statements = vec!["CREATE VIEW v0 AS SELECT a FROM t".to_owned()];
        statements.extend((1..=length).map(|n| {
            let source = sources.replace('@', &format!("v{}", n - 1));
            format!("CREATE VIEW v{n} AS SELECT {column} AS a FROM {source}")
        }));
        statements.push(format!("SELECT count(a) FROM v{length}"));
        vec![statements.join("; ")]
    }

    /// Returns a table with generated columns, CHECKs and a partial index, and rows for it.
    fn table(&mut self) -> Vec<String> {
        let count = self.size(1990);
        let kind = self.one_of(&["VIRTUAL", "STORED"]);
        let previous = |n: usize| if n == 1 { "a".to_owned() } else { format!("c{}", n - 1) };
        let (before, after) = self.one_of(&EXPRESSIONS[..17]);
        let columns: String =
            (1..=count).map(|n| format!(", c{n} AS ({before}{}{after}) {kind}", previous(n))).collect();
        let check = self.nest("a", &EXPRESSIONS[..17]);
        let condition = self.nest("a", &EXPRESSIONS[..17]);
        let create = match self.below(3) {
            0 => format!("CREATE TABLE g(a INTEGER{columns})"),
            1 => format!("CREATE TABLE g(a INTEGER, CHECK ({check}))"),
            _ => format!("CREATE TABLE g(a INTEGER, b DEFAULT ({}))", self.deep_expression()),
        };
        vec![
            create,
            format!("CREATE INDEX gi ON g({condition}) WHERE {check}"),
            "INSERT INTO g(a) SELECT a FROM t RETURNING *".to_owned(),
            "SELECT * FROM g".to_owned(),
        ]
    }

    /// Returns writes with triggers, upserts and RETURNING.
    fn writes(&mut self) -> Vec<String> {
        let (value, other) = (self.expression(), self.expression());
        let length = self.size(100);
        let tables: String =
            (0..=length).map(|n| format!("CREATE TABLE w{n}(a INTEGER PRIMARY KEY, b); ")).collect();
        let triggers: String = (0..length)
            .map(|n| {
                let (next, event) = (n + 1, self.one_of(&["INSERT", "UPDATE"]));
                format!(
                    "CREATE TRIGGER wt{n} AFTER {event} ON w{n} BEGIN INSERT INTO w{next} VALUES (new.a, new.b) ON CONFLICT (a) DO UPDATE SET b = b || excluded.b; END; "
                )
            })
            .collect();
        vec![
            tables + &triggers,
            format!("INSERT INTO w0 SELECT a, {value} FROM t RETURNING {other}"),
            format!(
                "INSERT INTO w0 SELECT a, b FROM t WHERE 1 ON CONFLICT (a) DO UPDATE SET b = {other} RETURNING a, b"
            ),
            format!("UPDATE w0 SET b = {value} FROM t WHERE t.a = w0.a RETURNING length(w0.b)"),
            format!("DELETE FROM w0 WHERE {other} RETURNING *"),
        ]
    }
}
