//! The line on stdout with which a node reports that it accepts connections.
//!
//! It ends with a command that works as it stands: it has the node's address, which may differ from
//! the default of `--server`, and the password file, as long as it exists.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use super::superuser::PASSWORD_FILE;
use crate::cli::DEFAULT_SERVER;

/// Returns the line. `source` states where the data is.
pub fn line(sql: SocketAddr, http: SocketAddr, source: &str, password_file: Option<&Path>) -> String {
    format!("fulmar ready: sql {sql}, http {http}, {source}; try: {}", first_command(sql, password_file))
}

/// The password file of a data directory, if clients of this node need one.
pub fn password_file(data: &Path, insecure: bool) -> Option<std::path::PathBuf> {
    Some(data.join(PASSWORD_FILE)).filter(|file| !insecure && file.exists())
}

fn first_command(sql: SocketAddr, password_file: Option<&Path>) -> String {
    let mut command = "fulmar tenant list".to_owned();
    let server = format!("postgres://fulmar@{}", reachable(sql));
    if server != DEFAULT_SERVER {
        command.push_str(&format!(" --server {server}"));
    }
    if let Some(file) = password_file {
        command.push_str(&format!(" --password-file {}", quoted(&file.display().to_string())));
    }
    command
}

/// The address at which a client on this machine reaches a listener.
fn reachable(listening: SocketAddr) -> SocketAddr {
    let ip = match listening.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(ip, listening.port())
}

/// Quotes a word for a shell, if it needs that.
fn quoted(word: &str) -> String {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "/._-+:,@%".contains(character);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_has_what_differs_from_the_defaults() {
        let command =
            |sql: &str, file: Option<&str>| first_command(sql.parse().unwrap(), file.map(Path::new));
        assert_eq!(command("127.0.0.1:5433", None), "fulmar tenant list");
        assert_eq!(
            command("127.0.0.1:7000", None),
            "fulmar tenant list --server postgres://fulmar@127.0.0.1:7000"
        );
        assert_eq!(
            command("0.0.0.0:5433", Some("/d/superuser-password")),
            "fulmar tenant list --password-file /d/superuser-password"
        );
        assert_eq!(
            command("[::]:1", Some("/my data/p'w")),
            r"fulmar tenant list --server postgres://fulmar@[::1]:1 --password-file '/my data/p'\''w'"
        );
    }

    #[test]
    fn only_an_existing_password_file_is_named() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(password_file(directory.path(), false), None);
        std::fs::write(directory.path().join(PASSWORD_FILE), "x").unwrap();
        assert_eq!(password_file(directory.path(), false), Some(directory.path().join(PASSWORD_FILE)));
        assert_eq!(password_file(directory.path(), true), None);
    }
}
