//! Connection targets: the server, user and database of a `postgres://` URL.

use std::fmt;
use std::str::FromStr;

use tokio_postgres::config::Host;

/// A server, a user and a database.
#[derive(Clone, PartialEq, Eq)]
pub struct Target {
    /// Host name or address. Only TCP is supported.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// The user to connect as.
    pub user: String,
    /// The password, if the server requires one.
    pub password: Option<String>,
    /// The database. For Fulmar, the tenant.
    pub database: String,
}

/// Why a target could not be parsed.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// Not a connection string.
    #[error("invalid target: {0}; expected postgres://user:password@host:port/database")]
    Syntax(#[from] tokio_postgres::Error),
    /// A feature that the driver does not support.
    #[error("invalid target: {0}; expected postgres://user:password@host:port/database")]
    Unsupported(&'static str),
}

impl Target {
    /// The same server and user with another database.
    pub fn with_database(&self, database: impl Into<String>) -> Target {
        Target { database: database.into(), ..self.clone() }
    }
}

impl FromStr for Target {
    type Err = TargetError;

    /// Parses a URL or a `host=... port=...` string. Missing parts have libpq's defaults.
    fn from_str(text: &str) -> Result<Target, TargetError> {
        let config: tokio_postgres::Config = text.parse()?;
        let host = match (config.get_hostaddrs(), config.get_hosts()) {
            ([address], _) => address.to_string(),
            ([], []) => "127.0.0.1".to_owned(),
            ([], [Host::Tcp(name)]) => name.clone(),
            ([], [_]) => return Err(TargetError::Unsupported("Unix sockets are not supported")),
            _ => return Err(TargetError::Unsupported("multiple hosts are not supported")),
        };
        let port = match config.get_ports() {
            [] => 5432,
            [port] => *port,
            _ => return Err(TargetError::Unsupported("multiple ports are not supported")),
        };
        let user = config.get_user().unwrap_or("postgres").to_owned();
        let password = match config.get_password().map(|bytes| String::from_utf8(bytes.to_vec())) {
            None => None,
            Some(Ok(password)) => Some(password),
            Some(Err(_)) => {
                return Err(TargetError::Unsupported("the password is not valid UTF-8"));
            }
        };
        let database = config.get_dbname().unwrap_or(&user).to_owned();
        Ok(Target { host, port, user, password, database })
    }
}

impl fmt::Display for Target {
    /// Formats the URL without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "postgres://{}@{}:{}/{}", self.user, self.host, self.port, self.database)
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_of_a_url_are_parsed() {
        let target: Target = "postgres://ann:p%40ss@db.example:6000/shop".parse().unwrap();
        assert_eq!((target.host.as_str(), target.port), ("db.example", 6000));
        assert_eq!((target.user.as_str(), target.database.as_str()), ("ann", "shop"));
        assert_eq!(target.password.as_deref(), Some("p@ss"));
        assert!(!format!("{target} {target:?}").contains("p@ss"));
    }

    #[test]
    fn omitted_parts_have_libpq_defaults() {
        let target: Target = "postgres://ann@localhost".parse().unwrap();
        assert_eq!((target.port, target.database.as_str(), target.password), (5432, "ann", None));
    }

    #[test]
    fn unsupported_targets_are_rejected() {
        for text in ["postgres://a@h1,h2/x", "host=/var/run user=a", "http://x"] {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
    }
}
