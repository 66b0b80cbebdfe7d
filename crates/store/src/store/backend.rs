//! Directories, S3 and memory, through the crate `object_store`.
//!
//! What it leaves to us: listings in order, page by page; parts that can be sent again; and what to make of an error.
//! Its own retries are off: [`super::Reliable`] has them, for every store alike.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, TryStreamExt};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::SpawnedReqwestConnector;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    ClientOptions, Error, GetOptions, GetRange, MultipartId, MultipartUpload, ObjectStore, ObjectStoreExt,
    PutMode, PutOptions, RetryConfig,
};

use super::open_files::OpenFiles;
use super::{Failure, FailureKind, Listing, Piece, Span, Store, Upload};
use super::{paging, sweep};

/// How long a connection to an S3 server may take; how long an answer may take is [`super::Limits`]' matter.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Far above any limit of ours, so that ours counts.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(3600);

/// A store of the crate `object_store`.
#[derive(Clone)]
pub struct Backend {
    place: Place,
    /// What people call it.
    name: String,
}

#[derive(Clone)]
enum Place {
    Directory { files: Arc<LocalFileSystem>, root: PathBuf, open: Arc<OpenFiles> },
    Memory(Arc<InMemory>),
    S3 { client: Arc<AmazonS3>, prefix: Path },
}

impl Backend {
    /// Keeps objects in a directory, which must exist. Every write is synced, file and directory.
    pub fn directory(directory: &FilePath) -> Result<Backend, Failure> {
        let files = LocalFileSystem::new_with_prefix(directory).map_err(|cause| local_failure(&cause))?;
        let files = Arc::new(files.with_fsync(true));
        let place = Place::Directory { files, root: directory.to_owned(), open: Arc::new(OpenFiles::new()) };
        Ok(Backend { place, name: format!("file://{}", directory.display()) })
    }

    /// Keeps objects in this process's memory: clones are the same store.
    pub fn memory() -> Backend {
        Backend { place: Place::Memory(Arc::new(InMemory::new())), name: "memory:".to_owned() }
    }

    /// Keeps objects in a bucket, which must exist, below a prefix (empty: none). Credentials, region and endpoint are in
    /// `environment`, whose variables that begin with `AWS_` are those of Amazon's own tools. Must be called in a tokio
    /// runtime, which does all the sending: callers may wait on stacks that are too small for it.
    pub fn s3(
        bucket: &str,
        prefix: &str,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Backend, Failure> {
        // The HTTP client wants one for the process; whoever came first has chosen the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = AmazonS3Builder::new();
        for (variable, value) in environment {
            if let Some(key) = setting(&variable) {
                builder = builder.with_config(key, value);
            }
        }
        let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint]
            .iter()
            .find_map(|key| builder.get_config_value(key));
        let options = ClientOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_timeout(CLIENT_TIMEOUT)
            // Who names an endpoint without TLS wants it so.
            .with_allow_http(endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")));
        let client = builder
            .with_bucket_name(bucket)
            .with_client_options(options)
            .with_http_connector(SpawnedReqwestConnector::new(tokio::runtime::Handle::current()))
            .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
            .build()
            .map_err(|cause| s3_failure(&cause))?;
        let name = format!("s3://{}", [bucket, prefix].join("/").trim_end_matches('/'));
        Ok(Backend { place: Place::S3 { client: Arc::new(client), prefix: Path::from(prefix) }, name })
    }

    /// Removes what a crash has left half written and nobody has touched since `before`; answers how many objects that
    /// would have become. In S3 the bucket's rules do that. Blocks the thread.
    pub fn sweep(&self, before: SystemTime) -> io::Result<u64> {
        match &self.place {
            Place::Directory { root, .. } => sweep::sweep(root, before),
            Place::Memory(_) | Place::S3 { .. } => Ok(0),
        }
    }

    fn objects(&self) -> &dyn ObjectStore {
        match &self.place {
            Place::Directory { files, .. } => files.as_ref(),
            Place::Memory(memory) => memory.as_ref(),
            Place::S3 { client, .. } => client.as_ref(),
        }
    }

    fn path(&self, name: &str) -> Path {
        match &self.place {
            Place::S3 { prefix, .. } => prefix.parts().chain(Path::from(name).parts()).collect(),
            Place::Directory { .. } | Place::Memory(_) => Path::from(name),
        }
    }

    /// The name of what lies at a path.
    fn name_of(&self, path: &Path) -> Option<String> {
        match &self.place {
            Place::S3 { prefix, .. } => {
                let parts: Vec<_> = path.prefix_match(prefix)?.map(|part| part.as_ref().to_owned()).collect();
                Some(parts.join("/"))
            }
            Place::Directory { .. } | Place::Memory(_) => Some(path.to_string()),
        }
    }

    fn failure(&self, cause: &Error) -> Failure {
        match &self.place {
            Place::S3 { .. } => s3_failure(cause),
            Place::Directory { .. } | Place::Memory(_) => local_failure(cause),
        }
    }
}

/// What a variable of the environment sets.
fn setting(variable: &str) -> Option<AmazonS3ConfigKey> {
    variable.starts_with("AWS_").then(|| variable.to_ascii_lowercase().parse().ok()).flatten()
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl fmt::Debug for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The client's own would show its settings.
        write!(f, "Backend({})", self.name)
    }
}

