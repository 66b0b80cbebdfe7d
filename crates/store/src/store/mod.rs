//! What Fulmar asks of a place that keeps objects: a directory, S3, a database. Everything above it is built of six
//! operations.
//!
//! ```text
//!   PageStore                     segments and manifests
//!      |
//!   Reliable                      bounds, retries, read-back after doubt, counts
//!      |
//!   dyn Store                     put  upload  get  list  delete  sync
//!      |-- Backend                a directory, S3, memory (the crate object_store)
//!      `-- FaultyStore            any of them, with faults: for tests
//! ```
//!
//! # The contract
//! - A name is a path, `manifests/0007/01`: parts of `0-9 a-z -`, separated by `/`. An object is never empty, and never
//!   changed: it is made once and deleted once.
//! - [`Store::put`] makes an object **if there is none**, whole or not at all. Of many that race for a name one wins, and
//!   each of the others is told [`FailureKind::Exists`]. An answer of any other kind than success, `Exists` and `Refused`
//!   leaves open whether the object is there, now or in a while.
//! - What a put has made (its answer has arrived) every later `get` and `list` sees, from wherever, and no crash of the
//!   store takes back.
//! - [`Store::get`] answers the bytes of a range that there are: fewer where the object ends, none beyond.
//! - [`Store::list`] answers names in the order of their bytes, as many at a time as suit the store, all of them behind the name
//!   that it was given. One that promises more has a name, after which it goes on.
//! - [`Store::delete`] of what is not there succeeds.
//! - What a `get` finds although its put was not answered may still be lost in a crash: [`Store::sync`] makes it stay.
//!
//! An operation may be dropped while it waits (a time-out does that): what becomes of it is then as open as after an
//! error. `crates/store/tests/conformance` holds every store to this.

mod backend;
mod failure;
mod faulty;
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
pub use faulty::{FaultyStore, StoreFault, Uploads};
pub use read_only::ReadOnlyStore;
pub use reliable::{Limits, Reliable};
pub use statistics::{OperationStatistics, StoreOperation, TIME_BUCKETS, time_bucket_us};
pub use url::{StoreUrl, StoreUrlError};

/// Which bytes of an object are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Span {
    /// All of it.
    Whole,
    /// From a place on, so many.
    Range {
        /// Where they begin.
        offset: u64,
        /// How many.
        bytes: u64,
    },
    /// So many at its end.
    Last(u64),
}

/// Bytes of an object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Where in the object they begin.
    pub offset: u64,
    /// They themselves.
    pub bytes: Bytes,
}

/// Names that a listing answers at once.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Listing {
    /// In the order of their bytes.
    pub names: Vec<String>,
    /// Whether there may be more after the last one. Then there is a last one.
    pub more: bool,
}

/// A place that keeps objects: see the contract above. Its text (`Display`) is what people call it.
#[async_trait]
pub trait Store: Debug + Display + Send + Sync + 'static {
    /// Makes an object, if there is none of that name.
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), Failure>;

    /// Begins an object that comes in parts. Its name is nobody else's: it is not compared with what is there.
    async fn upload(&self, name: &str) -> Result<Box<dyn Upload>, Failure>;

    /// Reads an object, or some of it.
    async fn get(&self, name: &str, span: Span) -> Result<Piece, Failure>;

    /// The names below `directory` (without a `/` at its end), from the first one after `after` on.
    async fn list(&self, directory: &str, after: Option<&str>) -> Result<Listing, Failure>;

    /// Deletes an object, if it is there.
    async fn delete(&self, name: &str) -> Result<(), Failure>;

    /// Makes durable what a `get` has found: to be asked before an object is relied on whose put or completion has not been
    /// answered. Where nothing is seen before it is durable there is nothing to do.
    async fn sync(&self, _name: &str) -> Result<(), Failure> {
        Ok(())
    }

    /// The directory in which objects are files of their names, if that is how they are kept: who has an object's bytes in a
    /// file may link it there.
    fn directory(&self) -> Option<&Path> {
        None
    }
}

/// An object that comes in parts. It is there when [`Upload::complete`] has succeeded, not before; one that is dropped
/// never will be.
#[async_trait]
pub trait Upload: Send {
    /// Adds bytes at the end. All parts are of one size of at least 5 MiB, except that the last may be smaller. After a failure
    /// that is worth trying again the same part may be given again: it takes the place that it was meant for.
    async fn part(&mut self, bytes: Bytes) -> Result<(), Failure>;

    /// Makes the object.
    async fn complete(&mut self) -> Result<(), Failure>;

    /// Gives it up.
    async fn abort(&mut self) -> Result<(), Failure>;
}
