//! The metadata store, and the catalog of tenants, users, privileges and partitions on top of it.
//!
//! ```text
//!   gateway, command       sessions look up tenants, users and privileges in memory
//!        |
//!   Catalog                typed, fully cached; changes are compare-and-set transactions
//!        |   ^
//!        |   | every change, in order of revision (Observer)
//!        v   |
//!   MetadataStore          keys, values, revisions: get, scan, transact, follow
//!        |
//!   Embedded               one SQLite file, one thread, group commit
//!   EtcdStore              a prefix of keys in etcd
//!   CatalogReplica         read-only: a catalog that another node published in the object store
//! ```
//!
//! **Reads never wait.** The catalog follows the store: it receives a snapshot, then every change
//! in order, and keeps everything in memory (about 500 bytes per tenant). A lookup takes a short
//! read lock.
//!
//! **Changes use optimistic concurrency control.** A change reads the records that it depends on
//! from memory, and commits only if the store still has them at the same revision. Otherwise it is
//! retried with the current records. The same code is therefore correct with one node on a file and
//! with many nodes on etcd; of two concurrent creations of the same tenant only one succeeds. When
//! a change returns, it is durable and visible in memory.
//!
//! **Keys and values.** Values are JSON with a format version `v`. A record with an unknown version
//! is rejected. Names are stored unescaped, as the last part of their keys.
//!
//! ```text
//! tenant/NAME         {"v":1,"partition":2,"owner":"ada","created_unix_ms":1790000000000,
//!                      "state":"ready","limits":{"max_size":65536},"durability":"shared"}
//! partition/ID        {"v":1,"lineage":2,"epoch":1}
//! user/NAME           {"v":1,"superuser":false,"leaving":false,
//!                      "verifier":{"iterations":4096,"salt":"...","stored_key":"...",
//!                                  "server_key":"..."}}
//! grant/ID/NAME       {"v":1,"read_only":true}
//! token/NAME          {"v":1,"hash":"...","partition":2,"admin":true,
//!                      "created_unix_ms":1790000000000,"expires_unix_ms":1800000000000}
//! counter/partition   {"v":1,"next":66}
//! dropped/ID          {"v":1}
//! counter/dropped     {"v":1,"before":66}
//! secret/salt         {"v":1,"key":"..."}
//! ```
//!
//! ID is a partition id in 16 hexadecimal digits. Bytes are written as hexadecimal digits.
//!
//! - `tenant`: `state` is `creating`, `ready` or `dropping`. `limits` contains the limits that were
//!   set, in milliseconds or kilobytes. It is omitted if none is set, and in records older than
//!   limits. `durability` is omitted for `local`.
//! - `user`: `verifier` is null for a user without a password.
//! - `grant`: user NAME may read the tenant of partition ID. Without `read_only` it may also write.
//! - `token`: the hash of an HTTP token. Without `partition` the token is valid for the whole node,
//!   without `expires_unix_ms` it does not expire. Without `admin` it shows statistics only.
//! - `counter/partition`: no partition id at or above `next` was ever assigned.
//! - `dropped`: partition ID was dropped. Logs and store may still hold its data.
//! - `counter/dropped`: every partition below `before` without a record was dropped, or its id was
//!   never used.
//! - `secret/salt`: 32 random bytes, from which SCRAM salts for nonexistent users are derived.
//!
//! Other keys are ignored: they belong to later versions. The keys listed after `counter/partition`
//! were added later. They are created when a catalog without them is opened; `counter/dropped` is
//! then `next` of `counter/partition`.
//!
//! **A tenant is created and dropped in two steps**, because it consists of a catalog record *and*
//! a partition in the engine, and a crash can occur between the two changes:
//!
//! ```text
//!   create_tenant ── creating ── engine.create_partition ── finish_create ── ready
//!   begin_drop ───── dropping ── engine.drop_partition ──── finish_drop ──── (gone)
//! ```
//!
//! [`Catalog::tenant`] returns only ready tenants, so no client connects to an incomplete one. At
//! start, [`Catalog::unfinished`] lists the tenants that a crash left in the state `creating` or
//! `dropping`. For each of them the caller drops the partition, if it exists, and calls
//! [`Catalog::finish_drop`]. The partition id is not reused: ids are assigned from blocks that are
//! reserved durably before the first id of the block is used.

mod catalog;
mod catalog_replication;
mod copy;
mod embedded;
mod error;
mod etcd;
mod limits;
mod store;
mod units;

pub use catalog::{Access, Catalog, PartitionRecord, SYSTEM_PARTITION, SYSTEM_TENANT, SYSTEM_USER};
pub use catalog::{SaltKey, ScramVerifier, SecretHash, Tenant, TenantState, Token, User};
pub use catalog::{partition_of_key, value_in_cluster};
pub use catalog_replication::{CatalogReplica, Publisher};
pub use copy::{Copied, CopyProgress, copy, reject_unfinished, reserve};
pub use embedded::Embedded;
pub use error::{MetaError, ObjectKind};
pub use etcd::{EtcdOptions, EtcdStore, EtcdTls};
pub use limits::{Limit, Limits, LiveLimits, ShownLimit};
pub use store::{Change, Compare, Entry, MetadataStore, Observer, Operation, Outcome, Revision, Transaction};
pub use store::{MAX_KEY_BYTES, MAX_TRANSACTION_BYTES, MAX_TRANSACTION_STEPS, MAX_VALUE_BYTES};
pub use units::Unit;
