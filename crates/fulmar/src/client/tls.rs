//! TLS to a node, in libpq's words: `?sslmode=verify-full&sslrootcert=FILE` means what it means to psql.
//!
//! | sslmode | TLS | the node's certificate |
//! | --- | --- | --- |
//! | `disable` | never | |
//! | `prefer`, `require` | if the node has it; always | any, or with `sslrootcert` as `verify-ca` |
//! | `verify-ca` | always | is in the file that `sslrootcert` names, or signed by one that is |
//! | `verify-full` | always | the same, and it names the host of the address |
//!
//! A certificate that is itself in the file is trusted as it is, whatever it says of what it is for: the usual certificate
//! that signs itself calls itself an authority, which WebPKI does not take from a server.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use anyhow::{Context, bail, ensure};
use futures::future::{BoxFuture, FutureExt};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::Config;
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::TlsConnector;

/// What a URL says of TLS.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Wanted {
    mode: Option<Mode>,
    roots: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Disable,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

/// The URL without what tokio-postgres does not know, and that.
pub(super) fn taken_out(url: &str) -> anyhow::Result<(String, Wanted)> {
    let mut wanted = Wanted::default();
    let Some((address, query)) = url.split_once('?') else { return Ok((url.to_owned(), wanted)) };
    let mut rest = Vec::new();
    for pair in query.split('&') {
        match pair.split_once('=') {
            Some(("sslmode", mode)) => wanted.mode = Some(Mode::parse(mode)?),
            Some(("sslrootcert", file)) => wanted.roots = Some(decoded(file)?.into()),
            _ => rest.push(pair),
        }
    }
    let separator = if rest.is_empty() { "" } else { "?" };
    Ok((format!("{address}{separator}{}", rest.join("&")), wanted))
}

/// A value of a URL, by the decoder of tokio-postgres: in the place of one that it knows.
fn decoded(value: &str) -> anyhow::Result<String> {
    let url = format!("postgres:///?application_name={value}").parse::<Config>();
    let config = url.context("cannot read sslrootcert in --server")?;
    Ok(config.get_application_name().unwrap_or_default().to_owned())
}

impl Mode {
    fn parse(text: &str) -> anyhow::Result<Mode> {
        Ok(match text {
            "disable" => Mode::Disable,
            "prefer" => Mode::Prefer,
            "require" => Mode::Require,
            "verify-ca" => Mode::VerifyCa,
            "verify-full" => Mode::VerifyFull,
            _ => bail!(
                "there is no sslmode \"{text}\" for --server; write disable, prefer, require, verify-ca or verify-full"
            ),
        })
    }
}

/// Makes connections of TLS.
#[derive(Clone)]
pub(super) struct Tls {
    config: Arc<ClientConfig>,
}

impl Tls {
    /// As it is wanted; the configuration is told whether TLS must be.
    pub(super) fn new(wanted: &Wanted, config: &mut Config) -> anyhow::Result<Tls> {
        if let Some(mode) = wanted.mode {
            config.ssl_mode(match mode {
                Mode::Disable => SslMode::Disable,
                Mode::Prefer => SslMode::Prefer,
                Mode::Require | Mode::VerifyCa | Mode::VerifyFull => SslMode::Require,
            });
        }
        ensure!(
            wanted.roots.is_some() || !matches!(wanted.mode, Some(Mode::VerifyCa | Mode::VerifyFull)),
            "this sslmode needs sslrootcert=FILE in --server: the node's certificate, or that of who signed it (on \
             Debian those that the system trusts are in /etc/ssl/certs/ca-certificates.crt)"
        );
        let provider = Arc::new(ring::default_provider());
        let trusted =
            wanted.roots.as_deref().map(|file| Trusted::read(file, wanted.mode == Some(Mode::VerifyFull)));
        let verifier = Verifier { trusted: trusted.transpose()?, provider: provider.clone() };
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        Ok(Tls { config: Arc::new(config) })
    }
}

