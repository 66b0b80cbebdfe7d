//! The metadata store of a node that has no other: one SQLite file, one thread, group commit.
//!
//! ```text
//!   callers ──► bounded queue ──► thread "fulmar-meta": take all that waits (at most 256 requests)
//!                                    BEGIN
//!                                      each in turn: compares, puts, deletes, reads
//!                                    COMMIT                    one fdatasync for all of them
//!                                    record the head           one fdatasync of meta.head
//!                                    tell observers, answer callers
//! ```
//!
//! Stock SQLite does the storing, on its own VFS. `journal_mode=WAL` with `synchronous=FULL` appends a commit
//! to the write-ahead log and syncs it before COMMIT returns, so what is answered survives a power loss, at one
//! sync a batch (a rollback journal needs three). `locking_mode=EXCLUSIVE` keeps other processes out, and needs
//! no shared memory. The file can be read with the `sqlite3` shell while no node runs.
//!
//! **Damage and old copies are refused.** SQLite ends recovery of its write-ahead log at the first bad checksum, without an error,
//! and its pages have no checksums. Therefore each batch is recorded twice before it is acknowledged: `meta.db` holds the head
//! (revision and digest of all contents) and the head before the batch, and `meta.head` ([`head`]) holds the head. The start
//! requires:
//!
//! 1. SQLite's own check of `meta.db` passes, and the definitions of its tables are the expected ones.
//! 2. The contents of `meta.db` have the digest of its head.
//! 3. `meta.head` holds the head of `meta.db`, or the head before its last batch.
//!
//! Otherwise the store is not opened, and no file is changed. Restoring the file that was damaged makes the next start succeed. A
//! revision can be accepted explicitly ([`Embedded::open_accepting`]).
//!
//! Every crash point passes this check:
//!
//! | crash | `meta.db` after recovery | `meta.head` | start |
//! | --- | --- | --- | --- |
//! | before or during COMMIT | n | n | equal |
//! | after COMMIT, before or during the write of `meta.head` | n + 1, previous n | n (a torn slot does not count) | continues with n + 1, which was not acknowledged; writes `meta.head` first |
//! | after the write of `meta.head` | n + 1 | n + 1 | equal |
//! | after `meta.db` was created or converted, before `meta.head` was created | no previous | missing | creates `meta.head` |
//!
//! A batch that was not acknowledged may survive a crash or not; an acknowledged one is in `meta.head`, so its loss is noticed. A
//! `meta.db` without a previous head and without `meta.head` is accepted. This happens once: the next batch sets the previous head.
//! Data directories of format version 1 (no digests, no `meta.head`) are converted when they are opened.
//!
//! Reads go through the same queue, so they see every transaction that was answered before them, and are
//! answered after the commit of those that they saw.
//!
//! **When the disk fails.** A full disk makes SQLite roll back: the batch is answered as not made, and the next
//! one may succeed. Any other error of COMMIT leaves open what is on the disk (a failed sync must not be tried
//! again: the kernel has forgotten the pages). From then on every request is refused until a restart has read
//! the file again. The batch itself is told that its outcome is not known.

mod file;
mod head;
mod thread;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};

use crate::{Entry, MetaError, MetadataStore, Observer, Outcome, Revision, Transaction};
use file::File;
use thread::{Request, Worker};

/// Requests that may wait for the thread; more callers than that wait for a place.
const QUEUE_REQUESTS: usize = 1024;

/// A metadata store in a local file.
///
/// Dropping it answers what is queued, then closes the file; the drop waits for that.
#[derive(Debug)]
pub struct Embedded {
    /// Taken when the store is dropped, so that the thread sees the end of its queue.
    queue: Option<mpsc::Sender<Request>>,
    thread: Option<std::thread::JoinHandle<()>>,
    revision: Arc<AtomicU64>,
}

impl Embedded {
    /// Opens the file at `path`, or creates it if neither it nor its head file exists. Blocks while it reads (milliseconds).
    ///
    /// Errors: [`MetaError::Unavailable`] if the file cannot be opened or another process has it, [`MetaError::Damaged`] if it or
    /// its head file is damaged, missing or an old copy, [`MetaError::Corrupt`] if its contents are damaged, if it is no metadata
    /// file, or if a newer Fulmar wrote it.
    pub fn open(path: &Path) -> Result<Self, MetaError> {
        Self::over(File::open(path, None)?)
    }

    /// Opens the file even if the head file does not confirm its revision, provided that it is `revision` (0: a missing or empty
    /// file). Changes of later revisions are lost.
    pub fn open_accepting(path: &Path, revision: Option<Revision>) -> Result<Self, MetaError> {
        Self::over(File::open(path, revision)?)
    }

    /// The last revision that was acknowledged.
    pub fn revision(&self) -> Revision {
        Revision(self.revision.load(Ordering::Acquire))
    }

