//! TLS between nodes: mutual authentication with certificates of the cluster's authority.
//!
//! ```text
//!   dialing node                               accepting node
//!   TLS 1.3 handshake           <---->         checks the certificate of the dialing node
//!   checks the certificate, which must
//!   contain the name of the node it dialed
//!   waits for the confirmation  <-----         confirmation: one byte
//!   Hello ...                   ----->         (see [`crate::hello`])
//! ```
//!
//! In TLS 1.3 a client's handshake ends before the server has checked the client's certificate. The
//! confirmation makes [`NodeTls::connect`] fail with the reason, instead of the first read or write.
//!
//! Every connection checks both certificates: sessions are not resumed.

mod refusal;
mod stream;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fulmar_certificates::{
    Error as CertificateError, FileWatch, PemFile, PemPair, Reload, TrustedAuthorities, check_name,
};
use parking_lot::RwLock;
use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use crate::Error;
pub(crate) use refusal::ALL_OR_NONE;
use refusal::{Handshake, refusal};
pub use stream::{NodeStream, Peer};

/// The byte that the accepting node sends after the handshake.
const CONFIRMATION: u8 = 1;

/// A certificate that expires within this time causes a warning.
const EXPIRY_NOTICE: Duration = Duration::from_hours(14 * 24);

/// The files with which a node authenticates itself to others, and others to itself.
#[derive(Clone, Debug)]
pub struct NodeTlsFiles {
    /// Certificates of the authorities whose nodes are accepted: `--rpc-ca`.
    pub ca: PathBuf,
    /// The certificate chain of this node: `--rpc-cert`.
    pub certificate: PathBuf,
    /// Its private key: `--rpc-key`.
    pub key: PathBuf,
}

/// TLS for connections with other nodes.
#[derive(Debug)]
pub struct NodeTls {
    name: String,
    ca: PemFile,
    pair: PemPair,
    files: FileWatch,
    current: RwLock<Arc<Credentials>>,
}

/// Certificates in use.
#[derive(Debug)]
struct Credentials {
    chain: Vec<CertificateDer<'static>>,
    trusted: TrustedAuthorities,
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl NodeTls {
    /// Loads the certificates of the node `name`. Fails if other nodes would reject them.
    pub fn load(files: NodeTlsFiles, name: &str) -> Result<Arc<NodeTls>, CertificateError> {
        let ca = PemFile::new("--rpc-ca", files.ca);
        let certificate = PemFile::new("--rpc-cert", files.certificate);
        let pair = PemPair { certificate, key: PemFile::new("--rpc-key", files.key) };
        let files = FileWatch::new([ca.path(), pair.certificate.path(), pair.key.path()]);
        let current = RwLock::new(Arc::new(Credentials::read(&ca, &pair, name)?));
        Ok(Arc::new(NodeTls { name: name.to_owned(), ca, pair, files, current }))
    }

    /// Authenticates a byte stream that this node dialed. The peer must have a certificate for
    /// `peer_name`, the name of the node that this node wants to talk to.
    pub async fn connect<S>(&self, stream: S, peer_name: &str) -> Result<TlsStream<S>, Error>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let label = format!("node \"{peer_name}\"");
        let server_name = ServerName::try_from(peer_name.to_owned()).map_err(|_| {
            Error::Refused(format!(
                "{label} cannot have a certificate: its name is not a DNS name; rename it"
            ))
        })?;
        let connector = TlsConnector::from(self.current().client.clone());
        let confirmed = async {
            let mut stream = connector.connect(server_name, stream).await?;
            let confirmation = stream.read_u8().await?;
            Ok((stream, confirmation))
        };
        match confirmed.await {
            Ok((stream, CONFIRMATION)) => Ok(stream.into()),
            Ok(_) => Err(Error::Protocol("unknown confirmation of the TLS handshake")),
            Err(error) => Err(refusal(error, Handshake::With(&label))),
        }
    }

    /// Authenticates a byte stream that another node has dialed. The peer may be any node of the
    /// cluster; [`Peer::check_name`] checks which.
    pub async fn accept<S>(&self, stream: S) -> Result<TlsStream<S>, Error>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let acceptor = TlsAcceptor::from(self.current().server.clone());
        let confirmed = async {
            let mut stream = acceptor.accept(stream).await?;
            stream.write_u8(CONFIRMATION).await?;
            stream.flush().await?;
            Ok(stream.into())
        };
        confirmed.await.map_err(|error| refusal(error, Handshake::WithDialingNode))
    }

    fn current(&self) -> Arc<Credentials> {
        self.current.read().clone()
    }
}

impl Reload for NodeTls {
    fn name(&self) -> &'static str {
        "TLS certificate for connections between nodes"
    }

    fn files(&self) -> &FileWatch {
        &self.files
    }

    fn reload(&self) -> Result<(), CertificateError> {
        *self.current.write() = Arc::new(Credentials::read(&self.ca, &self.pair, &self.name)?);
        Ok(())
    }

    fn warning(&self) -> Option<String> {
        let current = self.current();
        current.trusted.check(&current.chain, SystemTime::now() + EXPIRY_NOTICE).err()?;
        Some(format!(
            "{} expires within {} days, and other nodes reject it then; issue a new one with `fulmar cert node`",
            self.pair.certificate,
            EXPIRY_NOTICE.as_secs() / 86_400
        ))
    }
}

impl Credentials {
    fn read(ca: &PemFile, pair: &PemPair, name: &str) -> Result<Credentials, CertificateError> {
        let in_ca = |error| CertificateError(format!("invalid {ca}: {error}"));
        let trusted = TrustedAuthorities::new(ca.certificates()?).map_err(in_ca)?;
        // Checks that the key matches.
        let chain = pair.read()?.cert;
        let rejected = |error| CertificateError(format!("the certificate in {} {error}", pair.certificate));
        trusted.check(&chain, SystemTime::now()).map_err(rejected)?;
        check_name(&chain[0], name).map_err(rejected)?;
        let invalid =
            |error: rustls::Error| CertificateError(format!("invalid {}: {error}", pair.certificate));
        let provider = Arc::new(ring::default_provider());
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(invalid)?
            .with_root_certificates(trusted.roots())
            .with_client_auth_cert(chain.clone(), pair.key.key()?)
            .map_err(invalid)?;
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(invalid)?
            .with_client_cert_verifier(trusted.client_verifier())
            .with_single_cert(chain.clone(), pair.key.key()?)
            .map_err(invalid)?;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        Ok(Credentials { chain, trusted, client: Arc::new(client), server: Arc::new(server) })
    }
}
