//! `COPY t FROM STDIN`: rows from the client into a table.
//!
//! ```text
//! client: COPY t FROM STDIN          server: CopyInResponse
//!         CopyData "1\tone\n2\tt"            lines are cut, unescaped, inserted some rows at a time
//!         CopyData "wo\n"                    (a line may come in pieces)
//!         CopyDone                           the last rows, the commit, COPY 2
//! ```
//!
//! The rows are inserted by ordinary prepared INSERTs in the client's transaction, or in an implicit one: an error
//! takes all of them back. They are run as they come, so TCP holds a client back that is faster than the engine.

use std::sync::Arc;

use fulmar_engine::{Error, ParameterInfo, Scope, Statement, Value, sqlstate};

use super::rows::Collector;
use super::simple::Rest;
use super::{Fault, MESSAGE_BYTES, Session};
use crate::Result;
use crate::dialect::copy::Copy;
use crate::dialect::token::quote_name;
use crate::protocol::{Format, backend};
use crate::types::{self, Type, decode};

/// Parameters of one INSERT at most.
const PARAMETERS: usize = 512;

/// A COPY that is going on.
pub(super) struct CopyIn {
    copy: Copy,
    columns: usize,
    /// Inserts `batch` rows at once.
    insert_batch: Arc<Statement>,
    batch: usize,
    insert_one: Arc<Statement>,
    /// What the columns are declared as.
    kinds: Vec<Type>,
    /// Values of rows that have not been inserted.
    values: Vec<Value>,
    /// The start of a line whose end has not come.
    partial: Vec<u8>,
    lines: u64,
    rows: u64,
    /// After `\.`: the rest is ignored.
    ended: bool,
    /// Of the text that the COPY stands in; `None` in the extended protocol.
    pub(super) rest: Option<Rest>,
}

impl Session {
    /// Prepares the INSERTs and asks for the rows.
    pub(super) async fn begin_copy(&mut self, copy: &Copy, output: &mut Vec<u8>) -> Result<()> {
        let columns = match copy.columns.len() {
            0 => self.table_columns(copy).await?,
            _ => copy.columns.clone(),
        };
        let batch = (PARAMETERS / columns.len()).max(1);
        let (insert_batch, _) = self.link.prepare(&insert(copy, &columns, batch)).await?;
        let (insert_one, _) = self.link.prepare(&insert(copy, &columns, 1)).await?;
        let declared =
            |info: &ParameterInfo| types::declared(info.declared_type.as_deref().unwrap_or("TEXT"));
        let kinds =
            insert_one.parameters.iter().map(|info| declared(info).map_or(Type::Text, |known| known.kind));
        self.copy = Some(Box::new(CopyIn {
            kinds: kinds.collect(),
            copy: copy.clone(),
            columns: columns.len(),
            insert_batch,
            batch,
            insert_one,
            values: Vec::new(),
            partial: Vec::new(),
            lines: 0,
            rows: 0,
            ended: false,
            rest: None,
        }));
        backend::copy_in(output, columns.len());
        let lost = || Error::new(sqlstate::CONNECTION_FAILURE, "the connection was lost when COPY began");
        self.link.send(output).await.map_err(|_| lost())?;
        output.clear();
        Ok(())
    }

    async fn table_columns(&mut self, copy: &Copy) -> Result<Vec<String>> {
        let schema = copy.table.schema.clone().unwrap_or_else(|| "main".into());
        let sql = "SELECT name FROM pragma_table_xinfo($1, $2) WHERE hidden = 0 ORDER BY cid";
        let values = [Value::Text(copy.table.name.clone()), Value::Text(schema)];
        let names =
            self.link.collect(sql, &values).await?.into_iter().flatten().filter_map(|name| match name {
                Value::Text(name) => Some(name),
                _ => None,
            });
        let names: Vec<String> = names.collect();
        if names.is_empty() {
            let message = format!("relation \"{}\" does not exist", copy.table.name);
            return Err(Error::new(sqlstate::UNDEFINED_TABLE, message));
        }
        Ok(names)
    }

    /// Takes rows. Without a COPY they are the rest of one that failed, and ignored.
    pub(super) async fn copy_data(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        let Some(mut copy) = self.copy.take() else { return Ok(()) };
        match copy.take(bytes, self).await {
            Ok(()) => {
                self.copy = Some(copy);
                Ok(())
            }
            Err(error) => self.end_of_copy(copy, Err(error)).await,
        }
    }

    /// The rows are complete.
    pub(super) async fn copy_done(&mut self) -> Result<(), Fault> {
        let Some(mut copy) = self.copy.take() else { return Ok(()) };
        let outcome = copy.finish(self).await;
        self.end_of_copy(copy, outcome).await
    }

