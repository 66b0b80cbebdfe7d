//! The catalog in the store: its owner puts it there, whole, after each change; who reads beside the owner follows it.
//!
//! ```text
//!   owner:  Embedded --- "something has changed" ---> Publisher --- catalog/000c ---> the store
//!                                                                                       | a listing every second
//!   reader: Catalog <--- everything, anew ---  Followed <--- catalog/000c --------------'
//! ```
//!
//! Catalogs are numbered; the greatest number is what the owner has said last. It is the number of the publication, not the revision
//! of the metadata store: an owner whose data directory was restored from a backup is at a revision of before, and says so under
//! a number that is new.
//!
//! # Crashes, and what comes late
//! A catalog is one object, created only if absent: it is there as a whole or not at all. Older ones are deleted when a newer one is
//! there. Who dies before that leaves several, of which the newest counts, and the next publication deletes the others.
//!
//! An owner begins with a look at what there is: if the newest is not what its metadata store holds, or cannot be read, it
//! publishes. So who dies between a change and its publication makes up for it at the next start. A put that was left under
//! way by an owner of before may arrive at any time: under the number after the newest one that was known then. The next owner
//! wants that number first. It wins it, and what comes late is told that the name is taken; or, when its own has been deleted for a
//! newer one, the late one has a number below the newest, and means nothing. Or it loses it, and takes the next.
//!
//! Two owners of one store are an operator's error, as for everything else in it; the last word counts.
//!
//! # Secrets
//! What the catalog holds of passwords (SCRAM verifiers) and tokens (hashes) is in the store, then.

mod followed;
mod publisher;

pub use followed::Followed;
pub use publisher::Publisher;

use fulmar_store::StoreError;

use crate::MetaError;

/// The store does not do its work.
fn unavailable(error: &StoreError) -> MetaError {
    MetaError::Unavailable {
        cause: format!("in the store cannot be used: {error}"),
        remedy: "see to the store; it is tried again",
    }
}
