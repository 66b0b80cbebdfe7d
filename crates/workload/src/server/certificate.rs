//! TLS certificates for servers that tests start.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// A certificate and its key, as PEM files.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Creates a certificate for `localhost` with the openssl command, as `NAME.crt` and `NAME.key` in
/// `directory`. It is self-signed, unless the additional arguments `further` of `openssl req -x509`
/// change that.
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
    let output = command.output().context("could not run openssl; install Debian's package openssl")?;
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "openssl failed: {messages}");
    Ok(Certificate { certificate, key })
}
