//! A PostgreSQL client with little CPU overhead, for benchmarks.
//!
//! The driver and the measured server share a machine, so CPU time that the driver uses is missing
//! at the server. This client is therefore optimised for one case, a closed loop of prepared
//! statements:
//!
//! ```text
//!   Bind Execute Sync  --one write-->   server
//!   client             <--one read---   BindComplete DataRow.. CommandComplete ReadyForQuery
//! ```
//!
//! - Messages are built in a reused buffer, and responses are decoded in the input buffer. A
//!   statement needs no allocation, task or channel.
//! - The task that owns a connection drives it. Hundreds of connections share one thread and its
//!   event loop.
//! - [`Client::execute`] only counts rows. [`Client::fetch`] decodes columns in place.
//!   [`Client::query`] decodes all rows, for setup and checks.
//!
//! It supports protocol 3.0 over TCP with trust, clear-text, MD5 and SCRAM-SHA-256 authentication.
//! It does not support TLS: to benchmark a remote server that requires TLS, use a tunnel.

mod authentication;
mod error;
mod frames;
mod row;

use std::time::Duration;

use bytes::{Buf, BufMut, BytesMut};
use postgres_protocol::IsNull;
use postgres_protocol::message::frontend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub use self::error::Error;
use self::frames::Frame;
pub use self::row::Row;
use crate::Target;

/// Timeout of a connection attempt, including authentication.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Timeout of a statement outside the measurement.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// Initial buffer capacity: enough for the largest common response (a row of 1 KB), and small
/// enough for thousands of connections.
const BUFFER_BYTES: usize = 4 << 10;

/// The parameter types that the workloads use, named after the PostgreSQL types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// `int4`
    Int4,
    /// `int8`
    Int8,
    /// `varchar`
    Varchar,
}

impl Type {
    fn oid(self) -> u32 {
        match self {
            Type::Int4 => 23,
            Type::Int8 => 20,
            Type::Varchar => 1043,
        }
    }
}

/// The value of a parameter, sent in binary format.
#[derive(Clone, Copy, Debug)]
pub enum Parameter<'a> {
    /// For [`Type::Int4`].
    Int4(i32),
    /// For [`Type::Int8`].
    Int8(i64),
    /// For [`Type::Varchar`]; UTF-8.
    Text(&'a [u8]),
}

/// A statement prepared on one connection.
#[derive(Debug)]
pub struct Statement {
    name: String,
}

/// A connection.
pub struct Client {
    stream: TcpStream,
    input: BytesMut,
    output: BytesMut,
    statements: u32,
    executed: u64,
    in_transaction: bool,
}

impl Client {
    /// Connects and authenticates.
    pub async fn connect(target: &Target) -> Result<Client, Error> {
        with_timeout(CONNECT_TIMEOUT, Client::open(target)).await
    }

    async fn open(target: &Target) -> Result<Client, Error> {
        let stream = TcpStream::connect((target.host.as_str(), target.port)).await?;
        stream.set_nodelay(true)?;
        let mut client = Client {
            stream,
            input: BytesMut::with_capacity(BUFFER_BYTES),
            output: BytesMut::with_capacity(BUFFER_BYTES),
            statements: 0,
            executed: 0,
            in_transaction: false,
        };
        client.authenticate(target).await?;
        Ok(client)
    }

    /// Prepares `sql`. `types` are the types of its parameters `$1`, `$2` and so on.
    pub async fn prepare(&mut self, sql: &str, types: &[Type]) -> Result<Statement, Error> {
        let name = format!("s{}", self.statements);
        self.statements += 1;
        frontend::parse(&name, sql, types.iter().map(|kind| kind.oid()), &mut self.output)?;
        frontend::sync(&mut self.output);
        with_timeout(ANSWER_TIMEOUT, async {
            self.send().await?;
            self.read_response(|_| Ok(())).await
        })
        .await?;
        Ok(Statement { name })
    }

