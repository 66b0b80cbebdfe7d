//! A store that fails, delays and loses answers as a test wants it: for tests of this crate and of those above it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::watch;

use super::{Failure, FailureKind, Listing, Piece, Span, Store, StoreOperation, Upload};

/// What happens to an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreFault {
    /// It is not done, and fails.
    Fail(FailureKind),
    /// It is done, and the answer is lost. (A part of an upload is not done: who sends it again must not know of the
    /// first, and what is faulty lies above that.)
    LoseAnswer,
    /// It is done later.
    Delay(Duration),
    /// It is done later even if nobody waits for it any more (a put; the others are as with `Delay`).
    Linger(Duration),
    /// A listing has no names and promises more (the others are done).
    EmptyPage,
}

/// What became of objects that come in parts, in the store itself: whatever its callers were told.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Uploads {
    /// So many were begun,
    pub begun: usize,
    /// so many of them completed,
    pub completed: usize,
    /// and so many aborted. The others are under way, or were forgotten.
    pub aborted: usize,
}

/// A store with faults. Clones are the same one.
#[derive(Clone)]
pub struct FaultyStore {
    store: Arc<dyn Store>,
    faults: Arc<watch::Sender<Faults>>,
}

#[derive(Default)]
struct Faults {
    /// One for the next operation of its kind.
    next: Vec<(StoreOperation, StoreFault)>,
    /// For every operation of its kind.
    always: Vec<(StoreOperation, StoreFault)>,
    /// Operations that wait, and a prefix of their objects' names.
    held: Vec<(StoreOperation, &'static str)>,
    /// How many operations are held now.
    waiting: usize,
    uploads: Uploads,
}

impl FaultyStore {
    /// `store`, without faults so far.
    pub fn new(store: Arc<dyn Store>) -> Self {
        FaultyStore { store, faults: Arc::new(watch::Sender::new(Faults::default())) }
    }

    /// Gives the next operation of this kind a fault; called twice, the next two.
    pub fn next(&self, operation: StoreOperation, fault: StoreFault) {
        self.faults.send_modify(|faults| faults.next.push((operation, fault)));
    }

    /// Gives all operations of this kind a fault, until this is called with None.
    pub fn always(&self, operation: StoreOperation, fault: Option<StoreFault>) {
        self.faults.send_modify(|faults| {
            faults.always.retain(|(other, _)| *other != operation);
            faults.always.extend(fault.map(|fault| (operation, fault)));
        });
    }

    /// Forgets the faults that were for the next operations of this kind.
    pub fn forget(&self, operation: StoreOperation) {
        self.faults.send_modify(|faults| faults.next.retain(|(other, _)| *other != operation));
    }

    /// Lets all operations of this kind wait, until this is called with false.
    pub fn hold(&self, operation: StoreOperation, hold: bool) {
        self.faults.send_modify(|faults| {
            faults.held.retain(|(other, _)| *other != operation);
            faults.held.extend(hold.then_some((operation, "")));
        });
    }

    /// Holds operations of this kind on objects whose names start with `prefix`, until [`FaultyStore::hold`] is called with false.
    pub fn hold_under(&self, operation: StoreOperation, prefix: &'static str) {
        self.faults.send_modify(|faults| faults.held.push((operation, prefix)));
    }

    /// Waits until an operation is held.
    pub async fn is_holding(&self) {
        // The sender is ours: it cannot be gone.
        let _ = self.faults.subscribe().wait_for(|faults| faults.waiting > 0).await;
    }

    /// What became of objects that come in parts.
    pub fn uploads(&self) -> Uploads {
        self.faults.borrow().uploads
    }

    /// Waits until every upload that was begun is completed or aborted.
    pub async fn uploads_have_ended(&self) {
        let ended =
            |faults: &Faults| faults.uploads.begun == faults.uploads.completed + faults.uploads.aborted;
        let _ = self.faults.subscribe().wait_for(ended).await;
    }

    /// Waits while operations of this kind on this object or directory are held. Returns the fault to apply.
    async fn begin(&self, operation: StoreOperation, name: &str) -> Option<StoreFault> {
        let is_held = |faults: &Faults| {
            faults.held.iter().any(|(held, prefix)| *held == operation && name.starts_with(prefix))
        };
        if is_held(&self.faults.borrow()) {
            self.faults.send_modify(|faults| faults.waiting += 1);
            // Also if it is dropped while it waits.
            let _waited = Waited(&self.faults);
            let _ = self.faults.subscribe().wait_for(|faults| !is_held(faults)).await;
        }
        let mut fault = None;
        self.faults.send_modify(|faults| {
            let next = faults.next.iter().position(|(of, _)| *of == operation);
            let always = faults.always.iter().find(|(of, _)| *of == operation);
            fault = match next {
                Some(next) => Some(faults.next.remove(next).1),
                None => always.map(|(_, fault)| *fault),
            };
        });
        fault
    }

    async fn through<T>(
        &self,
        operation: StoreOperation,
        name: &str,
        done: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        Self::with(self.begin(operation, name).await, done).await
    }

