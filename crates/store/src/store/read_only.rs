//! A read-only view of a store, for replicas. It rejects every change of existing objects, so that
//! no bug of a replica can damage the data. It may add objects that a replica needs to communicate
//! with the owner.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use super::{Failure, FailureKind, Listing, Piece, Span, Store, Upload};

/// Rejects all changes, except for new objects with permitted names.
#[derive(Clone, Debug)]
pub struct ReadOnlyStore {
    store: Arc<dyn Store>,
    may_add: fn(&str) -> bool,
}

impl ReadOnlyStore {
    /// Reads from `store`. Only objects for which `may_add` returns true can be added.
    pub fn new(store: Arc<dyn Store>, may_add: fn(&str) -> bool) -> Self {
        ReadOnlyStore { store, may_add }
    }
}

impl fmt::Display for ReadOnlyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

fn refused() -> Failure {
    Failure::new(FailureKind::Refused, "the store is read-only for this process")
}

#[async_trait]
impl Store for ReadOnlyStore {
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), Failure> {
        match (self.may_add)(name) {
            true => self.store.put(name, bytes).await,
            false => Err(refused()),
        }
    }

    async fn upload(&self, _name: &str) -> Result<Box<dyn Upload>, Failure> {
        Err(refused())
    }

    async fn get(&self, name: &str, span: Span) -> Result<Piece, Failure> {
        self.store.get(name, span).await
    }

    async fn list(&self, directory: &str, after: Option<&str>) -> Result<Listing, Failure> {
        self.store.list(directory, after).await
    }

    async fn delete(&self, _name: &str) -> Result<(), Failure> {
        Err(refused())
    }

    async fn sync(&self, name: &str) -> Result<(), Failure> {
        self.store.sync(name).await
    }

    /// Files could be linked into this directory; read-only processes do not do that.
    fn directory(&self) -> Option<&Path> {
        self.store.directory()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Backend;

    #[tokio::test]
    async fn permits_reads_and_permitted_additions_only() {
        let backend = Backend::memory();
        backend.put("a/1", Bytes::from_static(b"x")).await.unwrap();
        let store = ReadOnlyStore::new(Arc::new(backend.clone()), |name| name.starts_with("b/"));
        assert_eq!(&store.get("a/1", Span::Whole).await.unwrap().bytes[..], b"x");
        assert_eq!(
            store.put("a/2", Bytes::from_static(b"y")).await.unwrap_err().kind(),
            FailureKind::Refused
        );
        assert_eq!(store.delete("a/1").await.unwrap_err().kind(), FailureKind::Refused);
        assert!(store.upload("a/3").await.is_err());
        let twice = [
            store.put("b/1", Bytes::from_static(b"z")).await,
            store.put("b/1", Bytes::from_static(b"y")).await,
        ];
        assert_eq!(
            twice.map(|put| put.map_err(|failure| failure.kind())),
            [Ok(()), Err(FailureKind::Exists)]
        );
        assert_eq!(store.delete("b/1").await.unwrap_err().kind(), FailureKind::Refused);
        assert_eq!(backend.list("a", None).await.unwrap().names, ["a/1"]);
    }
}
