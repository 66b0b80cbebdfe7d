//! Errors of a connection and of its streams.

use std::sync::Arc;

/// Why a connection or a stream has ended.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The byte stream failed, or the peer closed it.
    #[error("connection to the node was lost: {0}")]
    Lost(Arc<std::io::Error>),
    /// The peer sent bytes that are not part of the protocol.
    #[error("protocol violation by the peer: {0}")]
    Protocol(&'static str),
    /// The peer refused the connection, or this node did. The text gives the cause and the remedy.
    #[error("{0}")]
    Refused(String),
    /// The peer reset the stream.
    #[error("request was rejected by the node: {0}")]
    Reset(String),
    /// A message is longer than the receiver allows.
    #[error("message of more than {limit_bytes} bytes")]
    TooLong {
        /// The receiver's limit.
        limit_bytes: usize,
    },
    /// The connection has [`crate::MAX_STREAMS`] streams.
    #[error("too many concurrent requests to one node")]
    TooManyStreams,
    /// This node closed the connection.
    #[error("connection was closed")]
    Closed,
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Error::Lost(Arc::new(error))
    }
}
