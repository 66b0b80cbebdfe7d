//! The embedded metadata store: one SQLite file, one thread, group commit.
//!
//! ```text
//!   callers ──► bounded queue ──► thread "fulmar-meta": take up to 256 queued requests
//!                                    BEGIN
//!                                      run the requests: compares, puts, deletes, reads
//!                                    COMMIT                one fdatasync for the batch
//!                                    write the head        one fdatasync of meta.head
//!                                    notify observers, answer callers
//! ```
//!
//! Storage is stock SQLite on its default VFS:
//!
//! - `journal_mode=WAL` with `synchronous=FULL` appends a commit to the write-ahead log and syncs
//!   it before COMMIT returns. Acknowledged changes therefore survive a power loss, at one sync per
//!   batch (a rollback journal needs three).
//! - `locking_mode=EXCLUSIVE` keeps other processes out and needs no shared memory.
//! - The file can be read with the `sqlite3` shell while no node runs.
//!
//! **Detecting damage and old copies.** SQLite ends the recovery of its write-ahead log at the
//! first bad checksum, without an error, and its pages have no checksums. Each batch is therefore
//! recorded twice before it is acknowledged: `meta.db` holds the head (revision and digest of all
//! contents) and the head before the batch, and `meta.head` ([`head`]) holds the head. The start
//! requires:
//!
//! 1. SQLite's check of `meta.db` passes, and its tables have the expected definitions.
//! 2. The contents of `meta.db` have the digest of its head.
//! 3. `meta.head` holds the head of `meta.db`, or the head before its last batch.
//!
//! Otherwise the store is not opened, and no file is changed. After the damaged file is restored,
//! the next start succeeds. On a single node an operator can accept a revision explicitly
//! ([`Embedded::open_accepting`]). In a cluster that is not possible: other nodes, whose commits
//! may depend on the lost changes, cannot check it. There only all three files from one backup are
//! accepted, and each node then compares them with its generation (`fulmar_cluster::generation`).
//!
//! Every crash point passes this check:
//!
//! | crash | `meta.db` after recovery | `meta.head` | start |
//! | --- | --- | --- | --- |
//! | before or during COMMIT | n | n | equal |
//! | (a) after COMMIT, before `meta.head` is written | n + 1, previous n | n | continues |
//! | after the write of `meta.head` | n + 1 | n + 1 | equal |
//! | (b) before `meta.head` exists | no previous | missing | creates `meta.head` |
//!
//! - (a) A torn slot of `meta.head` is ignored. The start continues with n + 1, which was not
//!   acknowledged, and writes `meta.head` first.
//! - (b) The crash occurred after `meta.db` was created or converted. A `meta.db` without a
//!   previous head and without `meta.head` is accepted. This is possible only once, because the
//!   next batch sets the previous head.
//!
//! A batch that was not acknowledged may or may not survive a crash. An acknowledged one is
//! recorded in `meta.head`, so its loss is detected. Data directories of format version 1 (no
//! digests, no `meta.head`) are converted when they are opened.
//!
//! **Reads** use the same queue. They see every transaction that was acknowledged before them, and
//! are answered after the commit of the transactions that they saw.
//!
//! **Disk errors.** On a full disk SQLite rolls back. The batch fails without a change, and the
//! next one may succeed. After any other error of COMMIT the state on disk is unknown. (A failed
//! sync must not be retried, because the kernel has discarded the dirty pages.) The requests of the
//! batch fail with an unknown outcome, and all later ones are rejected until a restart has read the
//! file again.

mod file;
mod head;
mod thread;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};

use crate::{Entry, MetaError, MetadataStore, Observer, Outcome, Revision, Transaction};
use file::{Acceptance, File};
use thread::{Request, Worker};

/// Capacity of the request queue. Further callers wait until there is space in the queue.
const QUEUE_REQUESTS: usize = 1024;

/// A metadata store in a local file.
///
/// A drop blocks until all queued requests are answered and the file is closed.
#[derive(Debug)]
pub struct Embedded {
    /// Taken on drop, which closes the thread's queue.
    queue: Option<mpsc::Sender<Request>>,
    thread: Option<std::thread::JoinHandle<()>>,
    revision: Arc<AtomicU64>,
}

impl Embedded {
    /// Opens the file at `path`, or creates it if neither it nor its head file exists. Blocks for
    /// some milliseconds while it reads the file.
    ///
    /// Errors:
    /// - [`MetaError::Unavailable`] if the file cannot be opened, or is open in another process;
    /// - [`MetaError::Damaged`] if it or its head file is damaged, missing or an old copy, it is not
    ///   a metadata file, or a newer version of Fulmar wrote it.
    pub fn open(path: &Path) -> Result<Self, MetaError> {
        Self::over(File::open(path, Acceptance::Never)?)
    }

    /// Like [`Embedded::open`], but accepts a file at `revision` that the head file does not
    /// confirm (0: a missing or empty file). Changes of later revisions are lost. If it is `None`,
    /// errors name the revision for `--accept-catalog`.
    pub fn open_accepting(path: &Path, revision: Option<Revision>) -> Result<Self, MetaError> {
        Self::over(File::open(path, Acceptance::At(revision))?)
    }

    /// The last acknowledged revision.
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
                remedy: "Raise the limit of threads (ulimit -u).",
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
            remedy: "Restart the node. The reason is in its log.",
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
            // A panic of the thread was already reported by the panic handler.
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
        let file = File::open(&directory.path().join("meta.db"), Acceptance::Never).unwrap();
        file.sabotage(sql);
        Embedded::over(file).unwrap()
    }

    async fn put(store: &Embedded, key: &str, bytes: usize) -> Result<Outcome, MetaError> {
        store.transact(Transaction::new().put(key, vec![7; bytes])).await
    }

    #[tokio::test]
    async fn full_disk_rejects_changes_until_space_is_free() {
        let directory = tempfile::tempdir().unwrap();
        let store = sabotaged(&directory, "PRAGMA max_page_count = 100");
        let kept = put(&store, "kept", 100_000).await.unwrap();
        let refused = put(&store, "large", 900_000).await.unwrap_err();
        assert!(refused.to_string().contains("made no change"), "{refused}");
        assert!(refused.remedy().contains("Free some disk space"), "{}", refused.remedy());
        assert_eq!(store.get("large").await.unwrap(), None);
        let Outcome::Committed(kept) = kept else { panic!("conflict") };
        assert_eq!(put(&store, "small", 10).await.unwrap(), Outcome::Committed(crate::Revision(kept.0 + 1)));
    }

    /// A deferred constraint, which is checked by COMMIT, simulates a failed sync.
    #[tokio::test]
    async fn failed_commit_disables_the_store_until_it_is_reopened() {
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

    /// If the write of the head file fails, the commit is durable but not acknowledged.
    #[tokio::test]
    async fn failed_head_write_disables_the_store_until_it_is_reopened() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = File::open(&directory.path().join("meta.db"), Acceptance::Never).unwrap();
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
