//! A store that can be relied on: every operation ends within bounds, and a put that was told to have failed has.
//!
//! ```text
//!   put ---> done
//!        |-> exists -----------> read it: our bytes -> done, others -> exists, none -> (a 409 for nothing) again
//!        |-> refused ----------> failed
//!        `-> no answer --------> wait, put again                  (the first may still arrive: it meets the second)
//!                  `-- bounds -> read it: our bytes -> done, else -> failed, "may yet appear"
//! ```
//!
//! The waits between tries double, with jitter, so that many who failed together do not come back together. A reader
//! that was cut off asks again as often.
//!
//! "Ours" are the same bytes. Who uses an object to find out who was first must write something into it that is nobody
//! else's.

use std::fmt;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::time::Instant;

use super::statistics::Statistics;
use super::{Failure, FailureKind, Listing, OperationStatistics, Piece, Span, Store, StoreOperation, Upload};

/// How long and how often a store is asked.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tries of one operation.
    pub tries: u32,
    /// No try begins later than this after the first.
    pub patience: Duration,
    /// About how long to wait after the first failure; doubled after each.
    pub first_delay: Duration,
    /// The longest wait between two tries.
    pub longest_delay: Duration,
    /// How long one try may take, besides the time for its bytes.
    pub answer: Duration,
    /// Bytes that move in a second at least.
    pub bytes_per_second: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            tries: 6,
            patience: Duration::from_secs(60),
            first_delay: Duration::from_millis(50),
            longest_delay: Duration::from_secs(5),
            answer: Duration::from_secs(10),
            bytes_per_second: 1 << 20,
        }
    }
}

impl Limits {
    fn time_for(&self, bytes: u64) -> Duration {
        self.answer + Duration::from_secs(bytes / self.bytes_per_second.max(1))
    }

    /// How long to wait after so many failures.
    fn delay(&self, failures: u32) -> Duration {
        let doubled = self.first_delay.saturating_mul(1 << failures.saturating_sub(1).min(16));
        doubled.min(self.longest_delay).mul_f64(rand::random_range(0.5..1.0))
    }
}

/// A store behind bounds, retries, read-back and counters. Clones share the counters.
#[derive(Clone, Debug)]
pub struct Reliable {
    store: Arc<dyn Store>,
    limits: Limits,
    statistics: Arc<Statistics>,
}

impl Reliable {
    /// Relies on `store` within `limits`.
    pub fn new(store: Arc<dyn Store>, limits: Limits) -> Self {
        Reliable { store, limits, statistics: Arc::default() }
    }

    /// What has been counted.
    pub fn statistics(&self) -> Vec<OperationStatistics> {
        self.statistics.now()
    }

    /// All names below a directory.
    pub async fn list_all(&self, directory: &str) -> Result<Vec<String>, Failure> {
        self.list_all_after(directory, None).await
    }

    /// All names below a directory that come after one.
    pub async fn list_all_after(
        &self,
        directory: &str,
        after: Option<String>,
    ) -> Result<Vec<String>, Failure> {
        let mut names = Vec::new();
        self.list_each(directory, after, |page| names.extend(page)).await?;
        Ok(names)
    }

    /// The same a page at a time, for who keeps less of a name than the name.
    pub async fn list_each(
        &self,
        directory: &str,
        after: Option<String>,
        mut visit: impl FnMut(Vec<String>),
    ) -> Result<(), Failure> {
        let mut last = after;
        loop {
            let page = self.list(directory, last.as_deref()).await?;
            if !page.more {
                visit(page.names);
                return Ok(());
            }
            // One that leads nowhere is not the end: what is not listed is deleted, or passed over, by who believes it.
            if page.names.last() <= last.as_ref() {
                let cause = "a page of a listing promises more and leads no further";
                return Err(Failure::new(FailureKind::Unavailable, cause));
            }
            last = page.names.last().cloned();
            visit(page.names);
        }
    }

