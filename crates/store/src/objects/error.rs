//! What can go wrong with segments and manifests.

use std::fmt::Display;

use fulmar_pages::FormatError;

/// Why a segment or manifest could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It is not there.
    #[error(
        "{object} is not in the store; if nobody has deleted it the store is not the one that the log belongs to"
    )]
    Missing {
        /// The object's name.
        object: String,
    },
    /// Another one has its name.
    #[error(
        "{object} exists with other contents: another node writes for the partition, or an old store is in use; look up who owns the partition"
    )]
    Exists {
        /// The object's name.
        object: String,
    },
    /// It is not what was written.
    #[error("{object} is damaged: {cause}; restore it from a copy of the store")]
    Damaged {
        /// The object's name.
        object: String,
        /// What is wrong with it.
        cause: FormatError,
    },
    /// It is a manifest of another partition or version.
    #[error(
        "{object} holds the manifest of another partition or version; restore it from a copy of the store"
    )]
    Misnamed {
        /// The object's name.
        object: String,
    },
    /// The store cannot do what was asked.
    #[error(
        "cannot {operation} {object}: {cause}; check that the store can be reached, may be written and has space"
    )]
    Failed {
        /// What was tried.
        operation: &'static str,
        /// The object's name.
        object: String,
        /// Why it failed.
        cause: object_store::Error,
    },
}

impl StoreError {
    pub(super) fn failed(operation: &'static str, object: impl Display, cause: object_store::Error) -> Self {
        let object = object.to_string();
        match cause {
            object_store::Error::NotFound { .. } => StoreError::Missing { object },
            cause => StoreError::Failed { operation, object, cause },
        }
    }
}