    /// The client gives up.
    pub(super) async fn copy_failed(&mut self, reason: &[u8]) -> Result<(), Fault> {
        let Some(copy) = self.copy.take() else { return Ok(()) };
        let message = format!("COPY from stdin failed: {}", String::from_utf8_lossy(reason));
        let error = Error::new(sqlstate::QUERY_CANCELED, message);
        self.end_of_copy(copy, Err(error)).await
    }

    /// The client sends something else.
    pub(super) async fn copy_interrupted(&mut self) -> Result<(), Fault> {
        let Some(copy) = self.copy.take() else { return Ok(()) };
        let error = Error::new(sqlstate::PROTOCOL_VIOLATION, "unexpected message during COPY from stdin");
        self.end_of_copy(copy, Err(error)).await
    }

    async fn end_of_copy(&mut self, copy: Box<CopyIn>, outcome: Result<()>) -> Result<(), Fault> {
        let (rows, rest) = (copy.rows, copy.rest);
        let Some(Rest(rest)) = rest else {
            return match outcome.map_err(Fault::from) {
                Ok(()) => {
                    backend::copy_complete(&mut self.output, rows);
                    Ok(())
                }
                Err(Fault::Statement(error)) => {
                    self.extended_failed(&error);
                    Ok(())
                }
                Err(end) => Err(end),
            };
        };
        let outcome = match outcome {
            Ok(()) => self.go_on_after_copy(rows, &rest).await,
            Err(error) => Err(error.into()),
        };
        Box::pin(self.end_of_text(outcome)).await
    }

    async fn go_on_after_copy(&mut self, rows: u64, rest: &str) -> Result<(), Fault> {
        if super::simple::is_blank(rest) {
            self.link.finish().await?;
        }
        backend::copy_complete(&mut self.output, rows);
        Box::pin(self.run_text(rest)).await
    }
}

impl CopyIn {
    async fn take(&mut self, bytes: &[u8], session: &mut Session) -> Result<()> {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            let (line, after) = rest.split_at(end);
            rest = &after[1..];
            if self.partial.is_empty() {
                self.line(line, session).await?;
            } else {
                let mut whole = std::mem::take(&mut self.partial);
                whole.extend_from_slice(line);
                self.line(&whole, session).await?;
            }
        }
        if self.partial.len() + rest.len() > MESSAGE_BYTES {
            let message = format!("line {} is longer than {} MiB", self.lines + 1, MESSAGE_BYTES >> 20);
            return Err(Error::new(sqlstate::PROGRAM_LIMIT, message));
        }
        self.partial.extend_from_slice(rest);
        Ok(())
    }

    async fn finish(&mut self, session: &mut Session) -> Result<()> {
        if !self.partial.is_empty() {
            let line = std::mem::take(&mut self.partial);
            self.line(&line, session).await?;
        }
        while !self.values.is_empty() {
            self.insert(1, session).await?;
        }
        Ok(())
    }

    async fn line(&mut self, line: &[u8], session: &mut Session) -> Result<()> {
        self.lines += 1;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        self.ended |= line == b"\\.";
        if self.ended || (self.lines == 1 && self.copy.header) {
            return Ok(());
        }
        let before = self.values.len();
        let split = split_line(line, self.copy.delimiter, &self.copy.null, &self.kinds, &mut self.values);
        split.map_err(|error| self.at_line(error))?;
        let found = self.values.len() - before;
        if found != self.columns {
            let what = if found < self.columns { "missing data" } else { "extra data" };
            let message = format!("{what}: a row has {found} columns, COPY wants {}", self.columns);
            return Err(self.at_line(Error::new(sqlstate::BAD_COPY_FILE, message)));
        }
        if self.values.len() >= self.batch * self.columns {
            self.insert(self.batch, session).await?;
        }
        Ok(())
    }

    async fn insert(&mut self, rows: usize, session: &mut Session) -> Result<()> {
        let statement = if rows == 1 { &self.insert_one } else { &self.insert_batch };
        let values = &self.values[..rows * self.columns];
        let run = session.link.execute(statement, values, Scope::Implicit, &mut Collector::default()).await;
        run.map_err(|error| self.at_line(error))?;
        self.values.drain(..rows * self.columns);
        self.rows += rows as u64;
        Ok(())
    }

    /// Says where in the rows an error was met: up to the line that was read last.
    fn at_line(&self, error: Error) -> Error {
        match error.get_detail() {
            Some(_) => error,
            None => error.detail(format!("COPY {}, up to line {}", self.copy.table.name, self.lines)),
        }
    }
}