#[async_trait]
impl Store for Backend {
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), Failure> {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let put = self.objects().put_opts(&self.path(name), bytes.into(), options).await;
        put.map(drop).map_err(|cause| no_bucket(self.failure(&cause)))
    }

    async fn upload(&self, name: &str) -> Result<Box<dyn Upload>, Failure> {
        let path = self.path(name);
        if let Place::S3 { client, .. } = &self.place {
            let id = client.create_multipart(&path).await;
            let id = id.map_err(|cause| no_bucket(s3_failure(&cause)))?;
            return Ok(Box::new(S3Upload { client: client.clone(), path, id, parts: Vec::new() }));
        }
        let upload = self.objects().put_multipart(&path).await.map_err(|cause| local_failure(&cause))?;
        Ok(Box::new(LocalUpload { upload: Some(upload), part: None, completion: None }))
    }

    async fn get(&self, name: &str, span: Span) -> Result<Piece, Failure> {
        if let (Place::Directory { root, open, .. }, Span::Range { offset, bytes }) = (&self.place, span)
            && let Ok(bytes) = open.read(root, name, offset, bytes as usize).await
        {
            return Ok(Piece { offset, bytes });
        }
        let range = match span {
            Span::Whole => None,
            Span::Range { offset, bytes } => Some(GetRange::Bounded(offset..offset.saturating_add(bytes))),
            Span::Last(bytes) => Some(GetRange::Suffix(bytes)),
        };
        let options = GetOptions { range, ..GetOptions::default() };
        let read = match self.objects().get_opts(&self.path(name), options).await {
            Ok(found) => {
                let offset = found.range.start;
                found.bytes().await.map(|bytes| Piece { offset, bytes })
            }
            Err(cause) => Err(cause),
        };
        match (read, span) {
            (Err(cause), Span::Range { offset, .. }) if is_past_the_end(&cause) => {
                Ok(Piece { offset, bytes: Bytes::new() })
            }
            (read, _) => read.map_err(|cause| self.failure(&cause)),
        }
    }

    async fn list(&self, directory: &str, after: Option<&str>) -> Result<Listing, Failure> {
        let path = self.path(directory);
        let after = after.map(|after| self.path(after));
        let (objects, more) = match &self.place {
            Place::S3 { client, .. } => paging::page(&**client, &path, after.as_ref()).await?,
            Place::Directory { .. } | Place::Memory(_) => {
                let found = match &after {
                    Some(after) => self.objects().list_with_offset(Some(&path), after),
                    None => self.objects().list(Some(&path)),
                };
                // A directory that is not there is an empty listing already; any other error is one.
                (found.try_collect().await.map_err(|cause| local_failure(&cause))?, false)
            }
        };
        let mut names: Vec<_> = objects.iter().filter_map(|object| self.name_of(&object.location)).collect();
        names.sort_unstable();
        Ok(Listing { names, more })
    }

    async fn delete(&self, name: &str) -> Result<(), Failure> {
        let deleted = self.objects().delete(&self.path(name)).await;
        if let Place::Directory { open, .. } = &self.place {
            open.close(name);
        }
        match deleted {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(cause) => Err(self.failure(&cause)),
        }
    }

    async fn sync(&self, name: &str) -> Result<(), Failure> {
        let Place::Directory { root, .. } = &self.place else { return Ok(()) };
        let (root, file) = (root.clone(), root.join(name));
        let synced = tokio::task::spawn_blocking(move || {
            File::open(&file)?.sync_all()?;
            // The object's name stands in its directory, whose own may be new too.
            let above = file.ancestors().skip(1).take_while(|directory| directory.starts_with(&root));
            above.into_iter().try_for_each(|directory| File::open(directory)?.sync_all())
        });
        let synced = synced.await.unwrap_or_else(|panic| Err(io::Error::other(panic)));
        synced.map_err(|cause| match cause.kind() {
            io::ErrorKind::NotFound => Failure::new(FailureKind::Missing, cause),
            _ => Failure::new(FailureKind::Other, cause),
        })
    }

    fn directory(&self) -> Option<&FilePath> {
        match &self.place {
            Place::Directory { root, .. } => Some(root),
            _ => None,
        }
    }
}

