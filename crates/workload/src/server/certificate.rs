//! Certificates for servers that tests start.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// A certificate with its key, as PEM files.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// A certificate for `localhost`, made by the openssl command: `NAME.crt` and `NAME.key` in the directory. It signs itself,
/// unless `further` arguments of `openssl req -x509` say otherwise.
pub fn certificate(directory: &Path, name: &str, further: &[&str]) -> anyhow::Result<Certificate> {
    let [certificate, key] = ["crt", "key"].map(|kind| directory.join(format!("{name}.{kind}")));
    let mut command = Command::new("openssl");
    command.current_dir(directory);
    command.args([
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]);
    command.args(["-subj", &format!("/CN={name}"), "-addext", "subjectAltName=DNS:localhost"]);
    command.arg("-out").arg(&certificate).arg("-keyout").arg(&key).args(further);
    let made = command.output().context("openssl cannot be run: apt-get install openssl")?;
    ensure!(made.status.success(), "openssl made no certificate: {}", String::from_utf8_lossy(&made.stderr));
    Ok(Certificate { certificate, key })
}