    async fn with<T>(
        fault: Option<StoreFault>,
        done: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        match fault {
            None | Some(StoreFault::EmptyPage) => done.await,
            Some(StoreFault::Fail(kind)) => Err(Failure::new(kind, "a fault of the test's")),
            Some(StoreFault::LoseAnswer) => {
                done.await?;
                Err(Failure::new(FailureKind::Unavailable, "the answer was lost"))
            }
            Some(StoreFault::Delay(delay) | StoreFault::Linger(delay)) => {
                tokio::time::sleep(delay).await;
                done.await
            }
        }
    }
}

struct Waited<'a>(&'a watch::Sender<Faults>);

impl Drop for Waited<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|faults| faults.waiting -= 1);
    }
}

impl fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

impl fmt::Debug for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultyStore({})", self.store)
    }
}

#[async_trait]
impl Store for FaultyStore {
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), Failure> {
        let fault = self.begin(StoreOperation::Put, name).await;
        let (store, name) = (self.store.clone(), name.to_owned());
        let put = async move { Self::with(fault, store.put(&name, bytes)).await };
        if !matches!(fault, Some(StoreFault::Linger(_))) {
            return put.await;
        }
        // A task of its own goes on when its caller is gone.
        let ended = tokio::spawn(put).await;
        ended.unwrap_or_else(|panic| Err(Failure::new(FailureKind::Other, panic)))
    }

    async fn upload(&self, name: &str) -> Result<Box<dyn Upload>, Failure> {
        let begin = async {
            let upload = self.store.upload(name).await?;
            self.faults.send_modify(|faults| faults.uploads.begun += 1);
            Ok::<_, Failure>(upload)
        };
        let upload = self.through(StoreOperation::Upload, name, begin).await?;
        Ok(Box::new(FaultyUpload {
            store: self.clone(),
            name: name.to_owned(),
            upload,
            first_and_last: None,
            has_ended: false,
        }))
    }

    async fn get(&self, name: &str, span: Span) -> Result<Piece, Failure> {
        self.through(StoreOperation::Get, name, self.store.get(name, span)).await
    }

    async fn list(&self, directory: &str, after: Option<&str>) -> Result<Listing, Failure> {
        match self.begin(StoreOperation::List, directory).await {
            Some(StoreFault::EmptyPage) => Ok(Listing { names: Vec::new(), more: true }),
            fault => Self::with(fault, self.store.list(directory, after)).await,
        }
    }

    async fn delete(&self, name: &str) -> Result<(), Failure> {
        self.through(StoreOperation::Delete, name, self.store.delete(name)).await
    }

    /// Has the faults of gets.
    async fn sync(&self, name: &str) -> Result<(), Failure> {
        self.through(StoreOperation::Get, name, self.store.sync(name)).await
    }
}

/// It insists on what only some stores do: that all parts are of one size, except a smaller one at the end.
struct FaultyUpload {
    store: FaultyStore,
    name: String,
    upload: Box<dyn Upload>,
    /// Of its first part, and of its last so far.
    first_and_last: Option<(usize, usize)>,
    /// Completed, or aborted.
    has_ended: bool,
}

impl FaultyUpload {
    fn check_size(&mut self, bytes: usize) -> Result<(), Failure> {
        let (first, last) = self.first_and_last.unwrap_or((bytes, bytes));
        if last < first || bytes > first {
            let message = format!("parts of {first}, {last} and {bytes} bytes: not of one size");
            return Err(Failure::new(FailureKind::Refused, message));
        }
        self.first_and_last = Some((first, bytes));
        Ok(())
    }
}

#[async_trait]
impl Upload for FaultyUpload {
    async fn part(&mut self, bytes: Bytes) -> Result<(), Failure> {
        match self.store.begin(StoreOperation::Upload, &self.name).await {
            Some(StoreFault::LoseAnswer) => Err(Failure::new(FailureKind::Unavailable, "the part was lost")),
            fault => {
                let size = bytes.len();
                FaultyStore::with(fault, self.upload.part(bytes)).await?;
                self.check_size(size)
            }
        }
    }

    async fn complete(&mut self) -> Result<(), Failure> {
        let FaultyUpload { store, name, upload, has_ended, .. } = self;
        let complete = async {
            upload.complete().await?;
            end(store, has_ended, |uploads| &mut uploads.completed);
            Ok::<_, Failure>(())
        };
        store.through(StoreOperation::Upload, name, complete).await
    }

    async fn abort(&mut self) -> Result<(), Failure> {
        let FaultyUpload { store, name, upload, has_ended, .. } = self;
        let abort = async {
            upload.abort().await?;
            end(store, has_ended, |uploads| &mut uploads.aborted);
            Ok::<_, Failure>(())
        };
        store.through(StoreOperation::Upload, name, abort).await
    }
}

/// Counts the end of an upload, once.
fn end(store: &FaultyStore, has_ended: &mut bool, as_what: fn(&mut Uploads) -> &mut usize) {
    if !std::mem::replace(has_ended, true) {
        store.faults.send_modify(|faults| *as_what(&mut faults.uploads) += 1);
    }
}
