//! The certificate for clients, and the reload of all certificates while the node runs.
//!
//! ```text
//!   SIGHUP -----------------------+
//!   every 30 s: files changed? ---+--> load them --valid----> used for new connections
//!                                            `-----invalid--> old ones stay; log and event
//! ```
//!
//! Certificates are renewed every few weeks by programs that replace the files. A change is
//! detected from the metadata of the files ([`FileWatch`]). A check between the replacement of two
//! files finds a pair that does not match. It is rejected, and the next check finds the complete
//! pair.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_certificates::{Error, FileWatch, PemFile, PemPair, Reload};
use fulmar_gateway::events::{Event, EventLog, Kind};
use parking_lot::RwLock;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::signal::unix::Signal;

/// Interval between checks of the files.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Interval of warnings, for example of a certificate that will expire soon.
const WARNING_INTERVAL: Duration = Duration::from_hours(24);

/// A certificate and key for clients, from two PEM files.
#[derive(Debug)]
pub struct Tls {
    pair: PemPair,
    files: FileWatch,
    current: RwLock<Arc<CertifiedKey>>,
}

impl Tls {
    /// Loads the files, if both are given.
    pub fn load(certificate: Option<&Path>, key: Option<&Path>) -> anyhow::Result<Option<Arc<Tls>>> {
        let (Some(certificate), Some(key)) = (certificate, key) else {
            return Ok(None);
        };
        let certificate = PemFile::new("--tls-cert", certificate);
        let pair = PemPair { certificate, key: PemFile::new("--tls-key", key) };
        let files = pair.watch();
        let current = RwLock::new(Arc::new(pair.read()?));
        Ok(Some(Arc::new(Tls { pair, files, current })))
    }

    /// Returns a configuration that uses the newest certificate for each connection.
    pub fn server(self: &Arc<Self>) -> Arc<ServerConfig> {
        Arc::new(ServerConfig::builder().with_no_client_auth().with_cert_resolver(self.clone()))
    }
}

impl Reload for Tls {
    fn name(&self) -> &'static str {
        "TLS certificate"
    }

    fn files(&self) -> &FileWatch {
        &self.files
    }

    fn reload(&self) -> Result<(), Error> {
        *self.current.write() = Arc::new(self.pair.read()?);
        Ok(())
    }
}

impl ResolvesServerCert for Tls {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().clone())
    }
}

/// Reloads all certificates on every SIGHUP, and each one whenever its files have changed. Never
/// returns.
pub async fn reload_on_change(
    certificates: Vec<Arc<dyn Reload>>,
    mut hangups: Signal,
    journal: Arc<EventLog>,
) {
    let mut last_warning: Option<Instant> = None;
    loop {
        if last_warning.is_none_or(|last| last.elapsed() >= WARNING_INTERVAL) {
            last_warning = Some(Instant::now());
            certificates.iter().filter_map(|certificate| certificate.warning()).for_each(|warning| {
                tracing::warn!(warning, "a certificate for connections between nodes must be renewed");
            });
        }
        let signalled = tokio::select! {
            _ = hangups.recv() => true,
            () = tokio::time::sleep(CHECK_INTERVAL) => false,
        };
        for certificate in &certificates {
            if certificate.files().changed() || signalled {
                reload(&**certificate, &journal);
                last_warning = None;
            }
        }
    }
}

fn reload(certificate: &dyn Reload, journal: &EventLog) {
    let name = certificate.name();
    match certificate.reload() {
        Ok(()) => {
            tracing::info!("{name} reloaded; new connections use it");
            journal.record(Event::new(Kind::TlsReloaded));
        }
        Err(error) => {
            let cause = error.to_string();
            tracing::error!(%cause, "cannot reload the {name}; new connections use the old one");
            journal.record(Event::new(Kind::TlsRefused).detail("cause", cause));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tls_is_optional_and_errors_name_the_invalid_file() {
        assert!(Tls::load(None, None).unwrap().is_none());
        let directory = tempfile::tempdir().unwrap();
        let absent = directory.path().join("absent.pem");
        let error = Tls::load(Some(&absent), Some(&absent)).unwrap_err().to_string();
        assert!(error.contains("cannot read --tls-cert") && error.contains("absent.pem"), "{error}");
    }
}