/// Who is known.
#[derive(Debug)]
struct Trusted {
    named: Vec<CertificateDer<'static>>,
    roots: RootCertStore,
    /// The certificate must be that of the host.
    checks_name: bool,
}

impl Trusted {
    fn read(file: &Path, checks_name: bool) -> anyhow::Result<Trusted> {
        let certificates = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<_, _>>);
        let named: Vec<CertificateDer<'static>> = certificates
            .with_context(|| format!("cannot read the certificates (sslrootcert) in {}", file.display()))?;
        ensure!(!named.is_empty(), "there is no certificate (sslrootcert) in {}", file.display());
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(named.iter().cloned());
        Ok(Trusted { named, roots, checks_name })
    }

    fn verify(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        host: &ServerName<'_>,
        now: UnixTime,
        provider: &CryptoProvider,
    ) -> Result<(), rustls::Error> {
        let certificate = ParsedCertificate::try_from(shown)?;
        if !self.named.contains(shown) {
            let algorithms = provider.signature_verification_algorithms.all;
            verify_server_cert_signed_by_trust_anchor(&certificate, &self.roots, between, now, algorithms)?;
        }
        if self.checks_name { verify_server_name(&certificate, host) } else { Ok(()) }
    }
}

#[derive(Debug)]
struct Verifier {
    /// `None`: everybody is trusted.
    trusted: Option<Trusted>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        host: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified = self
            .trusted
            .as_ref()
            .map_or(Ok(()), |trusted| trusted.verify(shown, between, host, now, &self.provider));
        verified.map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> MakeTlsConnect<S> for Tls {
    type Stream = Encrypted<S>;
    type TlsConnect = ToHost;
    type Error = io::Error;

    fn make_tls_connect(&mut self, host: &str) -> io::Result<ToHost> {
        Ok(ToHost { tls: self.clone(), host: host.to_owned() })
    }
}

/// The handshake with one host.
pub(super) struct ToHost {
    tls: Tls,
    host: String,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> TlsConnect<S> for ToHost {
    type Stream = Encrypted<S>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Encrypted<S>>>;

    fn connect(self, stream: S) -> Self::Future {
        async move {
            let host = ServerName::try_from(self.host).map_err(io::Error::other)?;
            Ok(Encrypted(TlsConnector::from(self.tls.config).connect(host, stream).await?))
        }
        .boxed()
    }
}

/// A stream of tokio-rustls that tokio-postgres takes.
pub(super) struct Encrypted<S>(tokio_rustls::client::TlsStream<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Encrypted<S> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Encrypted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Encrypted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_url_says_of_tls_is_taken_out() {
        let wanted = |mode, roots: Option<&str>| Wanted { mode, roots: roots.map(Into::into) };
        for (url, rest, expected) in [
            ("postgres://a@h:1/d", "postgres://a@h:1/d", wanted(None, None)),
            ("postgres://a@h?sslmode=require", "postgres://a@h", wanted(Some(Mode::Require), None)),
            (
                "postgres://a@h?sslrootcert=%2Fa%20b&connect_timeout=3&sslmode=verify-full",
                "postgres://a@h?connect_timeout=3",
                wanted(Some(Mode::VerifyFull), Some("/a b")),
            ),
            ("host=h password=a?b sslmode=x", "host=h password=a?b sslmode=x", wanted(None, None)),
        ] {
            assert_eq!(taken_out(url).unwrap(), (rest.to_owned(), expected));
        }
        for (url, problem) in [
            ("postgres://a@h?sslmode=allow", "verify-full"),
            ("postgres://a@h?sslmode=verify-full", "needs sslrootcert"),
            ("postgres://a@h?sslmode=verify-ca&sslrootcert=/nowhere", "/nowhere"),
        ] {
            let made = taken_out(url).and_then(|(_, wanted)| Tls::new(&wanted, &mut Config::new()));
            let error = made.err().expect("it is refused");
            assert!(format!("{error:#}").contains(problem), "{error:#}");
        }
    }
}
