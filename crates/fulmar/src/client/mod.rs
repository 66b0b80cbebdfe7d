//! The command as a client of a node: how it connects, logs in, and tells what the node says.
//!
//! It is a client like any other: the address is that of psql, with its words for TLS ([`tls`]), and the password may stand
//! in a file, in the address, or in the environment.

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

/// A client of a database.
pub async fn connect(arguments: &ServerArgs, database: &str) -> anyhow::Result<Client> {
    let (url, wanted) = tls::taken_out(&arguments.server)?;
    let mut config = parsed(&url)?;
    let tls = Tls::new(&wanted, &mut config)?;
    config.dbname(database).application_name("fulmar");
    if let Some(password) = password(&config, arguments.password_file.as_deref())? {
        config.password(password);
    }
    let (client, connection) = config.connect(tls).await.map_err(|error| refusal(&error, &config))?;
    // The connection works until the client is dropped; what goes wrong with it the client reports.
    tokio::spawn(connection);
    Ok(client)
}

impl ServerArgs {
    /// The database that the URL names.
    pub fn database(&self) -> anyhow::Result<Option<String>> {
        Ok(self.config()?.get_dbname().map(str::to_owned))
    }

    /// Where the node is, and who asks.
    pub fn config(&self) -> anyhow::Result<Config> {
        parsed(&tls::taken_out(&self.server)?.0)
    }
}

fn parsed(url: &str) -> anyhow::Result<Config> {
    url.parse().context("cannot read --server; write postgres://USER:PASSWORD@HOST:PORT")
}

/// The password file's, else what the URL holds (nothing to add), else PGPASSWORD's.
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

/// A struct out of a row whose columns have the names of its fields; some may come from elsewhere.
macro_rules! from_row {
    ($row:ident => $name:ident { $($field:ident),+ $(; $other:ident: $value:expr)* $(,)? }) => {
        $name { $($field: $row.try_get(stringify!($field))?,)+ $($other: $value,)* }
    };
}
pub(crate) use from_row;

/// Why there is no connection, and what to do. (tokio-postgres tells its own kinds of errors apart by their texts only.)
fn refusal(error: &tokio_postgres::Error, config: &Config) -> anyhow::Error {
    let said = server_error(error);
    if error.as_db_error().is_some() {
        return said.context("the node refused");
    }
    match error.source().map(ToString::to_string).as_deref() {
        Some("password missing") => {
            anyhow!("the node wants a password: --password-file FILE, PGPASSWORD, or in --server")
        }
        Some("server does not support TLS") => {
            anyhow!("the node speaks no TLS; start it with --tls-cert, or leave sslmode out of --server")
        }
        _ if distrusts(error) => said.context(
            "cannot trust the node's certificate; is the file that sslrootcert names this certificate, or that of who \
             signed it?",
        ),
        _ => said.context(format!(
            "cannot connect to {}; is the node running, and is --server its --sql address?",
            addresses(config)
        )),
    }
}

/// Where a connection was tried.
fn addresses(config: &Config) -> String {
    const USUAL_PORT: u16 = 5432;
    let (hosts, ports) = (config.get_hosts(), config.get_ports());
    let of_all = ports.first().copied().unwrap_or(USUAL_PORT);
    let address = |(at, host): (usize, &Host)| {
        let port = ports.get(at).copied().unwrap_or(of_all);
        match host {
            Host::Tcp(name) if name.contains(':') => format!("[{name}]:{port}"),
            Host::Tcp(name) => format!("{name}:{port}"),
            Host::Unix(directory) => format!("{}/.s.PGSQL.{port}", directory.display()),
        }
    };
    hosts.iter().enumerate().map(address).collect::<Vec<_>>().join(" or ")
}

/// The node has shown a certificate that was not taken.
fn distrusts(error: &tokio_postgres::Error) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    let inner = source.and_then(io::Error::get_ref).and_then(|inner| inner.downcast_ref());
    matches!(inner, Some(rustls::Error::InvalidCertificate(_)))
}

/// What the server said.
#[derive(Debug)]
pub struct ServerError {
    /// SQLSTATE; `None` if it said nothing, and this tells what became of the connection.
    pub state: Option<String>,
    /// Its primary message.
    pub message: String,
    /// What it advises.
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

/// An error with what the server said in it.
pub fn server_error(error: &tokio_postgres::Error) -> anyhow::Error {
    let error = match error.as_db_error() {
        Some(said) => ServerError {
            state: Some(said.code().code().to_owned()),
            message: said.message().to_owned(),
            hint: said.hint().map(str::to_owned),
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
    fn the_password_file_comes_first_and_loses_its_line_break() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("password");
        std::fs::write(&file, " se cret \r\n").unwrap();
        let config: Config = "postgres://a:inurl@h".parse().unwrap();
        assert_eq!(password(&config, Some(&file)).unwrap().as_deref(), Some(" se cret "));
        assert_eq!(password(&config, None).unwrap(), None);
        assert!(password(&config, Some(directory.path())).is_err());
    }

    #[test]
    fn every_address_that_was_tried_is_named() {
        let of = |url: &str| addresses(&parsed(url).unwrap());
        assert_eq!(of("postgres://fulmar@db.example:5433/shop"), "db.example:5433");
        assert_eq!(of("postgres://fulmar@[::1]"), "[::1]:5432");
        assert_eq!(of("postgres://fulmar@a:1,b:2"), "a:1 or b:2");
        assert_eq!(of("host=a,b port=7"), "a:7 or b:7");
        assert_eq!(of("host=/run/db"), "/run/db/.s.PGSQL.5432");
    }
}
