//! Stores in directories, S3 and memory, based on the crate `object_store`.
//!
//! This module adds ordered listings in pages, parts that can be sent again, and the classification
//! of errors. The retries of the crate are disabled, because [`super::Reliable`] retries for all
//! stores alike.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures::TryStreamExt;
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

use super::file_upload::FileUpload;
use super::open_files::OpenFiles;
use super::{Failure, FailureKind, Listing, Piece, Span, Store, Upload};
use super::{paging, sweep};

/// Timeout for connecting to an S3 server. [`super::Limits`] limit the response time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Much longer than the limits of [`super::Limits`], so that those apply.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(3600);

/// A store of the crate `object_store`.
#[derive(Clone)]
pub struct Backend {
    location: Location,
    /// Name of the store for users.
    name: String,
}

#[derive(Clone)]
enum Location {
    Directory { files: Arc<LocalFileSystem>, root: PathBuf, open: Arc<OpenFiles> },
    Memory(Arc<InMemory>),
    S3 { client: Arc<AmazonS3>, prefix: Path },
}

impl Backend {
    /// A store in a directory, which must exist. Every write is synced, the file and its directory.
    pub fn directory(directory: &FilePath) -> Result<Backend, Failure> {
        let files = LocalFileSystem::new_with_prefix(directory).map_err(|cause| local_failure(&cause))?;
        let files = Arc::new(files.with_fsync(true));
        let location =
            Location::Directory { files, root: directory.to_owned(), open: Arc::new(OpenFiles::new()) };
        Ok(Backend { location, name: format!("file://{}", directory.display()) })
    }

    /// A store in memory of this process. Clones share it.
    pub fn memory() -> Backend {
        Backend { location: Location::Memory(Arc::new(InMemory::new())), name: "memory:".to_owned() }
    }

    /// A store in a bucket, which must exist, below a prefix that may be empty. Credentials, region
    /// and endpoint are taken from the `AWS_...` variables of `environment`, as for Amazon's own
    /// tools. Must be called in a tokio runtime, which sends all requests: callers may wait on
    /// stacks that are too small for that.
    pub fn s3(
        bucket: &str,
        prefix: &str,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Backend, Failure> {
        // The HTTP client needs a process-wide provider. If one is installed already, it is the
        // same.
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
            // An endpoint without TLS is used only if it was configured explicitly.
            .with_allow_http(endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")));
        let client = builder
            .with_bucket_name(bucket)
            .with_client_options(options)
            .with_http_connector(SpawnedReqwestConnector::new(tokio::runtime::Handle::current()))
            .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
            .build()
            .map_err(|cause| s3_failure(&cause))?;
        let name = format!("s3://{}", [bucket, prefix].join("/").trim_end_matches('/'));
        Ok(Backend { location: Location::S3 { client: Arc::new(client), prefix: Path::from(prefix) }, name })
    }

    /// Removes incomplete files of a crash that have not been modified since `before`, and returns
    /// their number. In S3, the bucket's lifecycle rules do that. Blocks the thread.
    pub fn sweep(&self, before: SystemTime) -> io::Result<u64> {
        match &self.location {
            Location::Directory { root, .. } => sweep::sweep(root, before),
            Location::Memory(_) | Location::S3 { .. } => Ok(0),
        }
    }

    fn objects(&self) -> &dyn ObjectStore {
        match &self.location {
            Location::Directory { files, .. } => files.as_ref(),
            Location::Memory(memory) => memory.as_ref(),
            Location::S3 { client, .. } => client.as_ref(),
        }
    }

    fn path(&self, name: &str) -> Path {
        match &self.location {
            Location::S3 { prefix, .. } => prefix.parts().chain(Path::from(name).parts()).collect(),
            Location::Directory { .. } | Location::Memory(_) => Path::from(name),
        }
    }

    /// Returns the name of the object at a path.
    fn name_of(&self, path: &Path) -> Option<String> {
        match &self.location {
            Location::S3 { prefix, .. } => {
                let parts: Vec<_> = path.prefix_match(prefix)?.map(|part| part.as_ref().to_owned()).collect();
                Some(parts.join("/"))
            }
            Location::Directory { .. } | Location::Memory(_) => Some(path.to_string()),
        }
    }

    fn failure(&self, cause: &Error) -> Failure {
        match &self.location {
            Location::S3 { .. } => s3_failure(cause),
            Location::Directory { .. } | Location::Memory(_) => local_failure(cause),
        }
    }
}

/// Returns the setting of an environment variable.
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
        // The client's own implementation would print its settings.
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
        if let Location::S3 { client, .. } = &self.location {
            let id = client.create_multipart(&path).await;
            let id = id.map_err(|cause| no_bucket(s3_failure(&cause)))?;
            return Ok(Box::new(S3Upload { client: client.clone(), path, id, parts: Vec::new() }));
        }
        if let Location::Directory { root, .. } = &self.location {
            return Ok(Box::new(FileUpload::start(root.join(name)).await?));
        }
        let upload = self.objects().put_multipart(&path).await.map_err(|cause| local_failure(&cause))?;
        Ok(Box::new(MemoryUpload(upload)))
    }

