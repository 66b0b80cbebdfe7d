//! Connects to a node over the PostgreSQL protocol, and reports its errors.
//!
//! The command is an ordinary client. It takes a connection URL as psql does, with the same TLS
//! parameters ([`tls`]), and the password from a file, the URL or the environment.

mod tls;

use std::error::Error;
use std::fmt;
use std::io;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use tokio_postgres::config::Host;
use tokio_postgres::{Client, Config};

use self::tls::Tls;
use crate::cli::ServerArgs;

/// Connects to a database of the node.
pub async fn connect(arguments: &ServerArgs, database: &str) -> anyhow::Result<Client> {
    let (url, tls_options) = tls::split_tls_options(&arguments.server)?;
    let mut config = parse_url(&url)?;
    let tls = Tls::new(&tls_options, &mut config)?;
    config.dbname(database).application_name("fulmar");
    if let Some(password) = password(&config, arguments.password_file.as_deref())? {
        config.password(password);
    }
    let (client, connection) = config.connect(tls).await.map_err(|error| connect_error(&error, &config))?;
    // The task ends when the client is dropped. The client reports the connection's errors.
    tokio::spawn(connection);
    Ok(client)
}

impl ServerArgs {
    /// Returns the database that the URL names, if any.
    pub fn database(&self) -> anyhow::Result<Option<String>> {
        Ok(self.config()?.get_dbname().map(str::to_owned))
    }

    /// Parses the URL, without its TLS parameters.
    pub fn config(&self) -> anyhow::Result<Config> {
        parse_url(&tls::split_tls_options(&self.server)?.0)
    }
}

fn parse_url(url: &str) -> anyhow::Result<Config> {
    url.parse().context("invalid --server; expected postgres://USER:PASSWORD@HOST:PORT")
}

/// Returns the password of the password file, or that of PGPASSWORD. Returns `None` if the URL
/// contains a password and there is no password file: `config` has it already.
fn password(config: &Config, file: Option<&Path>) -> anyhow::Result<Option<String>> {
    if let Some(file) = file {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read the password file {}", file.display()))?;
        return Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()));
    }
    if config.get_password().is_some() {
        return Ok(None);
    }
    match std::env::var("PGPASSWORD") {
        Ok(password) => Ok(Some(password)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => bail!("PGPASSWORD is not UTF-8; use --password-file"),
    }
}

/// Builds a struct from a row with columns named like its fields. Fields after `;` have explicit
/// values.
macro_rules! from_row {
    ($row:ident => $name:ident { $($field:ident),+ $(; $other:ident: $value:expr)* $(,)? }) => {
        $name { $($field: $row.try_get(stringify!($field))?,)+ $($other: $value,)* }
    };
}
pub(crate) use from_row;

/// Returns the cause of a failed connection, and the remedy. tokio-postgres identifies its own
/// errors only by their texts.
fn connect_error(error: &tokio_postgres::Error, config: &Config) -> anyhow::Error {
    let cause = server_error(error);
    if error.as_db_error().is_some() {
        return cause.context("the node rejected the connection");
    }
    match error.source().map(ToString::to_string).as_deref() {
        Some("password missing") => {
            anyhow!("the node requires a password; set --password-file, PGPASSWORD or a password in --server")
        }
        Some("server does not support TLS") => {
            anyhow!(
                "the node does not support TLS; start it with --tls-cert, or remove sslmode from --server"
            )
        }
        _ if is_certificate_error(error) => cause.context(
            "cannot verify the node's certificate; check that the sslrootcert file contains this \
             certificate or that of its issuer",
        ),
        _ => cause.context(format!(
            "cannot connect to {}; check that the node is running and that --server is its --sql \
             address",
            addresses(config)
        )),
    }
}

/// Returns the addresses that a connection attempt uses.
fn addresses(config: &Config) -> String {
    const DEFAULT_PORT: u16 = 5432;
    let (hosts, ports) = (config.get_hosts(), config.get_ports());
    let common_port = ports.first().copied().unwrap_or(DEFAULT_PORT);
    let address = |(index, host): (usize, &Host)| {
        let port = ports.get(index).copied().unwrap_or(common_port);
        match host {
            Host::Tcp(name) if name.contains(':') => format!("[{name}]:{port}"),
            Host::Tcp(name) => format!("{name}:{port}"),
            Host::Unix(directory) => format!("{}/.s.PGSQL.{port}", directory.display()),
        }
    };
    hosts.iter().enumerate().map(address).collect::<Vec<_>>().join(" or ")
}

/// Returns true if the client rejected the node's certificate.
fn is_certificate_error(error: &tokio_postgres::Error) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    let inner = source.and_then(io::Error::get_ref).and_then(|inner| inner.downcast_ref());
    matches!(inner, Some(rustls::Error::InvalidCertificate(_)))
}

/// An error response of the server, or a failure of the connection.
#[derive(Debug)]
pub struct ServerError {
    /// SQLSTATE. `None` for a failure of the connection.
    pub state: Option<String>,
    /// The primary message.
    pub message: String,
    /// The server's hint.
    pub hint: Option<String>,
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.state.iter().try_for_each(|state| write!(f, " ({state})"))?;
        self.hint.iter().try_for_each(|hint| write!(f, "; {hint}"))
    }
}

impl Error for ServerError {}

/// Converts a driver error to a [`ServerError`].
pub fn server_error(error: &tokio_postgres::Error) -> anyhow::Error {
    let error = match error.as_db_error() {
        Some(response) => ServerError {
            state: Some(response.code().code().to_owned()),
            message: response.message().to_owned(),
            hint: response.hint().map(str::to_owned),
        },
        None => {
            let cause = error.source().map(|source| format!(": {source}")).unwrap_or_default();
            ServerError { state: None, message: format!("{error}{cause}"), hint: None }
        }
    };
    error.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn password_file_has_precedence_and_its_line_break_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("password");
        std::fs::write(&file, " se cret \r\n").unwrap();
        let config: Config = "postgres://a:inurl@h".parse().unwrap();
        assert_eq!(password(&config, Some(&file)).unwrap().as_deref(), Some(" se cret "));
        assert_eq!(password(&config, None).unwrap(), None);
        assert!(password(&config, Some(directory.path())).is_err());
    }

    #[test]
    fn connection_error_lists_every_address() {
        let list = |url: &str| addresses(&parse_url(url).unwrap());
        assert_eq!(list("postgres://fulmar@db.example:5433/shop"), "db.example:5433");
        assert_eq!(list("postgres://fulmar@[::1]"), "[::1]:5432");
        assert_eq!(list("postgres://fulmar@a:1,b:2"), "a:1 or b:2");
        assert_eq!(list("host=a,b port=7"), "a:7 or b:7");
        assert_eq!(list("host=/run/db"), "/run/db/.s.PGSQL.5432");
    }
}
