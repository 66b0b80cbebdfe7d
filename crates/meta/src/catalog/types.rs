//! Types of the catalog: tenants, users, tokens and partitions.

use std::fmt;

use fulmar_pages::{Durability, PartitionId};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::{Limits, Revision};

/// The state of a tenant's life cycle; see the crate documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TenantState {
    /// Its partition is being created.
    Creating,
    /// Clients can connect to it.
    Ready,
    /// Its partition is being dropped.
    Dropping,
}

/// A database that clients connect to by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// The database name.
    pub name: String,
    /// The partition with its data.
    pub partition: PartitionId,
    /// The user that owns it.
    pub owner: String,
    /// Time of creation, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// State of its life cycle.
    pub state: TenantState,
    /// Resource limits.
    pub limits: Limits,
    /// Where its commits are made durable.
    pub durability: Durability,
    /// Revision of its record, compared by changes.
    pub(crate) revision: Revision,
}

/// A role that clients log in as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The user name.
    pub name: String,
    /// Has all privileges.
    pub superuser: bool,
    /// Verifies the password. Without it, the user cannot log in by password.
    pub verifier: Option<ScramVerifier>,
    /// The user is being dropped, and cannot get new tenants or privileges.
    pub(crate) leaving: bool,
    /// Revision of its record, compared by changes.
    pub(crate) revision: Revision,
}

/// A SCRAM-SHA-256 verifier, stored instead of a password (RFC 5802, section 3).
#[derive(Clone, PartialEq, Eq)]
pub struct ScramVerifier {
    /// Random salt of the hash.
    pub salt: Vec<u8>,
    /// Number of hash iterations.
    pub iterations: u32,
    /// Verifies that the client knows the password. 32 bytes.
    pub stored_key: Vec<u8>,
    /// Proves to the client that the server has this verifier. 32 bytes.
    pub server_key: Vec<u8>,
}

impl ScramVerifier {
    /// A hash that identifies the verifier. It does not reveal the keys.
    pub fn fingerprint(&self) -> u64 {
        let parts: [&[u8]; 3] = [&self.salt, &self.stored_key, &self.iterations.to_be_bytes()];
        xxh3_64(&parts.concat())
    }
}

impl fmt::Debug for ScramVerifier {
    /// Omits the secrets: a process with the keys could impersonate the server.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScramVerifier").field("iterations", &self.iterations).finish_non_exhaustive()
    }
}

/// The hash of a token's secret. Stored instead of the secret, which has too much entropy to guess.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretHash(pub Vec<u8>);

impl SecretHash {
    /// Compares two hashes. The run time does not reveal where they differ.
    pub fn matches(&self, other: &SecretHash) -> bool {
        let differences = self.0.iter().zip(&other.0).fold(0, |found, (one, other)| found | (one ^ other));
        self.0.len() == other.0.len() && differences == 0
    }
}

impl fmt::Debug for SecretHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretHash")
    }
}

/// The secret from which SCRAM salts for nonexistent users are derived.
#[derive(Clone, PartialEq, Eq)]
pub struct SaltKey(pub Vec<u8>);

impl SaltKey {
    /// Generates a new secret.
    pub fn random() -> Self {
        SaltKey(rand::random::<[u8; 32]>().to_vec())
    }
}

impl fmt::Debug for SaltKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SaltKey")
    }
}

/// A bearer token of an HTTP client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// Name of the token. Not secret.
    pub name: String,
    /// Hash of the secret, which is not stored.
    pub hash: SecretHash,
    /// The partition of the tenant that it is valid for. `None`: the whole node.
    pub partition: Option<PartitionId>,
    /// Whether it administers, as a superuser does, and not only shows statistics.
    pub is_admin: bool,
    /// Time of creation, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// Time of expiry, in milliseconds since 1970. `None`: it does not expire.
    pub expires_unix_ms: Option<u64>,
    /// Revision of its record, compared by changes.
    pub(crate) revision: Revision,
}

/// The privileges of a user in a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// May read everything.
    ReadOnly,
    /// Has all privileges, like the owner and superusers.
    ReadWrite,
}

/// The privileges that a user was granted in a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) access: Access,
    /// Revision of its record, compared by changes.
    pub(super) revision: Revision,
}

/// A partition that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionRecord {
    /// Its id.
    pub id: PartitionId,
    /// Changes with each restore. Initially the partition's id, so a branch, which is a new
    /// partition, has a different lineage.
    pub lineage: u64,
    /// Incremented with every restore and every change of owner.
    pub epoch: u32,
    /// Revision of its record, compared by changes.
    pub(crate) revision: Revision,
}

impl PartitionRecord {
    /// The record of a new partition.
    pub(crate) fn first(id: PartitionId) -> Self {
        Self { id, lineage: id.0, epoch: 1, revision: Revision::default() }
    }
}
