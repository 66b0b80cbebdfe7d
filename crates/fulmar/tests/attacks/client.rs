//! Clients of a node under attack: ordinary sessions, and raw connections that disconnect, stall or
//! do not read.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_postgres::{CancelToken, Client, Config, NoTls};

/// The password of every user in these tests.
pub const PASSWORD: &str = "correct horse";

/// Timeout for the response to a script, or to statements that no timeout ends. A response that
/// takes longer is a hang, not a slow machine.
pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(600);

/// The response of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Response {
    /// Success.
    Success,
    /// An error with its SQLSTATE and message.
    Error(String, String),
    /// The connection was closed without an error message.
    Closed(String),
    /// No response within this time.
    Timeout(Duration),
    /// A response after its deadline.
    Late(Duration),
    /// An incorrect response.
    Wrong(String),
}

impl Response {
    pub fn of<T>(result: Result<T, tokio_postgres::Error>) -> Response {
        let Err(error) = result else { return Response::Success };
        match error.as_db_error() {
            Some(error) => Response::Error(error.code().code().to_owned(), error.message().to_owned()),
            None => Response::Closed(error.to_string()),
        }
    }

    /// Returns the SQLSTATE, with `00000` for success, or a word for the other cases.
    pub fn state(&self) -> &str {
        match self {
            Response::Success => "00000",
            Response::Error(state, _) => state,
            Response::Closed(_) => "closed",
            Response::Timeout(_) => "nothing",
            Response::Late(_) => "late",
            Response::Wrong(_) => "wrong",
        }
    }
}

impl std::fmt::Display for Response {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Response::Success => write!(f, "success"),
            Response::Error(state, message) => {
                write!(f, "{state} {}", message.chars().take(120).collect::<String>())
            }
            Response::Closed(cause) => write!(f, "connection closed ({cause})"),
            Response::Timeout(timeout) => write!(f, "no response within {timeout:?}"),
            Response::Late(took) => write!(f, "late response after {took:.1?}"),
            Response::Wrong(text) => write!(f, "incorrect response: {text}"),
        }
    }
}

/// Waits up to [`RESPONSE_TIMEOUT`] for the response to a statement.
pub async fn answer<T>(statement: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Response {
    answer_within(RESPONSE_TIMEOUT, statement).await
}

/// Waits up to `limit` for the response to a statement.
pub async fn answer_within<T>(
    limit: Duration,
    statement: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Response {
    timeout(limit, statement).await.map_or(Response::Timeout(limit), Response::of)
}

/// Returns the connection settings of a user. `sql` is the address of the node.
pub fn config(sql: &str, tenant: &str, user: &str) -> Config {
    let (host, port) = sql.rsplit_once(':').unwrap();
    let mut config = Config::new();
    config.host(host).port(port.parse().unwrap()).dbname(tenant).user(user).password(PASSWORD);
    config
}

/// Opens an ordinary session.
pub async fn log_in(sql: &str, tenant: &str, user: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = config(sql, tenant, user).connect(NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// A raw connection after its login.
pub struct Raw {
    socket: TcpStream,
    /// Bytes received after the last complete message.
    unread: Vec<u8>,
    cancel: CancelToken,
}

/// Size of one read from the socket.
const READ_BYTES: usize = 1 << 20;

impl Raw {
    pub async fn log_in(sql: &str, tenant: &str, user: &str) -> io::Result<Raw> {
        let socket = std::net::TcpStream::connect(sql)?;
        socket.set_nonblocking(true)?;
        let login = TcpStream::from_std(socket.try_clone()?)?;
        let session = config(sql, tenant, user).connect_raw(login, NoTls).await.map_err(io::Error::other)?;
        let cancel = session.0.cancel_token();
        // The connection is not polled again, so it sends no Terminate, and the session stays open
        // on the duplicated descriptor.
        drop(session);
        Ok(Raw { socket: TcpStream::from_std(socket)?, unread: Vec::new(), cancel })
    }

    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.socket.write_all(bytes).await
    }

    /// Sends a cancel request for the running statement.
    pub async fn cancel(&self) -> io::Result<()> {
        let connection = TcpStream::connect(self.socket.peer_addr()?).await?;
        self.cancel.cancel_query_raw(connection, NoTls).await.map_err(io::Error::other)
    }

    /// Reads messages until `count` messages of the type `wanted`, or an error, have arrived.
    pub async fn read_until(&mut self, wanted: u8, count: usize) -> Response {
        let Raw { socket, unread, .. } = self;
        let reading = async {
            let mut seen = 0;
            loop {
                while let Some(length) = complete(unread) {
                    let message: Vec<u8> = unread.drain(..length).collect();
                    if message[0] == b'E' {
                        return Ok(error(&message[5..]));
                    }
                    seen += usize::from(message[0] == wanted);
                    if seen == count {
                        return Ok(Response::Success);
                    }
                }
                socket.readable().await?;
                let start = unread.len();
                unread.resize(start + READ_BYTES, 0);
                let read = socket.try_read(&mut unread[start..]);
                unread.truncate(start + read.as_ref().map_or(0, |bytes| *bytes));
                match read {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                    _ => {}
                }
            }
        };
        match timeout(RESPONSE_TIMEOUT, reading).await {
            Err(_) => Response::Timeout(RESPONSE_TIMEOUT),
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => Response::Closed(error.to_string()),
        }
    }
}

/// Returns the length of the first message, if it is complete.
fn complete(bytes: &[u8]) -> Option<usize> {
    let length = u32::from_be_bytes(*bytes.get(1..)?.first_chunk()?) as usize + 1;
    (bytes.len() >= length).then_some(length)
}

/// Parses the fields of an ErrorResponse: each one is a letter and a C string.
fn error(fields: &[u8]) -> Response {
    let field = |name: u8| {
        let mut fields = fields.split(|byte| *byte == 0).filter(|field| !field.is_empty());
        let field = fields.find(|field| field[0] == name).map(|field| &field[1..]);
        String::from_utf8_lossy(field.unwrap_or_default()).into_owned()
    };
    Response::Error(field(b'C'), field(b'M'))
}

/// Encodes a message of the wire protocol, version 3.
pub fn message(kind: u8, body: &[&[u8]]) -> Vec<u8> {
    let length = 4 + body.iter().map(|part| part.len()).sum::<usize>();
    let mut message = vec![kind];
    message.extend((length as u32).to_be_bytes());
    body.iter().for_each(|part| message.extend_from_slice(part));
    message
}

/// Encodes a simple query.
pub fn query(sql: &str) -> Vec<u8> {
    message(b'Q', &[sql.as_bytes(), b"\0"])
}

/// Encodes a Parse of the unnamed statement with one parameter of type text.
pub fn parse(sql: &str) -> Vec<u8> {
    message(b'P', &[b"\0", sql.as_bytes(), b"\0", &[0, 1, 0, 0, 0, 25]])
}

/// Encodes a Bind of the unnamed statement to a portal.
pub fn bind(portal: &str, parameter: &[u8]) -> Arc<[u8]> {
    let length = (parameter.len() as u32).to_be_bytes();
    message(b'B', &[portal.as_bytes(), b"\0\0", &[0, 0, 0, 1], &length, parameter, &[0, 0]]).into()
}

pub const FLUSH: [u8; 5] = [b'H', 0, 0, 0, 4];