fn insert(copy: &Copy, columns: &[String], rows: usize) -> String {
    let names: Vec<String> = columns.iter().map(|column| quote_name(column)).collect();
    let mut sql = format!("INSERT INTO {} ({}) VALUES ", copy.table.sql(), names.join(", "));
    for row in 0..rows {
        sql.push_str(if row == 0 { "(" } else { ", (" });
        for column in 0..columns.len() {
            let comma = if column == 0 { "" } else { ", " };
            sql.push_str(&format!("{comma}${}", row * columns.len() + column + 1));
        }
        sql.push(')');
    }
    sql
}

/// Cuts a line at its delimiters and undoes what the text format escapes.
fn split_line(line: &[u8], delimiter: u8, null: &str, kinds: &[Type], values: &mut Vec<Value>) -> Result<()> {
    let mut kinds = kinds.iter();
    let mut start = 0;
    let mut at = 0;
    let mut escaped = false;
    loop {
        match line.get(at) {
            Some(b'\\') => {
                escaped = true;
                at += 2;
            }
            Some(&byte) if byte != delimiter => at += 1,
            end => {
                let field = &line[start..at.min(line.len())];
                values.push(value(field, null, escaped, *kinds.next().unwrap_or(&Type::Text))?);
                if end.is_none() {
                    return Ok(());
                }
                at += 1;
                (start, escaped) = (at, false);
            }
        }
    }
}

/// A field, read as its column is declared.
fn value(field: &[u8], null: &str, escaped: bool, kind: Type) -> Result<Value> {
    if field == null.as_bytes() {
        Ok(Value::Null)
    } else if escaped {
        decode::value(&unescape(field), kind, Format::Text)
    } else {
        decode::value(field, kind, Format::Text)
    }
}

fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        match rest.next() {
            Some(b'b') => bytes.push(8),
            Some(b'f') => bytes.push(12),
            Some(b'n') => bytes.push(b'\n'),
            Some(b'r') => bytes.push(b'\r'),
            Some(b't') => bytes.push(b'\t'),
            Some(b'v') => bytes.push(11),
            Some(digit @ b'0'..=b'7') => {
                let mut code = u32::from(digit - b'0');
                for _ in 0..2 {
                    if let Some(digit) = rest.next_if(|byte| (b'0'..=b'7').contains(byte)) {
                        code = code * 8 + u32::from(digit - b'0');
                    }
                }
                bytes.push(code as u8);
            }
            Some(b'x') => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                let mut code = None;
                for _ in 0..2 {
                    if let Some(value) = rest.peek().copied().and_then(digit) {
                        rest.next();
                        code = Some(code.unwrap_or(0) * 16 + value);
                    }
                }
                bytes.push(code.map_or(b'x', |code| code as u8));
            }
            Some(other) => bytes.push(other),
            None => bytes.push(b'\\'),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(line: &str) -> Vec<Value> {
        let mut values = Vec::new();
        split_line(line.as_bytes(), b'\t', "\\N", &[], &mut values).unwrap();
        values
    }

    #[test]
    fn lines_of_the_text_format() {
        let text = |text: &str| Value::Text(text.into());
        assert_eq!(split("1\tone"), [text("1"), text("one")]);
        assert_eq!(split("\\N\t\t\\\\N"), [Value::Null, text(""), text("\\N")]);
        assert_eq!(split("a\\tb\\nc\\\td\\101\\x41\\q"), [text("a\tb\nc\td\u{41}\u{41}q")]);
        assert_eq!(split("end\\"), [text("end\\")]);
        assert_eq!(split(""), [text("")]);
        let mut values = Vec::new();
        let kinds = [Type::Int8, Type::Bytea, Type::Bool];
        split_line(b"7\t\\\\x01\tt", b'\t', "\\N", &kinds, &mut values).unwrap();
        assert_eq!(values, [Value::Integer(7), Value::Blob(vec![1]), Value::Integer(1)]);
    }

    #[test]
    fn an_insert_numbers_its_parameters() {
        let copy = Copy {
            table: crate::dialect::token::Table { schema: None, name: "t".into() },
            columns: vec![],
            delimiter: b'\t',
            null: "\\N".into(),
            header: false,
        };
        let sql = insert(&copy, &["a".into(), "b".into()], 2);
        assert_eq!(sql, r#"INSERT INTO "t" ("a", "b") VALUES ($1, $2), ($3, $4)"#);
    }

    proptest! {
        #[test]
        fn survives_anything(line in proptest::collection::vec(any::<u8>(), 0..60)) {
            let mut values = Vec::new();
            let _ = split_line(&line, b'\t', "\\N", &[Type::Bytea, Type::Int8], &mut values);
        }

        #[test]
        fn what_is_escaped_reads_back(text in "[ -~\t\n\r\\\\]{0,30}") {
            let escaped = text.replace('\\', "\\\\").replace('\t', "\\t").replace('\n', "\\n").replace('\r', "\\r");
            prop_assert_eq!(split(&escaped), [Value::Text(text)]);
        }
    }
}
