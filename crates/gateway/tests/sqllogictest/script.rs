//! A reader of sqllogictest scripts, as described in
//! <https://sqlite.org/sqllogictest/doc/trunk/about.wiki>.
//!
//! ```text
//! onlyif sqlite              optional conditions: skipif, onlyif
//! statement ok               or: statement error
//! CREATE TABLE t(a INTEGER)
//!
//! query I rowsort label-1    one letter for each column
//! SELECT a FROM t
//! ----                       the expected result, which is ignored
//! 7
//! ```
//!
//! The expected results after `----` are rounded and hashed, so they are ignored: results are
//! compared with those of stock SQLite. Sort modes and `hash-threshold` have no effect for that
//! reason.

/// The outcome that a script expects of a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Success.
    Ok,
    /// An error.
    Error,
    /// Rows with this number of columns.
    Rows { columns: usize },
}

/// A statement or query of a script.
#[derive(Debug, PartialEq, Eq)]
pub struct Record {
    /// The number of its first line, starting at 1.
    pub line: usize,
    pub expected: Expected,
    pub sql: String,
}

/// The records for SQLite, in order, or the line that cannot be parsed.
pub fn read(text: &str) -> Result<Vec<Record>, String> {
    let mut records = Vec::new();
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    let mut at = 0;
    while at < lines.len() {
        let first = at;
        while at < lines.len() && !lines[at].is_empty() {
            at += 1;
        }
        let block: Vec<(usize, &str)> = (first..at)
            .map(|line| (line + 1, lines[line]))
            .filter(|(_, line)| !line.starts_with('#'))
            .collect();
        at += 1;
        match read_block(&block)? {
            Block::Nothing => {}
            Block::Halt => break,
            Block::Record(record) => records.push(record),
        }
    }
    Ok(records)
}

enum Block {
    Nothing,
    Halt,
    Record(Record),
}

fn read_block(block: &[(usize, &str)]) -> Result<Block, String> {
    let mut lines = block.iter();
    for (line, text) in lines.by_ref() {
        // A condition may be followed by a comment.
        let words: Vec<&str> = text.split_whitespace().take_while(|word| !word.starts_with('#')).collect();
        let expected = match words.as_slice() {
            ["onlyif", database] if *database != "sqlite" => return Ok(Block::Nothing),
            ["skipif", "sqlite"] => return Ok(Block::Nothing),
            ["onlyif" | "skipif", _] => continue,
            ["hash-threshold", _] => return Ok(Block::Nothing),
            ["halt"] => return Ok(Block::Halt),
            ["statement", "ok"] => Expected::Ok,
            ["statement", "error"] => Expected::Error,
            ["query", columns, ..] => Expected::Rows { columns: columns.len() },
            _ => return Err(format!("line {line}: {text}")),
        };
        let sql: Vec<&str> = lines.map(|(_, text)| *text).take_while(|text| *text != "----").collect();
        return Ok(Block::Record(Record { line: *line, expected, sql: sql.join("\n") }));
    }
    Ok(Block::Nothing)
}

#[test]
fn reads_records_and_conditions() {
    let text = "# a comment\nhash-threshold 8\n\nstatement ok\nCREATE\n# inside\nTABLE t\n\nonlyif mysql\nquery I\nno\n\n\
                skipif mysql # why\nquery IT rowsort x\nSELECT 1,\n2\n----\n1\n2\n\nonlyif sqlite\nhalt\n\nstatement ok\nno\n";
    let record = |line, expected, sql: &str| Record { line, expected, sql: sql.to_owned() };
    assert_eq!(
        read(text).unwrap(),
        [
            record(4, Expected::Ok, "CREATE\nTABLE t"),
            record(14, Expected::Rows { columns: 2 }, "SELECT 1,\n2")
        ]
    );
    assert_eq!(read("statement perhaps\nx\n").unwrap_err(), "line 1: statement perhaps");
}
