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
//! a number that is new. Its upper bits are the owner's term, as those of versions are.
//!
//! # Crashes, and what comes late
//! A catalog is one object, created only if absent: it is there as a whole or not at all. Older ones are deleted when a newer one is
//! there. Who dies before that leaves several, of which the newest counts, and the next publication deletes the others.
//!
//! An owner begins with a look at what there is: if the newest is not of its own term, or is not what its metadata store holds, or cannot be
//! read, it publishes. So who dies between a change and its publication makes up for it at the next start, under the first
//! number of the next term.
//!
//! A put whose answer is lost may arrive at any time. It is tried again under the number after the newest one that is
//! known then: the same or, if that has arrived, the next. What arrives later still is told that the name is taken; or, when that has been
//! deleted for a newer one, has a number below the newest, and means nothing.
//!
//! # Two owners
//! Of two that believe to own a store the one of the later term does ([`fulmar_store::Term`]). The other one, a *zombie*, need not ask whose
//! the store is, for which there would be a moment between the answer and what is done: whatever it does, whenever that arrives, does no
//! harm.
//! - It publishes under numbers of its own term only, all of which are below its successor's first one. Until that is there
//!   readers may see what the zombie says, as if it had said so before the store was taken over; from then on it is an older catalog, which
//!   nobody reads and the successor deletes with its next publication.
//! - It deletes what is below a catalog of its own, so nothing of its successor's.
//! - When it lists what there is, after each publication at the latest, and finds a catalog of a later term, it publishes no more.
//!
//! A store in the locked data directory has no terms, and one owner.
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
