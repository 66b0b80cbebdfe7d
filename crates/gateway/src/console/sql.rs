//! Internal sessions: run a statement as the superuser, and return its rows as JSON.
//!
//! The session is an ordinary one, at a worker or, in a cluster, at the owner of the database. It is
//! connected by a pipe instead of a socket, and this module is its client.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use serde::Serialize;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use crate::startup::InternalClient;
use crate::worker::Worker;

/// Capacity of the pipe, in each direction.
const PIPE_BYTES: usize = 64 << 10;
/// Maximum number of rows of a result. Statements state a smaller LIMIT.
const MAX_ROWS: usize = 5_000;
/// Maximum size of a result, in the client protocol.
const MAX_RESULT_BYTES: usize = 4 << 20;
/// Free space in the buffer before a read.
const READ_BYTES: usize = 8 << 10;
/// The smallest message: its kind and its length.
const HEADER_BYTES: usize = 5;

/// An error of a statement, with the parts of PostgreSQL's errors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct SqlError {
    /// The SQLSTATE, if the error is one of a statement.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) state: String,
    pub(super) message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) detail: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hint: Option<String>,
}

impl SqlError {
    /// The session has ended without an error.
    fn ended() -> SqlError {
        let hint = "The node may be shutting down. Retry, or use another node.".to_owned();
        SqlError {
            message: "the internal session has ended".to_owned(),
            hint: Some(hint),
            ..SqlError::default()
        }
    }

    fn too_large() -> SqlError {
        SqlError {
            message: format!("the result has more than {MAX_ROWS} rows or {MAX_RESULT_BYTES} bytes"),
            ..SqlError::default()
        }
    }

    fn malformed() -> SqlError {
        SqlError {
            message: "a message of the internal session is malformed".to_owned(),
            ..SqlError::default()
        }
    }
}

impl From<io::Error> for SqlError {
    fn from(_: io::Error) -> SqlError {
        SqlError::ended()
    }
}

/// A result.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Table {
    pub(super) columns: Vec<String>,
    pub(super) rows: Vec<Vec<Value>>,
}

/// Opens sessions.
#[derive(Clone)]
pub(super) struct Sessions {
    workers: Arc<[Worker]>,
    /// The number of regular workers, which come first.
    regular: usize,
}

impl Sessions {
    pub(super) fn new(workers: Arc<[Worker]>, regular: usize) -> Sessions {
        Sessions { workers, regular }
    }

    /// Opens a session in a database. `application` is its application name, `time` its
    /// `statement_timeout`.
    pub(super) async fn open(
        &self,
        database: &str,
        address: Option<IpAddr>,
        application: &str,
        time: Duration,
    ) -> Result<SqlSession, SqlError> {
        let workers = self.workers.iter().take(self.regular);
        let worker = workers.min_by_key(|worker| worker.load()).ok_or_else(SqlError::ended)?;
        let (near, far) = duplex(PIPE_BYTES);
        let parameters = [
            ("application_name".to_owned(), application.to_owned()),
            ("statement_timeout".to_owned(), format!("{}ms", time.as_millis())),
        ];
        let parameters = BTreeMap::from(parameters);
        worker
            .hand_over_internal(InternalClient {
                database: database.to_owned(),
                address,
                parameters,
                pipe: far,
            })
            .await;
        let mut session = SqlSession { pipe: near, input: BytesMut::new() };
        session.answer().await?;
        Ok(session)
    }
}

/// A session. Dropping it ends it, and cancels its statement, except a move, which continues.
pub(super) struct SqlSession {
    pipe: DuplexStream,
    input: BytesMut,
}

impl SqlSession {
    /// Runs one statement.
    pub(super) async fn query(&mut self, sql: &str) -> Result<Table, SqlError> {
        let mut message = Vec::with_capacity(sql.len() + HEADER_BYTES + 1);
        message.push(b'Q');
        message.extend_from_slice(&(sql.len() as u32 + 5).to_be_bytes());
        message.extend_from_slice(sql.as_bytes());
        message.push(0);
        self.pipe.write_all(&message).await?;
        self.answer().await
    }

    /// Reads messages until the session is ready for a statement.
    async fn answer(&mut self) -> Result<Table, SqlError> {
        let (mut answer, mut bytes) = (Answer::default(), 0);
        loop {
            let Some((kind, body)) = self.message().await? else {
                return Err(answer.error.unwrap_or_else(SqlError::ended));
            };
            bytes += body.len();
            if bytes > MAX_RESULT_BYTES || answer.table.rows.len() > MAX_ROWS {
                return Err(SqlError::too_large());
            }
            if answer.add(kind, body).ok_or_else(SqlError::malformed)? {
                return answer.error.map_or(Ok(answer.table), Err);
            }
        }
    }

    /// The next message; `None` at the end.
    async fn message(&mut self) -> Result<Option<(u8, Bytes)>, SqlError> {
        loop {
            if let Some(header) = self.input.first_chunk::<HEADER_BYTES>() {
                let length = (&header[1..]).get_u32() as usize;
                if !(4..=MAX_RESULT_BYTES).contains(&length) {
                    return Err(SqlError::too_large());
                }
                if self.input.len() > length {
                    let mut message = self.input.split_to(length + 1).freeze();
                    let kind = message.get_u8();
                    message.advance(4);
                    return Ok(Some((kind, message)));
                }
            }
            self.input.reserve(READ_BYTES);
            if self.pipe.read_buf(&mut self.input).await? == 0 {
                return Ok(None);
            }
        }
    }
}

