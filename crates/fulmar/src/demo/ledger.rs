//! One client that inserts a row at a time and remembers which were acknowledged.
//!
//! Row ids are given once, in order. A row is *in doubt* from the moment its INSERT is sent until it is
//! answered; if the connection breaks before that it stays in doubt, and the next id is used. So the table must
//! hold every id that was given and is not in doubt, and none that was not given.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use fulmar_workload::Target;
use fulmar_workload::client::Client;
use tokio::task::JoinHandle;

use super::live::Live;

/// Between two tries to connect again.
const RECONNECT: Duration = Duration::from_millis(20);
/// A node that is not back by then does not come back.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the client knows.
#[derive(Default)]
struct Book {
    /// Ids below this one were given.
    next: u64,
    in_doubt: BTreeSet<u64>,
}

impl Book {
    fn give(&mut self) -> u64 {
        let id = self.next;
        self.next += 1;
        self.in_doubt.insert(id);
        id
    }

    fn acknowledged(&self) -> u64 {
        self.next - self.in_doubt.len() as u64
    }

    fn must_be_there(&self) -> BTreeSet<u64> {
        (0..self.next).filter(|id| !self.in_doubt.contains(id)).collect()
    }
}

/// The ledger's tenant, with its client at work until [`Ledger::stop`] or the drop.
pub struct Ledger {
    target: Target,
    book: Arc<Mutex<Book>>,
    stop: Arc<AtomicBool>,
    client: JoinHandle<anyhow::Result<()>>,
}

impl Ledger {
    /// Makes the table; the client begins at once.
    pub async fn open(target: Target, live: Arc<Live>) -> anyhow::Result<Self> {
        let mut client = Client::connect(&target).await.context("cannot connect to the ledger")?;
        client.query("CREATE TABLE entry (id INTEGER PRIMARY KEY, note TEXT NOT NULL)").await?;
        let (book, stop) = (Arc::<Mutex<Book>>::default(), Arc::<AtomicBool>::default());
        let worker = Worker { client, target: target.clone(), book: book.clone(), stop: stop.clone(), live };
        Ok(Self { target, book, stop, client: tokio::spawn(worker.run()) })
    }

    /// Rows whose INSERT was answered.
    pub fn acknowledged(&self) -> u64 {
        lock(&self.book).acknowledged()
    }

    /// Lets the client end its row and go; answers the error that ended it before, if there was one.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        (&mut self.client).await.context("the ledger's client failed")?
    }

    /// Every acknowledged row is there; nothing is there that was not written.
    pub async fn check(&self) -> anyhow::Result<()> {
        let must = lock(&self.book).must_be_there();
        let mut client = Client::connect(&self.target).await.context("cannot check the ledger")?;
        let rows = client.query("SELECT id FROM entry").await.context("cannot check the ledger")?;
        client.close().await?;
        let ids = rows.into_iter().map(|row| row.first()?.as_deref()?.parse().ok());
        let there: BTreeSet<u64> =
            ids.collect::<Option<_>>().context("the ledger has a row without a number")?;
        // Read after the table: the client went on meanwhile.
        let next = lock(&self.book).next;
        judge(&must, next, &there)
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.client.abort();
    }
}

/// The rows that must be there are, and all that are there have an id below `next`.
fn judge(must: &BTreeSet<u64>, next: u64, there: &BTreeSet<u64>) -> anyhow::Result<()> {
    if let Some(lost) = must.difference(there).next() {
        bail!("ledger row {lost} was acknowledged and is lost");
    }
    if let Some(foreign) = there.range(next..).next() {
        bail!("ledger row {foreign} is there, and nobody wrote it");
    }
    Ok(())
}

/// The client at work.
struct Worker {
    client: Client,
    target: Target,
    book: Arc<Mutex<Book>>,
    stop: Arc<AtomicBool>,
    live: Arc<Live>,
}

impl Worker {
    async fn run(mut self) -> anyhow::Result<()> {
        while !self.stop.load(Ordering::Relaxed) {
            let id = lock(&self.book).give();
            match self.client.query(&format!("INSERT INTO entry VALUES ({id}, 'entry {id}')")).await {
                Ok(_) => {
                    let mut book = lock(&self.book);
                    book.in_doubt.remove(&id);
                    self.live.ledger(book.acknowledged());
                }
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
                    ensure!(began.elapsed() < PATIENCE, "the ledger's client cannot connect again: {error}")
                }
            }
            tokio::time::sleep(RECONNECT).await;
        }
    }
}

fn lock(book: &Mutex<Book>) -> MutexGuard<'_, Book> {
    // Nothing that holds it can panic half way through a change.
    book.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_and_foreign_rows_are_found() {
        let mut book = Book::default();
        for _ in 0..5 {
            let id = book.give();
            if id != 3 {
                book.in_doubt.remove(&id);
            }
        }
        let must = book.must_be_there();
        assert_eq!((book.acknowledged(), must.len()), (4, 4));
        let verdict = |there: &[u64]| judge(&must, book.next, &there.iter().copied().collect());
        verdict(&[0, 1, 2, 4]).unwrap();
        verdict(&[0, 1, 2, 3, 4]).unwrap();
        assert!(verdict(&[0, 1, 4]).unwrap_err().to_string().contains("row 2 was acknowledged"));
        assert!(verdict(&[0, 1, 2, 4, 5]).unwrap_err().to_string().contains("row 5 is there"));
    }
}
