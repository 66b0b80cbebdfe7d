//! An object store in memory whose reads are slow, or whose writes wait or fail, as a test wants it.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::*;
use tokio::sync::watch;

/// What happens to an object that is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    Pass,
    /// Until something else is set.
    Wait,
    Fail,
}

#[derive(Debug)]
pub struct Objects {
    inner: Arc<InMemory>,
    read_delay: Duration,
    writes: watch::Sender<Writes>,
    waiting: watch::Sender<usize>,
}

impl Objects {
    pub fn new(inner: Arc<InMemory>) -> Objects {
        let (writes, waiting) = (watch::Sender::new(Writes::Pass), watch::Sender::new(0));
        Objects { inner, read_delay: Duration::ZERO, writes, waiting }
    }

    pub fn reads_take(self, read_delay: Duration) -> Objects {
        Objects { read_delay, ..self }
    }

    pub fn set_writes(&self, writes: Writes) {
        self.writes.send_replace(writes);
    }

    /// Waits until a write waits.
    pub async fn write_waits(&self) {
        self.waiting.subscribe().wait_for(|waiting| *waiting > 0).await.unwrap();
    }

    async fn write(&self) -> Result<()> {
        self.waiting.send_modify(|waiting| *waiting += 1);
        let writes = *self.writes.subscribe().wait_for(|writes| *writes != Writes::Wait).await.unwrap();
        self.waiting.send_modify(|waiting| *waiting -= 1);
        match writes {
            Writes::Fail => Err(Error::Generic { store: "test", source: "no space on the store".into() }),
            _ => Ok(()),
        }
    }
}

impl std::fmt::Display for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "faulty {}", self.inner)
    }
}

#[async_trait::async_trait]
impl ObjectStore for Objects {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.write().await?;
        self.inner.put_opts(at, payload, options).await
    }
    async fn put_multipart_opts(
        &self,
        at: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.write().await?;
        self.inner.put_multipart_opts(at, options).await
    }
    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        tokio::time::sleep(self.read_delay).await;
        self.inner.get_opts(at, options).await
    }
    async fn get_ranges(&self, at: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        tokio::time::sleep(self.read_delay).await;
        self.inner.get_ranges(at, ranges).await
    }
    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(paths)
    }
    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }
    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }
    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