    fn over(file: File) -> Result<Self, MetaError> {
        let (queue, requests) = mpsc::channel(QUEUE_REQUESTS);
        let revision = Arc::new(AtomicU64::new(file.revision().0));
        let shown = revision.clone();
        let thread = std::thread::Builder::new()
            .name("fulmar-meta".to_owned())
            .spawn(move || Worker::new(file, requests, shown).run())
            .map_err(|error| MetaError::Unavailable {
                cause: format!("could not start its thread: {error}"),
                remedy: "raise the limit of threads (ulimit -u)",
            })?;
        Ok(Self { queue: Some(queue), thread: Some(thread), revision })
    }

    /// Queues a request and waits for its answer.
    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, MetaError>>) -> Request,
    ) -> Result<T, MetaError> {
        let stopped = || MetaError::Unavailable {
            cause: "has stopped".to_owned(),
            remedy: "restart the node, and look in its log for the reason",
        };
        let queue = self.queue.as_ref().ok_or_else(stopped)?;
        let (answer, answered) = oneshot::channel();
        queue.send(request(answer)).await.map_err(|_| stopped())?;
        answered.await.map_err(|_| stopped())?
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been reported where it happened; a drop has nobody to tell.
            let _ = thread.join();
        }
    }
}

#[async_trait]
impl MetadataStore for Embedded {
    async fn get(&self, key: &str) -> Result<Option<Entry>, MetaError> {
        self.ask(|answer| Request::Get { key: key.to_owned(), answer }).await
    }

    async fn scan(&self, prefix: &str) -> Result<Vec<Entry>, MetaError> {
        self.ask(|answer| Request::Scan { prefix: prefix.to_owned(), answer }).await
    }

    async fn transact(&self, transaction: Transaction) -> Result<Outcome, MetaError> {
        transaction.check()?;
        self.ask(|answer| Request::Transact { transaction, answer }).await
    }

    async fn follow(&self, observer: Arc<dyn Observer>) -> Result<(), MetaError> {
        self.ask(|answer| Request::Follow { observer, answer }).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sabotaged(directory: &tempfile::TempDir, sql: &str) -> Embedded {
        let file = File::open(&directory.path().join("meta.db"), None).unwrap();
        file.sabotage(sql);
        Embedded::over(file).unwrap()
    }

    async fn put(store: &Embedded, key: &str, bytes: usize) -> Result<Outcome, MetaError> {
        store.transact(Transaction::new().put(key, vec![7; bytes])).await
    }

    #[tokio::test]
    async fn a_full_disk_refuses_changes_until_there_is_room() {
        let directory = tempfile::tempdir().unwrap();
        let store = sabotaged(&directory, "PRAGMA max_page_count = 100");
        let kept = put(&store, "kept", 100_000).await.unwrap();
        let refused = put(&store, "large", 900_000).await.unwrap_err();
        assert!(refused.to_string().contains("made no change"), "{refused}");
        assert!(refused.remedy().contains("free some space"), "{}", refused.remedy());
        assert_eq!(store.get("large").await.unwrap(), None);
        let Outcome::Committed(kept) = kept else { panic!("conflict") };
        assert_eq!(put(&store, "small", 10).await.unwrap(), Outcome::Committed(crate::Revision(kept.0 + 1)));
    }

    /// A constraint that is only looked at by COMMIT stands for a sync that fails there.
    #[tokio::test]
    async fn a_failed_commit_ends_the_store_until_it_is_opened_again() {
        let directory = tempfile::tempdir().unwrap();
        let store = sabotaged(
            &directory,
            "CREATE TABLE parent (id INTEGER PRIMARY KEY);
             CREATE TABLE child (id INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
             CREATE TRIGGER fail AFTER INSERT ON entry WHEN new.key = CAST('fail' AS BLOB)
             BEGIN INSERT INTO child VALUES (1); END;
             PRAGMA foreign_keys = ON;",
        );
        put(&store, "before", 1).await.unwrap();
        let unknown = put(&store, "fail", 1).await.unwrap_err();
        assert!(unknown.to_string().contains("outcome of this change is not known"), "{unknown}");
        for refused in [put(&store, "after", 1).await.map(drop), store.get("before").await.map(drop)] {
            assert!(refused.unwrap_err().to_string().contains("failed before"));
        }
        drop(store);
        let store = Embedded::open(&directory.path().join("meta.db")).unwrap();
        assert!(store.get("before").await.unwrap().is_some());
        assert_eq!(store.get("after").await.unwrap(), None);
        put(&store, "after", 1).await.unwrap();
    }

    /// A write of the head file that fails: the commit stands, but was not acknowledged.
    #[tokio::test]
    async fn a_failed_write_of_the_head_ends_the_store_until_it_is_opened_again() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = File::open(&directory.path().join("meta.db"), None).unwrap();
        file.sabotage_head();
        let store = Embedded::over(file).unwrap();
        let unknown = put(&store, "unknown", 1).await.unwrap_err();
        assert!(unknown.to_string().contains("outcome of this change is not known"), "{unknown}");
        assert!(unknown.to_string().contains("meta.head"), "{unknown}");
        assert!(store.get("unknown").await.unwrap_err().to_string().contains("failed before"));
        drop(store);
        let store = Embedded::open(&directory.path().join("meta.db")).unwrap();
        assert!(store.get("unknown").await.unwrap().is_some());
    }
}
