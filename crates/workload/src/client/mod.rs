//! A small Postgres client that costs its machine little.
//!
//! The driver shares the machine with the server it measures: what the driver burns, the server cannot have. So this
//! client does one thing well, the closed loop of a prepared statement:
//!
//! ```text
//!   Bind Execute Sync  --one write-->   server
//!   client             <--one read---   BindComplete DataRow.. CommandComplete ReadyForQuery
//! ```
//! Messages are built into a buffer that is kept, and answers are looked at where they were read: no allocation, no
//! task, no channel per statement. A connection is driven by the task that owns it; hundreds of them share a thread
//! and its event loop. Rows are counted, or read in place by who needs their columns ([`Client::fetch`]);
//! [`Client::query`] decodes all, for set-up and checks.
//!
//! It speaks protocol 3.0 over TCP, trust, clear-text, MD5 and SCRAM-SHA-256 authentication. It has no TLS: a
//! benchmark of a server elsewhere that demands it needs a tunnel.

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

/// How long a connection attempt may take, authentication included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a server may think about a statement that is not part of a measurement.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// Room for the largest common answer (a row of a kilobyte), small enough for thousands of connections.
const BUFFER_BYTES: usize = 4 << 10;

/// The types of parameters that the workloads use, by name of their Postgres type.
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

/// A parameter's value, sent in binary format.
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

/// One connection.
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
        within(CONNECT_TIMEOUT, Client::open(target)).await
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

    /// Prepares `sql`, whose parameters `$1`, `$2` ... have these types.
    pub async fn prepare(&mut self, sql: &str, types: &[Type]) -> Result<Statement, Error> {
        let name = format!("s{}", self.statements);
        self.statements += 1;
        frontend::parse(&name, sql, types.iter().map(|kind| kind.oid()), &mut self.output)?;
        frontend::sync(&mut self.output);
        within(ANSWER_TIMEOUT, async {
            self.send().await?;
            self.answer(|_| Ok(())).await
        })
        .await?;
        Ok(Statement { name })
    }

    /// Runs a prepared statement: one write, one read. Answers how many rows it returned or changed. Waits as long as
    /// the server takes (a timer for each statement would cost the driver): who measures sets bounds from outside.
    pub async fn execute(
        &mut self,
        statement: &Statement,
        parameters: &[Parameter<'_>],
    ) -> Result<u64, Error> {
        self.begin_execution(statement, parameters).await?;
        self.row_count().await
    }

    /// As [`Client::execute`], showing each row to `look` where it was read. An error of `look` is the answer once the
    /// server has answered.
    pub async fn fetch(
        &mut self,
        statement: &Statement,
        parameters: &[Parameter<'_>],
        mut look: impl FnMut(&mut Row<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.begin_execution(statement, parameters).await?;
        let mut failure = None;
        self.answer(|frame| {
            if frame.tag == b'D' && failure.is_none() {
                failure = Row::new(frame.body).and_then(|mut row| look(&mut row)).err();
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
            .map_err(|_| Error::Protocol("a parameter is too long"))?;
        frontend::execute("", 0, &mut self.output)?;
        frontend::sync(&mut self.output);
        self.executed += 1;
        self.send().await
    }

    /// Runs statements by the simple protocol; answers the rows of all of them as text. Two minutes at most.
    pub async fn query(&mut self, sql: &str) -> Result<Vec<Vec<Option<String>>>, Error> {
        frontend::query(sql, &mut self.output)?;
        let mut rows = Vec::new();
        within(ANSWER_TIMEOUT, async {
            self.send().await?;
            self.answer(|frame| {
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

    /// Runs a `COPY ... FROM STDIN`. `write` puts the next lines into an empty buffer, and answers `false` when there are
    /// no more. Answers how many rows the server has taken. Waits as long as the server takes.
    pub async fn copy_in(
        &mut self,
        sql: &str,
        mut write: impl FnMut(&mut Vec<u8>) -> bool,
    ) -> Result<u64, Error> {
        frontend::query(sql, &mut self.output)?;
        self.send().await?;
        let mut piece = Vec::new();
        if self.invited().await? {
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

    /// Waits until the server asks for rows; `false` if it has something else to say.
    async fn invited(&mut self) -> Result<bool, Error> {
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

    /// How many prepared statements this connection has executed.
    pub fn executed(&self) -> u64 {
        self.executed
    }

    /// The session is inside a transaction block (a failed one too).
    pub fn in_transaction(&self) -> bool {
        self.in_transaction
    }

    /// Says good-bye, so that the server need not log a broken connection.
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

    /// Reads messages up to ReadyForQuery; answers how many rows were returned, or how many the last command says that it
    /// changed. (A CALL does not say how many it returned.)
    async fn row_count(&mut self) -> Result<u64, Error> {
        let (mut returned, mut rows) = (0, 0);
        self.answer(|frame| {
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

    /// Reads messages up to ReadyForQuery, showing each to `look`. The first error of the server is the answer, once
    /// the server is ready again or has hung up.
    async fn answer(&mut self, mut look: impl FnMut(&Frame<'_>) -> Result<(), Error>) -> Result<(), Error> {
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
                    b'G' | b'W' => return Err(Error::Protocol("COPY is not spoken by this client")),
                    _ => look(&frame)?,
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
        // An emptied buffer is rewound to its start instead of growing.
        self.input.reserve(BUFFER_BYTES / 2);
        match self.stream.read_buf(&mut self.input).await? {
            0 => Err(Error::Closed),
            _ => Ok(()),
        }
    }
}

/// A connection that ran out of time is of no more use: its answer may still come.
pub(crate) async fn within<T>(
    time: Duration,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(time, work).await {
        Ok(result) => result,
        Err(_) => Err(Error::Silent(time)),
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
    async fn a_silent_server_is_given_up() {
        // Accepts connections (the kernel does), never answers.
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let target: Target = format!("postgres://nobody@127.0.0.1:{port}/none").parse().unwrap();
        let time = Duration::from_millis(5);
        let error = within(time, Client::open(&target)).await.err().expect("no answer comes");
        assert!(matches!(error, Error::Silent(_)) && error.ends_session(), "{error}");
    }
}
