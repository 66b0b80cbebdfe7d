//! A store with every behaviour that the contract allows: operations are delayed, fail, succeed
//! although they report a failure, or take effect much later. Listings are read in small pages
//! while others write.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::time::sleep;

use crate::store::{Backend, Failure, FailureKind, Listing, Piece, Span, Store, Upload};

/// Clones share the same store.
#[derive(Clone)]
pub(super) struct Wild {
    truth: Backend,
    random: Arc<Mutex<StdRng>>,
    /// Percentage of operations that go wrong.
    fault_percent: Arc<Mutex<u32>>,
    /// Delay of an operation that does not go wrong; a put has two.
    delay_ms: Range<u32>,
    /// Maximum number of names in a page of a listing.
    max_page: u32,
}

impl Wild {
    pub(super) fn new(seed: u64) -> Self {
        Wild {
            truth: Backend::memory(),
            random: Arc::new(Mutex::new(StdRng::seed_from_u64(seed))),
            fault_percent: Arc::new(Mutex::new(30)),
            delay_ms: 0..10,
            max_page: 4,
        }
    }

    /// A store that works and is slow.
    pub(super) fn slow(seed: u64, delay_ms: Range<u32>) -> Self {
        let store = Wild { delay_ms, max_page: 1000, ..Wild::new(seed) };
        store.disable_faults();
        store
    }

    /// Disables all faults from now on.
    pub(super) fn disable_faults(&self) {
        *self.fault_percent.lock() = 0;
    }

    /// The store without delays and faults.
    pub(super) fn truth(&self) -> &Backend {
        &self.truth
    }

    fn below(&self, bound: u32) -> u32 {
        self.random.lock().random_range(0..bound)
    }

    fn draw_fault(&self) -> bool {
        self.below(100) < *self.fault_percent.lock()
    }

    /// Sleeps: usually as long as configured, if a fault is drawn up to 150 ms, longer than the
    /// timeout.
    async fn random_delay(&self) {
        let range = if self.draw_fault() { 0..150 } else { self.delay_ms.clone() };
        let ms = range.start + self.below(range.end - range.start);
        sleep(Duration::from_millis(ms.into())).await;
    }

    /// Runs an operation that can be repeated, after a delay; it may fail instead.
    async fn run_unreliably<T>(&self, done: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        self.random_delay().await;
        if self.draw_fault() && self.below(2) == 0 {
            return Err(unavailable());
        }
        done.await
    }
}

fn unavailable() -> Failure {
    Failure::new(FailureKind::Unavailable, "injected fault")
}

impl fmt::Display for Wild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("wild:")
    }
}

impl fmt::Debug for Wild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Wild")
    }
}

#[async_trait]
impl Store for Wild {
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), Failure> {
        self.random_delay().await;
        if !self.draw_fault() {
            let done = self.truth.put(name, bytes).await;
            self.random_delay().await;
            return done;
        }
        match self.below(4) {
            0 => {}
            1 => {
                let _ = self.truth.put(name, bytes).await;
            }
            2 => return Err(Failure::new(FailureKind::Exists, "injected conflict")),
            _ => {
                let (store, name) = (self.truth.clone(), name.to_owned());
                let late = Duration::from_millis(self.below(3000).into());
                tokio::spawn(async move {
                    sleep(late).await;
                    let _ = store.put(&name, bytes).await;
                });
            }
        }
        Err(unavailable())
    }

    async fn upload(&self, _: &str) -> Result<Box<dyn Upload>, Failure> {
        Err(unavailable())
    }

    async fn get(&self, name: &str, span: Span) -> Result<Piece, Failure> {
        self.run_unreliably(self.truth.get(name, span)).await
    }

    async fn list(&self, directory: &str, after: Option<&str>) -> Result<Listing, Failure> {
        let mut listing = self.run_unreliably(self.truth.list(directory, after)).await?;
        let page = 1 + self.below(self.max_page) as usize;
        listing.more = listing.names.len() > page;
        listing.names.truncate(page);
        Ok(listing)
    }

    async fn delete(&self, name: &str) -> Result<(), Failure> {
        self.run_unreliably(self.truth.delete(name)).await
    }

    async fn sync(&self, name: &str) -> Result<(), Failure> {
        self.run_unreliably(self.truth.sync(name)).await
    }
}
