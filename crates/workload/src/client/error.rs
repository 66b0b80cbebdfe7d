//! What can go wrong between the driver and a server.

use std::io;
use std::time::Duration;

/// Why a request to a server failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server answered with an error.
    #[error("the server answered {sqlstate}: {message}")]
    Server {
        /// The five characters of the SQLSTATE.
        sqlstate: String,
        /// The server's primary message, with the detail and the hint if it gives them.
        message: String,
    },
    /// The network, or the server's end of it, failed.
    #[error("the connection failed: {0}")]
    Io(io::Error),
    /// The server did not answer in time.
    #[error("the server has not answered for {0:?}")]
    Silent(Duration),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server sent what the protocol does not allow here, or what this client does not speak.
    #[error("protocol: {0}")]
    Protocol(&'static str),
}

/// The cause stands in the message, since errors are shown by that alone too; so it is no source, to be shown again.
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

    /// The transaction may succeed if it is run again: a serialization failure or a deadlock.
    pub fn is_retryable(&self) -> bool {
        matches!(self.sqlstate(), Some("40001" | "40P01"))
    }

    /// The session is gone (or could not be had yet): only another connection can go on.
    pub fn ends_session(&self) -> bool {
        match self {
            Error::Io(_) | Error::Silent(_) | Error::Closed | Error::Protocol(_) => true,
            Error::Server { sqlstate, .. } => sqlstate.starts_with("57P") || sqlstate.starts_with("08"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        let error = Error::from(io::Error::from(io::ErrorKind::ConnectionRefused));
        let told = format!("{:#}", anyhow::Error::new(error).context("cannot use it"));
        assert_eq!(told, "cannot use it: the connection failed: connection refused");
    }
}
