//! The connections to etcd's members, and the choice of the member for each request.
//!
//! One connection per configured address; requests go to the current member until it fails or is
//! slow.
//!
//! - **Reads** are hedged: if the current member has not answered within 300 ms, the next one is
//!   asked as well, and the first answer counts. A member that hangs or is cut off therefore delays
//!   a lease renewal by 300 ms.
//! - **Changes** are sent once. Only if it is certain that a member did not carry it out (no
//!   connection, no leader) is the next one asked. Otherwise the outcome is unknown.
//! - **Connection attempts** are hedged too: every 250 ms another one begins, and the first one that
//!   ends counts. The kernel repeats the first packet of a connection only after 1 s, so after a cut
//!   a single attempt would find the network back up to 1 s late. Only the connection that is used
//!   authenticates: etcd spends 100 ms of CPU time on a password, also for clients that have gone,
//!   so hedged authentications would delay one another on a busy machine.
//! - **A silent connection is replaced**: later requests and the watch use a new one. After a cut,
//!   TCP repeats lost packets only at intervals that double, so the old connection could stay
//!   silent for as long again as the cut has lasted.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{
    Certificate, Channel, Client, ConnectOptions, Error, Identity, KvClient, TlsOptions, WatchClient,
};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::sync::{OnceCell, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tonic::transport::{Endpoint, Uri};

use super::EtcdOptions;
use super::failure::Failure;
use super::guard::Guard;
use crate::MetaError;

/// A read is also sent to the next member if there is no answer within this time.
const HEDGE_DELAY: Duration = Duration::from_millis(300);
/// Pause between attempts after all members have failed.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// A connection without an answer for this time is replaced.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(1);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Another attempt to connect to a member begins if none has ended for this time.
const CONNECT_HEDGE_DELAY: Duration = Duration::from_millis(250);
/// Maximum number of attempts for one connection. The first one times out when the last one begins.
const MAX_CONNECT_ATTEMPTS: usize = 8;
/// etcd closes connections that are pinged more often than every 5 s.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// A connected member.
#[derive(Clone)]
pub(super) struct Member {
    /// HOST:PORT.
    pub(super) endpoint: String,
    client: Client,
}

impl Member {
    pub(super) fn kv(&self) -> KvClient {
        // The size of an answer is bounded by the requests, and by the records that Fulmar wrote.
        self.client.kv_client().max_decoding_message_size(usize::MAX)
    }

    pub(super) fn watch(&self) -> WatchClient {
        self.client.watch_client().max_decoding_message_size(usize::MAX)
    }

    pub(super) fn failure(&self, error: etcd_client::Error) -> Failure {
        Failure::of(&self.endpoint, error)
    }
}

/// A connection to a member. The first request that uses it opens it.
#[derive(Clone, Default)]
struct Connection {
    /// Counts the connections to the address.
    number: u64,
    member: Arc<OnceCell<Member>>,
}

/// A configured address.
struct Address {
    endpoint: String,
    connection: watch::Sender<Connection>,
}

/// All members.
pub(super) struct Members {
    addresses: Vec<Address>,
    tls: Option<TlsOptions>,
    login: ConnectOptions,
    /// The index of the member that answered last.
    current: AtomicUsize,
    timeout: Duration,
}

impl Members {
    pub(super) fn new(options: &EtcdOptions) -> Result<Self, MetaError> {
        let unreachable = |cause: String| MetaError::Unavailable {
            cause,
            remedy: "Configure the addresses of etcd's members as HOST:PORT.",
        };
        if options.endpoints.is_empty() {
            return Err(unreachable("has no address".to_owned()));
        }
        if let Some(invalid) = options.endpoints.iter().find(|endpoint| endpoint.contains('/')) {
            return Err(unreachable(format!("cannot be reached at \"{invalid}\"")));
        }
        let mut login = ConnectOptions::new().with_require_leader(true).with_auto_token_refresh(true);
        if let Some((name, password)) = &options.user {
            login = login.with_user(name, password);
        }
        let tls = options.tls.as_ref().map(|tls| {
            let config = TlsOptions::new().ca_certificate(Certificate::from_pem(&tls.ca_pem));
            match &tls.identity_pem {
                Some((certificate, key)) => config.identity(Identity::from_pem(certificate, key)),
                None => config,
            }
        });
        let address = |endpoint: &String| Address {
            endpoint: endpoint.clone(),
            connection: watch::Sender::new(Connection::default()),
        };
        Ok(Self {
            addresses: options.endpoints.iter().map(address).collect(),
            tls,
            login,
            current: AtomicUsize::new(0),
            timeout: options.timeout,
        })
    }

    pub(super) fn current(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }

    /// The member at an index, which may exceed the number of members. Connects to it, and checks
    /// that its version is supported and that it belongs to the etcd cluster of the others.
    pub(super) async fn member(&self, index: usize, guard: &Guard) -> Result<Member, Failure> {
        let address = self.address(index);
        let connection = address.connection.borrow().clone();
        connection.member.get_or_try_init(|| self.connect(&address.endpoint, guard)).await.cloned()
    }

    /// Completes when the connection to a member has been replaced.
    pub(super) fn replaced(&self, index: usize) -> impl Future<Output = ()> + use<> {
        let mut connection = self.address(index).connection.subscribe();
        // The sender lives as long as the store.
        async move { drop(connection.changed().await) }
    }

    /// Lets later requests to a member open a connection, if this one is the newest.
    fn replace(&self, index: usize, number: u64) {
        self.address(index).connection.send_if_modified(|connection| {
            let is_newest = connection.number == number;
            if is_newest {
                *connection = Connection { number: number + 1, ..Connection::default() };
            }
            is_newest
        });
    }

    /// The number of the newest connection to a member.
    fn number(&self, index: usize) -> u64 {
        self.address(index).connection.borrow().number
    }

    fn address(&self, index: usize) -> &Address {
        &self.addresses[index % self.addresses.len()]
    }

    async fn connect(&self, endpoint: &str, guard: &Guard) -> Result<Member, Failure> {
        let not_sent = |error| match Failure::of(endpoint, error) {
            // No request of the caller was sent.
            Failure::Unknown(cause) => Failure::NotSent(cause),
            failure => failure,
        };
        let transport = self.transport(endpoint).map_err(not_sent)?;
        let connecting = hedged(CONNECT_HEDGE_DELAY, MAX_CONNECT_ATTEMPTS, || transport.connect());
        let channel = connecting.await.map_err(|error| not_sent(error.into()))?;
        let client = Client::from_channel(Channel::Tonic(channel), Some(self.login.clone()));
        let mut client = client.await.map_err(not_sent)?;
        let status = client.status().await.map_err(not_sent)?;
        guard.check_member(endpoint, &status).map_err(Failure::Rejected)?;
        Ok(Member { endpoint: endpoint.to_owned(), client })
    }

    /// How a connection to a member is opened.
    fn transport(&self, endpoint: &str) -> Result<Endpoint, Error> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let transport = Endpoint::from(format!("{scheme}://{endpoint}").parse::<Uri>()?)
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .keep_alive_while_idle(false);
        Ok(match &self.tls {
            Some(tls) => transport.tls_config(tls.clone())?,
            None => transport,
        })
    }

    /// Runs a request that changes nothing, on as many members as necessary. `Compacted` and
    /// rejections end it; all other failures are retried until the deadline.
    pub(super) async fn read<T, F>(&self, guard: &Guard, request: impl Fn(Member) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let deadline = Instant::now() + self.timeout;
        let members = self.addresses.len();
        let first = self.current();
        let attempt = |number: usize| {
            let request = &request;
            async move {
                let index = (first + number) % members;
                let result = match self.member(index, guard).await {
                    Ok(member) => self.renewing_token(member, request).await,
                    Err(failure) => Err(failure),
                };
                (index, result)
            }
        };
        let mut running = FuturesUnordered::new();
        let (mut attempts, mut next_attempt) = (0, Instant::now());
        // The connections of the attempts that are not known to be silent.
        let mut used = Vec::new();
        let (mut max_running, mut silent_at) = (members, Instant::now() + SILENCE_TIMEOUT);
        let mut last = "no answer".to_owned();
        loop {
            tokio::select! {
                biased;
                Some((index, result)) = running.next(), if !running.is_empty() => match result {
                    Ok(answer) => {
                        self.current.store(index, Ordering::Relaxed);
                        return Ok(answer);
                    }
                    Err(failure @ (Failure::Rejected(_) | Failure::Compacted)) => return Err(failure),
                    Err(failure) => {
                        last = failure.cause();
                        let pause = if attempts < members { Duration::ZERO } else { RETRY_PAUSE };
                        next_attempt = Instant::now() + pause;
                    }
                },
                () = sleep_until(deadline) => return Err(Failure::Rejected(self.unavailable(&last))),
                () = sleep_until(silent_at) => {
                    for (index, number) in used.drain(..) {
                        self.replace(index, number);
                    }
                    max_running = running.len() + members;
                    next_attempt = Instant::now();
                    silent_at = next_attempt + SILENCE_TIMEOUT;
                }
                () = sleep_until(next_attempt), if running.len() < max_running => {
                    used.push((first + attempts, self.number(first + attempts)));
                    running.push(attempt(attempts));
                    attempts += 1;
                    next_attempt = Instant::now() + HEDGE_DELAY;
                }
            }
        }
    }

    /// Runs a request that changes something, at most once.
    pub(super) async fn change<T, F>(
        &self,
        guard: &Guard,
        request: impl Fn(Member) -> F,
    ) -> Result<T, MetaError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let deadline = Instant::now() + self.timeout;
        let first = self.current();
        let mut number = 0;
        loop {
            let index = (first + number) % self.addresses.len();
            let connection = self.number(index);
            let member = match timeout_at(deadline, self.member(index, guard)).await {
                Ok(member) => member,
                Err(_) => {
                    self.replace(index, connection);
                    self.current.store(index + 1, Ordering::Relaxed);
                    return Err(self.unavailable("no connection"));
                }
            };
            let result = match member {
                Ok(member) => timeout_at(deadline, self.renewing_token(member, &request)).await,
                Err(failure) => Ok(Err(failure)),
            };
            let failure = match result {
                Ok(Ok(answer)) => {
                    self.current.store(index, Ordering::Relaxed);
                    return Ok(answer);
                }
                Ok(Err(failure)) => failure,
                Err(_) => {
                    self.replace(index, connection);
                    Failure::Unknown(format!("no answer within {:?}", self.timeout))
                }
            };
            // The next request begins with another member.
            self.current.store(index + 1, Ordering::Relaxed);
            match failure {
                Failure::Rejected(error) => return Err(error),
                Failure::Unknown(cause) => return Err(unknown(&cause)),
                Failure::NotSent(_) | Failure::TokenExpired(_) | Failure::Compacted => {}
            }
            if Instant::now() + RETRY_PAUSE >= deadline {
                return Err(self.unavailable(&failure.cause()));
            }
            number += 1;
            if number >= self.addresses.len() {
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
    }

    /// Runs a request on a member, and once more with a new token if etcd's users have changed.
    pub(super) async fn renewing_token<T, F>(
        &self,
        member: Member,
        request: impl Fn(Member) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        match request(member.clone()).await {
            Err(Failure::TokenExpired(_)) => {
                member.client.refresh_token().await.map_err(|error| match member.failure(error) {
                    Failure::Unknown(cause) => Failure::NotSent(cause),
                    failure => failure,
                })?;
                request(member).await
            }
            result => result,
        }
    }

    pub(super) fn unavailable(&self, cause: &str) -> MetaError {
        MetaError::Unavailable {
            cause: format!(
                "is not available: no majority of etcd's members answered within {:?} ({cause})",
                self.timeout
            ),
            remedy: "Check that a majority of etcd's members run (`etcdctl endpoint health --cluster`) and can be \
                     reached from this node. Requests succeed again as soon as there is a majority.",
        }
    }
}

/// Begins an attempt at intervals of `delay`, up to `max` of them. Returns the result of the first one
/// that ends.
async fn hedged<T, F: Future<Output = T>>(delay: Duration, max: usize, attempt: impl Fn() -> F) -> T {
    let mut running = FuturesUnordered::from_iter([attempt()]);
    loop {
        tokio::select! {
            biased;
            Some(result) = running.next() => return result,
            () = sleep(delay), if running.len() < max => running.push(attempt()),
        }
    }
}

fn unknown(cause: &str) -> MetaError {
    MetaError::OutcomeUnknown {
        cause: format!("did not answer a change: etcd at {cause}"),
        remedy: "Check whether the change was made, and repeat it if not.",
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::pending;

    use fulmar_workload::server::{Etcd, EtcdSetup};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::Revision;

    #[tokio::test(start_paused = true)]
    async fn lost_attempt_does_not_delay_the_next_one() {
        let (begun, attempts) = (Instant::now(), Cell::new(0));
        let attempt = || {
            attempts.set(attempts.get() + 1);
            let number = attempts.get();
            async move { if number < 3 { pending().await } else { number } }
        };
        assert_eq!(hedged(CONNECT_HEDGE_DELAY, MAX_CONNECT_ATTEMPTS, attempt).await, 3);
        assert_eq!(begun.elapsed(), 2 * CONNECT_HEDGE_DELAY);
    }

    #[tokio::test]
    async fn silent_connection_is_replaced() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let options = EtcdOptions {
            timeout: Duration::from_secs(60),
            ..EtcdOptions::new(vec![listener.local_addr().unwrap().to_string()], "c")
        };
        let (members, guard) = (Members::new(&options).unwrap(), Guard::new("c", Revision(0)));
        let reading = members.read(&guard, async |_| Ok(()));
        let accepting = async {
            let _first = listener.accept().await.unwrap();
            listener.accept().await.unwrap();
        };
        tokio::select! {
            read = reading => panic!("the member has not answered: {read:?}"),
            _ = accepting => {}
        }
    }

    /// A password of this cost takes longer than the time after which connecting is hedged.
    #[tokio::test(flavor = "multi_thread")]
    async fn slow_authentication_is_not_repeated() {
        let arguments = vec!["--bcrypt-cost=13".to_owned()];
        let etcd = Etcd::start_with(1, EtcdSetup { arguments, ..EtcdSetup::default() }).unwrap();
        for arguments in [
            &["user", "add", "root:secret"][..],
            &["user", "grant-role", "root", "root"],
            &["auth", "enable"],
        ] {
            etcd.etcdctl(arguments).unwrap();
        }
        let options = EtcdOptions {
            user: Some(("root".to_owned(), "secret".to_owned())),
            ..EtcdOptions::new(etcd.endpoints(), "c")
        };
        let members = Members::new(&options).unwrap();
        members.member(0, &Guard::new("c", Revision(0))).await.unwrap();
        let metrics = metrics(&etcd.endpoints()[0]).await;
        let authentications = "grpc_server_started_total{grpc_method=\"Authenticate\"";
        let line = metrics.lines().find(|line| line.starts_with(authentications)).unwrap();
        assert!(line.ends_with(" 1"), "{line}");
    }

    async fn metrics(endpoint: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(endpoint).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test(start_paused = true)]
    async fn number_of_attempts_is_limited() {
        let attempts = Cell::new(0);
        let attempt = || {
            attempts.set(attempts.get() + 1);
            pending::<()>()
        };
        let hedging = hedged(CONNECT_HEDGE_DELAY, MAX_CONNECT_ATTEMPTS, attempt);
        tokio::time::timeout(Duration::from_hours(1), hedging).await.expect_err("no attempt ends");
        assert_eq!(attempts.get(), MAX_CONNECT_ATTEMPTS);
    }
}
