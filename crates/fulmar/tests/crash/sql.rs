//! A SQL client of a node.

use std::str::FromStr;

use anyhow::Context;
use tokio_postgres::{Config, Error, NoTls, SimpleQueryMessage, SimpleQueryRow};

use crate::node::Node;

/// A connection to one tenant. Dropping it closes it.
pub struct Client(tokio_postgres::Client);

impl Client {
    pub async fn connect(node: &Node, database: &str) -> Result<Client, Error> {
        Client::connect_to(node.sql, database).await
    }

    pub async fn connect_to(sql: std::net::SocketAddr, database: &str) -> Result<Client, Error> {
        let mut config = Config::new();
        config.host(sql.ip().to_string()).port(sql.port()).user("fulmar").dbname(database);
        let (client, connection) = config.connect(NoTls).await?;
        // Connection errors are returned by the statements.
        tokio::spawn(connection);
        Ok(Client(client))
    }

    /// Returns true if the connection is closed.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Runs statements over the simple protocol and returns all rows.
    pub async fn query(&self, sql: &str) -> Result<Vec<SimpleQueryRow>, Error> {
        let messages = self.0.simple_query(sql).await?;
        Ok(messages
            .into_iter()
            .filter_map(|message| match message {
                SimpleQueryMessage::Row(row) => Some(row),
                _ => None,
            })
            .collect())
    }

    /// Inserts a note over the extended protocol.
    pub async fn insert_note(&self, note: i64, body: &str) -> Result<u64, Error> {
        self.0.execute("INSERT INTO note (id, body) VALUES ($1, $2)", &[&note, &body]).await
    }

    /// Queries the outcome of a transaction.
    pub async fn outcome(&self, xact: i64) -> anyhow::Result<Outcome> {
        let rows = self.query(&format!("SELECT pg_xact_status({xact})")).await?;
        match rows.first().context("no row")?.get(0) {
            Some("committed") => Ok(Outcome::Committed),
            Some("aborted") => Ok(Outcome::Aborted),
            other => anyhow::bail!("pg_xact_status({xact}) returns {other:?}"),
        }
    }
}

/// The outcome of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Committed,
    Aborted,
}

/// The id of a transaction, and its queried outcome.
pub type QueriedOutcome = (i64, Outcome);

/// Parses a column of a row as a number.
pub fn number<T: FromStr<Err: std::error::Error + Send + Sync + 'static>>(
    row: &SimpleQueryRow,
    column: usize,
) -> anyhow::Result<T> {
    let text = row.get(column).with_context(|| format!("column {column} is null"))?;
    text.parse().with_context(|| format!("column {column} is {text:?}"))
}
