//! The thread that owns the file: group commit. It takes requests in batches, commits each batch
//! with one SQLite transaction, then notifies observers and answers callers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rusqlite::ErrorCode;
use tokio::sync::{mpsc, oneshot};

use super::file::File;
use crate::{Change, Entry, MetaError, Observer, Operation, Outcome, Revision, Transaction};

/// Maximum number of requests per SQLite transaction. Bounds the latency of the first one.
const BATCH_REQUESTS: usize = 256;

type Answer<T> = oneshot::Sender<Result<T, MetaError>>;

/// A request of a caller.
pub(super) enum Request {
    Get { key: String, answer: Answer<Option<Entry>> },
    Scan { prefix: String, answer: Answer<Vec<Entry>> },
    Transact { transaction: Transaction, answer: Answer<Outcome> },
    Follow { observer: Arc<dyn Observer>, answer: Answer<()> },
}

/// A request that has run and waits for the commit of its batch.
enum Done {
    Get(Option<Entry>, Answer<Option<Entry>>),
    Scan(Vec<Entry>, Answer<Vec<Entry>>),
    Transact(Outcome, Vec<Operation>, Answer<Outcome>),
    /// The snapshot, and its revision: that of the preceding requests of the batch.
    Follow(Arc<dyn Observer>, Vec<Entry>, Revision, Answer<()>),
}

pub(super) struct Worker {
    file: File,
    requests: mpsc::Receiver<Request>,
    observers: Vec<Weak<dyn Observer>>,
    /// The last acknowledged revision.
    revision: Arc<AtomicU64>,
    /// Set after a commit with unknown outcome. All later requests get this error.
    failed: Option<MetaError>,
}

impl Worker {
    pub(super) fn new(file: File, requests: mpsc::Receiver<Request>, revision: Arc<AtomicU64>) -> Self {
        Self { file, requests, observers: Vec::new(), revision, failed: None }
    }

    /// Runs until all senders are dropped and the queue is empty.
    pub(super) fn run(mut self) {
        let mut batch = Vec::with_capacity(BATCH_REQUESTS);
        while self.requests.blocking_recv_many(&mut batch, BATCH_REQUESTS) > 0 {
            self.run_batch(std::mem::take(&mut batch));
        }
    }

    fn run_batch(&mut self, batch: Vec<Request>) {
        if let Some(error) = &self.failed {
            batch.into_iter().for_each(|request| request.refuse(error));
            return;
        }
        let mut done = Vec::with_capacity(batch.len());
        match self.execute_all(batch, &mut done) {
            Ok(()) => done.into_iter().for_each(|done| self.finish(done)),
            Err((error, not_run)) => {
                done.into_iter().for_each(|done| done.refuse(&error));
                not_run.into_iter().for_each(|request| request.refuse(&error));
            }
        }
    }

    /// Runs the requests in one SQLite transaction and commits it. On an error nothing was changed,
    /// or the store has failed permanently. The error includes the requests that have not run.
    fn execute_all(
        &mut self,
        batch: Vec<Request>,
        done: &mut Vec<Done>,
    ) -> Result<(), (MetaError, Vec<Request>)> {
        let mut requests = batch.into_iter();
        if let Err(error) = self.file.begin() {
            return Err((self.undo(&error), requests.collect()));
        }
        while let Some(request) = requests.next() {
            match request.execute(&mut self.file) {
                Ok(completed) => done.push(completed),
                Err((error, request)) => {
                    return Err((self.undo(&error), std::iter::once(request).chain(requests).collect()));
                }
            }
        }
        if let Err(error) = self.file.stamp() {
            return Err((self.undo(&error), Vec::new()));
        }
        self.file.commit().map_err(|error| (self.commit_failed(&error), Vec::new()))?;
        self.file.acknowledge().map_err(|error| {
            let path = self.file.head_path().display().to_string();
            (self.fail(format!("could not write {path}: {error}")), Vec::new())
        })?;
        self.revision.store(self.file.revision().0, Ordering::Release);
        Ok(())
    }

    /// Rolls back after an error before the commit. The returned error says that nothing was
    /// changed.
    fn undo(&mut self, error: &rusqlite::Error) -> MetaError {
        if let Err(rollback) = self.file.rollback() {
            return self
                .fail(format!("could neither run ({error}) nor roll back ({rollback}) a transaction"));
        }
        no_change(&self.file, error)
    }

    /// Handles an error of the commit itself. The head of module `embedded` explains why the store
    /// continues only after a full disk.
    fn commit_failed(&mut self, error: &rusqlite::Error) -> MetaError {
        let full = error.sqlite_error_code() == Some(ErrorCode::DiskFull);
        if full && self.file.rollback().is_ok() {
            return no_change(&self.file, error);
        }
        self.fail(format!("could not commit: {error}"))
    }

