//! A store that reads from another one what it does not have: objects of a node that has not been
//! copied yet.

use std::fmt::{self, Debug};
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use super::{Failure, FailureKind, Listing, Piece, Span, Store, Upload};

/// Where objects are read that a store does not have.
#[async_trait]
pub trait Fallback: Debug + Send + Sync + 'static {
    /// Reads an object, or a part of it. `None` if it cannot be elsewhere.
    async fn get(&self, name: &str, span: Span) -> Option<Result<Piece, Failure>>;
}

/// Reads objects that are missing from a [`Fallback`]. Everything else is the store's.
#[derive(Clone, Debug)]
pub struct FallbackStore {
    store: Arc<dyn Store>,
    fallback: Arc<dyn Fallback>,
}

impl FallbackStore {
    /// Reads from `store`, and from `fallback` what is missing there.
    pub fn new(store: Arc<dyn Store>, fallback: Arc<dyn Fallback>) -> Self {
        FallbackStore { store, fallback }
    }
}

impl fmt::Display for FallbackStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.store, f)
    }
}

#[async_trait]
impl Store for FallbackStore {
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), Failure> {
        self.store.put(name, bytes).await
    }

    async fn upload(&self, name: &str) -> Result<Box<dyn Upload>, Failure> {
        self.store.upload(name).await
    }

    async fn get(&self, name: &str, span: Span) -> Result<Piece, Failure> {
        match self.store.get(name, span).await {
            Err(failure) if failure.kind() == FailureKind::Missing => {
                self.fallback.get(name, span).await.unwrap_or(Err(failure))
            }
            read => read,
        }
    }

    async fn list(&self, directory: &str, after: Option<&str>) -> Result<Listing, Failure> {
        self.store.list(directory, after).await
    }

    async fn delete(&self, name: &str) -> Result<(), Failure> {
        self.store.delete(name).await
    }

    async fn sync(&self, name: &str) -> Result<(), Failure> {
        self.store.sync(name).await
    }

    fn directory(&self) -> Option<&Path> {
        self.store.directory()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Backend;

    #[derive(Debug)]
    struct Other(Backend);

    #[async_trait]
    impl Fallback for Other {
        async fn get(&self, name: &str, span: Span) -> Option<Result<Piece, Failure>> {
            match name.starts_with("b/") {
                true => Some(self.0.get(name, span).await),
                false => None,
            }
        }
    }

    #[tokio::test]
    async fn missing_objects_are_read_elsewhere_and_no_others() {
        let (own, other) = (Backend::memory(), Backend::memory());
        own.put("b/1", Bytes::from_static(b"own")).await.unwrap();
        for name in ["a/1", "b/1", "b/2"] {
            other.put(name, Bytes::from_static(b"other")).await.unwrap();
        }
        let store = FallbackStore::new(Arc::new(own), Arc::new(Other(other)));
        assert_eq!(&store.get("b/1", Span::Whole).await.unwrap().bytes[..], b"own");
        assert_eq!(&store.get("b/2", Span::Last(3)).await.unwrap().bytes[..], b"her");
        for name in ["a/1", "b/3"] {
            assert_eq!(store.get(name, Span::Whole).await.unwrap_err().kind(), FailureKind::Missing);
        }
        assert_eq!(store.list("b", None).await.unwrap().names, ["b/1"]);
    }
}
