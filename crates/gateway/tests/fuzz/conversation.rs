//! Generates the client side of a conversation from fuzz input: mostly valid protocol messages in
//! any order and with arbitrary content, and sometimes arbitrary bytes.

use fulmar_fuzz::Choices;

/// The bytes to send, in pieces.
pub struct Conversation {
    pub pieces: Vec<Vec<u8>>,
    /// Whether to wait for responses between the pieces.
    pub waits: bool,
    /// Whether the client disconnects without reading to the end.
    pub hurries: bool,
    /// Whether the node requires a password, which the client does not know.
    pub locked_out: bool,
    plain: bool,
}

pub const WORDS: &[&str] =
    &["SELECT 1", ";", "$1", "BEGIN", "COMMIT", "\0\0\0\x04", "\u{7f}\u{7f}", "t", "s", "p"];

const SQL: [&str; 64] = [
    "",
    "SELECT 1",
    "SELECT * FROM t",
    "SELECT a, b FROM t WHERE a = $1",
    "SELECT $1, $2",
    "INSERT INTO t(b) VALUES ($1) RETURNING a",
    "INSERT INTO t VALUES (1, 'twice')",
    "UPDATE t SET b = b || 'x' WHERE a = 1",
    "DELETE FROM t WHERE a > 3",
    "BEGIN",
    "BEGIN IMMEDIATE",
    "BEGIN READ ONLY",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT s",
    "ROLLBACK TO s",
    "RELEASE s",
    "SELECT * FROM t WHERE a = 1 FOR UPDATE",
    "COPY t FROM STDIN",
    "COPY t(a, b) FROM STDIN (FORMAT csv, HEADER)",
    "COPY t TO STDOUT",
    "COPY (SELECT 1, NULL) TO STDOUT (FORMAT csv)",
    "SELECT 1; COPY t FROM STDIN; SELECT 2",
    "CALL p(1)",
    "CALL p($1)",
    "CREATE TABLE IF NOT EXISTS u(x INTEGER, y NUMERIC(5,2), z TIMESTAMPTZ)",
    "DROP TABLE IF EXISTS u",
    "CREATE TEMP TABLE IF NOT EXISTS v(x)",
    "INSERT INTO u VALUES ($1, $2, $3)",
    "SET statement_timeout = '100ms'",
    "SET LOCAL application_name = 'x'",
    "RESET ALL",
    "SHOW ALL",
    "DISCARD ALL",
    "DEALLOCATE ALL",
    "SELECT version(), now()",
    "SELECT datname FROM pg_database",
    "SELECT pg_current_xact_id()",
    "SELECT pg_xact_status(1)",
    "SELECT missing",
    "SELEC",
    "SELECT 'open",
    ";;;;;;;;;;;;;;;;;;; SELECT 1",
    "SELECT 1; SELECT missing; SELECT 3",
    "BEGIN; INSERT INTO t(b) VALUES ('y'); COMMIT; SELECT 2",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000) SELECT i, hex(zeroblob(50)) FROM n",
    "SELECT zeroblob(300000000)",
    "SELECT zeroblob(300000)",
    "PRAGMA integrity_check",
    "PRAGMA table_info(t)",
    "VACUUM",
    "ANALYZE",
    "EXPLAIN SELECT 1",
    "CREATE DATABASE other",
    "SELECT CAST('x' AS BLOB), 1.5, NULL, 'text'",
    "SELECT d, c FROM t",
    "TRUNCATE t",
    "CREATE OR REPLACE PROCEDURE p(n INTEGER) LANGUAGE lua AS $$ while true do end $$",
    "DROP PROCEDURE IF EXISTS p",
    "INSERT INTO t(b) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300) SELECT i FROM n",
    "SELECT count(*) FROM t, t AS x, t AS y, t AS z, t AS w",
    "VALUES (1, 'a'), (2, 'b')",
    "ALTER TABLE t ADD COLUMN e TEXT",
];

const NAMES: [&str; 4] = ["", "s", "p", "other"];
const VALUES: [&[u8]; 12] = [
    b"1",
    b"",
    b"text",
    b"\0\0\0\x07",
    b"\0\0\0\0\0\0\0\x07",
    b"\xff\xfe",
    b"9223372036854775808",
    b"2024-01-02 03:04:05",
    b"\\x00ff",
    b"t",
    b"\0\x01\0\0\0\0\0\0\0\x05",
    b"\x7f\xf8\0\0\0\0\0\0",
];
const OIDS: [u32; 12] = [0, 16, 17, 20, 21, 23, 25, 701, 1114, 1700, 2950, 9999];
const ROWS: [&str; 6] =
    ["4\tx\t\\\\x00\t2024-01-01\n", "a,b\n5,\"y\"\n", "\\.\n", "\"", "1\n", "no\tsuch\trow\there\t\n"];