/// What a session has answered so far.
#[derive(Default)]
struct Answer {
    table: Table,
    types: Vec<u32>,
    error: Option<SqlError>,
}

impl Answer {
    /// Adds a message. Returns true if it is the last one, `None` if it is malformed.
    fn add(&mut self, kind: u8, mut body: Bytes) -> Option<bool> {
        match kind {
            b'T' => {
                let columns = body.try_get_u16().ok()?;
                self.table = Table::default();
                self.types.clear();
                for _ in 0..columns {
                    self.table.columns.push(text(&mut body)?);
                    body.try_get_u32().ok()?;
                    body.try_get_u16().ok()?;
                    self.types.push(body.try_get_u32().ok()?);
                    (body.len() >= 8).then(|| body.advance(8))?;
                }
            }
            b'D' => {
                let columns = body.try_get_u16().ok()?;
                let mut row = Vec::with_capacity(usize::from(columns));
                for column in 0..usize::from(columns) {
                    row.push(match usize::try_from(body.try_get_i32().ok()?) {
                        Err(_) => Value::Null,
                        Ok(length) => {
                            let bytes = (body.len() >= length).then(|| body.split_to(length))?;
                            value(&bytes, self.types.get(column).copied().unwrap_or_default())
                        }
                    });
                }
                self.table.rows.push(row);
            }
            b'E' => self.error = Some(error(body)?),
            b'Z' => return Some(true),
            _ => {}
        }
        Some(false)
    }
}

/// A value in text format, as JSON: numbers, booleans and JSON as such, everything else as text.
fn value(bytes: &[u8], oid: u32) -> Value {
    const BOOL: u32 = 16;
    const INTEGERS: [u32; 4] = [20, 21, 23, 26];
    const JSON: u32 = 114;
    const FLOATS: [u32; 3] = [700, 701, 1700];
    let text = String::from_utf8_lossy(bytes);
    let typed = match oid {
        BOOL => match &*text {
            "t" | "1" => Some(Value::Bool(true)),
            "f" | "0" => Some(Value::Bool(false)),
            _ => None,
        },
        JSON => serde_json::from_str(&text).ok(),
        _ if INTEGERS.contains(&oid) => text.parse::<i64>().ok().map(Value::from),
        _ if FLOATS.contains(&oid) => text.parse::<f64>().ok().map(Value::from),
        _ => None,
    };
    typed.unwrap_or_else(|| Value::String(text.into_owned()))
}

/// A string that ends with a zero byte.
fn text(body: &mut Bytes) -> Option<String> {
    let end = body.iter().position(|byte| *byte == 0)?;
    let bytes = body.split_to(end);
    body.advance(1);
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn error(mut body: Bytes) -> Option<SqlError> {
    let mut error = SqlError::default();
    loop {
        match body.try_get_u8().ok()? {
            0 => return Some(error),
            b'C' => error.state = text(&mut body)?,
            b'M' => error.message = text(&mut body)?,
            b'D' => error.detail = Some(text(&mut body)?),
            b'H' => error.hint = Some(text(&mut body)?),
            _ => drop(text(&mut body)?),
        }
    }
}

/// A name as an SQL identifier.
pub(super) fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A text as an SQL string constant.
pub(super) fn string(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_become_json_of_their_type() {
        for (text, oid, expected) in [
            ("7", 20, Value::from(7)),
            ("0.5", 701, Value::from(0.5)),
            ("NaN", 701, Value::Null),
            ("t", 16, Value::from(true)),
            ("{\"a\":1}", 114, serde_json::json!({"a": 1})),
            ("{", 114, Value::from("{")),
            ("7", 25, Value::from("7")),
            ("<b>", 19, Value::from("<b>")),
        ] {
            assert_eq!(value(text.as_bytes(), oid), expected, "{text} {oid}");
        }
    }

    #[test]
    fn names_and_texts_are_quoted() {
        assert_eq!(identifier("a\"b; DROP"), "\"a\"\"b; DROP\"");
        assert_eq!(string("it's"), "'it''s'");
    }

    #[tokio::test]
    async fn answers_are_read_across_pieces_and_bounded() {
        let (mut far, pipe) = duplex(64);
        let mut session = SqlSession { pipe, input: BytesMut::new() };
        let mut answer = Vec::new();
        let mut put = |kind: u8, body: &[u8]| {
            answer.push(kind);
            answer.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
            answer.extend_from_slice(body);
        };
        put(b'T', b"\0\x01n\0\0\0\0\0\0\0\0\0\0\x14\0\x08\0\0\0\0\0\0");
        put(b'D', b"\0\x01\0\0\0\x0242");
        put(b'D', b"\0\x01\xff\xff\xff\xff");
        put(b'C', b"SELECT 2\0");
        put(b'Z', b"I");
        put(b'E', b"SERROR\0C42P01\0Mno such table\0\0");
        put(b'Z', b"I");
        put(b'D', b"\0\x01\0\0\0\x09short");
        let sending = tokio::spawn(async move {
            for piece in answer.chunks(7) {
                far.write_all(piece).await.unwrap();
            }
        });
        let table = session.answer().await.unwrap();
        assert_eq!(
            table,
            Table { columns: vec!["n".into()], rows: vec![vec![42.into()], vec![Value::Null]] }
        );
        let error = session.answer().await.unwrap_err();
        assert_eq!((&*error.state, &*error.message), ("42P01", "no such table"));
        assert_eq!(session.answer().await.unwrap_err(), SqlError::malformed());
        sending.await.unwrap();
        assert_eq!(session.answer().await.unwrap_err(), SqlError::ended());
    }
}