/// A file that grows beside its place, or memory.
///
/// A part that takes too long is written all the same, on a thread of its own, and its place is taken. So what is under way is
/// kept when nobody waits for it any more: who tries again waits for that, and gets its answer.
struct LocalUpload {
    /// `None` from its completion on.
    upload: Option<Box<dyn MultipartUpload>>,
    /// The part that is being written.
    part: Option<BoxFuture<'static, object_store::Result<()>>>,
    completion: Option<BoxFuture<'static, object_store::Result<()>>>,
}

impl LocalUpload {
    /// The upload, if nothing is under way in it.
    fn at_rest(&mut self) -> Result<&mut Box<dyn MultipartUpload>, Failure> {
        let busy = || Failure::new(FailureKind::Other, "what was begun before is not done");
        self.upload.as_mut().filter(|_| self.part.is_none()).ok_or_else(busy)
    }
}

#[async_trait]
impl Upload for LocalUpload {
    async fn part(&mut self, bytes: Bytes) -> Result<(), Failure> {
        if self.part.is_none() {
            self.part = Some(self.at_rest()?.put_part(bytes.into()));
        }
        until_done(&mut self.part).await
    }

    async fn complete(&mut self) -> Result<(), Failure> {
        if self.completion.is_none() {
            self.at_rest()?;
            let upload = self.upload.take();
            self.completion =
                upload.map(|mut upload| async move { upload.complete().await.map(drop) }.boxed());
        }
        until_done(&mut self.completion).await
    }

    async fn abort(&mut self) -> Result<(), Failure> {
        self.at_rest()?.abort().await.map_err(|cause| local_failure(&cause))
    }
}

/// Waits for what is under way. Whoever is dropped meanwhile leaves it there.
async fn until_done(
    under_way: &mut Option<BoxFuture<'static, object_store::Result<()>>>,
) -> Result<(), Failure> {
    let Some(done) = under_way else { return Ok(()) };
    let result = done.await;
    *under_way = None;
    result.map_err(|cause| local_failure(&cause))
}

/// Parts with numbers: one that is sent again takes its own place.
struct S3Upload {
    client: Arc<AmazonS3>,
    path: Path,
    id: MultipartId,
    parts: Vec<PartId>,
}

#[async_trait]
impl Upload for S3Upload {
    async fn part(&mut self, bytes: Bytes) -> Result<(), Failure> {
        let sent = self.client.put_part(&self.path, &self.id, self.parts.len(), bytes.into()).await;
        self.parts.push(sent.map_err(|cause| s3_failure(&cause))?);
        Ok(())
    }

