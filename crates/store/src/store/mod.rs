//! The interface to object storage: a directory, S3, or memory. All durable state above it is built
//! on six operations.
//!
//! ```text
//!   PageStore                     segments and manifests
//!      |
//!   Reliable                      time limits, retries, read-back of uncertain puts, counters
//!      |
//!   dyn Store                     put  upload  get  list  delete  sync
//!      |-- Backend                a directory, S3, memory (the crate object_store)
//!      |-- FallbackStore          one that reads what it does not have from other nodes
//!      `-- FaultyStore            any of them, with faults: for tests
//! ```
//!
//! # Contract
//!
//! - A name is a path such as `manifests/0007/01`: parts of `0-9 a-z -`, separated by `/`. An
//!   object is never empty and is immutable: it is created once and deleted once.
//! - [`Store::put`] creates an object **only if absent**, completely or not at all. If several puts
//!   race for a name, one wins, and the others get [`FailureKind::Exists`]. After any result other
//!   than success, `Exists` and `Refused`, the object may or may not exist, or may still appear.
//! - Once a put has succeeded, every later `get` and `list` by any process sees the object, and it
//!   survives a crash of the store.
//! - [`Store::get`] returns the bytes of a range that exist: fewer at the end of the object, none
//!   beyond it.
//! - [`Store::list`] returns names in byte order, as many per page as the store chooses, all of
//!   them after the given name. A page that is not the last one contains a name, after which the
//!   next page continues.
//! - [`Store::delete`] of an object that does not exist succeeds.
//! - An object that a `get` has found, but whose put was not acknowledged, may still be lost in a
//!   crash. [`Store::sync`] makes it durable.
//!
//! An operation may be dropped while it runs, for example by a time-out. Its outcome is then as
//! uncertain as after an error. `crates/store/tests/conformance` tests every store against this
//! contract.

mod backend;
mod failure;
mod fallback;
mod faulty;
mod file_upload;
mod open_files;
mod paging;
mod read_only;
mod reliable;
mod statistics;
mod sweep;
mod url;

use std::fmt::{Debug, Display};
use std::path::Path;

use async_trait::async_trait;
use bytes::Bytes;

pub use backend::Backend;
pub use failure::{Failure, FailureKind};
pub use fallback::{Fallback, FallbackStore};
pub use faulty::{FaultyStore, StoreFault, UploadCounts};
pub use read_only::ReadOnlyStore;
pub use reliable::{Limits, Reliable};
pub use statistics::{OperationStatistics, StoreOperation};
pub use url::{StoreUrl, StoreUrlError};

/// A range of an object's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Span {
    /// The whole object.
    Whole,
    /// A number of bytes from an offset on.
    Range {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// A number of bytes at the end.
    Last(u64),
}

/// Some bytes of an object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Their offset in the object.
    pub offset: u64,
    /// The bytes.
    pub bytes: Bytes,
}

/// A page of a listing.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Listing {
    /// Names in byte order.
    pub names: Vec<String>,
    /// There may be more names after the last one. In that case the page is not empty.
    pub more: bool,
}

/// An object store; see the contract above. Its `Display` text is its name for users.
#[async_trait]
pub trait Store: Debug + Display + Send + Sync + 'static {
    /// Creates an object if none has this name.
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), Failure>;

    /// Starts an object that is uploaded in parts. The caller guarantees that the name is unique:
    /// the result is not compared with an existing object.
    async fn upload(&self, name: &str) -> Result<Box<dyn Upload>, Failure>;

    /// Reads an object, or a part of it.
    async fn get(&self, name: &str, span: Span) -> Result<Piece, Failure>;

    /// Lists the names below `directory` (without a trailing `/`) that come after `after`.
    async fn list(&self, directory: &str, after: Option<&str>) -> Result<Listing, Failure>;

    /// Deletes an object. Succeeds if it does not exist.
    async fn delete(&self, name: &str) -> Result<(), Failure>;

    /// Makes an object that a `get` has found durable. Must be called before relying on an object
    /// whose put or completion was not acknowledged. A no-op if objects are visible only once they
    /// are durable.
    async fn sync(&self, _name: &str) -> Result<(), Failure> {
        Ok(())
    }

    /// The directory in which objects are stored as files with their names, if they are stored that
    /// way. A caller may link a file into it.
    fn directory(&self) -> Option<&Path> {
        None
    }
}

/// An object that is uploaded in parts. It exists once [`Upload::complete`] has succeeded. If the
/// upload is dropped before, it never will.
#[async_trait]
pub trait Upload: Send {
    /// Writes the parts past the operating system's page cache, where the store writes files. For
    /// objects that are not read soon. Takes effect with the next part.
    fn bypass_page_cache(&mut self) {}

    /// Appends a part. All parts must have the same size of at least 5 MiB, except that the last
    /// may be smaller. After a transient failure, the same part may be passed again and takes its
    /// original place.
    async fn part(&mut self, bytes: Bytes) -> Result<(), Failure>;

    /// Creates the object.
    async fn complete(&mut self) -> Result<(), Failure>;

    /// Aborts the upload.
    async fn abort(&mut self) -> Result<(), Failure>;
}
