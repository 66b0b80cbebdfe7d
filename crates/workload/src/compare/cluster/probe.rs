//! Clients with a constant rate, one per tenant, that record when their transactions were answered.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use rand::RngExt;
use tokio::time::{Instant, MissedTickBehavior};

use crate::Target;
use crate::client::{Client, Error};

/// The interval between a client's transactions, unless a case needs another one.
pub(super) const INTERVAL: Duration = Duration::from_millis(500);
/// Pause before a client connects again.
const RECONNECT_PAUSE: Duration = Duration::from_millis(20);
/// A transaction without an answer within this time has failed.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// What a client saw of one transaction.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// When it was sent.
    pub sent: Instant,
    /// When it was answered, or had failed.
    pub done: Instant,
    /// The node that the client was connected to.
    pub gateway: usize,
    /// The error. `None` if it has committed.
    pub error: Option<String>,
}

/// The samples of one tenant.
pub(super) type Samples = Rc<RefCell<Vec<Sample>>>;

/// Runs transactions in a tenant until it is dropped, one each `every`. Connects to the node `home`, and to the next
/// one when the connection is lost. `targets` are the tenant's addresses, one per node.
pub(super) async fn run(targets: Vec<Target>, home: usize, every: Duration, samples: Samples) {
    let mut interval = tokio::time::interval(every);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tokio::time::sleep(every.mul_f64(rand::rng().random_range(0.0..1.0))).await;
    let mut gateway = home;
    let mut client: Option<Client> = None;
    loop {
        interval.tick().await;
        let sent = Instant::now();
        loop {
            let answered = tokio::time::timeout(ANSWER_TIMEOUT, transaction(&targets[gateway], &mut client));
            let error = match answered.await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error),
                Err(_) => {
                    client = None;
                    Some(format!("no answer within {ANSWER_TIMEOUT:?}"))
                }
            };
            let is_over = error.is_none();
            samples.borrow_mut().push(Sample { sent, done: Instant::now(), gateway, error });
            if is_over {
                break;
            }
            if client.is_none() {
                gateway = (gateway + 1) % targets.len();
            }
            tokio::time::sleep(RECONNECT_PAUSE).await;
        }
    }
}

async fn transaction(target: &Target, client: &mut Option<Client>) -> Result<(), String> {
    let work = async {
        let connected = match client.take() {
            Some(connected) => connected,
            None => Client::connect(target).await?,
        };
        let connected = client.insert(connected);
        connected.query("UPDATE counters SET n = n + 1 WHERE id = 1").await.map(drop)
    };
    let done: Result<(), Error> = work.await;
    done.map_err(|error| {
        if error.ends_session() {
            *client = None;
        }
        error.to_string()
    })
}
