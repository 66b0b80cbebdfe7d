//! Errors of the metadata store and the catalog, each with a cause and a remedy.

use std::fmt;

use thiserror::Error;

use crate::Outcome;

/// The kind of object that an error refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    /// A tenant.
    Tenant,
    /// A user.
    User,
    /// A token.
    Token,
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ObjectKind::Tenant => "tenant",
            ObjectKind::User => "user",
            ObjectKind::Token => "token",
        })
    }
}

/// An error of the metadata store or the catalog. `Display` gives the cause, [`MetaError::remedy`]
/// the remedy.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum MetaError {
    /// The name is taken.
    #[error("{what} \"{name}\" already exists")]
    Exists {
        /// The kind of object.
        what: ObjectKind,
        /// The name that is taken.
        name: String,
    },
    /// No object has that name.
    #[error("{what} \"{name}\" does not exist")]
    Missing {
        /// The kind of object.
        what: ObjectKind,
        /// The requested name.
        name: String,
    },
    /// The name is invalid.
    #[error("invalid {what} name \"{}\": {rule}", name.escape_debug())]
    InvalidName {
        /// The kind of object.
        what: ObjectKind,
        /// The requested name, truncated to 100 characters.
        name: String,
        /// The violated rule.
        rule: &'static str,
    },
    /// The object cannot be changed or dropped now, because something depends on it.
    #[error("{what} \"{name}\" {reason}")]
    InUse {
        /// The kind of object.
        what: ObjectKind,
        /// Its name.
        name: String,
        /// The reason. Continues the sentence after the name.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The limit does not exist.
    #[error("unrecognized limit \"{name}\"")]
    UnknownLimit {
        /// The requested name.
        name: String,
        /// A sentence that lists the valid names.
        known: String,
    },
    /// The value of a limit is invalid.
    #[error("invalid value for limit \"{name}\": \"{value}\"")]
    InvalidLimit {
        /// The limit's name.
        name: &'static str,
        /// The requested value, truncated to 100 characters.
        value: String,
        /// A sentence that describes valid values.
        rule: String,
    },
    /// The store cannot be reached, or cannot write.
    #[error("the metadata store {cause}")]
    Unavailable {
        /// The cause. Continues the sentence after "the metadata store".
        cause: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// No answer came to a change: it may have been applied, or may still be. Only another
    /// transaction that compares the same keys settles it.
    #[error("the metadata store {cause}; the outcome of this change is not known")]
    OutcomeUnknown {
        /// The cause. Continues the sentence after "the metadata store".
        cause: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The outcome is known, but this process has not yet observed all changes up to its revision.
    #[error("the metadata store {}, but this node's copy of it is stale: {cause}", decided(*outcome))]
    CacheStale {
        /// The outcome of the transaction.
        outcome: Outcome,
        /// Why the copy is stale.
        cause: String,
    },
    /// The store is out of space. Nothing was changed.
    #[error("the metadata store {cause}")]
    OutOfSpace {
        /// The cause. Continues the sentence after "the metadata store".
        cause: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The store rejects this node's credentials, or they do not permit the request.
    #[error("the metadata store {cause}")]
    PermissionDenied {
        /// The cause. Continues the sentence after "the metadata store".
        cause: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The version of the store's server is not supported.
    #[error("the metadata store {cause}")]
    Unsupported {
        /// The cause. Continues the sentence after "the metadata store".
        cause: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// This node is a read replica.
    #[error("cannot change the catalog on a read-only node")]
    ReadOnly,
    /// A file of the store is damaged, missing, or older than the last acknowledged change.
    #[error("{place} {cause}")]
    Damaged {
        /// The path of the file.
        place: String,
        /// Its state. Continues the sentence after the path.
        cause: String,
        /// The remedy.
        remedy: String,
    },
    /// A record is invalid or of an unsupported version.
    #[error("metadata {place} cannot be read: {cause}")]
    Corrupt {
        /// The key of the record.
        place: String,
        /// The problem.
        cause: String,
    },
}

impl MetaError {
    /// The remedy, as one or more sentences with capital and full stop.
    pub fn remedy(&self) -> &str {
        match self {
            MetaError::Exists { .. } => "Choose another name, or drop or rename the existing one.",
            MetaError::Missing { what: ObjectKind::Tenant, .. } => {
                "Run `fulmar tenant list` to list the tenants."
            }
            MetaError::Missing { what: ObjectKind::User, .. } => "Create the user with CREATE USER.",
            MetaError::Missing { what: ObjectKind::Token, .. } => {
                "Run `fulmar token list` to list the tokens."
            }
            MetaError::ReadOnly => "Connect to the primary node.",
            MetaError::Damaged { remedy, .. } => remedy,
            MetaError::InvalidName { .. } => "Choose a valid name.",
            MetaError::UnknownLimit { known, .. } => known,
            MetaError::InvalidLimit { rule, .. } => rule,
            MetaError::InUse { remedy, .. }
            | MetaError::Unavailable { remedy, .. }
            | MetaError::OutcomeUnknown { remedy, .. }
            | MetaError::OutOfSpace { remedy, .. }
            | MetaError::PermissionDenied { remedy, .. }
            | MetaError::Unsupported { remedy, .. } => remedy,
            MetaError::CacheStale { .. } => {
                "No action is needed: the node catches up. If this persists, check its connection to etcd."
            }
            MetaError::Corrupt { .. } => {
                "Start the version of Fulmar that wrote it, or restore the metadata store from a backup."
            }
        }
    }

    /// The outcome of the transaction, if the error contains it.
    pub fn outcome(&self) -> Option<Outcome> {
        match self {
            MetaError::CacheStale { outcome, .. } => Some(*outcome),
            _ => None,
        }
    }

    pub(crate) fn missing(what: ObjectKind, name: &str) -> Self {
        MetaError::Missing { what, name: name.to_owned() }
    }

    pub(crate) fn exists(what: ObjectKind, name: &str) -> Self {
        MetaError::Exists { what, name: name.to_owned() }
    }
}

fn decided(outcome: Outcome) -> String {
    match outcome {
        Outcome::Committed(revision) => format!("committed the change at revision {}", revision.0),
        Outcome::Conflict(revision) => {
            format!("rejected the change at revision {} because of a concurrent change", revision.0)
        }
    }
}