/// Meaningful conversations as choices: connect, then messages of the kinds of [`message`].
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![
        vec![0, 0, 0, 1, 0, 2],                                        // two queries
        vec![0, 1, 1, 1, 3, 0, 2, 1, 1, 0, 1, 0, 3, 1, 1, 4, 1, 0, 5], // parse, bind, describe, execute, sync
        vec![0, 1, 0, 18, 7, 0, 8, 0, 2],                              // COPY in
        vec![0, 0, 0, 9, 0, 7, 0, 14, 0, 6, 0, 15, 0, 12],             // a transaction
        vec![1, 0, 0, 1],                                              // TLS first
        vec![2, 0],
        vec![3, 0, 0, 1],
        vec![4, 9, 9, 9, 9],
        vec![6, 2, 0, 0, 0, 0, 0, 3, 1, 0, 1, 0, 1], // SCRAM
        vec![6, 1, 6, 1, 0, 0, 0, 1],
    ];
    // Each statement as a simple query, and prepared.
    for text in 0..SQL.len() as u8 {
        seeds.push(vec![0, 0, 0, text, 0, 1]);
        seeds.push(vec![0, 1, 1, 1, text, 1, 1, 2, 1, 1, 2, 0, 1, 0, 1, 4, 1, 0, 5]);
    }
    seeds
}

impl Conversation {
    pub fn of(input: &[u8]) -> Conversation {
        let mut choices = Choices::new(input);
        let mode = choices.byte();
        let mut conversation = Conversation {
            pieces: Vec::new(),
            waits: false,
            hurries: false,
            locked_out: mode % 8 == 6,
            plain: true,
        };
        conversation.connect(mode, &mut choices);
        let bits = choices.byte();
        conversation.waits = bits & 1 != 0;
        conversation.hurries = bits & 4 != 0;
        let mut output = Vec::new();
        // Limits the time per input.
        while !choices.is_empty() && output.len() < 1 << 20 {
            message(&mut choices, &mut output);
            if bits & 2 != 0 {
                conversation.pieces.push(std::mem::take(&mut output));
            }
        }
        framed(b'S', &[], &mut output);
        framed(b'X', &[], &mut output);
        conversation.pieces.push(output);
        conversation
    }

    /// Returns true if the node responds with protocol messages only.
    pub fn is_plain(&self) -> bool {
        self.plain
    }

    fn connect(&mut self, mode: u8, choices: &mut Choices<'_>) {
        let code = |code: u32| [8u32.to_be_bytes(), code.to_be_bytes()].concat();
        match mode % 8 {
            1 => (self.plain, self.pieces) = (false, vec![code(80_877_103)]),
            2 => (self.plain, self.pieces) = (false, vec![code(80_877_104)]),
            3 => {
                let cancel =
                    [&16u32.to_be_bytes()[..], &80_877_102u32.to_be_bytes(), choices.bytes(8), &[0; 8]]
                        .concat();
                self.pieces.push(cancel[..16].to_vec());
            }
            4 => self.pieces.push(choices.bytes(64).to_vec()),
            5 => {
                let version = [0x0003_0000u32, 0x0003_0002, 0x0002_0000, 0, u32::MAX][choices.below(5)];
                let parameters = choices.bytes(40);
                let length = (9 + parameters.len()) as u32;
                self.pieces.push([&length.to_be_bytes(), &version.to_be_bytes(), parameters, &[0]].concat());
            }
            _ => {}
        }
        let parameters = b"user\0anna\0database\0fuzz\0options\0-c statement_timeout=1s\0\0";
        let length = (8 + parameters.len()) as u32;
        self.pieces.push([&length.to_be_bytes(), &0x0003_0000u32.to_be_bytes(), &parameters[..]].concat());
        if self.locked_out {
            (0..choices.below(4)).for_each(|_| self.pieces.push(password(choices)));
        }
    }
}

