//! A Rust client for a cluster of Fulmar nodes: connects to the node that owns a database.
//!
//! Every node serves every database, and relays the statements of databases that another node owns.
//! Ordinary drivers therefore work with any node. This driver saves the relay: it learns the owner
//! of each database and connects to it directly. It is a thin layer over `tokio-postgres`, whose
//! [`Client`](tokio_postgres::Client) it returns.
//!
//! ```no_run
//! # async fn example() -> Result<(), fulmar_driver::Error> {
//! let config = "host=10.0.0.1,10.0.0.2,10.0.0.3 user=app password=secret".parse()?;
//! let cluster = fulmar_driver::Cluster::new(config, tokio_postgres::NoTls);
//! let mut session = cluster.connect("shop").await?;
//! session.execute("INSERT INTO orders (item) VALUES ($1)", &[&"chair"]).await?;
//! // Between transactions: connect to the new owner, if the database was moved.
//! cluster.follow(&mut session).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # How the owner is learned
//!
//! A node reports the parameter `fulmar.owner` when a session starts, and again when the owner has
//! changed: the address of the owner, or the empty text if the node itself is the owner. The driver
//! remembers the last owner of each database ([`Cluster`]). What it remembers may be outdated, and
//! then costs time, but never an error (thesis of Karyakin, 3.1.5):
//!
//! - **A new client** knows no owner. It connects to one of the configured hosts, and then to the
//!   owner that this one reports.
//! - **The database was moved.** The remembered node relays the session, and reports the new owner.
//! - **The node is gone.** The driver forgets it, and asks the other hosts.
//! - **The owner cannot be reached** by the client, for example because of a firewall. The driver
//!   keeps the relayed session.

mod address;
mod session;

use std::collections::HashMap;

use parking_lot::Mutex;
use tokio_postgres::config::Host;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{Config, Socket};

pub use address::Address;
pub use session::Session;

/// The port of nodes whose address has none.
const DEFAULT_PORT: u16 = 5432;
/// How often a session follows reports of other owners before it stays where it is. More than one
/// change during a login is unusual.
const MAX_REDIRECTS: usize = 3;

/// Why a client could not connect.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration has no hosts, or a Unix socket.
    #[error("the configuration has no TCP hosts; add host=... to it")]
    NoHosts,
    /// The last of the hosts that were tried refused the connection, or could not be reached.
    #[error(transparent)]
    Postgres(#[from] tokio_postgres::Error),
}

/// A cluster: its nodes, and the owners of databases as far as they are known.
pub struct Cluster<T> {
    config: Config,
    tls: T,
    owners: Mutex<HashMap<String, Address>>,
}

impl<T> Cluster<T>
where
    T: MakeTlsConnect<Socket> + Clone + Send + 'static,
    T::Stream: Send,
    T::TlsConnect: Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    /// A cluster with the hosts, user and options of `config`. Its database is ignored.
    pub fn new(config: Config, tls: T) -> Cluster<T> {
        Cluster { config, tls, owners: Mutex::default() }
    }

    /// Connects to a database: at its owner, or through another node if the owner cannot be
    /// reached.
    pub async fn connect(&self, database: &str) -> Result<Session, Error> {
        let mut session = self.connect_anywhere(database).await?;
        for _ in 0..MAX_REDIRECTS {
            let Some(owner) = session.owner() else { break };
            match self.connect_to(&owner, database).await {
                Ok(direct) => session = direct,
                Err(_) => {
                    self.forget(database, &owner);
                    return Ok(session);
                }
            }
        }
        let address = session.owner().unwrap_or_else(|| session.address().clone());
        self.owners.lock().insert(database.to_owned(), address);
        Ok(session)
    }

    /// Connects a session to the owner of its database if that has changed, or if the connection
    /// was lost. Prepared statements and settings of the session are lost then. Call it between
    /// transactions. Returns true if the session is a new one.
    pub async fn follow(&self, session: &mut Session) -> Result<bool, Error> {
        if session.owner().is_none() && !session.is_closed() {
            return Ok(false);
        }
        let database = session.database().to_owned();
        *session = self.connect(&database).await?;
        Ok(true)
    }

    /// The remembered owner of a database.
    pub fn owner(&self, database: &str) -> Option<Address> {
        self.owners.lock().get(database).cloned()
    }

    /// Connects to the remembered owner, or to the first configured host that answers.
    async fn connect_anywhere(&self, database: &str) -> Result<Session, Error> {
        if let Some(owner) = self.owner(database) {
            match self.connect_to(&owner, database).await {
                Ok(session) => return Ok(session),
                // The node refuses the user or the database: any other one would, too.
                Err(Error::Postgres(error)) if is_refusal(&error) => return Err(error.into()),
                Err(_) => self.forget(database, &owner),
            }
        }
        let mut last = Error::NoHosts;
        for host in self.hosts() {
            match self.connect_to(&host, database).await {
                Ok(session) => return Ok(session),
                Err(Error::Postgres(error)) if is_refusal(&error) => return Err(error.into()),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn connect_to(&self, address: &Address, database: &str) -> Result<Session, Error> {
        let config = address::config_for(&self.config, address, database);
        Session::connect(config, self.tls.clone(), address.clone(), database).await
    }

    /// Forgets an owner, unless another one has become known.
    fn forget(&self, database: &str, owner: &Address) {
        let mut owners = self.owners.lock();
        if owners.get(database) == Some(owner) {
            owners.remove(database);
        }
    }

    /// The configured hosts.
    fn hosts(&self) -> Vec<Address> {
        let ports = self.config.get_ports();
        let port = |number: usize| match ports {
            [] => DEFAULT_PORT,
            [port] => *port,
            ports => ports.get(number).copied().unwrap_or(DEFAULT_PORT),
        };
        let tcp = |(number, host): (usize, &Host)| match host {
            Host::Tcp(name) => Some(Address { host: name.clone(), port: port(number) }),
            Host::Unix(_) => None,
        };
        self.config.get_hosts().iter().enumerate().filter_map(tcp).collect()
    }
}

/// The server answered, and every node would answer the same: the class of SQLSTATE says that the
/// user, its password or the database is wrong.
fn is_refusal(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|state| ["28", "3D", "42"].iter().any(|class| state.code().starts_with(class)))
}
