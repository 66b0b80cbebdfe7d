//! What the catalog knows of tenants, users and partitions.

use std::fmt;

use fulmar_pages::{Durability, PartitionId};
use serde::{Deserialize, Serialize};

use crate::{Limits, Revision};

/// How far a tenant has come; see the head of the crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TenantState {
    /// Its partition is being made.
    Creating,
    /// Clients can connect to it.
    Ready,
    /// Its partition is being dropped.
    Dropping,
}

/// A database that clients connect to by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// What clients call it.
    pub name: String,
    /// Where its data is.
    pub partition: PartitionId,
    /// The user that it belongs to.
    pub owner: String,
    /// When it was created, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// How far it has come.
    pub state: TenantState,
    /// What it may use.
    pub limits: Limits,
    /// Where its commits are made durable.
    pub durability: Durability,
    /// Of its record: what a change compares.
    pub(crate) revision: Revision,
}

/// A role that clients log in as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// What clients call themselves.
    pub name: String,
    /// May do everything.
    pub superuser: bool,
    /// What a password is checked against. Without it the user cannot log in by password.
    pub verifier: Option<ScramVerifier>,
    /// It is being dropped: it takes no new tenants and rights.
    pub(crate) leaving: bool,
    /// Of its record: what a change compares.
    pub(crate) revision: Revision,
}

/// What SCRAM-SHA-256 keeps instead of a password (RFC 5802, section 3).
#[derive(Clone, PartialEq, Eq)]
pub struct ScramVerifier {
    /// Random bytes that the password was hashed with.
    pub salt: Vec<u8>,
    /// How often it was hashed.
    pub iterations: u32,
    /// Proves that the client knows the password: 32 bytes.
    pub stored_key: Vec<u8>,
    /// Proves to the client that the server knows this verifier: 32 bytes.
    pub server_key: Vec<u8>,
}

impl fmt::Debug for ScramVerifier {
    /// Shows no secret: whoever has the keys can play the server.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScramVerifier").field("iterations", &self.iterations).finish_non_exhaustive()
    }
}

/// The hash of a secret that nobody can guess: what is kept in the place of a token.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretHash(pub Vec<u8>);

impl SecretHash {
    /// Whether it is the same. How long this takes says nothing of where the two differ.
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

/// A secret from which salts for users that do not exist are derived.
#[derive(Clone, PartialEq, Eq)]
pub struct SaltKey(pub Vec<u8>);

impl SaltKey {
    /// A new secret.
    pub fn random() -> Self {
        SaltKey(rand::random::<[u8; 32]>().to_vec())
    }
}

impl fmt::Debug for SaltKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SaltKey")
    }
}

/// What a client of HTTP proves its right with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// What it is called; no secret.
    pub name: String,
    /// Of the secret, which is kept nowhere.
    pub hash: SecretHash,
    /// The tenant that it is for; `None`: the whole node.
    pub partition: Option<PartitionId>,
    /// When it was made, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// From when on it is worth nothing.
    pub expires_unix_ms: Option<u64>,
    /// Of its record: what a change compares.
    pub(crate) revision: Revision,
}

/// What a user may do in a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read everything.
    ReadOnly,
    /// Everything: what its owner and superusers may.
    ReadWrite,
}

/// What a user was granted in a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) access: Access,
    /// Of its record: what a change compares.
    pub(super) revision: Revision,
}

/// A partition that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionRecord {
    /// Its id.
    pub id: PartitionId,
    /// Another one when it is restored; the first has the number of the partition, so that a branch,
    /// which is a partition of its own, has one of its own.
    pub lineage: u64,
    /// Grows with every restore and every change of owner.
    pub epoch: u32,
    /// Of its record: what a change compares.
    pub(crate) revision: Revision,
}

impl PartitionRecord {
    /// A partition as it is when it is made.
    pub(crate) fn first(id: PartitionId) -> Self {
        Self { id, lineage: id.0, epoch: 1, revision: Revision::default() }
    }
}
