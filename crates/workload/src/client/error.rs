//! Errors of the benchmark client.

use std::io;
use std::time::Duration;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server answered with an error.
    #[error("server error {sqlstate}: {message}")]
    Server {
        /// The five-character SQLSTATE.
        sqlstate: String,
        /// The server's primary message, followed by its detail and hint if it sent them.
        message: String,
    },
    /// The connection failed with an I/O error.
    #[error("connection failed: {0}")]
    Io(io::Error),
    /// The server did not respond in time.
    #[error("no response from the server within {0:?}")]
    Timeout(Duration),
    /// The server closed the connection.
    #[error("server closed the connection unexpectedly")]
    Closed,
    /// The server violated the protocol, or used a part of it that this client does not support.
    #[error("protocol error: {0}")]
    Protocol(&'static str),
}

/// The cause is part of the message, because errors are also shown without their sources. It is
/// therefore not a source, or it would be shown twice.
impl From<io::Error> for Error {
    fn from(cause: io::Error) -> Error {
        Error::Io(cause)
    }
}

impl Error {
    /// The SQLSTATE, if the server sent one.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            Error::Server { sqlstate, .. } => Some(sqlstate),
            _ => None,
        }
    }

    /// Returns true for serialization failures and deadlocks: a retry of the transaction may
    /// succeed.
    pub fn is_retryable(&self) -> bool {
        matches!(self.sqlstate(), Some("40001" | "40P01"))
    }

    /// Returns true if the session is lost or could not be established, so that only a new
    /// connection can continue.
    pub fn ends_session(&self) -> bool {
        match self {
            Error::Io(_) | Error::Timeout(_) | Error::Closed | Error::Protocol(_) => true,
            Error::Server { sqlstate, .. } => sqlstate.starts_with("57P") || sqlstate.starts_with("08"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cause_is_shown_once() {
        let error = Error::from(io::Error::from(io::ErrorKind::ConnectionRefused));
        let shown = format!("{:#}", anyhow::Error::new(error).context("could not connect"));
        assert_eq!(shown, "could not connect: connection failed: connection refused");
    }
}
