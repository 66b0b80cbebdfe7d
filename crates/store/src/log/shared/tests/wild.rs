//! A store where everything happens that the contract allows: operations take their time, fail, are done although they
//! failed, or long after; listings come name by name, while others write.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::time::sleep;

use crate::store::{Backend, Failure, FailureKind, Listing, Piece, Span, Store, Upload};

/// Clones are the same store.
#[derive(Clone)]
pub(super) struct Wild {
    truth: Backend,
    random: Arc<Mutex<StdRng>>,
    /// Of a hundred operations so many go wrong.
    wrong: Arc<Mutex<u32>>,
}

impl Wild {
    pub(super) fn new(seed: u64) -> Self {
        Wild {
            truth: Backend::memory(),
            random: Arc::new(Mutex::new(StdRng::seed_from_u64(seed))),
            wrong: Arc::new(Mutex::new(30)),
        }
    }

    /// From now on nothing goes wrong.
    pub(super) fn calm(&self) {
        *self.wrong.lock() = 0;
    }

    fn below(&self, bound: u32) -> u32 {
        self.random.lock().random_range(0..bound)
    }

    fn goes_wrong(&self) -> bool {
        self.below(100) < *self.wrong.lock()
    }

    /// Mostly some milliseconds, now and then longer than anybody waits.
    async fn dawdle(&self) {
        let longest = if self.goes_wrong() { 150 } else { 10 };
        let ms = self.below(longest);
        sleep(Duration::from_millis(ms.into())).await;
    }

    /// An operation that can be made again.
    async fn at_last<T>(&self, done: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        self.dawdle().await;
        if self.goes_wrong() && self.below(2) == 0 {
            return Err(unavailable());
        }
        done.await
    }
}

fn unavailable() -> Failure {
    Failure::new(FailureKind::Unavailable, "a fault of the test's")
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
        self.dawdle().await;
        if !self.goes_wrong() {
            let done = self.truth.put(name, bytes).await;
            self.dawdle().await;
            return done;
        }
        match self.below(4) {
            0 => {}
            1 => {
                let _ = self.truth.put(name, bytes).await;
            }
            2 => return Err(Failure::new(FailureKind::Exists, "a conflict for nothing")),
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
        self.at_last(self.truth.get(name, span)).await
    }

    async fn list(&self, directory: &str, after: Option<&str>) -> Result<Listing, Failure> {
        let mut listing = self.at_last(self.truth.list(directory, after)).await?;
        let page = 1 + self.below(4) as usize;
        listing.more = listing.names.len() > page;
        listing.names.truncate(page);
        Ok(listing)
    }

    async fn delete(&self, name: &str) -> Result<(), Failure> {
        self.at_last(self.truth.delete(name)).await
    }

    async fn sync(&self, name: &str) -> Result<(), Failure> {
        self.at_last(self.truth.sync(name)).await
    }
}
