//! A client that inserts one row at a time and records which inserts were acknowledged.
//!
//! Row ids are assigned in ascending order and never reused. A row is *in doubt* from the moment
//! its INSERT is sent until the response arrives. If the connection breaks before that, or the
//! response says that the outcome is unknown, the row stays in doubt, and the client continues with
//! the next id. The table must therefore contain
//! every assigned id that is not in doubt, and no id that was not assigned.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use fulmar_workload::Target;
use fulmar_workload::client::Client;
use tokio::task::JoinHandle;

use super::live::DemoStatistics;

/// `transaction_resolution_unknown`
const OUTCOME_UNKNOWN: &str = "08007";
/// Interval between attempts to reconnect.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(20);
/// A node that does not accept connections within this time does not recover.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// The client's record of its inserts.
#[derive(Default)]
struct Book {
    /// All smaller ids have been assigned.
    next: u64,
    in_doubt: BTreeSet<u64>,
}

impl Book {
    fn assign_id(&mut self) -> u64 {
        let id = self.next;
        self.next += 1;
        self.in_doubt.insert(id);
        id
    }

    fn acknowledged(&self) -> u64 {
        self.next - self.in_doubt.len() as u64
    }

    fn acknowledged_ids(&self) -> BTreeSet<u64> {
        (0..self.next).filter(|id| !self.in_doubt.contains(id)).collect()
    }
}

/// The ledger's tenant, and its client, which runs until [`Ledger::stop`] or drop.
pub struct Ledger {
    target: Target,
    book: Arc<Mutex<Book>>,
    stop: Arc<AtomicBool>,
    client: JoinHandle<anyhow::Result<()>>,
}

impl Ledger {
    /// Creates the table and starts the client.
    pub async fn open(target: Target, live: Arc<DemoStatistics>) -> anyhow::Result<Self> {
        let mut client = Client::connect(&target).await.context("cannot connect to the ledger")?;
        client.query("CREATE TABLE entry (id INTEGER PRIMARY KEY, note TEXT NOT NULL)").await?;
        let (book, stop) = (Arc::<Mutex<Book>>::default(), Arc::<AtomicBool>::default());
        let worker = Worker { client, target: target.clone(), book: book.clone(), stop: stop.clone(), live };
        Ok(Self { target, book, stop, client: tokio::spawn(worker.run()) })
    }

    /// Number of acknowledged rows.
    pub fn acknowledged(&self) -> u64 {
        lock(&self.book).acknowledged()
    }

    /// Stops the client after its current insert. Returns the error that ended it earlier, if any.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        (&mut self.client).await.context("the ledger's client failed")?
    }

    /// Checks that the table has every acknowledged row, and no row that the client did not write.
    pub async fn check(&self) -> anyhow::Result<()> {
        let acknowledged = lock(&self.book).acknowledged_ids();
        let mut client = Client::connect(&self.target).await.context("cannot check the ledger")?;
        let rows = client.query("SELECT id FROM entry").await.context("cannot check the ledger")?;
        client.close().await?;
        let ids = rows.into_iter().map(|row| row.first()?.as_deref()?.parse().ok());
        let found: BTreeSet<u64> =
            ids.collect::<Option<_>>().context("the ledger has a row with an invalid id")?;
        // Read after the table, because the client inserts rows concurrently.
        let next = lock(&self.book).next;
        compare(&acknowledged, next, &found)
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.client.abort();
    }
}

/// Checks that all acknowledged rows were found, and that all rows found have an id below `next`.
fn compare(acknowledged: &BTreeSet<u64>, next: u64, found: &BTreeSet<u64>) -> anyhow::Result<()> {
    if let Some(lost) = acknowledged.difference(found).next() {
        bail!("ledger row {lost} was acknowledged and is lost");
    }
    if let Some(unexpected) = found.range(next..).next() {
        bail!("ledger row {unexpected} exists but was never written");
    }
    Ok(())
}

/// The client's task.
struct Worker {
    client: Client,
    target: Target,
    book: Arc<Mutex<Book>>,
    stop: Arc<AtomicBool>,
    live: Arc<DemoStatistics>,
}

impl Worker {
    async fn run(mut self) -> anyhow::Result<()> {
        while !self.stop.load(Ordering::Relaxed) {
            let id = lock(&self.book).assign_id();
            match self.client.query(&format!("INSERT INTO entry VALUES ({id}, 'entry {id}')")).await {
                Ok(_) => {
                    let mut book = lock(&self.book);
                    book.in_doubt.remove(&id);
                    self.live.ledger(book.acknowledged());
                }
                Err(error) if error.sqlstate() == Some(OUTCOME_UNKNOWN) => {}
                Err(error) if error.ends_session() => self.client = self.reconnect().await?,
                Err(error) => return Err(error).with_context(|| format!("cannot write ledger row {id}")),
            }
        }
        Ok(())
    }

    async fn reconnect(&self) -> anyhow::Result<Client> {
        let began = Instant::now();
        loop {
            match Client::connect(&self.target).await {
                Ok(client) => return Ok(client),
                Err(error) => {
                    ensure!(
                        began.elapsed() < RECONNECT_TIMEOUT,
                        "the ledger's client cannot reconnect: {error}"
                    )
                }
            }
            tokio::time::sleep(RECONNECT_INTERVAL).await;
        }
    }
}

fn lock(book: &Mutex<Book>) -> MutexGuard<'_, Book> {
    // No holder of the lock can panic in the middle of a change.
    book.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_and_unexpected_rows_are_detected() {
        let mut book = Book::default();
        for _ in 0..5 {
            let id = book.assign_id();
            if id != 3 {
                book.in_doubt.remove(&id);
            }
        }
        let acknowledged = book.acknowledged_ids();
        assert_eq!((book.acknowledged(), acknowledged.len()), (4, 4));
        let check = |found: &[u64]| compare(&acknowledged, book.next, &found.iter().copied().collect());
        check(&[0, 1, 2, 4]).unwrap();
        check(&[0, 1, 2, 3, 4]).unwrap();
        assert!(check(&[0, 1, 4]).unwrap_err().to_string().contains("row 2 was acknowledged"));
        assert!(check(&[0, 1, 2, 4, 5]).unwrap_err().to_string().contains("row 5 exists"));
    }
}
