//! Where a server listens and as whom to connect: what a `postgres://` URL says.

use std::fmt;
use std::str::FromStr;

use tokio_postgres::config::Host;

/// A server, a user and a database of it.
#[derive(Clone, PartialEq, Eq)]
pub struct Target {
    /// Host name or address (TCP only).
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// The user to connect as.
    pub user: String,
    /// Their password, if the server asks for one.
    pub password: Option<String>,
    /// The database, which for Fulmar is the tenant.
    pub database: String,
}

/// A target that could not be understood.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// Not a connection string at all.
    #[error("cannot read the target: {0}; write postgres://user:password@host:port/database")]
    Syntax(#[from] tokio_postgres::Error),
    /// Something the driver does not do.
    #[error("the target {0}; write postgres://user:password@host:port/database")]
    Unsupported(&'static str),
}

impl Target {
    /// The same server and user, another database.
    pub fn with_database(&self, database: impl Into<String>) -> Target {
        Target { database: database.into(), ..self.clone() }
    }
}

impl FromStr for Target {
    type Err = TargetError;

    /// Reads a URL or a `host=... port=...` string, with libpq's defaults for what is left out.
    fn from_str(text: &str) -> Result<Target, TargetError> {
        let config: tokio_postgres::Config = text.parse()?;
        let host = match (config.get_hostaddrs(), config.get_hosts()) {
            ([address], _) => address.to_string(),
            ([], []) => "127.0.0.1".to_owned(),
            ([], [Host::Tcp(name)]) => name.clone(),
            ([], [_]) => return Err(TargetError::Unsupported("names a Unix socket; only TCP is spoken")),
            _ => return Err(TargetError::Unsupported("names several hosts; name one")),
        };
        let port = match config.get_ports() {
            [] => 5432,
            [port] => *port,
            _ => return Err(TargetError::Unsupported("names several ports; name one")),
        };
        let user = config.get_user().unwrap_or("postgres").to_owned();
        let password = match config.get_password().map(|bytes| String::from_utf8(bytes.to_vec())) {
            None => None,
            Some(Ok(password)) => Some(password),
            Some(Err(_)) => return Err(TargetError::Unsupported("has a password that is not UTF-8")),
        };
        let database = config.get_dbname().unwrap_or(&user).to_owned();
        Ok(Target { host, port, user, password, database })
    }
}

impl fmt::Display for Target {
    /// As a URL, without the password.
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
    fn a_url_is_read_whole() {
        let target: Target = "postgres://ann:p%40ss@db.example:6000/shop".parse().unwrap();
        assert_eq!((target.host.as_str(), target.port), ("db.example", 6000));
        assert_eq!((target.user.as_str(), target.database.as_str()), ("ann", "shop"));
        assert_eq!(target.password.as_deref(), Some("p@ss"));
        assert!(!format!("{target} {target:?}").contains("p@ss"));
    }

    #[test]
    fn what_is_left_out_has_libpq_defaults() {
        let target: Target = "postgres://ann@localhost".parse().unwrap();
        assert_eq!((target.port, target.database.as_str(), target.password), (5432, "ann", None));
    }

    #[test]
    fn what_cannot_be_done_is_said() {
        for text in ["postgres://a@h1,h2/x", "host=/var/run user=a", "http://x"] {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
    }
}
