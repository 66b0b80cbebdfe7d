//! Generates Lua procedures from fuzz input: with a grammar of everything that a procedure can
//! access (`db`, SQL values, the standard library), or from the raw bytes.

use fulmar_fuzz::Choices;

pub const WORDS: &[&str] =
    &["db.query(", "db.exec(", "db.abort(", "pcall(", "return ", "end ", "nil", "{", "}", "\"", ")"];

const EXPRESSIONS: [&str; 40] = [
    "nil",
    "true",
    "0/0",
    "1/0",
    "-1",
    "2^53",
    "2^53 + 2",
    "0.5",
    "''",
    "'text'",
    "'\\255\\254'",
    "string.rep('x', 1000000)",
    "string.rep('x', 100000000)",
    "{}",
    "{1, 2, nil, 4}",
    "{x = 1, y = {z = 2}}",
    "{[1.5] = 1, [true] = 2}",
    "buffer.create(10)",
    "buffer.fromstring('abc')",
    "buffer.create(1000000000)",
    "vector",
    "print",
    "db",
    "db.query",
    "n",
    "s",
    "r",
    "setmetatable({}, {__index = function(t, k) return k end})",
    "setmetatable({}, {__tostring = function() error('x') end, __len = function() return 1e9 end})",
    "setmetatable({}, {__iter = function() return next, {} end, __metatable = false})",
    "function() return 1 end",
    "coroutine",
    "os",
    "_G",
    "getfenv",
    "math.huge",
    "tostring(db)",
    "string.format('%d %s %q', 1, 'x', 'y')",
    "table.create(100000000, 0)",
    "utf8.char(0x10ffff)",
];

const SQL: [&str; 16] = [
    "'SELECT * FROM t'",
    "'SELECT a FROM t WHERE a = $1'",
    "'SELECT $1, $2, $3'",
    "'INSERT INTO t(b, c) VALUES ($1, $2)'",
    "'UPDATE t SET b = $1'",
    "'DELETE FROM t WHERE a > 3'",
    "'SELECT 9223372036854775807'",
    "'SELECT zeroblob(30000000)'",
    "'WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n'",
    "'WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000) SELECT i FROM n'",
    "'COMMIT'",
    "'DROP TABLE t'",
    "'CALL q(1, 2, 3)'",
    "'SELECT 1; SELECT 2'",
    "''",
    "'SELECT missing'",
];

pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = (0..12).map(|kind| vec![0, 3, kind, 1, kind, 2, 3, 4, 5, 6]).collect();
    seeds.extend((0..EXPRESSIONS.len() as u8).map(|expression| vec![0, 2, 0, expression, 0, 3, 3, 26, 0]));
    seeds.extend((0..SQL.len() as u8).map(|sql| vec![0, 3, 1, sql, 2, 24, 25, 9, sql, 1, 13]));
    seeds.push(b"\x01local r = db.query('SELECT a FROM t') for i, row in r do db.exec('DELETE FROM t WHERE a = $1', row.a) end".to_vec());
    seeds
}

/// The statement that creates the procedure.
pub fn procedure(input: &[u8]) -> String {
    let mut choices = Choices::new(input);
    let source = match choices.byte() % 4 {
        1 => String::from_utf8_lossy(choices.rest()).into_owned(),
        _ => {
            let returns = choices.below(3);
            let mut source = "local r = 1\n".to_owned();
            block(&mut choices, 0, &mut source);
            if returns > 0 {
                source.push_str("\nreturn r");
            }
            source
        }
    };
    let returns = ["", "RETURNS TABLE (x INTEGER)", "RETURNS TABLE (x BYTEA, y TEXT)"];
    let returns = returns[usize::from(input.first().copied().unwrap_or(0)) / 4 % 3];
    format!(
        "CREATE OR REPLACE PROCEDURE q(n INTEGER, s TEXT, f REAL) {returns} LANGUAGE lua AS $fuzz$ {source} $fuzz$"
    )
}

fn block(choices: &mut Choices<'_>, depth: usize, out: &mut String) {
    while !choices.is_empty() && out.len() < 1 << 16 {
        statement(choices, depth, out);
        if choices.below(4) == 0 && depth > 0 {
            return;
        }
    }
}

fn statement(choices: &mut Choices<'_>, depth: usize, out: &mut String) {
    let kind = if depth > 8 { choices.below(6) } else { choices.below(13) };
    let (open, close) = match kind {
        0 => {
            out.push_str(&format!("r = {}\n", expression(choices)));
            return;
        }
        1 | 2 => {
            let call = if kind == 1 { "db.query" } else { "db.exec" };
            let sql =
                if choices.below(8) == 0 { expression(choices) } else { choices.one_of(&SQL).to_owned() };
            out.push_str(&format!("r = {call}({sql}, {}, {})\n", expression(choices), expression(choices)));
            return;
        }
        3 => {
            out.push_str(&format!("db.abort({})\n", expression(choices)));
            return;
        }
        4 => {
            out.push_str(&format!("error({})\n", expression(choices)));
            return;
        }
        5 => {
            out.push_str(&format!("r = pcall({}, {})\n", expression(choices), expression(choices)));
            return;
        }
        6 => ("while true do ".to_owned(), "end"),
        7 => (format!("for i = 1, {} do ", expression(choices)), "end"),
        8 => (format!("for k, v in {} do ", expression(choices)), "end"),
        9 => ("r = pcall(function() ".to_owned(), "end)"),
        10 => ("local function g() ".to_owned(), "g() end g()"),
        11 => ("r = xpcall(function() ".to_owned(), "end, function(e) return db.query('SELECT 1') end)"),
        _ => (format!("if {} == r then ", expression(choices)), "end"),
    };
    out.push_str(&open);
    block(choices, depth + 1, out);
    out.push_str(close);
    out.push('\n');
}

fn expression(choices: &mut Choices<'_>) -> String {
    let first = *choices.one_of(&EXPRESSIONS.each_ref());
    match choices.below(12) {
        0 => format!("{first} .. {}", EXPRESSIONS[choices.below(EXPRESSIONS.len())]),
        1 => format!("#{first}"),
        2 => format!("({first}).x"),
        3 => format!("({first})[1]"),
        4 => format!("({first})({})", EXPRESSIONS[choices.below(EXPRESSIONS.len())]),
        5 => format!("{first} + {}", EXPRESSIONS[choices.below(EXPRESSIONS.len())]),
        6 => format!("tostring({first})"),
        _ => first.to_owned(),
    }
}
