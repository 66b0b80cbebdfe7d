//! TLS for connections to a node. The URL parameters `sslmode` and `sslrootcert` have libpq's
//! meaning.
//!
//! | sslmode | TLS | accepted certificates |
//! | --- | --- | --- |
//! | `disable` | never | |
//! | `prefer` | if the node supports it | any; with `sslrootcert` as `verify-ca` |
//! | `require` | always | any; with `sslrootcert` as `verify-ca` |
//! | `verify-ca` | always | in the file `sslrootcert`, or issued by a certificate in it |
//! | `verify-full` | always | as `verify-ca`, and valid for the host name of the URL |
//!
//! A server certificate that is itself in the file is trusted without checking its constraints: a
//! self-signed certificate is usually marked as a CA certificate, which WebPKI rejects as a server
//! certificate.

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

/// The TLS parameters of a URL.
#[derive(Debug, Default, PartialEq)]
pub(super) struct TlsOptions {
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

/// Splits a URL into one without TLS parameters, which tokio-postgres does not know, and these
/// parameters.
pub(super) fn split_tls_options(url: &str) -> anyhow::Result<(String, TlsOptions)> {
    let mut options = TlsOptions::default();
    let Some((address, query)) = url.split_once('?') else { return Ok((url.to_owned(), options)) };
    let mut rest = Vec::new();
    for pair in query.split('&') {
        match pair.split_once('=') {
            Some(("sslmode", mode)) => options.mode = Some(Mode::parse(mode)?),
            Some(("sslrootcert", file)) => options.roots = Some(decode(file)?.into()),
            _ => rest.push(pair),
        }
    }
    let separator = if rest.is_empty() { "" } else { "?" };
    Ok((format!("{address}{separator}{}", rest.join("&")), options))
}

/// Decodes a percent-encoded value with tokio-postgres's decoder, as the value of a parameter that
/// it knows.
fn decode(value: &str) -> anyhow::Result<String> {
    let url = format!("postgres:///?application_name={value}").parse::<Config>();
    let config = url.context("invalid sslrootcert in --server")?;
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
                "invalid sslmode \"{text}\" in --server; use disable, prefer, require, verify-ca \
                 or verify-full"
            ),
        })
    }
}

/// A TLS connector for tokio-postgres.
#[derive(Clone)]
pub(super) struct Tls {
    config: Arc<ClientConfig>,
}

impl Tls {
    /// Creates a connector for the options, and sets whether `config` requires TLS.
    pub(super) fn new(options: &TlsOptions, config: &mut Config) -> anyhow::Result<Tls> {
        if let Some(mode) = options.mode {
            config.ssl_mode(match mode {
                Mode::Disable => SslMode::Disable,
                Mode::Prefer => SslMode::Prefer,
                Mode::Require | Mode::VerifyCa | Mode::VerifyFull => SslMode::Require,
            });
        }
        ensure!(
            options.roots.is_some() || !matches!(options.mode, Some(Mode::VerifyCa | Mode::VerifyFull)),
            "this sslmode requires sslrootcert=FILE in --server: a file with the node's \
             certificate or that of its issuer (Debian's trusted certificates are in \
             /etc/ssl/certs/ca-certificates.crt)"
        );
        let provider = Arc::new(ring::default_provider());
        let anchors = options
            .roots
            .as_deref()
            .map(|file| TrustAnchors::read(file, options.mode == Some(Mode::VerifyFull)));
        let verifier = Verifier { anchors: anchors.transpose()?, provider: provider.clone() };
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        Ok(Tls { config: Arc::new(config) })
    }
}

/// The certificates of the file `sslrootcert`.
#[derive(Debug)]
struct TrustAnchors {
    /// Server certificates that are trusted as they are.
    certificates: Vec<CertificateDer<'static>>,
    /// The same certificates, as issuers.
    roots: RootCertStore,
    /// Whether the certificate must be valid for the host name.
    checks_name: bool,
}

