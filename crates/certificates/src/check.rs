//! Checks certificates, and describes why one is rejected.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, RootCertStore};

use crate::Error;

/// The role in which a certificate is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// By the node that dials.
    Client,
    /// By the node that accepts the connection.
    Server,
}

/// The authorities whose certificates are accepted.
#[derive(Clone, Debug)]
pub struct TrustedAuthorities {
    roots: Arc<RootCertStore>,
    clients: Arc<dyn ClientCertVerifier>,
}

impl TrustedAuthorities {
    /// The authorities with these certificates.
    pub fn new(certificates: impl IntoIterator<Item = CertificateDer<'static>>) -> Result<Self, Error> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates {
            let added = roots.add(certificate);
            added.map_err(|error| Error(format!("invalid certificate of an authority ({error})")))?;
        }
        let roots = Arc::new(roots);
        let clients =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), Arc::new(ring::default_provider()))
                .build()
                .map_err(|error| Error(format!("no certificate of an authority ({error})")))?;
        Ok(TrustedAuthorities { roots, clients })
    }

    /// The certificates of the authorities, for a rustls client.
    pub fn roots(&self) -> Arc<RootCertStore> {
        self.roots.clone()
    }

    /// Checks the certificates of clients, for a rustls server. Clients without a certificate are
    /// rejected.
    pub fn client_verifier(&self) -> Arc<dyn ClientCertVerifier> {
        self.clients.clone()
    }

    /// Checks that a chain, which begins with the certificate itself, is accepted at the time `at`
    /// both as a client's and as a server's.
    pub fn check(&self, chain: &[CertificateDer<'_>], at: SystemTime) -> Result<(), Error> {
        let (certificate, intermediates) =
            chain.split_first().ok_or_else(|| Error("no certificate".to_owned()))?;
        let at = UnixTime::since_unix_epoch(at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
        let rejected = |role: Role| move |error| Error(reason(&error, role));
        let provider = ring::default_provider();
        ParsedCertificate::try_from(certificate)
            .and_then(|parsed| {
                let algorithms = provider.signature_verification_algorithms.all;
                verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, at, algorithms)
            })
            .map_err(rejected(Role::Server))?;
        let verified = self.clients.verify_client_cert(certificate, intermediates, at);
        verified.map(|_| ()).map_err(rejected(Role::Client))
    }
}

/// Checks that a certificate is valid for a name: a DNS name or an IP address.
pub fn check_name(certificate: &CertificateDer<'_>, name: &str) -> Result<(), Error> {
    let server_name = ServerName::try_from(name)
        .map_err(|_| Error(format!("a certificate cannot contain the name \"{name}\"")))?;
    ParsedCertificate::try_from(certificate)
        .and_then(|parsed| verify_server_name(&parsed, &server_name))
        .map_err(|error| Error(reason(&error, Role::Server)))
}

fn reason(error: &rustls::Error, role: Role) -> String {
    match error {
        rustls::Error::InvalidCertificate(error) => describe(error, role),
        error => error.to_string(),
    }
}

/// Describes why a certificate was rejected in this role, with the remedy. The text follows the
/// words "the certificate".
pub fn describe(error: &CertificateError, role: Role) -> String {
    use CertificateError as E;
    match error {
        E::ExpiredContext { time, not_after } => {
            let ago = age(time.as_secs().saturating_sub(not_after.as_secs()));
            format!("expired {ago} ago; issue a new one with `fulmar cert node`")
        }
        E::NotValidYetContext { time, not_before } => {
            let left = age(not_before.as_secs().saturating_sub(time.as_secs()));
            format!("is not valid until {left} from now; check the clocks of the nodes")
        }
        E::UnknownIssuer | E::BadSignature => {
            "was issued by another authority; issue it with `fulmar cert node` and the authority of this cluster"
                .to_owned()
        }
        E::NotValidForNameContext { expected, presented } => {
            let presented: Vec<_> = presented.iter().map(|name| plain_name(name)).collect();
            format!(
                "is valid for {}, not for \"{}\"; issue one for this name with `fulmar cert node`",
                presented.join(", "),
                expected.to_str()
            )
        }
        E::InvalidPurpose | E::InvalidPurposeContext { .. } => {
            let (side, usage) = match role {
                Role::Client => ("client", "clientAuth"),
                Role::Server => ("server", "serverAuth"),
            };
            format!(
                "cannot be used as a {side} certificate; its extended key usage must contain {usage}, as in those \
                 of `fulmar cert node`"
            )
        }
        error => format!("is invalid ({error}); issue a new one with `fulmar cert node`"),
    }
}

/// `DnsName("a")` as `"a"`.
fn plain_name(name: &str) -> &str {
    name.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')')).unwrap_or(name)
}

/// A duration in its largest unit.
fn age(seconds: u64) -> String {
    let age = Duration::from_secs(seconds);
    match seconds {
        0..60 => format!("{} s", age.as_secs()),
        60..3600 => format!("{} min", age.as_secs() / 60),
        3600..172_800 => format!("{} h", age.as_secs() / 3600),
        _ => format!("{} d", age.as_secs() / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Authority;
    use rustls::pki_types::pem::PemObject;

    #[test]
    fn expired_premature_and_foreign_certificates_are_rejected() {
        let day = Duration::from_hours(24);
        let created = |days| {
            let issued = Authority::create(days * day).unwrap();
            let der = CertificateDer::from_pem_slice(issued.certificate_pem.as_bytes()).unwrap();
            (Authority::from_pem(&issued.certificate_pem, &issued.key_pem).unwrap(), der)
        };
        let ((authority, certificate), (_, other)) = (created(20), created(20));
        let issued = authority.issue("a", &[], 2 * day).unwrap();
        let chain = [CertificateDer::from_pem_slice(issued.certificate_pem.as_bytes()).unwrap()];
        let trusted = TrustedAuthorities::new([other.clone(), certificate]).unwrap();
        let now = SystemTime::now();
        trusted.check(&chain, now).unwrap();
        for (trusted, at, text) in [
            (&trusted, now + 6 * day, "expired 4 d ago"),
            (&trusted, now + 2 * day + Duration::from_secs(7800), "expired 2 h ago"),
            (&trusted, now - 3 * day + Duration::from_secs(1800), "not valid until 47 h"),
            (&TrustedAuthorities::new([other]).unwrap(), now, "another authority"),
        ] {
            let error = trusted.check(&chain, at).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        assert!(TrustedAuthorities::new([]).is_err());
        assert!(trusted.check(&[], now).is_err());
    }
}
