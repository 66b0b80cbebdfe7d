//! The server's TLS certificate and key, reloaded while the node runs.
//!
//! ```text
//!   SIGHUP -----------------------+
//!   every 30 s: files changed? ---+--> load both --valid----> used for new connections
//!                                            `-----invalid--> old pair stays; log and event
//! ```
//!
//! Certificates are renewed every few weeks by programs that replace the files. A change is
//! detected from the metadata of the files. A check between the replacement of the two files finds
//! a pair that does not match. It is rejected, and the next check finds the complete pair.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use fulmar_gateway::events::{Event, EventLog, Kind};
use parking_lot::RwLock;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::signal::unix::Signal;

/// Interval between checks of the files.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Identifies a version of a file: device, inode, size and modification time. `None` if it cannot
/// be read.
type Stamp = Option<[u64; 5]>;

/// A certificate and key from two PEM files.
#[derive(Debug)]
pub struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    /// Stamps of the files before they were first read.
    loaded: [Stamp; 2],
    current: RwLock<Arc<CertifiedKey>>,
}

impl Tls {
    /// Loads the files, if both are given.
    pub fn load(certificate: Option<&Path>, key: Option<&Path>) -> anyhow::Result<Option<Arc<Tls>>> {
        let (Some(certificate), Some(key)) = (certificate, key) else {
            return Ok(None);
        };
        // Taken before the files are read, so that every later change is detected.
        let loaded = [stamp(certificate), stamp(key)];
        let current = RwLock::new(Arc::new(read(certificate, key)?));
        let (certificate, key) = (certificate.to_owned(), key.to_owned());
        Ok(Some(Arc::new(Tls { certificate, key, loaded, current })))
    }

    /// Returns a configuration that uses the newest certificate for each connection.
    pub fn server(self: &Arc<Self>) -> Arc<ServerConfig> {
        Arc::new(ServerConfig::builder().with_no_client_auth().with_cert_resolver(self.clone()))
    }

    /// Reloads the files on every SIGHUP, and whenever they have changed. Never returns.
    pub async fn reload_on_change(self: Arc<Self>, mut hangups: Signal, journal: Arc<EventLog>) {
        let mut seen = self.loaded;
        loop {
            let signalled = tokio::select! {
                _ = hangups.recv() => true,
                () = tokio::time::sleep(CHECK_INTERVAL) => false,
            };
            let now = self.stamps();
            if signalled || now != seen {
                seen = now;
                self.reload(&journal);
            }
        }
    }

    fn reload(&self, journal: &EventLog) {
        match read(&self.certificate, &self.key) {
            Ok(current) => {
                *self.current.write() = Arc::new(current);
                tracing::info!("TLS certificate reloaded; new connections use it");
                journal.record(Event::new(Kind::TlsReloaded));
            }
            Err(error) => {
                let cause = format!("{error:#}");
                tracing::error!(%cause, "cannot reload the TLS certificate; new connections use the old one");
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
    ensure!(!chain.is_empty(), "--tls-cert {shown} does not contain a certificate; it must be a PEM file");
    let key = PrivateKeyDer::from_pem_file(key).with_context(|| {
        format!(
            "cannot read --tls-key {}; it must be a PEM file with an unencrypted private key",
            key.display()
        )
    })?;
    CertifiedKey::from_der(chain, key, &ring::default_provider())
        .context("--tls-cert and --tls-key do not match")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tls_is_optional_and_errors_name_the_invalid_file() {
        assert!(Tls::load(None, None).unwrap().is_none());
        let directory = tempfile::tempdir().unwrap();
        let (empty, absent) = (directory.path().join("empty.pem"), directory.path().join("absent.pem"));
        std::fs::write(&empty, "").unwrap();
        let error = |certificate: &Path| Tls::load(Some(certificate), Some(&absent)).unwrap_err().to_string();
        assert!(error(&absent).contains("absent.pem"), "{}", error(&absent));
        assert!(error(&empty).contains("does not contain a certificate"), "{}", error(&empty));
    }

    #[test]
    fn replaced_file_is_detected() {
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
