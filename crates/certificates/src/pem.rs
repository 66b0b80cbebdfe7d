//! Certificates and keys in PEM files that flags name.

use std::fmt;
use std::path::{Path, PathBuf};

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use crate::{Error, FileWatch};

/// A file, and the flag that names it. Displayed as both.
#[derive(Clone, Debug)]
pub struct PemFile {
    flag: &'static str,
    path: PathBuf,
}

impl fmt::Display for PemFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.flag, self.path.display())
    }
}

impl PemFile {
    /// The file at `path`, which the flag `flag` names.
    pub fn new(flag: &'static str, path: impl Into<PathBuf>) -> Self {
        PemFile { flag, path: path.into() }
    }

    /// The flag.
    pub fn flag(&self) -> &'static str {
        self.flag
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the certificates. There is at least one.
    pub fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, Error> {
        let certificates = CertificateDer::pem_file_iter(&self.path)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|error| Error(format!("cannot read {self} ({error}); it must be a PEM file")))?;
        match certificates.is_empty() {
            true => Err(Error(format!("{self} does not contain a certificate; it must be a PEM file"))),
            false => Ok(certificates),
        }
    }

    /// Reads the private key.
    pub fn key(&self) -> Result<PrivateKeyDer<'static>, Error> {
        PrivateKeyDer::from_pem_file(&self.path).map_err(|error| {
            Error(format!(
                "cannot read {self} ({error}); it must be a PEM file with an unencrypted private key"
            ))
        })
    }
}

/// A certificate chain and its private key.
#[derive(Clone, Debug)]
pub struct PemPair {
    /// The certificate chain.
    pub certificate: PemFile,
    /// The private key.
    pub key: PemFile,
}

impl PemPair {
    /// Reads both files, and checks that they match.
    pub fn read(&self) -> Result<CertifiedKey, Error> {
        let (chain, key) = (self.certificate.certificates()?, self.key.key()?);
        CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(|error| {
            let (certificate, key) = (self.certificate.flag, self.key.flag);
            Error(format!("{certificate} and {key} do not match ({error})"))
        })
    }

    /// Watches both files.
    pub fn watch(&self) -> FileWatch {
        FileWatch::new([self.certificate.path(), self.key.path()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_invalid_file_and_its_flag() {
        let directory = tempfile::tempdir().unwrap();
        let (empty, absent) = (directory.path().join("empty.pem"), directory.path().join("absent.pem"));
        std::fs::write(&empty, "").unwrap();
        let error = |path: &Path| PemFile::new("--tls-cert", path).certificates().unwrap_err().to_string();
        assert!(error(&absent).contains("--tls-cert") && error(&absent).contains("absent.pem"));
        assert!(error(&empty).contains("does not contain a certificate"), "{}", error(&empty));
        let error = PemFile::new("--tls-key", &empty).key().unwrap_err().to_string();
        assert!(error.contains("unencrypted private key"), "{error}");
    }
}
