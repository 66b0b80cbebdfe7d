//! Adds time limits and retries to a store, and resolves uncertain puts by reading back.
//!
//! ```text
//!   put ---> done
//!        |-> exists -----------> read it: same bytes -> done; others -> exists;
//!        |                                none (spurious 409) -> retry
//!        |-> refused ----------> failed
//!        `-> no response ------> wait, put again (a late first put makes the second one fail)
//!                  `-- limits -> read it: same bytes -> done; others -> exists;
//!                                         else -> failed, "may still appear"
//! ```
//!
//! Delays between attempts double, with jitter, so that callers that failed together do not retry
//! together. A read that was interrupted is retried in the same way.
//!
//! An object with the same bytes counts as the caller's own. A caller that uses an object to decide
//! a race must therefore include a unique id in it.

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

/// Limits of store operations.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of attempts per operation.
    pub max_attempts: u32,
    /// No attempt starts later than this after the first one.
    pub retry_timeout: Duration,
    /// Approximate delay after the first failure. Doubles after each further one.
    pub first_delay: Duration,
    /// Maximum delay between two attempts.
    pub max_delay: Duration,
    /// Time limit of an attempt, in addition to the time for its bytes.
    pub attempt_timeout: Duration,
    /// Minimum throughput, from which the time for an attempt's bytes is derived.
    pub bytes_per_second: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_attempts: 6,
            retry_timeout: Duration::from_secs(60),
            first_delay: Duration::from_millis(50),
            max_delay: Duration::from_secs(5),
            attempt_timeout: Duration::from_secs(10),
            bytes_per_second: 1 << 20,
        }
    }
}

impl Limits {
    fn time_for(&self, bytes: u64) -> Duration {
        self.attempt_timeout + Duration::from_secs(bytes / self.bytes_per_second.max(1))
    }

    /// Delay after a number of failures.
    fn delay(&self, failures: u32) -> Duration {
        let doubled = self.first_delay.saturating_mul(1 << failures.saturating_sub(1).min(16));
        doubled.min(self.max_delay).mul_f64(rand::random_range(0.5..1.0))
    }
}

/// A store with time limits, retries, read-back and counters. Clones share the counters.
#[derive(Clone, Debug)]
pub struct Reliable {
    store: Arc<dyn Store>,
    limits: Limits,
    statistics: Arc<Statistics>,
}

impl Reliable {
    /// Wraps `store` with `limits`.
    pub fn new(store: Arc<dyn Store>, limits: Limits) -> Self {
        Reliable { store, limits, statistics: Arc::default() }
    }

    /// Returns the counters.
    pub fn statistics(&self) -> Vec<OperationStatistics> {
        self.statistics.snapshot()
    }

    /// Lists all names below a directory.
    pub async fn list_all(&self, directory: &str) -> Result<Vec<String>, Failure> {
        self.list_all_after(directory, None).await
    }

    /// Lists all names below a directory that come after `after`.
    pub async fn list_all_after(
        &self,
        directory: &str,
        after: Option<String>,
    ) -> Result<Vec<String>, Failure> {
        let mut names = Vec::new();
        self.list_each(directory, after, |page| names.extend(page)).await?;
        Ok(names)
    }

