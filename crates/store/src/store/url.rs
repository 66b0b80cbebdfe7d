//! Stores by URL.
//!
//! | URL | store |
//! | --- | --- |
//! | `file:///var/lib/fulmar-store` | a directory; made if it is not there |
//! | `s3://bucket/prefix` | an S3 bucket, with the usual `AWS_...` environment |
//! | `memory:` | the process's memory, for tests |

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use reqwest::Url;

use super::{Backend, Failure, FailureKind};

/// Names a store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreUrl {
    /// A directory, as an absolute path.
    Directory(PathBuf),
    /// Objects in a bucket, whose names begin with a prefix (or, if it is empty, with nothing).
    S3 {
        /// The bucket.
        bucket: String,
        /// Without `/` at its ends.
        prefix: String,
    },
    /// This process's memory.
    Memory,
}

/// A URL that names no store.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{url}` is no store: {why}; write file:///directory, s3://bucket/prefix or memory:")]
pub struct StoreUrlError {
    url: String,
    why: String,
}

impl StoreUrl {
    /// Opens the store. Nothing is asked of it yet. Must be called in a tokio runtime.
    pub fn open(&self) -> Result<Backend, Failure> {
        match self {
            StoreUrl::Directory(directory) => {
                let made = std::fs::create_dir_all(directory);
                made.map_err(|cause| Failure::new(FailureKind::Refused, format!("cannot make it: {cause}")))?;
                Backend::directory(directory)
            }
            StoreUrl::S3 { bucket, prefix } => Backend::s3(bucket, prefix, unicode_variables()),
            StoreUrl::Memory => Ok(Backend::memory()),
        }
    }
}

/// The environment. What is not Unicode is no setting of S3's.
fn unicode_variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

impl FromStr for StoreUrl {
    type Err = StoreUrlError;

    fn from_str(text: &str) -> Result<Self, StoreUrlError> {
        let refused = |why: String| StoreUrlError { url: text.to_owned(), why };
        let url = Url::parse(text).map_err(|cause| refused(cause.to_string()))?;
        if url.query().is_some() || url.fragment().is_some() || !url.username().is_empty() {
            return Err(refused(
                "it has more than a place in it (credentials come from the environment)".into(),
            ));
        }
        match url.scheme() {
            "file" => match url.to_file_path() {
                Ok(path) if text.starts_with("file:///") => Ok(StoreUrl::Directory(path)),
                _ => Err(refused("a directory is named by its absolute path".into())),
            },
            "s3" => match url.host_str() {
                Some(bucket) if !bucket.is_empty() && url.port().is_none() => {
                    let prefix = url.path().trim_matches('/').to_owned();
                    Ok(StoreUrl::S3 { bucket: bucket.to_owned(), prefix })
                }
                _ => Err(refused("it names no bucket".into())),
            },
            "memory" if url.path().is_empty() && url.host().is_none() => Ok(StoreUrl::Memory),
            scheme => Err(refused(format!("`{scheme}` is not known here"))),
        }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreUrl::Directory(directory) => match Url::from_file_path(directory) {
                Ok(url) => url.fmt(f),
                Err(()) => write!(f, "file://{}", directory.display()),
            },
            StoreUrl::S3 { bucket, prefix } if prefix.is_empty() => write!(f, "s3://{bucket}"),
            StoreUrl::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
            StoreUrl::Memory => f.write_str("memory:"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_stores() {
        let s3 = |bucket: &str, prefix: &str| StoreUrl::S3 { bucket: bucket.into(), prefix: prefix.into() };
        for (text, url) in [
            ("file:///var/lib/a%20b", StoreUrl::Directory("/var/lib/a b".into())),
            ("s3://bucket", s3("bucket", "")),
            ("s3://my.bucket-1/a/b", s3("my.bucket-1", "a/b")),
            ("memory:", StoreUrl::Memory),
        ] {
            assert_eq!(text.parse::<StoreUrl>().as_ref(), Ok(&url));
            assert_eq!(url.to_string(), text);
        }
        assert_eq!("s3://bucket/a/".parse(), Ok(s3("bucket", "a")));
    }

    #[test]
    fn what_names_no_store_is_told_so() {
        for text in [
            "",
            "/var/lib",
            "file:relative",
            "file://host/dir",
            "s3:",
            "s3:///prefix",
            "s3://key:secret@bucket",
            "s3://bucket?region=x",
            "memory:x",
            "http://host/bucket",
        ] {
            let error = text.parse::<StoreUrl>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{text}`")) && error.contains("s3://bucket/prefix"), "{error}");
        }
    }
}