/// A step of SCRAM, possibly malformed.
fn password(choices: &mut Choices<'_>) -> Vec<u8> {
    const STEPS: [&str; 7] = [
        "n,,n=,r=rOprNGfwEbeRWgbNEkqO",
        "y,,n=anna,r=x",
        "p=tls-unique,,n=,r=x",
        "c=biws,r=rOprNGfwEbeRWgbNEkqO,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        "c=biws,r=,p=",
        "n,,n=,r=",
        "secret\0",
    ];
    let (mut output, mut body) = (Vec::new(), Vec::new());
    let step = choices.one_of(&STEPS).as_bytes();
    if choices.below(2) == 0 {
        text(choices.one_of(&["SCRAM-SHA-256", "SCRAM-SHA-256-PLUS", ""]).as_bytes(), &mut body);
        let length = [step.len() as u32, u32::MAX, 1, 1 << 30][choices.below(4)];
        body.extend_from_slice(&length.to_be_bytes());
    }
    body.extend_from_slice(step);
    let more = choices.below(16);
    body.extend_from_slice(choices.bytes(more));
    framed(b'p', &body, &mut output);
    output
}

/// Appends a message.
fn message(choices: &mut Choices<'_>, out: &mut Vec<u8>) {
    let mut body = Vec::new();
    let kind = match choices.below(16) {
        0 => {
            text(sql(choices).as_bytes(), &mut body);
            b'Q'
        }
        1 => {
            text(choices.one_of(&NAMES).as_bytes(), &mut body);
            text(sql(choices).as_bytes(), &mut body);
            let count = choices.below(4);
            short(count, &mut body);
            (0..count).for_each(|_| body.extend_from_slice(&OIDS[choices.below(OIDS.len())].to_be_bytes()));
            b'P'
        }
        2 => {
            bind(choices, &mut body);
            b'B'
        }
        3 => {
            body.push([b'S', b'P', choices.byte()][choices.below(3)]);
            text(choices.one_of(&NAMES).as_bytes(), &mut body);
            b'D'
        }
        4 => {
            text(choices.one_of(&NAMES).as_bytes(), &mut body);
            let limit = [0u32, 1, 2, 1000, u32::MAX][choices.below(5)];
            body.extend_from_slice(&limit.to_be_bytes());
            b'E'
        }
        5 => b'S',
        6 => {
            body.push([b'S', b'P', choices.byte()][choices.below(3)]);
            text(choices.one_of(&NAMES).as_bytes(), &mut body);
            b'C'
        }
        7 => {
            body.extend_from_slice(choices.one_of(&ROWS).as_bytes());
            b'd'
        }
        8 => b'c',
        9 => {
            text(b"enough", &mut body);
            b'f'
        }
        10 => b'H',
        11 => {
            // Arbitrary text.
            let length = choices.below(64);
            body.extend_from_slice(choices.bytes(length));
            body.push(0);
            b'Q'
        }
        12 => {
            let length = choices.below(64);
            body.extend_from_slice(choices.bytes(length));
            choices.byte()
        }
        13 => {
            // Arbitrary bytes instead of a message.
            let length = choices.below(8);
            out.extend_from_slice(choices.bytes(length));
            return;
        }
        14 => {
            // A long message.
            text("SELECT 1;".repeat(choices.below(256)).as_bytes(), &mut body);
            b'Q'
        }
        _ => {
            text(";".repeat(choices.below(4096)).as_bytes(), &mut body);
            body.pop();
            text(b"SELECT 1", &mut body);
            b'Q'
        }
    };
    framed(kind, &body, out);
}

fn sql(choices: &mut Choices<'_>) -> &'static str {
    SQL[choices.below(SQL.len())]
}

fn bind(choices: &mut Choices<'_>, body: &mut Vec<u8>) {
    text(choices.one_of(&NAMES).as_bytes(), body);
    text(choices.one_of(&NAMES).as_bytes(), body);
    formats(choices, body);
    let count = choices.below(4);
    short(count, body);
    for _ in 0..count {
        match choices.below(VALUES.len() + 1) {
            0 => body.extend_from_slice(&(-1i32).to_be_bytes()),
            which => {
                let value = VALUES[which - 1];
                body.extend_from_slice(&(value.len() as u32).to_be_bytes());
                body.extend_from_slice(value);
            }
        }
    }
    formats(choices, body);
}

fn formats(choices: &mut Choices<'_>, body: &mut Vec<u8>) {
    let count = choices.below(4);
    short(count, body);
    (0..count).for_each(|_| short(choices.below(3), body));
}

fn short(value: usize, body: &mut Vec<u8>) {
    body.extend_from_slice(&(value as u16).to_be_bytes());
}

fn text(text: &[u8], body: &mut Vec<u8>) {
    body.extend_from_slice(text);
    body.push(0);
}

fn framed(kind: u8, body: &[u8], out: &mut Vec<u8>) {
    out.push(kind);
    out.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
    out.extend_from_slice(body);
}
