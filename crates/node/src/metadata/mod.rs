//! The embedded metadata store of the first node, for the other nodes of the cluster.
//!
//! ```text
//!   node with --join                              node with --meta embedded
//!   RemoteStore ── one stream per request ──────► serve ──► Embedded
//!               ── one stream per observer ─────►   └─ Forwarder (Observer)
//! ```
//!
//! - [`wire`]: the messages.
//! - [`server`]: serves the store.
//! - [`client`]: [`RemoteStore`], with the semantics of the trait.
//!
//! A node needs the metadata store before it has an identity in the cluster. It therefore connects as
//! [`fulmar_transport::hello::METADATA_CLIENT`], and such a connection serves nothing else.
//!
//! **Linearizable.** The embedded store is one process, which has locked its file. It answers every
//! request itself. **Observers.** Each observer has a stream with a snapshot, its revision, and all
//! later changes. `transact` waits until the observers have reached the revision of its outcome. If the
//! connection is lost, an observer gets a new snapshot. **Failures.** A request that got no answer
//! within the deadline closes the connection. A change that may have been received is not repeated:
//! [`MetaError::OutcomeUnknown`](fulmar_meta::MetaError).

pub mod client;
pub mod server;
mod wire;

pub use client::{RemoteOptions, RemoteStore};
