//! The mechanisms of live migration: what is copied to the destination before a partition's owner
//! changes.
//!
//! ```text
//!   prepare     copy                    handover                after
//!   journal     flush, list, warm ...   release, owner, open    report
//!               (rounds)                (the freeze)
//! ```
//!
//! A migration is a journalled state machine ([`fulmar_cluster::migration`]). This crate contains its
//! copying step: each mechanism composes the primitives of [`Source`], which the node implements over
//! its engine and its connection to the destination. It decides neither when nor where to move.
//!
//! | module | contents |
//! | --- | --- |
//! | [`copy`] | the mechanisms |
//! | [`rounds`] | when to stop copying and to hand over |
//! | [`pace`] | the limits on bytes per second: a maximum, and the latency around |
//! | [`prediction`] | what a migration will cost |
//! | [`report`] | what it has cost |
//!
//! # Which mechanism
//! | mechanism | pages | copies before the handover | open transactions |
//! | --- | --- | --- | --- |
//! | `stop` | common store | nothing | are aborted |
//! | `flush` | common store | nothing; the source flushes first | are aborted |
//! | `albatross` | common store | the cached pages, in rounds | continue at the destination |
//! | `live` | private stores | all pages, in rounds | continue at the destination |
//! | `delta` | private stores | the pages that differ from the destination's archive, and then rounds | continue at the destination |
//! | `on-demand` | private stores | nothing; the destination reads pages when it needs them, and copies them afterwards | continue at the destination |
//! | `bulk` | private stores | nothing; all pages are copied while the partition is frozen | end before; otherwise the move is undone |
//! | `sql` | private stores | nothing; all rows are read and inserted with SQL while the partition is frozen | as with `bulk` |
//!
//! A copy before the handover is slowed down while it disturbs databases at either node ([`pace`]).
//! The last round is not, because clients wait for its end.

pub mod copy;
pub mod pace;
pub mod prediction;
pub mod report;
pub mod rounds;

pub use fulmar_cluster::migration::Mechanism;

use fulmar_engine::{CachedPages, Result};
use fulmar_pages::PageNo;

use crate::report::Round;

/// The source of a migration between private stores, and its connection to the destination.
pub trait PageSource: Send {
    /// Begins a round with the newest version. Returns how many pages it sends.
    fn begin_round(&mut self) -> impl Future<Output = Result<u64>> + Send;

    /// Sends the next pages. Returns the bytes sent; `None` at the end of the round.
    fn send(&mut self) -> impl Future<Output = Result<Option<u64>>> + Send;

    /// The destination has made the round durable, and has read the pages that the source has in
    /// memory.
    fn end_round(&mut self, rounds: &[Round]) -> impl Future<Output = Result<()>> + Send;
}

/// The source of a migration in the common store, and its connection to the destination.
pub trait Source: Send + Sync {
    /// Stores the changes since the last flush, and lists the pages in memory.
    fn flush_and_list(&self) -> impl Future<Output = Result<CachedPages>> + Send;

    /// The destination reads these pages. Returns how many it had not in memory.
    fn warm(&self, pages: &[PageNo]) -> impl Future<Output = Result<u64>> + Send;

    /// A round has ended.
    fn round_ended(&self, rounds: &[Round]) -> impl Future<Output = ()> + Send;
}
