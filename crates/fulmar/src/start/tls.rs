//! The certificate and key that clients are shown.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// TLS from two PEM files, if they were given. Read once: a new certificate needs a restart.
pub fn load(certificate: Option<&Path>, key: Option<&Path>) -> anyhow::Result<Option<Arc<ServerConfig>>> {
    let (Some(certificate), Some(key)) = (certificate, key) else {
        return Ok(None);
    };
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
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .context("--tls-cert and --tls-key do not go together")?;
    Ok(Some(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_files_mean_no_tls_and_bad_files_say_which() {
        assert!(load(None, None).unwrap().is_none());
        let directory = tempfile::tempdir().unwrap();
        let (empty, absent) = (directory.path().join("empty.pem"), directory.path().join("absent.pem"));
        std::fs::write(&empty, "").unwrap();
        let error = |certificate: &Path| load(Some(certificate), Some(&absent)).unwrap_err().to_string();
        assert!(error(&absent).contains("absent.pem"), "{}", error(&absent));
        assert!(error(&empty).contains("no certificate"), "{}", error(&empty));
    }
}
