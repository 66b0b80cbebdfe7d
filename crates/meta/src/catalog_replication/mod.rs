//! Catalog replication through the object store: the primary publishes a full copy of the catalog
//! after each change, and replicas follow it.
//!
//! ```text
//!   primary:  Embedded --- notification --> Publisher --- catalog/000c ---> object store
//!                                                                              | list, every 1 s
//!   replica:  Catalog <-- snapshot -- CatalogReplica <-- catalog/000c ----------'
//! ```
//!
//! Catalogs are numbered, and the greatest number is the current one. The number counts
//! publications. It is not the revision of the metadata store: a primary whose data directory was
//! restored from a backup is at an older revision, and publishes it under a new number. The upper
//! bits of the number are the primary's term, as in version numbers.
//!
//! # Crashes and late requests
//! - A catalog is one object, created only if absent, so it exists completely or not at all.
//! - Older catalogs are deleted after a newer one exists. A crash before that leaves several. The
//!   newest is the current one, and the next publication deletes the others.
//! - At its start, a primary reads the newest catalog. It publishes if that catalog is of an
//!   earlier term, differs from its metadata store, or cannot be read. A crash between a change and
//!   its publication is therefore repaired by the next start, under the first number of the next
//!   term.
//! - A put whose answer is lost may arrive at any time. It is retried under the number after the
//!   newest known one: the same number or, if the put has arrived, the next. If it arrives after
//!   the retry, the name is taken, or, if that object was already deleted for a newer one, its
//!   number is below the newest and it is ignored.
//!
//! # Fencing
//! If two processes open the same store, the one with the later term owns it
//! ([`fulmar_store::Term`]). The earlier one, a *zombie*, does not check its ownership before each
//! request, because the check could be outdated when the request arrives. Its requests are harmless
//! whenever they arrive:
//!
//! - It publishes only under numbers of its own term, which are below its successor's first number.
//!   Until the successor publishes, replicas may read the zombie's catalogs, as if these had been
//!   published before the takeover. After that they are older catalogs, which no replica reads and
//!   the successor deletes with its next publication.
//! - It deletes only catalogs below one of its own, so none of its successor's.
//! - It lists the catalogs at least after each publication. It stops publishing when it finds a
//!   catalog of a later term.
//!
//! A store inside the locked data directory has no terms, and only one owner.
//!
//! # Secrets
//! The published catalog contains the SCRAM verifiers of passwords and the hashes of tokens.

mod publisher;
mod replica;

pub use publisher::Publisher;
pub use replica::CatalogReplica;

use fulmar_store::StoreError;

use crate::MetaError;

/// An error of the object store.
fn unavailable(error: &StoreError) -> MetaError {
    MetaError::Unavailable {
        cause: format!("cannot access the object store: {error}"),
        remedy: "Check the object store. The request is retried.",
    }
}
