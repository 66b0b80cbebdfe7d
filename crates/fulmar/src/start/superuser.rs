//! The superuser of a new node, and the file that tells its password to whoever owns the data directory.
//!
//! The file comes first, then the catalog: after a crash between the two, the next start finds the file, and
//! takes the password from it. When the catalog has a password, the file is never looked at again: change the
//! password, delete the file, as you like.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, ensure};
use fulmar_meta::{Catalog, SYSTEM_USER};
use rand::RngExt;

/// The file's name in the data directory.
const FILE: &str = "superuser-password";

/// 24 of 32 signs are 120 random bits. No two signs look alike, and none needs quoting in a URL or a shell.
const PASSWORD_SIGNS: usize = 24;
const SIGNS: &[u8; 32] = b"abcdefghjkmnpqrstuvwxyz234567890";

/// Gives the superuser a password, if it has none.
pub async fn ensure_password(catalog: &Catalog, data: &Path) -> anyhow::Result<()> {
    if catalog.user(SYSTEM_USER).is_some_and(|user| user.verifier.is_some()) {
        return Ok(());
    }
    let file = data.join(FILE);
    let password = write_or_read(data, &file)
        .with_context(|| format!("cannot keep the superuser's password in {}", file.display()))?;
    let verifier = fulmar_gateway::scram_verifier(&password);
    catalog.alter_user_password(SYSTEM_USER, Some(verifier)).await?;
    tracing::info!(
        user = SYSTEM_USER,
        password_file = %file.display(),
        "made the superuser; its password is in the file, which only its owner can read"
    );
    Ok(())
}

/// A new password, written so that nobody else could read it at any moment; or the one that a start before
/// this one wrote.
fn write_or_read(data: &Path, path: &Path) -> anyhow::Result<String> {
    // Mode and existence are settled by the one call that makes the file: no moment in between.
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
            // A crash may have left it empty.
            ensure!(password.len() >= PASSWORD_SIGNS, "it holds no password; delete it and start again");
            Ok(password.to_owned())
        }
        Err(error) => Err(error.into()),
    }
}

fn random_password() -> String {
    let mut random = rand::rng();
    (0..PASSWORD_SIGNS).map(|_| char::from(SIGNS[random.random_range(0..SIGNS.len())])).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_file_is_its_owners_only_and_read_again() {
        let data = tempfile::tempdir().unwrap();
        let file = data.path().join(FILE);
        let password = write_or_read(data.path(), &file).unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), password);
        assert_eq!(write_or_read(data.path(), &file).unwrap(), password);
        std::fs::write(&file, "").unwrap();
        assert!(write_or_read(data.path(), &file).unwrap_err().to_string().contains("delete it"));
    }

    #[test]
    fn passwords_use_every_sign_and_do_not_repeat() {
        let passwords: HashSet<String> = (0..200).map(|_| random_password()).collect();
        assert_eq!(passwords.len(), 200);
        let used: HashSet<u8> = passwords.iter().flat_map(|password| password.bytes()).collect();
        assert_eq!(used, SIGNS.iter().copied().collect());
    }
}
