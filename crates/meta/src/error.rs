//! What can go wrong with metadata: each error says its cause, and its remedy.

use std::fmt;

use thiserror::Error;

/// The kind of thing that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A tenant.
    Tenant,
    /// A user.
    User,
    /// A token.
    Token,
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            What::Tenant => "tenant",
            What::User => "user",
            What::Token => "token",
        })
    }
}

/// An error of the metadata store or the catalog. `Display` gives the cause; [`MetaError::remedy`] what to do.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum MetaError {
    /// The name is taken.
    #[error("{what} \"{name}\" already exists")]
    Exists {
        /// Of what kind.
        what: What,
        /// The name that is taken.
        name: String,
    },
    /// Nothing has that name.
    #[error("{what} \"{name}\" does not exist")]
    Missing {
        /// Of what kind.
        what: What,
        /// The name that was looked for.
        name: String,
    },
    /// The name breaks the rule for names.
    #[error("\"{}\" cannot be the name of a {what}: {rule}", name.escape_debug())]
    InvalidName {
        /// Of what kind.
        what: What,
        /// The name that was asked for, cut to 100 characters.
        name: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// It cannot be changed or dropped now, because something depends on it.
    #[error("{what} \"{name}\" {reason}")]
    InUse {
        /// Of what kind.
        what: What,
        /// Its name.
        name: String,
        /// Why; reads on from the name.
        reason: String,
        /// What to do first.
        remedy: &'static str,
    },
    /// There is no such limit.
    #[error("there is no limit \"{name}\"")]
    UnknownLimit {
        /// The name that was asked for.
        name: String,
        /// A sentence with the names that there are.
        known: String,
    },
    /// A limit cannot have that value.
    #[error("\"{value}\" cannot be the limit \"{name}\"")]
    InvalidLimit {
        /// The limit's name.
        name: &'static str,
        /// The value that was asked for, cut to 100 characters.
        value: String,
        /// What it can be.
        rule: String,
    },
    /// The store cannot be reached, or cannot write.
    #[error("the metadata store {cause}")]
    Unavailable {
        /// What it did; reads on from "the metadata store".
        cause: String,
        /// What to do.
        remedy: &'static str,
    },
    /// It is somebody else's, and only read here.
    #[error("this node reads the catalog of another one, and cannot change it")]
    ReadOnly,
    /// A file of the store is damaged, missing, or older than what was acknowledged.
    #[error("{place} {cause}")]
    Damaged {
        /// The path of the file.
        place: String,
        /// Its state; reads on from the path.
        cause: String,
        /// The ways to continue.
        remedy: String,
    },
    /// A record, or the store's file, cannot be understood.
    #[error("metadata {place} cannot be read: {cause}")]
    Corrupt {
        /// The key of the record, or the path of the file.
        place: String,
        /// What is wrong with it.
        cause: String,
    },
}

impl MetaError {
    /// What the reader of the error can do about it; a sentence without capital and full stop.
    pub fn remedy(&self) -> &str {
        match self {
            MetaError::Exists { .. } => "choose another name, or drop or rename the one that has it",
            MetaError::Missing { what: What::Tenant, .. } => {
                "`fulmar tenant list` shows the tenants there are"
            }
            MetaError::Missing { what: What::User, .. } => "create it with CREATE USER",
            MetaError::Missing { what: What::Token, .. } => "`fulmar token list` shows the tokens there are",
            MetaError::ReadOnly => "connect to the node that owns the store",
            MetaError::Damaged { remedy, .. } => remedy,
            MetaError::InvalidName { .. } => "choose a name that keeps the rule",
            MetaError::UnknownLimit { known, .. } => known,
            MetaError::InvalidLimit { rule, .. } => rule,
            MetaError::InUse { remedy, .. } | MetaError::Unavailable { remedy, .. } => remedy,
            MetaError::Corrupt { .. } => {
                "start the version of Fulmar that wrote it, or restore the data directory from a backup"
            }
        }
    }

    pub(crate) fn missing(what: What, name: &str) -> Self {
        MetaError::Missing { what, name: name.to_owned() }
    }

    pub(crate) fn exists(what: What, name: &str) -> Self {
        MetaError::Exists { what, name: name.to_owned() }
    }
}
