//! Another tenant of the node under attack, which measures the latency of its requests.
//!
//! ```text
//!  SESSIONS sessions   SELECT 1, INSERT (autocommit), SELECT 1, ...
//!  one task            log in, SELECT 1, log out
//!  one task            GET /healthz
//! ```
//!
//! Each task measures every request, including the pending one when [`Neighbour::longest`] is
//! called, so that a node that does not respond is detected. Requests are paced, so that the
//! neighbour does not compete with the attack for CPU time.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinHandle;

use crate::client;
use crate::common::{Node, SLOW_WORKER};

/// The tenant of the probes, owned by a user of the same name.
pub const TENANT: &str = "neighbour";

/// Number of sessions that run statements. Several, so that more than one worker thread is probed.
const SESSIONS: usize = 3;
/// Time between two requests of a task.
const REQUEST_INTERVAL: Duration = Duration::from_millis(10);
/// Time between two logins.
const LOGIN_INTERVAL: Duration = Duration::from_millis(30);
/// Source address of the logins. The attacks come from 127.0.0.1.
const LOGIN_ADDRESS: (Ipv4Addr, u16) = (Ipv4Addr::new(127, 0, 0, 2), 0);

pub struct Neighbour {
    probes: Vec<Arc<Probe>>,
    tasks: Vec<JoinHandle<()>>,
}

/// The measurements of one kind of request.
struct Probe {
    name: &'static str,
    requests: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    began: Option<Instant>,
    longest: Duration,
    failures: Vec<String>,
}

impl Probe {
    fn new(name: &'static str) -> Arc<Probe> {
        Arc::new(Probe { name, requests: AtomicU64::new(0), state: Mutex::default() })
    }

    /// Measures a request. Returns its result, or `None` if it failed.
    async fn measure<T, E: std::fmt::Display>(
        &self,
        request: impl Future<Output = Result<T, E>>,
    ) -> Option<T> {
        self.state.lock().began = Some(Instant::now());
        let result = request.await;
        let mut state = self.state.lock();
        let took = state.began.take().map_or(Duration::ZERO, |began| began.elapsed());
        state.longest = state.longest.max(took);
        self.requests.fetch_add(1, Ordering::Relaxed);
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                state.failures.push(format!("{}: {error}", self.name));
                None
            }
        }
    }
}

impl Neighbour {
    pub async fn start(node: &Node) -> Result<Neighbour, tokio_postgres::Error> {
        let mut neighbour = Neighbour { probes: Vec::new(), tasks: Vec::new() };
        for _ in 0..SESSIONS {
            let session = client::log_in(&node.sql, TENANT, TENANT).await?;
            let probe = neighbour.probe("a statement");
            neighbour.tasks.push(tokio::spawn(async move {
                let statements = ["SELECT 1", "INSERT INTO probe DEFAULT VALUES"];
                for statement in statements.into_iter().cycle() {
                    if probe.measure(session.batch_execute(statement)).await.is_none() {
                        return;
                    }
                    tokio::time::sleep(REQUEST_INTERVAL).await;
                }
            }));
        }
        let (probe, config) = (neighbour.probe("a login"), client::config(&node.sql, TENANT, TENANT));
        let sql = node.sql.clone();
        neighbour.tasks.push(tokio::spawn(async move {
            while probe.measure(log_in_and_out(&config, &sql)).await.is_some() {
                tokio::time::sleep(LOGIN_INTERVAL).await;
            }
        }));
        let (probe, http) = (neighbour.probe("/healthz"), node.http.clone());
        neighbour.tasks.push(tokio::spawn(async move {
            while probe.measure(check_health(&http)).await.is_some() {
                tokio::time::sleep(REQUEST_INTERVAL).await;
            }
        }));
        Ok(neighbour)
    }

    fn probe(&mut self, name: &'static str) -> Arc<Probe> {
        let probe = Probe::new(name);
        self.probes.push(probe.clone());
        probe
    }

    /// Resets the measurements.
    pub fn reset(&self) {
        for probe in &self.probes {
            let mut state = probe.state.lock();
            state.longest = Duration::ZERO;
            state.began = state.began.map(|_| Instant::now());
            state.failures.clear();
        }
    }

    /// Waits until every probe has made `count` more requests, or until one has failed or takes
    /// longer than `bound`.
    pub async fn make_requests(&self, count: u64, bound: Duration) {
        let goals: Vec<u64> =
            self.probes.iter().map(|probe| probe.requests.load(Ordering::Relaxed) + count).collect();
        let is_done = || {
            let mut probes = self.probes.iter().zip(&goals);
            probes.all(|(probe, goal)| probe.requests.load(Ordering::Relaxed) >= *goal)
        };
        while !is_done() && self.longest().0 <= bound && self.failures().is_empty() {
            tokio::time::sleep(REQUEST_INTERVAL).await;
        }
    }

    /// Returns the maximum latency since the last reset, and the kind of its request.
    pub fn longest(&self) -> (Duration, &'static str) {
        let waits = self.probes.iter().map(|probe| {
            let state = probe.state.lock();
            let waiting = state.began.map_or(Duration::ZERO, |began| began.elapsed());
            (state.longest.max(waiting), probe.name)
        });
        waits.max().unwrap_or_default()
    }

    pub fn failures(&self) -> Vec<String> {
        self.probes.iter().flat_map(|probe| probe.state.lock().failures.clone()).collect()
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Logs in, runs a statement and logs out. Uses a separate address, because the node delays logins
/// from an address with many failed ones.
async fn log_in_and_out(
    config: &tokio_postgres::Config,
    sql: &str,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from(LOGIN_ADDRESS))?;
    let stream = socket.connect(sql.parse()?).await?;
    let (session, connection) = config.connect_raw(stream, tokio_postgres::NoTls).await?;
    let connection = tokio::spawn(connection);
    session.batch_execute("SELECT 1").await?;
    drop(session);
    // The connection ends when its client is dropped.
    let _ = connection.await;
    Ok(())
}

/// Polls /healthz until it succeeds. A worker that does not respond within 2 s, as on a busy
/// machine, is a slow response: the bound of the latency applies.
async fn check_health(http: &str) -> std::io::Result<()> {
    loop {
        let mut connection = TcpStream::connect(http).await?;
        connection.write_all(b"GET /healthz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").await?;
        let mut response = String::new();
        connection.read_to_string(&mut response).await?;
        if response.starts_with("HTTP/1.1 200 ") {
            return Ok(());
        }
        if !response.contains(SLOW_WORKER) {
            let line = response.lines().next().unwrap_or("no response");
            return Err(std::io::Error::other(line.to_owned()));
        }
    }
}