    async fn complete(&mut self) -> Result<(), Failure> {
        let completed = self.client.complete_multipart(&self.path, &self.id, self.parts.clone()).await;
        completed.map(drop).map_err(|cause| s3_failure(&cause))
    }

    async fn abort(&mut self) -> Result<(), Failure> {
        self.client.abort_multipart(&self.path, &self.id).await.map_err(|cause| s3_failure(&cause))
    }
}

fn local_failure(cause: &Error) -> Failure {
    Failure::of(kind_of(cause).unwrap_or(FailureKind::Other), cause)
}

pub(super) fn s3_failure(cause: &Error) -> Failure {
    let failure = Failure::of(FailureKind::Other, cause);
    let kind = kind_of(cause).unwrap_or_else(|| kind_of_answer(&failure.to_string()));
    Failure::new(kind, failure)
}

/// An object that is read can be missing; where it is to be made, or names are listed, it is the bucket that is.
pub(super) fn no_bucket(failure: Failure) -> Failure {
    match failure.kind() {
        FailureKind::Missing => Failure::new(FailureKind::Refused, failure),
        _ => failure,
    }
}

/// What the library could tell.
fn kind_of(cause: &Error) -> Option<FailureKind> {
    Some(match cause {
        Error::NotFound { .. } => FailureKind::Missing,
        Error::AlreadyExists { .. } => FailureKind::Exists,
        Error::PermissionDenied { .. }
        | Error::Unauthenticated { .. }
        | Error::Precondition { .. }
        | Error::InvalidPath { .. }
        | Error::NotSupported { .. }
        | Error::NotImplemented { .. }
        | Error::UnknownConfigurationKey { .. } => FailureKind::Refused,
        _ => return None,
    })
}

/// What an S3 server's answer means, or that there was none. The library keeps the status in its text alone.
fn kind_of_answer(text: &str) -> FailureKind {
    match status(text) {
        // 408 and 429 ask to be patient; so does a 400 to a request that was too slow on its way.
        Some(408 | 429) => FailureKind::Unavailable,
        Some(400) if text.contains("<Code>RequestTimeout</Code>") => FailureKind::Unavailable,
        Some(400..500) => FailureKind::Refused,
        _ => FailureKind::Unavailable,
    }
}

fn status(text: &str) -> Option<u16> {
    let (_, after) = text.split_once("status code: ")?;
    after.get(..3)?.parse().ok()
}

fn is_past_the_end(cause: &Error) -> bool {
    let text = Failure::of(FailureKind::Other, cause).to_string();
    status(&text) == Some(416) || text.contains("Wanted range starting at")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_tells_whether_to_ask_again() {
        let kind =
            |status: &str| kind_of_answer(&format!("Server returned non-2xx status code: {status}: <Error>"));
        assert_eq!(kind("400 Bad Request"), FailureKind::Refused);
        assert_eq!(kind("429 Too Many Requests"), FailureKind::Unavailable);
        let of_body = |code: &str| kind(&format!("400 Bad Request: <Error><Code>{code}</Code></Error>"));
        assert_eq!(of_body("RequestTimeout"), FailureKind::Unavailable);
        assert_eq!(of_body("RequestTimeTooSkewed"), FailureKind::Refused);
        assert_eq!(kind("503 Service Unavailable"), FailureKind::Unavailable);
        assert_eq!(kind_of_answer("connection reset by peer"), FailureKind::Unavailable);
    }

    #[tokio::test]
    async fn names_in_s3_lie_below_the_prefix() {
        let at = |prefix| Backend::s3("bucket", prefix, []).unwrap();
        let store = at("a/b");
        assert_eq!(store.path("segments/x").as_ref(), "a/b/segments/x");
        assert_eq!(store.name_of(&store.path("segments/x")).unwrap(), "segments/x");
        assert_eq!(store.to_string(), "s3://bucket/a/b");
        assert_eq!((at("").path("x").as_ref(), at("").to_string().as_str()), ("x", "s3://bucket"));
    }
}
