//! A connection to a node, with the owner that the node reports.

use std::future::poll_fn;
use std::ops::Deref;

use futures::ready;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config, Connection, Socket};

use crate::{Address, Error};

/// The parameter with the address of the owner.
const OWNER: &str = "fulmar.owner";

/// A session on a database. Dereferences to the client of `tokio-postgres`.
pub struct Session {
    client: Client,
    address: Address,
    database: String,
    /// The owner, if it is another node than the one that the session is connected to.
    owner: watch::Receiver<Option<Address>>,
}

impl Session {
    pub(crate) async fn connect<T>(
        config: Config,
        tls: T,
        address: Address,
        database: &str,
    ) -> Result<Session, Error>
    where
        T: MakeTlsConnect<Socket>,
        T::Stream: Send + 'static,
    {
        let (client, connection) = config.connect(tls).await?;
        let (report, owner) = watch::channel(reported(&connection));
        tokio::spawn(drive(connection, report));
        Ok(Session { client, address, database: database.to_owned(), owner })
    }

    /// The node that the session is connected to.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The database.
    pub fn database(&self) -> &str {
        &self.database
    }

    /// The owner of the database, if the node relays the session to another one.
    pub fn owner(&self) -> Option<Address> {
        self.owner.borrow().clone()
    }

    /// The client, mutably, for transactions.
    pub fn client_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

impl Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

/// The owner that the node has reported last, if it is another node.
fn reported<S, T>(connection: &Connection<S, T>) -> Option<Address>
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    connection.parameter(OWNER)?.parse().ok()
}

/// Drives a connection until it ends, and publishes each change of the reported owner.
async fn drive<S, T>(mut connection: Connection<S, T>, report: watch::Sender<Option<Address>>)
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    poll_fn(|cx| {
        loop {
            let polled = connection.poll_message(cx);
            report.send_if_modified(|known| {
                let now = reported(&connection);
                let has_changed = *known != now;
                *known = now;
                has_changed
            });
            // An error of the connection is reported by the client's calls.
            if !matches!(ready!(polled), Some(Ok(_))) {
                return std::task::Poll::Ready(());
            }
        }
    })
    .await;
}
