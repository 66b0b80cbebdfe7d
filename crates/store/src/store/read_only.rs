//! A store that is only read: of a process that reads beside its owner. Whatever that process does, by whatever mistake,
//! nothing that it is made of is ever changed. What such a process has to say to the owner it may add.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use super::{Failure, FailureKind, Listing, Piece, Span, Store, Upload};

/// Refuses all that would change something.
#[derive(Clone, Debug)]
pub struct ReadOnlyStore {
    store: Arc<dyn Store>,
    may_add: fn(&str) -> bool,
}

impl ReadOnlyStore {
    /// Reads from this one, and adds only objects of such names.
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
    Failure::new(FailureKind::Refused, "this process only reads the store")
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

    /// Where there is one others may link files into it; nobody does here.
    fn directory(&self) -> Option<&Path> {
        self.store.directory()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Backend;

    #[tokio::test]
    async fn it_reads_and_changes_nothing_but_adds_what_it_may() {
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