    fn fail(&mut self, cause: String) -> MetaError {
        let place = self.file.path().display();
        tracing::error!(path = %place, %cause, "the metadata store has failed and rejects all requests");
        let remedy = "Check the disk, then restart the node. Committed changes are in the file.";
        self.failed =
            Some(MetaError::Unavailable { cause: format!("in {place} failed before: {cause}"), remedy });
        MetaError::OutcomeUnknown { cause: format!("in {place} {cause}"), remedy }
    }

    /// Completes a request after the commit. Notifies the observers before it answers the caller,
    /// as the trait guarantees.
    fn finish(&mut self, done: Done) {
        // The send fails if the caller has dropped its request.
        match done {
            Done::Get(entry, answer) => drop(answer.send(Ok(entry))),
            Done::Scan(entries, answer) => drop(answer.send(Ok(entries))),
            Done::Transact(outcome, operations, answer) => {
                if let Outcome::Committed(revision) = outcome {
                    self.notify_observers(operations, revision);
                }
                let _ = answer.send(Ok(outcome));
            }
            Done::Follow(observer, entries, revision, answer) => {
                let accepted = observer.snapshot(entries);
                if accepted.is_ok() {
                    observer.positioned(revision);
                    self.observers.push(Arc::downgrade(&observer));
                }
                let _ = answer.send(accepted);
            }
        }
    }

    fn notify_observers(&mut self, operations: Vec<Operation>, revision: Revision) {
        if operations.is_empty() {
            return;
        }
        let changes: Vec<Change> = operations
            .into_iter()
            .map(|operation| match operation {
                Operation::Put(key, value) => Change { key, value: Some(value), revision },
                Operation::Delete(key) => Change { key, value: None, revision },
            })
            .collect();
        self.observers.retain(|observer| match observer.upgrade() {
            Some(observer) => {
                observer.changed(&changes);
                true
            }
            None => false,
        });
    }
}

impl Request {
    /// Runs inside the batch's SQLite transaction. Returns the request with the error if SQLite
    /// fails.
    fn execute(self, file: &mut File) -> Result<Done, (rusqlite::Error, Request)> {
        match self {
            Request::Get { key, answer } => match file.get(&key) {
                Ok(entry) => Ok(Done::Get(entry, answer)),
                Err(error) => Err((error, Request::Get { key, answer })),
            },
            Request::Scan { prefix, answer } => match file.scan(&prefix) {
                Ok(entries) => Ok(Done::Scan(entries, answer)),
                Err(error) => Err((error, Request::Scan { prefix, answer })),
            },
            Request::Transact { transaction, answer } => match transact(file, &transaction) {
                Ok(outcome) => Ok(Done::Transact(outcome, transaction.operations, answer)),
                Err(error) => Err((error, Request::Transact { transaction, answer })),
            },
            Request::Follow { observer, answer } => match file.all() {
                Ok(entries) => Ok(Done::Follow(observer, entries, file.revision(), answer)),
                Err(error) => Err((error, Request::Follow { observer, answer })),
            },
        }
    }

    fn refuse(self, error: &MetaError) {
        let error = error.clone();
        match self {
            Request::Get { answer, .. } => drop(answer.send(Err(error))),
            Request::Scan { answer, .. } => drop(answer.send(Err(error))),
            Request::Transact { answer, .. } => drop(answer.send(Err(error))),
            Request::Follow { answer, .. } => drop(answer.send(Err(error))),
        }
    }
}

impl Done {
    fn refuse(self, error: &MetaError) {
        let error = error.clone();
        match self {
            Done::Get(_, answer) => drop(answer.send(Err(error))),
            Done::Scan(_, answer) => drop(answer.send(Err(error))),
            Done::Transact(_, _, answer) => drop(answer.send(Err(error))),
            Done::Follow(_, _, _, answer) => drop(answer.send(Err(error))),
        }
    }
}

/// Runs one transaction inside the SQLite transaction of the batch.
fn transact(file: &mut File, transaction: &Transaction) -> rusqlite::Result<Outcome> {
    for compare in &transaction.compares {
        if !file.holds(compare)? {
            return Ok(Outcome::Conflict(file.revision()));
        }
    }
    if !transaction.operations.is_empty() {
        file.next_revision();
    }
    for operation in &transaction.operations {
        file.apply(operation)?;
    }
    Ok(Outcome::Committed(file.revision()))
}

fn no_change(file: &File, error: &rusqlite::Error) -> MetaError {
    let full = error.sqlite_error_code() == Some(ErrorCode::DiskFull);
    let cause = format!("in {} made no change: {error}", file.path().display());
    if full {
        MetaError::OutOfSpace { cause, remedy: "Free some disk space and retry the change." }
    } else {
        MetaError::Unavailable { cause, remedy: "Check its disk and retry the change." }
    }
}
