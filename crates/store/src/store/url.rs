//! URLs of stores.
//!
//! | URL | store |
//! | --- | --- |
//! | `file:///var/lib/fulmar-store` | a directory; created if it does not exist |
//! | `s3://bucket/prefix` | an S3 bucket, configured by the usual `AWS_...` environment variables |
//! | `memory:` | memory of the process, for tests |

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use reqwest::Url;

use super::{Backend, Failure, FailureKind};

/// The URL of a store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreUrl {
    /// A directory, as an absolute path.
    Directory(PathBuf),
    /// Objects in a bucket whose names start with a prefix, which may be empty.
    S3 {
        /// The bucket.
        bucket: String,
        /// The prefix, without leading and trailing `/`.
        prefix: String,
    },
    /// Memory of this process.
    Memory,
}

/// An invalid store URL.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "`{url}` is not a valid store URL: {reason}; expected file:///directory, s3://bucket/prefix \
     or memory:"
)]
pub struct StoreUrlError {
    url: String,
    reason: String,
}

impl StoreUrl {
    /// Opens the store without accessing it yet. Must be called in a tokio runtime.
    pub fn open(&self) -> Result<Backend, Failure> {
        match self {
            StoreUrl::Directory(directory) => {
                let made = std::fs::create_dir_all(directory);
                made.map_err(|cause| {
                    Failure::new(FailureKind::Refused, format!("could not create directory: {cause}"))
                })?;
                Backend::directory(directory)
            }
            StoreUrl::S3 { bucket, prefix } => Backend::s3(bucket, prefix, unicode_variables()),
            StoreUrl::Memory => Ok(Backend::memory()),
        }
    }
}

/// The environment variables. Those that are not Unicode cannot be settings of S3.
fn unicode_variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

impl FromStr for StoreUrl {
    type Err = StoreUrlError;

    fn from_str(text: &str) -> Result<Self, StoreUrlError> {
        let refused = |reason: String| StoreUrlError { url: text.to_owned(), reason };
        let url = Url::parse(text).map_err(|cause| refused(cause.to_string()))?;
        if url.query().is_some() || url.fragment().is_some() || !url.username().is_empty() {
            return Err(refused(
                "user names, queries and fragments are not allowed \
                 (credentials come from the environment)"
                    .into(),
            ));
        }
        match url.scheme() {
            "file" => match url.to_file_path() {
                Ok(path) if text.starts_with("file:///") => Ok(StoreUrl::Directory(path)),
                _ => Err(refused("the directory must be an absolute path".into())),
            },
            "s3" => match url.host_str() {
                Some(bucket) if !bucket.is_empty() && url.port().is_none() => {
                    let prefix = url.path().trim_matches('/').to_owned();
                    Ok(StoreUrl::S3 { bucket: bucket.to_owned(), prefix })
                }
                _ => Err(refused("the bucket is missing".into())),
            },
            "memory" if url.path().is_empty() && url.host().is_none() => Ok(StoreUrl::Memory),
            scheme => Err(refused(format!("unsupported scheme `{scheme}`"))),
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
    fn valid_urls_are_parsed() {
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
    fn invalid_urls_are_rejected() {
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
