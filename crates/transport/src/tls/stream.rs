//! The byte stream between two nodes, with TLS or without.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

use super::{NodeTls, check_peer_name};
use crate::Error;

/// A byte stream between two nodes.
#[derive(Debug)]
pub enum NodeStream {
    /// Neither encrypted nor authenticated.
    Plain(TcpStream),
    /// With TLS.
    Tls(Box<TlsStream<TcpStream>>),
}

impl NodeStream {
    /// Authenticates the node `peer_name`, which this node has dialed, if this node uses TLS.
    pub async fn connect(tcp: TcpStream, tls: Option<&NodeTls>, peer_name: &str) -> Result<Self, Error> {
        match tls {
            Some(tls) => Ok(NodeStream::Tls(Box::new(tls.connect(tcp, peer_name).await?))),
            None => Ok(NodeStream::Plain(tcp)),
        }
    }

    /// Authenticates the node that has dialed this node, if this node uses TLS.
    pub async fn accept(tcp: TcpStream, tls: Option<&NodeTls>) -> Result<Self, Error> {
        match tls {
            Some(tls) => Ok(NodeStream::Tls(Box::new(tls.accept(tcp).await?))),
            None => Ok(NodeStream::Plain(tcp)),
        }
    }

    /// Checks that the peer's certificate is that of the node `name`. Without TLS, every name is
    /// accepted.
    pub fn check_peer_name(&self, name: &str) -> Result<(), Error> {
        match self {
            NodeStream::Plain(_) => Ok(()),
            NodeStream::Tls(stream) => check_peer_name(stream, name),
        }
    }
}

impl AsyncRead for NodeStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            NodeStream::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            NodeStream::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for NodeStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            NodeStream::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            NodeStream::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            NodeStream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            NodeStream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            NodeStream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            NodeStream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