impl TrustAnchors {
    fn read(file: &Path, checks_name: bool) -> anyhow::Result<TrustAnchors> {
        let parsed = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<_, _>>);
        let certificates: Vec<CertificateDer<'static>> =
            parsed.with_context(|| format!("cannot read the sslrootcert file {}", file.display()))?;
        ensure!(
            !certificates.is_empty(),
            "the sslrootcert file {} does not contain a certificate",
            file.display()
        );
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(certificates.iter().cloned());
        Ok(TrustAnchors { certificates, roots, checks_name })
    }

    fn verify(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        host: &ServerName<'_>,
        now: UnixTime,
        provider: &CryptoProvider,
    ) -> Result<(), rustls::Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        if !self.certificates.contains(end_entity) {
            let algorithms = provider.signature_verification_algorithms.all;
            verify_server_cert_signed_by_trust_anchor(
                &certificate,
                &self.roots,
                intermediates,
                now,
                algorithms,
            )?;
        }
        if self.checks_name { verify_server_name(&certificate, host) } else { Ok(()) }
    }
}

#[derive(Debug)]
struct Verifier {
    /// `None` accepts every certificate.
    anchors: Option<TrustAnchors>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        host: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified = self
            .anchors
            .as_ref()
            .map_or(Ok(()), |anchors| anchors.verify(end_entity, intermediates, host, now, &self.provider));
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
    type Stream = ClientTlsStream<S>;
    type TlsConnect = HostConnector;
    type Error = io::Error;

    fn make_tls_connect(&mut self, host: &str) -> io::Result<HostConnector> {
        Ok(HostConnector { tls: self.clone(), host: host.to_owned() })
    }
}

/// The handshake with one host.
pub(super) struct HostConnector {
    tls: Tls,
    host: String,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> TlsConnect<S> for HostConnector {
    type Stream = ClientTlsStream<S>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<ClientTlsStream<S>>>;

    fn connect(self, stream: S) -> Self::Future {
        async move {
            let host = ServerName::try_from(self.host).map_err(io::Error::other)?;
            Ok(ClientTlsStream(TlsConnector::from(self.tls.config).connect(host, stream).await?))
        }
        .boxed()
    }
}

/// A tokio-rustls stream with the traits that tokio-postgres requires.
pub(super) struct ClientTlsStream<S>(tokio_rustls::client::TlsStream<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for ClientTlsStream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for ClientTlsStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ClientTlsStream<S> {
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
    fn tls_parameters_are_removed_from_the_url_and_checked() {
        let options = |mode, roots: Option<&str>| TlsOptions { mode, roots: roots.map(Into::into) };
        for (url, rest, expected) in [
            ("postgres://a@h:1/d", "postgres://a@h:1/d", options(None, None)),
            ("postgres://a@h?sslmode=require", "postgres://a@h", options(Some(Mode::Require), None)),
            (
                "postgres://a@h?sslrootcert=%2Fa%20b&connect_timeout=3&sslmode=verify-full",
                "postgres://a@h?connect_timeout=3",
                options(Some(Mode::VerifyFull), Some("/a b")),
            ),
            ("host=h password=a?b sslmode=x", "host=h password=a?b sslmode=x", options(None, None)),
        ] {
            assert_eq!(split_tls_options(url).unwrap(), (rest.to_owned(), expected));
        }
        for (url, problem) in [
            ("postgres://a@h?sslmode=allow", "verify-full"),
            ("postgres://a@h?sslmode=verify-full", "requires sslrootcert"),
            ("postgres://a@h?sslmode=verify-ca&sslrootcert=/nowhere", "/nowhere"),
        ] {
            let created =
                split_tls_options(url).and_then(|(_, options)| Tls::new(&options, &mut Config::new()));
            let error = created.err().expect("invalid TLS parameters must be rejected");
            assert!(format!("{error:#}").contains(problem), "{error:#}");
        }
    }
}