    /// As [`Reliable::list_all_after`], but passes the names to `visit` page by page, for callers
    /// that do not keep all of them.
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
            // A page that does not advance is not the end of the listing: callers would treat the
            // remaining objects as missing, and might delete what depends on them.
            if page.names.last() <= last.as_ref() {
                let cause = "the listing does not advance after an incomplete page";
                return Err(Failure::new(FailureKind::Unavailable, cause));
            }
            last = page.names.last().cloned();
            visit(page.names);
        }
    }

    fn tries(&self, operation: StoreOperation, bytes: u64) -> Attempts {
        Attempts {
            operation,
            limits: self.limits,
            time_limit: self.limits.time_for(bytes),
            statistics: self.statistics.clone(),
            began: Instant::now(),
            attempts_made: 0,
        }
    }

    /// Makes one put, and resolves an "already exists" response by reading the object.
    async fn put_once(&self, name: &str, bytes: &Bytes) -> Result<(), Failure> {
        match self.store.put(name, bytes.clone()).await {
            Err(failure) if failure.kind() == FailureKind::Exists => {
                match self.has_contents(name, bytes).await? {
                    Some(true) => Ok(()),
                    Some(false) => Err(failure),
                    None => Err(Failure::new(
                        FailureKind::Unavailable,
                        failure.with_detail("but the object does not exist"),
                    )),
                }
            }
            other => other,
        }
    }

    /// Returns true if an object has exactly these bytes, after syncing it. Returns None if it does
    /// not exist.
    async fn has_contents(&self, name: &str, bytes: &Bytes) -> Result<Option<bool>, Failure> {
        match self.store.get(name, Span::Whole).await {
            Ok(found) if found.bytes == *bytes => self.store.sync(name).await.map(|()| Some(true)),
            Ok(_) => Ok(Some(false)),
            Err(failure) if failure.kind() == FailureKind::Missing => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Decides the outcome of a put that got no response in any attempt.
    async fn resolve_uncertain_put(
        &self,
        name: &str,
        bytes: &Bytes,
        failure: Failure,
    ) -> Result<(), Failure> {
        let limit = self.limits.time_for(bytes.len() as u64);
        match tokio::time::timeout(limit, self.has_contents(name, bytes)).await {
            Ok(Ok(Some(true))) => Ok(()),
            Ok(Ok(Some(false))) => Err(Failure::new(FailureKind::Exists, failure)),
            _ => Err(failure.with_detail("the object may still appear")),
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
            Err(failure) if failure.kind().is_transient() => {
                self.resolve_uncertain_put(name, &bytes, failure).await
            }
            other => other,
        };
        if result.is_ok() {
            self.statistics.record_bytes(StoreOperation::Put, bytes.len());
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
        self.statistics.record_bytes(StoreOperation::Get, piece.bytes.len());
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

/// An upload whose steps are retried like other operations.
struct ReliableUpload {
    store: Reliable,
    name: String,
    upload: Box<dyn Upload>,
    /// Total size of the parts.
    bytes: u64,
}

impl ReliableUpload {
    /// Returns true if the object exists with all its bytes, after syncing it. Used if the response
    /// to the completion was lost.
    async fn is_complete(&mut self) -> bool {
        let last = self.store.get(&self.name, Span::Last(1)).await;
        last.is_ok_and(|last| last.offset + last.bytes.len() as u64 == self.bytes)
            && self.store.sync(&self.name).await.is_ok()
    }
}

#[async_trait]
impl Upload for ReliableUpload {
    fn bypass_page_cache(&mut self) {
        self.upload.bypass_page_cache();
    }

    async fn part(&mut self, bytes: Bytes) -> Result<(), Failure> {
        let mut tries = self.store.tries(StoreOperation::Upload, bytes.len() as u64);
        loop {
            if let ControlFlow::Break(result) = tries.make(self.upload.part(bytes.clone())).await {
                result?;
                break;
            }
        }
        self.bytes += bytes.len() as u64;
        self.store.statistics.record_bytes(StoreOperation::Upload, bytes.len());
        Ok(())
    }

    async fn complete(&mut self) -> Result<(), Failure> {
        // The time limit covers all bytes, because the store assembles the parts.
        let mut tries = self.store.tries(StoreOperation::Upload, self.bytes);
        let result = loop {
            if let ControlFlow::Break(result) = tries.make(self.upload.complete()).await {
                break result;
            }
        };
        match result {
            // A second completion fails because the first one has ended the upload.
            Err(_) if tries.attempts_made > 1 && self.is_complete().await => Ok(()),
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

/// The attempts of one operation.
struct Attempts {
    operation: StoreOperation,
    limits: Limits,
    time_limit: Duration,
    statistics: Arc<Statistics>,
    began: Instant,
    attempts_made: u32,
}

impl Attempts {
    /// Makes one attempt. Returns `Continue`, after a delay, if another one is to be made.
    async fn make<T>(
        &mut self,
        attempt: impl Future<Output = Result<T, Failure>>,
    ) -> ControlFlow<Result<T, Failure>> {
        if self.attempts_made > 0 {
            self.statistics.record_retry(self.operation);
        }
        self.attempts_made += 1;
        let began = Instant::now();
        let result = tokio::time::timeout(self.time_limit, attempt).await;
        let result = result.unwrap_or_else(|_| Err(Failure::timed_out(self.time_limit)));
        self.statistics.record_attempt(self.operation, began.elapsed(), result.as_ref().err());
        let failure = match result {
            Err(failure) if failure.kind().is_transient() => failure,
            outcome => return ControlFlow::Break(outcome),
        };
        let delay = self.limits.delay(self.attempts_made);
        if self.attempts_made >= self.limits.max_attempts
            || self.began.elapsed() + delay > self.limits.retry_timeout
        {
            let (attempts, seconds) = (self.attempts_made, self.began.elapsed().as_secs_f64());
            return ControlFlow::Break(Err(
                failure.with_detail(format_args!("given up after {attempts} attempts in {seconds:.1} s"))
            ));
        }
        tracing::debug!(operation = self.operation.label(), %failure, ?delay, "retrying a store operation");
        tokio::time::sleep(delay).await;
        ControlFlow::Continue(())
    }
}
