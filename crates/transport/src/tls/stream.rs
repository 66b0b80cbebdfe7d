//! The byte stream between two nodes, with TLS or without.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use fulmar_certificates::check_name;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

use super::NodeTls;
use super::refusal::DIALING_NODE;
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

    /// The peer, as its certificate identifies it.
    pub fn peer(&self) -> Peer {
        let certificate = match self {
            NodeStream::Plain(_) => return Peer::Unauthenticated,
            NodeStream::Tls(stream) => stream.get_ref().1.peer_certificates().and_then(<[_]>::first),
        };
        Peer::Certificate(certificate.map(|certificate| certificate.clone().into_owned()))
    }
}

/// Who the peer of a byte stream has proved to be.
#[derive(Clone, Debug)]
pub enum Peer {
    /// Unknown: the connection has no TLS.
    Unauthenticated,
    /// A node with this certificate, which has been verified.
    Certificate(Option<CertificateDer<'static>>),
}

impl Peer {
    /// Checks that the certificate is that of the node `name`. An accepting node calls it once it
    /// knows from the handshake of the connection which node the peer claims to be. Without TLS,
    /// every name is accepted.
    pub fn check_name(&self, name: &str) -> Result<(), Error> {
        let certificate = match self {
            Peer::Unauthenticated => return Ok(()),
            Peer::Certificate(certificate) => certificate.as_ref(),
        };
        let certificate = certificate.ok_or(Error::Protocol("the peer has no certificate"))?;
        check_name(certificate, name).map_err(|error| {
            Error::Refused(format!("{DIALING_NODE} is not node \"{name}\": its certificate {error}"))
        })
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
