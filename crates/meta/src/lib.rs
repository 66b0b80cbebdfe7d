//! The metadata store, and the catalog that stands on it: which tenants, users, rights and partitions exist.
//!
//! ```text
//!   gateway, command                 sessions look up tenants, users and rights: memory only
//!        |
//!   Catalog            typed, cached whole; changes are compare-and-set transactions
//!        |   ^
//!        |   | every change, in order of revision (Observer)
//!        v   |
//!   MetadataStore      keys, values, revisions: get, scan, transact, follow
//!        |
//!   Embedded           one SQLite file, one thread, group commit      (etcd will stand here too)
//!   Followed           that of another node, which has put it into the store ([`published`]); only read
//! ```
//!
//! **Reads never wait.** The catalog follows the store: it is handed everything there is, then every change in
//! order, and keeps it all in memory (some 500 bytes a tenant). A lookup takes a read lock for a moment.
//!
//! **Changes are compare-and-set.** A change reads the records it depends on from memory, and commits only if
//! the store still holds them at the same revision; else it starts over with what it has learned. So the same
//! code is right with one node on a file and with many nodes on etcd, and two who create the same tenant at
//! the same time cannot both succeed. When a change returns it is durable, and visible in memory.
//!
//! **Keys and values.** Values are JSON with a format version `v`; a record of a version that this code does
//! not know is refused rather than guessed at. Names are stored as they are: they come last in their keys.
//!
//! | key | value | |
//! | --- | --- | --- |
//! | `tenant/NAME` | `{"v":1,"partition":2,"owner":"ada","created_unix_ms":1790000000000,"state":"ready","limits":{"max_size":65536}}` | states: `creating`, `ready`, `dropping`; `limits` holds those that were set, in milliseconds and kilobytes, and is missing where there are none (and in records of before there were limits); `"durability":"shared"`, missing for `local` |
//! | `partition/ID` | `{"v":1,"lineage":2,"epoch":1}` | ID: 16 hexadecimal digits |
//! | `user/NAME` | `{"v":1,"superuser":false,"leaving":false,"verifier":{"iterations":4096,"salt":"...","stored_key":"...","server_key":"..."}}` | bytes as hexadecimal digits; `verifier` is null for a user without password |
//! | `grant/ID/NAME` | `{"v":1,"read_only":true}` | user NAME may read the tenant whose partition is ID; without `read_only` also write |
//! | `token/NAME` | `{"v":1,"hash":"...","partition":2,"created_unix_ms":1790000000000,"expires_unix_ms":1800000000000}` | the hash of a token for HTTP (hexadecimal digits); without `partition` it is for the whole node, without `expires_unix_ms` for ever |
//! | `counter/partition` | `{"v":1,"next":66}` | no partition id at or above `next` was ever given out |
//! | `dropped/ID` | `{"v":1}` | partition ID was dropped: logs and store may hold data of it |
//! | `counter/dropped` | `{"v":1,"before":66}` | every partition below `before` that has no record was dropped, or its id was never used |
//! | `secret/salt` | `{"v":1,"key":"..."}` | 32 random bytes: SCRAM salts for users that do not exist are derived from it |
//!
//! Other keys are left alone: they belong to later versions. The keys below `counter/partition` were added later; a catalog without them
//! gets them when it is opened. `counter/dropped` is then `next` of `counter/partition`.
//!
//! **A tenant is made and dropped in two steps**, because a tenant is a catalog record *and* a partition in the
//! engine, and a crash may come between the two:
//!
//! ```text
//!   create_tenant ── creating ── engine.create_partition ── finish_create ── ready
//!   begin_drop ───── dropping ── engine.drop_partition ──── finish_drop ──── (gone)
//! ```
//!
//! [`Catalog::tenant`] shows only what is ready, so nobody connects to half a tenant. At start
//! [`Catalog::unfinished`] names what a crash left behind, creating or dropping: for each, drop the partition
//! (if it is there), then [`Catalog::finish_drop`]. Both are undone by the same two calls, and the partition id
//! is gone for good: ids are handed out from blocks that are reserved durably before the first of them is used.

mod catalog;
mod embedded;
mod error;
mod limits;
mod published;
mod store;
mod units;

pub use catalog::{Access, Catalog, PartitionRecord, SYSTEM_PARTITION, SYSTEM_TENANT, SYSTEM_USER};
pub use catalog::{SaltKey, ScramVerifier, SecretHash, Tenant, TenantState, Token, User};
pub use embedded::Embedded;
pub use error::{MetaError, What};
pub use limits::{Limit, Limits, LiveLimits, ShownLimit};
pub use published::{Followed, Publisher};
pub use store::{Change, Compare, Entry, MetadataStore, Observer, Operation, Outcome, Revision, Transaction};
pub use store::{MAX_KEY_BYTES, MAX_TRANSACTION_STEPS, MAX_VALUE_BYTES};
pub use units::Unit;
