//! A complete node in this process, and clients of it.

#![allow(dead_code, reason = "not every test program uses all of it")]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use fulmar_engine::{Config, Engine};
use fulmar_gateway::http::{self, HttpServer};
use fulmar_gateway::{Gateway, GatewayConfig};
use fulmar_meta::{Catalog, Embedded};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::{Client, NoTls};

/// Deadline of every wait in a test. A wait that takes longer is a hang, not a slow machine.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Polls until `holds` returns true. Panics after [`WAIT_TIMEOUT`].
pub async fn wait_until(description: &str, mut holds: impl AsyncFnMut() -> bool) {
    let poll = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    with_timeout(description, poll).await;
}

/// The result of `future`. Panics after [`WAIT_TIMEOUT`].
pub async fn with_timeout<T>(description: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(WAIT_TIMEOUT, future).await {
        Ok(value) => value,
        Err(_) => panic!("timed out: {description}"),
    }
}

/// A node on loopback, with its own directory.
pub struct Node {
    pub engine: Arc<Engine>,
    pub catalog: Arc<Catalog>,
    pub gateway: Gateway,
    pub http: HttpServer,
    pub directory: tempfile::TempDir,
}

impl Node {
    /// A node on which every user is a superuser.
    pub async fn insecure() -> Node {
        Node::start(|config| config.insecure = true).await
    }

    /// A node with password authentication, unless `change` disables it.
    pub async fn start(change: impl FnOnce(&mut GatewayConfig)) -> Node {
        Node::on_engine(change, |_| ()).await
    }

    /// The same, with changes to the engine's configuration.
    pub async fn on_engine(
        change: impl FnOnce(&mut GatewayConfig),
        change_engine: impl FnOnce(&mut Config),
    ) -> Node {
        let directory = tempfile::tempdir().unwrap();
        let store = Embedded::open(&directory.path().join("meta.db")).unwrap();
        let catalog = Catalog::open(Arc::new(store)).await.unwrap();
        // Sufficient for values of 100 MB.
        let mut engine = Config::new(directory.path(), 4 << 30);
        change_engine(&mut engine);
        let engine = Engine::start(engine).await.unwrap();
        let mut config = GatewayConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)));
        config.workers = 2;
        config.temporary_directory = directory.path().to_owned();
        change(&mut config);
        let gateway = Gateway::start(config, engine.clone(), catalog.clone()).unwrap();
        let http = http::serve(SocketAddr::from(([127, 0, 0, 1], 0)), &gateway).await.unwrap();
        Node { engine, catalog, gateway, http, directory }
    }

    /// The port for clients.
    pub fn port(&self) -> u16 {
        self.gateway.local_addr().port()
    }

    /// The connection options for a database and a user.
    pub fn config(&self, database: &str, user: &str) -> tokio_postgres::Config {
        let mut config = tokio_postgres::Config::new();
        config.host("127.0.0.1").port(self.port()).dbname(database).user(user);
        config
    }

    /// A client of a database. Dropping it closes the connection.
    pub async fn client(&self, database: &str) -> Client {
        connect(&self.config(database, "anna")).await.unwrap()
    }

    /// Creates a database and returns a client of it.
    pub async fn database(&self, name: &str) -> Client {
        let admin = self.client("fulmar").await;
        admin.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
        self.client(name).await
    }

    /// Runs a PostgreSQL program against a database.
    pub async fn run(&self, program: &str, database: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.directory.path())
            .env("PGHOST", "127.0.0.1")
            .env("PGPORT", self.port().to_string())
            .env("PGUSER", "anna")
            .env("PGDATABASE", database)
            .env("PSQLRC", PathBuf::from("/dev/null"))
            .env("PGCONNECT_TIMEOUT", "60");
        let name = program.to_owned();
        tokio::task::spawn_blocking(move || command.output())
            .await
            .unwrap()
            .unwrap_or_else(|error| panic!("{name} cannot be run ({error}): apt-get install postgresql-15"))
    }

    /// The head and body of the HTTP response. `header` contains additional header lines of the
    /// request.
    pub async fn get(&self, path: &str, header: &str) -> String {
        let mut stream = TcpStream::connect(self.http.local_addr()).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n{header}Connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    /// The head and body of the response to a health check. Repeats the check while a worker does
    /// not respond within 2 s, which a busy machine can exceed.
    pub async fn health(&self) -> String {
        let check = async {
            loop {
                let answer = self.get("/healthz", "").await;
                if !answer.contains("a worker thread does not respond") {
                    return answer;
                }
            }
        };
        with_timeout("all workers respond", check).await
    }

    /// Shuts everything down. Fails if the engine cannot close its log.
    pub async fn stop(self) {
        self.gateway.shutdown().await;
        self.http.shutdown().await.unwrap();
        self.engine.shutdown().await.unwrap();
    }
}

/// Connects, and runs the connection in a background task.
pub async fn connect(config: &tokio_postgres::Config) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// Waits until a client's connection is closed. The driver reports the error to a statement
/// slightly before it closes its side.
pub async fn ends(client: &Client) -> bool {
    let closed = async {
        while !client.is_closed() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, closed).await.is_ok()
}

/// The SQLSTATE of an error.
pub fn state<T>(outcome: Result<T, tokio_postgres::Error>) -> String {
    match outcome {
        Ok(_) => panic!("the statement must fail"),
        Err(error) => match error.code() {
            Some(code) => code.code().to_owned(),
            None => panic!("no SQLSTATE: {error}"),
        },
    }
}
