//! The certificate and key that clients are shown, read again while the node runs.
//!
//! ```text
//!   SIGHUP -----------------------+
//!   every 30 s: other files? -----+--> read both --good--> new connections are shown the new certificate
//!                                            `-----bad---> the old one stays; the log and the journal say why
//! ```
//!
//! Certificates are renewed every few weeks by programs that put new files in the place of the old ones. One look at
//! sizes and times tells whether they did. A look between the two files finds a pair that does not go together: it is
//! refused, and the next look finds both.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use fulmar_gateway::events::{Event, Journal, Kind};
use parking_lot::RwLock;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::signal::unix::Signal;

/// How often the files are looked at.
const PERIOD: Duration = Duration::from_secs(30);

/// What tells a file from the one that stood in its place: device, inode, size, and when it was changed.
type Stamp = Option<[u64; 5]>;

/// TLS from two PEM files.
#[derive(Debug)]
pub struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    /// Of the files before they were read first.
    loaded: [Stamp; 2],
    current: RwLock<Arc<CertifiedKey>>,
}

impl Tls {
    /// Reads the files, if they were given.
    pub fn load(certificate: Option<&Path>, key: Option<&Path>) -> anyhow::Result<Option<Arc<Tls>>> {
        let (Some(certificate), Some(key)) = (certificate, key) else {
            return Ok(None);
        };
        // Before they are read: who changes them from here on is noticed.
        let loaded = [stamp(certificate), stamp(key)];
        let current = RwLock::new(Arc::new(read(certificate, key)?));
        let (certificate, key) = (certificate.to_owned(), key.to_owned());
        Ok(Some(Arc::new(Tls { certificate, key, loaded, current })))
    }

    /// What a server needs: it shows each client the newest certificate.
    pub fn server(self: &Arc<Self>) -> Arc<ServerConfig> {
        Arc::new(ServerConfig::builder().with_no_client_auth().with_cert_resolver(self.clone()))
    }

    /// Reads the files again whenever they have changed, or a signal asks for it; for ever.
    pub async fn follow(self: Arc<Self>, mut hangups: Signal, journal: Arc<Journal>) {
        let mut seen = self.loaded;
        loop {
            let asked = tokio::select! {
                _ = hangups.recv() => true,
                () = tokio::time::sleep(PERIOD) => false,
            };
            let now = self.stamps();
            if asked || now != seen {
                seen = now;
                self.reload(&journal);
            }
        }
    }

    fn reload(&self, journal: &Journal) {
        match read(&self.certificate, &self.key) {
            Ok(current) => {
                *self.current.write() = Arc::new(current);
                tracing::info!("new connections get the new certificate");
                journal.record(Event::new(Kind::TlsReloaded));
            }
            Err(error) => {
                let cause = format!("{error:#}");
                tracing::error!(%cause, "the new certificate cannot be used; new connections get the old one");
                journal.record(Event::new(Kind::TlsRefused).detail("cause", cause));
            }
        }
    }

    fn stamps(&self) -> [Stamp; 2] {
        [stamp(&self.certificate), stamp(&self.key)]
    }
}

fn stamp(file: &Path) -> Stamp {
    let file = std::fs::metadata(file).ok()?;
    Some([file.dev(), file.ino(), file.size(), file.mtime() as u64, file.mtime_nsec() as u64])
}

impl ResolvesServerCert for Tls {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().clone())
    }
}

fn read(certificate: &Path, key: &Path) -> anyhow::Result<CertifiedKey> {
    let shown = certificate.display();
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(|| format!("cannot read --tls-cert {shown}; it must be a PEM file"))?;
    ensure!(!chain.is_empty(), "--tls-cert {shown} holds no certificate; it must be a PEM file");
    let key = PrivateKeyDer::from_pem_file(key).with_context(|| {
        format!(
            "cannot read --tls-key {}; it must be a PEM file with an unencrypted private key",
            key.display()
        )
    })?;
    CertifiedKey::from_der(chain, key, &ring::default_provider())
        .context("--tls-cert and --tls-key do not go together")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_files_mean_no_tls_and_bad_files_say_which() {
        assert!(Tls::load(None, None).unwrap().is_none());
        let directory = tempfile::tempdir().unwrap();
        let (empty, absent) = (directory.path().join("empty.pem"), directory.path().join("absent.pem"));
        std::fs::write(&empty, "").unwrap();
        let error = |certificate: &Path| Tls::load(Some(certificate), Some(&absent)).unwrap_err().to_string();
        assert!(error(&absent).contains("absent.pem"), "{}", error(&absent));
        assert!(error(&empty).contains("no certificate"), "{}", error(&empty));
    }

    #[test]
    fn a_file_in_the_place_of_another_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let (old, new) = (directory.path().join("old"), directory.path().join("new"));
        std::fs::write(&old, "same size").unwrap();
        let before = stamp(&old);
        assert!(before.is_some() && stamp(&old) == before);
        std::fs::write(&new, "same size").unwrap();
        std::fs::rename(&new, &old).unwrap();
        assert_ne!(stamp(&old), before);
        std::fs::remove_file(&old).unwrap();
        assert_eq!(stamp(&old), None);
    }
}