    /// Executes a prepared statement with one write and, usually, one read. Returns the number of
    /// rows that it returned or changed. There is no timeout, because a timer per statement would
    /// cost the driver CPU time: the caller bounds the run instead.
    pub async fn execute(
        &mut self,
        statement: &Statement,
        parameters: &[Parameter<'_>],
    ) -> Result<u64, Error> {
        self.begin_execution(statement, parameters).await?;
        self.row_count().await
    }

    /// Like [`Client::execute`], and passes each row to `visit`. If `visit` fails, its error is
    /// returned once the server has completed the response.
    pub async fn fetch(
        &mut self,
        statement: &Statement,
        parameters: &[Parameter<'_>],
        mut visit: impl FnMut(&mut Row<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.begin_execution(statement, parameters).await?;
        let mut failure = None;
        self.read_response(|frame| {
            if frame.tag == b'D' && failure.is_none() {
                failure = Row::new(frame.body).and_then(|mut row| visit(&mut row)).err();
            }
            Ok(())
        })
        .await?;
        failure.map_or(Ok(()), Err)
    }

    async fn begin_execution(
        &mut self,
        statement: &Statement,
        parameters: &[Parameter<'_>],
    ) -> Result<(), Error> {
        let parameters = parameters.iter();
        frontend::bind("", &statement.name, [1], parameters, write_parameter, [], &mut self.output)
            .map_err(|_| Error::Protocol("parameter value is too long"))?;
        frontend::execute("", 0, &mut self.output)?;
        frontend::sync(&mut self.output);
        self.executed += 1;
        self.send().await
    }

    /// Runs statements with the simple query protocol and returns the rows of all of them as text.
    /// Times out after [`ANSWER_TIMEOUT`].
    pub async fn query(&mut self, sql: &str) -> Result<Vec<Vec<Option<String>>>, Error> {
        frontend::query(sql, &mut self.output)?;
        let mut rows = Vec::new();
        with_timeout(ANSWER_TIMEOUT, async {
            self.send().await?;
            self.read_response(|frame| {
                if frame.tag == b'D' {
                    rows.push(frame.values()?);
                }
                Ok(())
            })
            .await
        })
        .await?;
        Ok(rows)
    }

    /// Runs a `COPY ... FROM STDIN` and returns the number of rows that the server copied. `write`
    /// appends the next lines to an empty buffer and returns `false` if there are none left. There
    /// is no timeout.
    pub async fn copy_in(
        &mut self,
        sql: &str,
        mut write: impl FnMut(&mut Vec<u8>) -> bool,
    ) -> Result<u64, Error> {
        frontend::query(sql, &mut self.output)?;
        self.send().await?;
        let mut piece = Vec::new();
        if self.copy_accepted().await? {
            while write(&mut piece) {
                frontend::CopyData::new(&piece[..])?.write(&mut self.output);
                self.send().await?;
                piece.clear();
            }
            frontend::copy_done(&mut self.output);
            self.send().await?;
        }
        self.row_count().await
    }

    /// Waits for the server's response to a COPY command. Returns true for CopyInResponse, and
    /// false for any other response, which stays in the input buffer.
    async fn copy_accepted(&mut self) -> Result<bool, Error> {
        loop {
            if let Some((frame, length)) = Frame::first(&self.input)? {
                let (asks, notice) = (frame.tag == b'G', matches!(frame.tag, b'N' | b'S'));
                if asks || notice {
                    self.input.advance(length);
                }
                if !notice {
                    return Ok(asks);
                }
                continue;
            }
            self.receive().await?;
        }
    }

    /// The number of executions of prepared statements on this connection.
    pub fn executed(&self) -> u64 {
        self.executed
    }

    /// Returns true if the session is inside a transaction block, including a failed one.
    pub fn in_transaction(&self) -> bool {
        self.in_transaction
    }

    /// Sends Terminate before closing, so that the server does not log a broken connection.
    pub async fn close(mut self) -> Result<(), Error> {
        frontend::terminate(&mut self.output);
        self.send().await?;
        self.stream.shutdown().await?;
        Ok(())
    }

    async fn send(&mut self) -> Result<(), Error> {
        let result = self.stream.write_all(&self.output).await;
        self.output.clear();
        Ok(result?)
    }

    /// Reads messages up to ReadyForQuery. Returns the row count of the last command, or the number
    /// of rows received if that is larger: the tag of CALL has no row count.
    async fn row_count(&mut self) -> Result<u64, Error> {
        let (mut returned, mut rows) = (0, 0);
        self.read_response(|frame| {
            match frame.tag {
                b'D' => returned += 1,
                b'C' => rows = frame.row_count().max(returned),
                _ => {}
            }
            Ok(())
        })
        .await?;
        Ok(rows)
    }

    /// Reads messages up to ReadyForQuery and passes each to `visit`. Returns the server's first
    /// error once the server is ready again or has closed the connection.
    async fn read_response(
        &mut self,
        mut visit: impl FnMut(&Frame<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut failure = None;
        loop {
            while let Some((frame, length)) = Frame::first(&self.input)? {
                match frame.tag {
                    b'Z' => {
                        self.in_transaction = frame.body.first() != Some(&b'I');
                        self.input.advance(length);
                        return failure.map_or(Ok(()), Err);
                    }
                    b'E' if failure.is_none() => failure = Some(frame.server_error()),
                    b'G' | b'W' => return Err(Error::Protocol("unexpected COPY response")),
                    _ => visit(&frame)?,
                }
                self.input.advance(length);
            }
            match self.receive().await {
                Ok(()) => {}
                Err(error) => return Err(failure.unwrap_or(error)),
            }
        }
    }

    async fn receive(&mut self) -> Result<(), Error> {
        // BytesMut::reserve moves an empty buffer back to its start instead of growing it.
        self.input.reserve(BUFFER_BYTES / 2);
        match self.stream.read_buf(&mut self.input).await? {
            0 => Err(Error::Closed),
            _ => Ok(()),
        }
    }
}

/// Limits `work` to `time`. After a timeout the connection must not be used again, because the late
/// response may still arrive.
pub(crate) async fn with_timeout<T>(
    time: Duration,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(time, work).await {
        Ok(result) => result,
        Err(_) => Err(Error::Timeout(time)),
    }
}

type ParameterError = Box<dyn std::error::Error + Sync + Send>;

fn write_parameter(parameter: &Parameter<'_>, out: &mut BytesMut) -> Result<IsNull, ParameterError> {
    match parameter {
        Parameter::Int4(value) => out.put_i32(*value),
        Parameter::Int8(value) => out.put_i64(*value),
        Parameter::Text(bytes) => out.put_slice(bytes),
    }
    Ok(IsNull::No)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn unresponsive_server_times_out() {
        // The kernel accepts the connection, and nothing ever responds to it.
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let target: Target = format!("postgres://nobody@127.0.0.1:{port}/none").parse().unwrap();
        let time = Duration::from_millis(5);
        let error = with_timeout(time, Client::open(&target)).await.err();
        let error = error.expect("the connection attempt must time out");
        assert!(matches!(error, Error::Timeout(_)) && error.ends_session(), "{error}");
    }
}
