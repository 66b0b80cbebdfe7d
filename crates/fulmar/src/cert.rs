//! `fulmar cert`: creates the certificates with which the nodes of a cluster authenticate each
//! other.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use fulmar_certificates::{Authority, Issued};

use crate::cli::{CertAction, CertArgs};
use crate::output;

/// The name of an authority's files.
const AUTHORITY: &str = "ca";

/// Runs `fulmar cert`.
pub fn run(arguments: CertArgs) -> anyhow::Result<()> {
    let (written, days) = match arguments.action {
        CertAction::Authority { out, days } => {
            (write(&out, AUTHORITY, &Authority::create(lifetime(days))?)?, days)
        }
        CertAction::Node { name, ca, out, addresses, days } => {
            let issued = read_authority(&ca)?.issue(&name, &addresses, lifetime(days))?;
            (write(&out, &name, &issued)?, days)
        }
    };
    let [certificate, key] = written;
    output::line(&format!("created {} and {}, valid for {days} days", certificate.display(), key.display()))
}

fn lifetime(days: u32) -> Duration {
    Duration::from_hours(24 * u64::from(days))
}

fn read_authority(directory: &Path) -> anyhow::Result<Authority> {
    let [certificate, key] = paths(directory, AUTHORITY).map(|path| {
        fs::read_to_string(&path).with_context(|| {
            format!(
                "cannot read {}; `fulmar cert authority` creates it in the directory --ca",
                path.display()
            )
        })
    });
    Authority::from_pem(&certificate?, &key?)
        .with_context(|| format!("invalid ca.crt or ca.key in --ca {}", directory.display()))
}

fn paths(directory: &Path, name: &str) -> [PathBuf; 2] {
    ["crt", "key"].map(|kind| directory.join(format!("{name}.{kind}")))
}

/// Writes both files, or none.
fn write(directory: &Path, name: &str, issued: &Issued) -> anyhow::Result<[PathBuf; 2]> {
    fs::create_dir_all(directory).with_context(|| {
        format!("cannot create --out {}; check its parent directory", directory.display())
    })?;
    let paths = paths(directory, name);
    let [certificate, key] = &paths;
    create(key, 0o600, &issued.key_pem)?;
    create(certificate, 0o644, &issued.certificate_pem).inspect_err(|_| {
        // Best effort: a key without its certificate is of no use.
        let _ = fs::remove_file(key);
    })?;
    Ok(paths)
}

/// Creates a file that does not exist yet.
fn create(path: &Path, mode: u32, text: &str) -> anyhow::Result<()> {
    let shown = path.display();
    let mut file = match OpenOptions::new().write(true).create_new(true).mode(mode).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            return Err(anyhow!("{shown} exists and is not overwritten; choose another directory for --out"));
        }
        opened => opened
            .with_context(|| format!("cannot create {shown}; check the permissions of its directory"))?,
    };
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.with_context(|| format!("cannot write {shown}; free some disk space, and delete the file"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn cert(directory: &Path, line: &str) -> anyhow::Result<()> {
        let line = line.replace("DIR", directory.to_str().unwrap());
        match Cli::try_parse_from(format!("fulmar cert {line}").split(' '))?.command {
            Command::Cert(arguments) => run(arguments),
            _ => panic!("parsed as another subcommand than cert"),
        }
    }

    #[test]
    fn keys_are_private_and_files_are_not_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        cert(directory, "authority --out DIR/new/ca --days 2").unwrap();
        cert(directory, "node n1 --ca DIR/new/ca --out DIR/n1 --address db.example --address ::1").unwrap();
        let mode = |file: &str| fs::metadata(directory.join(file)).unwrap().permissions().mode() & 0o777;
        for file in ["new/ca/ca", "n1/n1"] {
            assert_eq!(mode(&format!("{file}.key")), 0o600, "{file}");
            assert_eq!(mode(&format!("{file}.crt")) & 0o600, 0o600, "{file}");
        }
        let before = fs::read(directory.join("n1/n1.key")).unwrap();
        // The second one fails at the certificate, and leaves no key.
        fs::write(directory.join("n2.crt"), "").unwrap();
        for line in ["node n1 --ca DIR/new/ca --out DIR/n1", "node n2 --ca DIR/new/ca --out DIR"] {
            let error = cert(directory, line).unwrap_err().to_string();
            assert!(error.contains("exists and is not overwritten"), "{error}");
        }
        assert_eq!(fs::read(directory.join("n1/n1.key")).unwrap(), before);
        assert!(!directory.join("n2.key").exists());
    }

    #[test]
    fn errors_name_the_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let error = |line: &str| format!("{:#}", cert(directory, line).unwrap_err());
        assert!(error("node n1 --ca DIR --out DIR").contains("fulmar cert authority"));
        cert(directory, "authority --out DIR").unwrap();
        assert!(error("node ../n1 --ca DIR --out DIR").contains("use letters"));
        assert!(error("node n1 --ca DIR --out DIR --address h:1").contains("without a port"));
        assert!(error("node n1 --ca DIR --out DIR --days 0").contains("--days"));
        fs::write(directory.join("ca.key"), "").unwrap();
        assert!(error("node n1 --ca DIR --out DIR").contains("ca.key"));
    }
}