    fn tries(&self, operation: StoreOperation, bytes: u64) -> Tries {
        Tries {
            operation,
            limits: self.limits,
            time_limit: self.limits.time_for(bytes),
            statistics: self.statistics.clone(),
            began: Instant::now(),
            made: 0,
        }
    }

    /// One put, and what a refusal for existing comes to.
    async fn put_once(&self, name: &str, bytes: &Bytes) -> Result<(), Failure> {
        match self.store.put(name, bytes.clone()).await {
            Err(failure) if failure.kind() == FailureKind::Exists => match self.holds(name, bytes).await? {
                Some(true) => Ok(()),
                Some(false) => Err(failure),
                None => {
                    Err(Failure::new(FailureKind::Unavailable, failure.but("but there is no such object")))
                }
            },
            other => other,
        }
    }

    /// Whether an object has these bytes, durably; `None` if there is none.
    async fn holds(&self, name: &str, bytes: &Bytes) -> Result<Option<bool>, Failure> {
        match self.store.get(name, Span::Whole).await {
            Ok(found) if found.bytes == *bytes => self.store.sync(name).await.map(|()| Some(true)),
            Ok(_) => Ok(Some(false)),
            Err(failure) if failure.kind() == FailureKind::Missing => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// What to conclude of a put that got no answer in all its tries.
    async fn settle(&self, name: &str, bytes: &Bytes, failure: Failure) -> Result<(), Failure> {
        let limit = self.limits.time_for(bytes.len() as u64);
        match tokio::time::timeout(limit, self.holds(name, bytes)).await {
            Ok(Ok(Some(true))) => Ok(()),
            Ok(Ok(Some(false))) => Err(Failure::new(FailureKind::Exists, failure)),
            _ => Err(failure.but("it may yet appear")),
        }
    }
}

impl fmt::Display for Reliable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl Store for Reliable {
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), Failure> {
        let mut tries = self.tries(StoreOperation::Put, bytes.len() as u64);
        let result = loop {
            if let ControlFlow::Break(result) = tries.make(self.put_once(name, &bytes)).await {
                break result;
            }
        };
        let result = match result {
            Err(failure) if failure.kind().is_transient() => self.settle(name, &bytes, failure).await,
            other => other,
        };
        if result.is_ok() {
            self.statistics.moved(StoreOperation::Put, bytes.len());
        }
        result
    }

    async fn upload(&self, name: &str) -> Result<Box<dyn Upload>, Failure> {
        let mut tries = self.tries(StoreOperation::Upload, 0);
        let upload = loop {
            if let ControlFlow::Break(result) = tries.make(self.store.upload(name)).await {
                break result?;
            }
        };
        Ok(Box::new(ReliableUpload { store: self.clone(), name: name.to_owned(), upload, bytes: 0 }))
    }

    async fn get(&self, name: &str, span: Span) -> Result<Piece, Failure> {
        let expected = match span {
            Span::Whole => 0,
            Span::Range { bytes, .. } | Span::Last(bytes) => bytes,
        };
        let mut tries = self.tries(StoreOperation::Get, expected);
        let piece = loop {
            if let ControlFlow::Break(result) = tries.make(self.store.get(name, span)).await {
                break result?;
            }
        };
        self.statistics.moved(StoreOperation::Get, piece.bytes.len());
        Ok(piece)
    }

    async fn list(&self, directory: &str, after: Option<&str>) -> Result<Listing, Failure> {
        let mut tries = self.tries(StoreOperation::List, 0);
        loop {
            if let ControlFlow::Break(result) = tries.make(self.store.list(directory, after)).await {
                return result;
            }
        }
    }

    async fn delete(&self, name: &str) -> Result<(), Failure> {
        let mut tries = self.tries(StoreOperation::Delete, 0);
        loop {
            if let ControlFlow::Break(result) = tries.make(self.store.delete(name)).await {
                return result;
            }
        }
    }

    async fn sync(&self, name: &str) -> Result<(), Failure> {
        let mut tries = self.tries(StoreOperation::Get, 0);
        loop {
            if let ControlFlow::Break(result) = tries.make(self.store.sync(name)).await {
                return result;
            }
        }
    }

    fn directory(&self) -> Option<&Path> {
        self.store.directory()
    }
}

/// An upload whose every step is tried as an operation is.
struct ReliableUpload {
    store: Reliable,
    name: String,
    upload: Box<dyn Upload>,
    /// Of all its parts.
    bytes: u64,
}

impl ReliableUpload {
    /// Whether the object is there with all its bytes, durably: the answer to its completion was lost.
    async fn is_complete(&mut self) -> bool {
        let last = self.store.get(&self.name, Span::Last(1)).await;
        last.is_ok_and(|last| last.offset + last.bytes.len() as u64 == self.bytes)
            && self.store.sync(&self.name).await.is_ok()
    }
}

#[async_trait]
impl Upload for ReliableUpload {
    async fn part(&mut self, bytes: Bytes) -> Result<(), Failure> {
        let mut tries = self.store.tries(StoreOperation::Upload, bytes.len() as u64);
        loop {
            if let ControlFlow::Break(result) = tries.make(self.upload.part(bytes.clone())).await {
                result?;
                break;
            }
        }
        self.bytes += bytes.len() as u64;
        self.store.statistics.moved(StoreOperation::Upload, bytes.len());
        Ok(())
    }

