//! A store with fault injection: failures, delays and lost responses, for tests of this crate and
//! of its users.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::watch;

use super::{Failure, FailureKind, Listing, Piece, Span, Store, StoreOperation, Upload};

/// A fault of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreFault {
    /// The operation is not performed, and fails.
    Fail(FailureKind),
    /// The operation is performed, but its response is lost. (A part of an upload is not performed:
    /// the caller that sends it again must not observe the first one, and this fault is above that
    /// layer.)
    LoseResponse,
    /// The operation is delayed.
    Delay(Duration),
    /// The operation is delayed, and performed even if the caller is dropped. Applies to puts;
    /// otherwise as `Delay`.
    Linger(Duration),
    /// A listing returns an empty page that is not the last one. Other operations are performed
    /// normally.
    EmptyPage,
    /// A listing returns at most this many names. Other operations are performed normally.
    ShortPage(usize),
    /// A put overwrites an existing object, as in a store without conditional puts. Other
    /// operations are performed normally.
    Overwrite,
}

/// Uploads as seen by the underlying store, whatever their callers have observed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct UploadCounts {
    /// Uploads that were started.
    pub started: usize,
    /// Uploads that were completed.
    pub completed: usize,
    /// Uploads that were aborted. The others are in progress or were leaked.
    pub aborted: usize,
}

/// A store with faults. Clones share the store and its faults.
#[derive(Clone)]
pub struct FaultyStore {
    store: Arc<dyn Store>,
    faults: Arc<watch::Sender<Faults>>,
}

#[derive(Default)]
struct Faults {
    /// Faults for the next operation of each kind.
    next: Vec<(StoreOperation, StoreFault)>,
    /// Faults for all operations of a kind.
    always: Vec<(StoreOperation, StoreFault)>,
    /// Operations that are held, with a prefix of the names of their objects.
    held: Vec<(StoreOperation, &'static str)>,
    /// Number of operations that are currently held.
    waiting: usize,
    uploads: UploadCounts,
}

impl FaultyStore {
    /// Wraps `store`, initially without faults.
    pub fn new(store: Arc<dyn Store>) -> Self {
        FaultyStore { store, faults: Arc::new(watch::Sender::new(Faults::default())) }
    }

    /// Injects a fault into the next operation of this kind. Calling it twice affects the next two.
    pub fn next(&self, operation: StoreOperation, fault: StoreFault) {
        self.faults.send_modify(|faults| faults.next.push((operation, fault)));
    }

    /// Injects a fault into all operations of this kind, until it is called with None.
    pub fn always(&self, operation: StoreOperation, fault: Option<StoreFault>) {
        self.faults.send_modify(|faults| {
            faults.always.retain(|(other, _)| *other != operation);
            faults.always.extend(fault.map(|fault| (operation, fault)));
        });
    }

    /// Removes the faults for the next operations of this kind. Returns true if there were any, so
    /// if not all of them were reached.
    pub fn forget(&self, operation: StoreOperation) -> bool {
        let mut had_any = false;
        self.faults.send_modify(|faults| {
            had_any = faults.next.iter().any(|(other, _)| *other == operation);
            faults.next.retain(|(other, _)| *other != operation);
        });
        had_any
    }

    /// Holds all operations of this kind until it is called with false.
    pub fn hold(&self, operation: StoreOperation, hold: bool) {
        self.faults.send_modify(|faults| {
            faults.held.retain(|(other, _)| *other != operation);
            faults.held.extend(hold.then_some((operation, "")));
        });
    }

    /// Holds operations of this kind on objects whose names start with `prefix`, until
    /// [`FaultyStore::hold`] is called with false.
    pub fn hold_under(&self, operation: StoreOperation, prefix: &'static str) {
        self.faults.send_modify(|faults| faults.held.push((operation, prefix)));
    }

    /// Waits until an operation is held.
    pub async fn is_holding(&self) {
        // `self` owns the sender, so waiting cannot fail.
        let _ = self.faults.subscribe().wait_for(|faults| faults.waiting > 0).await;
    }

    /// Returns the counters of uploads.
    pub fn uploads(&self) -> UploadCounts {
        self.faults.borrow().uploads
    }

    /// Waits until every started upload is completed or aborted.
    pub async fn uploads_have_ended(&self) {
        let ended =
            |faults: &Faults| faults.uploads.started == faults.uploads.completed + faults.uploads.aborted;
        let _ = self.faults.subscribe().wait_for(ended).await;
    }

