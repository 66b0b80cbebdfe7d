//! Generates the password of a new node's superuser and writes it to a file in the data directory.
//!
//! The file is written before the catalog. After a crash between the two, the next start takes the
//! password from the file. Once the catalog has a password, the file is never read again, so the
//! operator may change the password or delete the file.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, ensure};
use fulmar_meta::{Catalog, SYSTEM_USER};
use rand::RngExt;

/// Name of the file in the data directory.
pub(super) const PASSWORD_FILE: &str = "superuser-password";

/// 24 characters from an alphabet of 32 are 120 random bits.
const PASSWORD_LENGTH: usize = 24;
/// No two characters look alike, and none needs quoting in a URL or a shell.
const ALPHABET: &[u8; 32] = b"abcdefghjkmnpqrstuvwxyz234567890";

/// Sets a password for the superuser if it has none.
pub async fn ensure_password(catalog: &Catalog, data: &Path) -> anyhow::Result<()> {
    if catalog.user(SYSTEM_USER).is_some_and(|user| user.verifier.is_some()) {
        return Ok(());
    }
    let file = data.join(PASSWORD_FILE);
    let password = write_or_read(data, &file)
        .with_context(|| format!("cannot store the superuser's password in {}", file.display()))?;
    let verifier = fulmar_gateway::scram_verifier(&password);
    if !catalog.set_first_password(SYSTEM_USER, verifier).await? {
        // Another node of the cluster, which was started at the same time, has set its own.
        return std::fs::remove_file(&file)
            .with_context(|| format!("cannot remove {}, which has an unused password", file.display()));
    }
    tracing::info!(
        user = SYSTEM_USER,
        password_file = %file.display(),
        "created the superuser; the password file is readable only by its owner"
    );
    Ok(())
}

/// Generates a password and writes it to the file, or reads the password that an earlier start has
/// written.
fn write_or_read(data: &Path, path: &Path) -> anyhow::Result<String> {
    // One call creates the file with its mode, so other users cannot read it at any moment.
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(mut file) => {
            let password = random_password();
            file.write_all(password.as_bytes())?;
            file.write_all(b"\n")?;
            file.sync_all()?;
            File::open(data)?.sync_all()?;
            Ok(password)
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let text = std::fs::read_to_string(path)?;
            let password = text.trim();
            // A crash may have left the file empty.
            ensure!(
                password.len() >= PASSWORD_LENGTH,
                "the file does not contain a password; delete it and start the node again"
            );
            Ok(password.to_owned())
        }
        Err(error) => Err(error.into()),
    }
}

fn random_password() -> String {
    let mut random = rand::rng();
    (0..PASSWORD_LENGTH).map(|_| char::from(ALPHABET[random.random_range(0..ALPHABET.len())])).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn password_file_is_private_and_reused_by_the_next_start() {
        let data = tempfile::tempdir().unwrap();
        let file = data.path().join(PASSWORD_FILE);
        let password = write_or_read(data.path(), &file).unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), password);
        assert_eq!(write_or_read(data.path(), &file).unwrap(), password);
        std::fs::write(&file, "").unwrap();
        assert!(write_or_read(data.path(), &file).unwrap_err().to_string().contains("delete it"));
    }

    #[test]
    fn passwords_use_the_whole_alphabet_and_do_not_repeat() {
        let passwords: HashSet<String> = (0..200).map(|_| random_password()).collect();
        assert_eq!(passwords.len(), 200);
        let used: HashSet<u8> = passwords.iter().flat_map(|password| password.bytes()).collect();
        assert_eq!(used, ALPHABET.iter().copied().collect());
    }
}