    async fn get(&self, name: &str, span: Span) -> Result<Piece, Failure> {
        if let (Location::Directory { root, open, .. }, Span::Range { offset, bytes }) =
            (&self.location, span)
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
        let (objects, more) = match &self.location {
            Location::S3 { client, .. } => paging::page(&**client, &path, after.as_ref()).await?,
            Location::Directory { .. } | Location::Memory(_) => {
                let found = match &after {
                    Some(after) => self.objects().list_with_offset(Some(&path), after),
                    None => self.objects().list(Some(&path)),
                };
                // The library lists a missing directory as empty. Other errors are returned.
                (found.try_collect().await.map_err(|cause| local_failure(&cause))?, false)
            }
        };
        let mut names: Vec<_> = objects.iter().filter_map(|object| self.name_of(&object.location)).collect();
        names.sort_unstable();
        Ok(Listing { names, more })
    }

    async fn delete(&self, name: &str) -> Result<(), Failure> {
        let deleted = self.objects().delete(&self.path(name)).await;
        if let Location::Directory { open, .. } = &self.location {
            open.close(name);
        }
        match deleted {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(cause) => Err(self.failure(&cause)),
        }
    }

    async fn sync(&self, name: &str) -> Result<(), Failure> {
        let Location::Directory { root, .. } = &self.location else { return Ok(()) };
        let (root, file) = (root.clone(), root.join(name));
        let synced = tokio::task::spawn_blocking(move || {
            File::open(&file)?.sync_all()?;
            // The object's name is stored in its directory, whose own entry may be new, too.
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
        match &self.location {
            Location::Directory { root, .. } => Some(root),
            _ => None,
        }
    }
}

/// An upload into memory, whose operations do not wait.
struct MemoryUpload(Box<dyn MultipartUpload>);

#[async_trait]
impl Upload for MemoryUpload {
    async fn part(&mut self, bytes: Bytes) -> Result<(), Failure> {
        self.0.put_part(bytes.into()).await.map_err(|cause| local_failure(&cause))
    }

    async fn complete(&mut self) -> Result<(), Failure> {
        self.0.complete().await.map(drop).map_err(|cause| local_failure(&cause))
    }

    async fn abort(&mut self) -> Result<(), Failure> {
        self.0.abort().await.map_err(|cause| local_failure(&cause))
    }
}

/// A multipart upload. Parts are numbered, so that a part that is sent again replaces itself.
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
    let kind = kind_of(cause).unwrap_or_else(|| kind_of_response(&failure.to_string()));
    Failure::new(kind, failure)
}

/// A missing object is possible when reading. When creating or listing, "not found" refers to the
/// bucket.
pub(super) fn no_bucket(failure: Failure) -> Failure {
    match failure.kind() {
        FailureKind::Missing => Failure::new(FailureKind::Refused, failure),
        _ => failure,
    }
}

/// Classifies an error that the library has recognized.
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

/// Classifies the response of an S3 server, or a missing response. The library returns the status
/// only as text.
fn kind_of_response(text: &str) -> FailureKind {
    match status(text) {
        // 408 and 429 ask to retry later, as does a 400 for a request that was sent too slowly.
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
    fn s3_responses_are_classified() {
        let kind = |status: &str| {
            kind_of_response(&format!("Server returned non-2xx status code: {status}: <Error>"))
        };
        assert_eq!(kind("400 Bad Request"), FailureKind::Refused);
        assert_eq!(kind("429 Too Many Requests"), FailureKind::Unavailable);
        let of_body = |code: &str| kind(&format!("400 Bad Request: <Error><Code>{code}</Code></Error>"));
        assert_eq!(of_body("RequestTimeout"), FailureKind::Unavailable);
        assert_eq!(of_body("RequestTimeTooSkewed"), FailureKind::Refused);
        assert_eq!(kind("503 Service Unavailable"), FailureKind::Unavailable);
        assert_eq!(kind_of_response("connection reset by peer"), FailureKind::Unavailable);
    }

    #[tokio::test]
    async fn s3_names_are_below_the_prefix() {
        let at = |prefix| Backend::s3("bucket", prefix, []).unwrap();
        let store = at("a/b");
        assert_eq!(store.path("segments/x").as_ref(), "a/b/segments/x");
        assert_eq!(store.name_of(&store.path("segments/x")).unwrap(), "segments/x");
        assert_eq!(store.to_string(), "s3://bucket/a/b");
        assert_eq!((at("").path("x").as_ref(), at("").to_string().as_str()), ("x", "s3://bucket"));
    }
}