    /// Waits while operations of this kind on this object or directory are held. Returns the fault
    /// to apply.
    async fn begin(&self, operation: StoreOperation, name: &str) -> Option<StoreFault> {
        let is_held = |faults: &Faults| {
            faults.held.iter().any(|(held, prefix)| *held == operation && name.starts_with(prefix))
        };
        if is_held(&self.faults.borrow()) {
            self.faults.send_modify(|faults| faults.waiting += 1);
            // Also counts down if the operation is dropped while it is held.
            let _waited = HeldGuard(&self.faults);
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

    async fn run_with_fault<T>(
        &self,
        operation: StoreOperation,
        name: &str,
        done: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        Self::apply_fault(self.begin(operation, name).await, done).await
    }

    async fn apply_fault<T>(
        fault: Option<StoreFault>,
        done: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        match fault {
            None | Some(StoreFault::EmptyPage | StoreFault::ShortPage(_) | StoreFault::Overwrite) => {
                done.await
            }
            Some(StoreFault::Fail(kind)) => Err(Failure::new(kind, "injected fault")),
            Some(StoreFault::LoseResponse) => {
                done.await?;
                Err(Failure::new(FailureKind::Unavailable, "injected fault: the response was lost"))
            }
            Some(StoreFault::Delay(delay) | StoreFault::Linger(delay)) => {
                tokio::time::sleep(delay).await;
                done.await
            }
        }
    }
}

struct HeldGuard<'a>(&'a watch::Sender<Faults>);

impl Drop for HeldGuard<'_> {
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
        let put = async move {
            if fault == Some(StoreFault::Overwrite) {
                store.delete(&name).await?;
            }
            Self::apply_fault(fault, store.put(&name, bytes)).await
        };
        if !matches!(fault, Some(StoreFault::Linger(_))) {
            return put.await;
        }
        // The spawned task continues if the caller is dropped.
        let ended = tokio::spawn(put).await;
        ended.unwrap_or_else(|panic| Err(Failure::new(FailureKind::Other, panic)))
    }

    async fn upload(&self, name: &str) -> Result<Box<dyn Upload>, Failure> {
        let begin = async {
            let upload = self.store.upload(name).await?;
            self.faults.send_modify(|faults| faults.uploads.started += 1);
            Ok::<_, Failure>(upload)
        };
        let upload = self.run_with_fault(StoreOperation::Upload, name, begin).await?;
        Ok(Box::new(FaultyUpload {
            store: self.clone(),
            name: name.to_owned(),
            upload,
            first_and_last: None,
            has_ended: false,
        }))
    }

    async fn get(&self, name: &str, span: Span) -> Result<Piece, Failure> {
        self.run_with_fault(StoreOperation::Get, name, self.store.get(name, span)).await
    }

    async fn list(&self, directory: &str, after: Option<&str>) -> Result<Listing, Failure> {
        match self.begin(StoreOperation::List, directory).await {
            Some(StoreFault::EmptyPage) => Ok(Listing { names: Vec::new(), more: true }),
            Some(StoreFault::ShortPage(names)) => {
                let mut listing = self.store.list(directory, after).await?;
                listing.more |= listing.names.len() > names;
                listing.names.truncate(names);
                Ok(listing)
            }
            fault => Self::apply_fault(fault, self.store.list(directory, after)).await,
        }
    }

    async fn delete(&self, name: &str) -> Result<(), Failure> {
        self.run_with_fault(StoreOperation::Delete, name, self.store.delete(name)).await
    }

    /// Gets the faults of [`StoreOperation::Get`].
    async fn sync(&self, name: &str) -> Result<(), Failure> {
        self.run_with_fault(StoreOperation::Get, name, self.store.sync(name)).await
    }
}

/// Enforces the rule of some stores that all parts have the same size, except for a smaller last
/// one.
struct FaultyUpload {
    store: FaultyStore,
    name: String,
    upload: Box<dyn Upload>,
    /// Sizes of the first part, and of the last one so far.
    first_and_last: Option<(usize, usize)>,
    /// The upload was completed or aborted.
    has_ended: bool,
}

impl FaultyUpload {
    fn check_size(&mut self, bytes: usize) -> Result<(), Failure> {
        let (first, last) = self.first_and_last.unwrap_or((bytes, bytes));
        if last < first || bytes > first {
            let message = format!("parts of {first}, {last} and {bytes} bytes do not have the same size");
            return Err(Failure::new(FailureKind::Refused, message));
        }
        self.first_and_last = Some((first, bytes));
        Ok(())
    }
}

#[async_trait]
impl Upload for FaultyUpload {
    fn bypass_page_cache(&mut self) {
        self.upload.bypass_page_cache();
    }

    async fn part(&mut self, bytes: Bytes) -> Result<(), Failure> {
        match self.store.begin(StoreOperation::Upload, &self.name).await {
            Some(StoreFault::LoseResponse) => {
                Err(Failure::new(FailureKind::Unavailable, "injected fault: the part was lost"))
            }
            fault => {
                let size = bytes.len();
                FaultyStore::apply_fault(fault, self.upload.part(bytes)).await?;
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
        store.run_with_fault(StoreOperation::Upload, name, complete).await
    }

    async fn abort(&mut self) -> Result<(), Failure> {
        let FaultyUpload { store, name, upload, has_ended, .. } = self;
        let abort = async {
            upload.abort().await?;
            end(store, has_ended, |uploads| &mut uploads.aborted);
            Ok::<_, Failure>(())
        };
        store.run_with_fault(StoreOperation::Upload, name, abort).await
    }
}

/// Counts the end of an upload, once.
fn end(store: &FaultyStore, has_ended: &mut bool, counter: fn(&mut UploadCounts) -> &mut usize) {
    if !std::mem::replace(has_ended, true) {
        store.faults.send_modify(|faults| *counter(&mut faults.uploads) += 1);
    }
}