    async fn complete(&mut self) -> Result<(), Failure> {
        // The store puts the parts together, which takes a large object longer.
        let mut tries = self.store.tries(StoreOperation::Upload, self.bytes);
        let result = loop {
            if let ControlFlow::Break(result) = tries.make(self.upload.complete()).await {
                break result;
            }
        };
        match result {
            // A second completion finds no upload any more.
            Err(_) if tries.made > 1 && self.is_complete().await => Ok(()),
            Err(failure) if failure.kind().is_transient() && self.is_complete().await => Ok(()),
            other => other,
        }
    }

    async fn abort(&mut self) -> Result<(), Failure> {
        let mut tries = self.store.tries(StoreOperation::Upload, 0);
        loop {
            if let ControlFlow::Break(result) = tries.make(self.upload.abort()).await {
                return result;
            }
        }
    }
}

/// The tries of one operation.
struct Tries {
    operation: StoreOperation,
    limits: Limits,
    time_limit: Duration,
    statistics: Arc<Statistics>,
    began: Instant,
    made: u32,
}

impl Tries {
    /// Makes one try. `Continue`, after a while, if another one is to be made.
    async fn make<T>(
        &mut self,
        attempt: impl Future<Output = Result<T, Failure>>,
    ) -> ControlFlow<Result<T, Failure>> {
        if self.made > 0 {
            self.statistics.retried(self.operation);
        }
        self.made += 1;
        let began = Instant::now();
        let result = tokio::time::timeout(self.time_limit, attempt).await;
        let result = result.unwrap_or_else(|_| Err(Failure::timed_out(self.time_limit)));
        self.statistics.tried(self.operation, began.elapsed(), result.as_ref().err());
        let failure = match result {
            Err(failure) if failure.kind().is_transient() => failure,
            settled => return ControlFlow::Break(settled),
        };
        let delay = self.limits.delay(self.made);
        if self.made >= self.limits.tries || self.began.elapsed() + delay > self.limits.patience {
            let (tries, seconds) = (self.made, self.began.elapsed().as_secs_f64());
            return ControlFlow::Break(Err(
                failure.but(format_args!("given up after {tries} tries in {seconds:.1} s"))
            ));
        }
        tracing::debug!(operation = self.operation.label(), %failure, ?delay, "the store is asked again");
        tokio::time::sleep(delay).await;
        ControlFlow::Continue(())
    }
}
