//! What can go wrong with segments and manifests.

use std::fmt::Display;

use fulmar_pages::{FormatError, PartitionId};

use super::MANIFESTS;
use crate::store::Failure;

/// Why a segment or manifest could not be read or written. Each names the object and the store.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// It is not there.
    #[error(
        "{object} is not in the store {store}; restore it from a copy, and if nobody has deleted it see whether this is the store that the node's data belong to"
    )]
    Missing {
        /// The object's name.
        object: String,
        /// The store's.
        store: String,
    },
    /// Another one has its name.
    #[error(
        "{object} exists in {store} with other contents: another node writes for the partition, or an old store is in use; look up who owns the partition"
    )]
    Exists {
        /// The object's name.
        object: String,
        /// The store's.
        store: String,
    },
    /// It is not what was written.
    #[error("{object} in {store} is damaged: {cause}; restore it from a copy of the store")]
    Damaged {
        /// The object's name.
        object: String,
        /// The store's.
        store: String,
        /// What is wrong with it.
        cause: FormatError,
    },
    /// It is what belongs to another partition or version.
    #[error(
        "{object} in {store} holds what belongs to another partition or version; restore it from a copy of the store"
    )]
    Misnamed {
        /// The object's name.
        object: String,
        /// The store's.
        store: String,
    },
    /// Others take it each time.
    #[error("{object} in {store} is taken by others again and again; see how many processes use this store")]
    Contended {
        /// The object's name, or how it begins.
        object: String,
        /// The store's.
        store: String,
    },
    /// There have been as many terms as can be.
    #[error(
        "the store {store} has been opened eight million times, and cannot be once more; export its databases, and import them into a new one"
    )]
    TooManyTerms {
        /// The store's name.
        store: String,
    },
    /// The store cannot do what was asked.
    #[error("cannot {operation} {object} in {store}: {cause}; {}", cause.kind().remedy())]
    Failed {
        /// What was tried.
        operation: &'static str,
        /// The object's name.
        object: String,
        /// The store's.
        store: String,
        /// Why it failed.
        cause: Failure,
    },
}

impl StoreError {
    /// What a tenant is told: not where the store is, nor what its server has said.
    pub fn for_tenants(&self) -> String {
        match self {
            StoreError::Missing { object, .. } => format!("{object} is not in the store"),
            StoreError::Exists { object, .. } => format!("{object} exists in the store with other contents"),
            StoreError::Damaged { object, .. } => format!("{object} in the store is damaged"),
            StoreError::Misnamed { object, .. } => {
                format!("{object} in the store holds what belongs to another partition or version")
            }
            StoreError::Contended { object, .. } => format!("{object} in the store is taken by others"),
            StoreError::TooManyTerms { .. } => "the store has been opened too often".to_owned(),
            StoreError::Failed { operation, object, cause, .. } => {
                format!(
                    "the store could not {operation} {object}: {}",
                    cause.kind().label().replace('_', " ")
                )
            }
        }
    }

    /// Whether the store did not answer, and may do what was asked another time.
    pub fn is_transient(&self) -> bool {
        matches!(self, StoreError::Failed { cause, .. } if cause.kind().is_transient())
    }

    /// The object, if it is one that is not what was written, or not there.
    pub fn damaged_object(&self) -> Option<&str> {
        match self {
            StoreError::Missing { object, .. }
            | StoreError::Damaged { object, .. }
            | StoreError::Misnamed { object, .. } => Some(object),
            _ => None,
        }
    }

    /// Whose object it is, where its name says that.
    pub fn partition(&self) -> Option<PartitionId> {
        let object: &str = match self {
            StoreError::Failed { object, .. }
            | StoreError::Exists { object, .. }
            | StoreError::Contended { object, .. } => object,
            error => error.damaged_object()?,
        };
        let digits = object.strip_prefix(MANIFESTS)?.strip_prefix('/')?.split('/').next()?;
        u64::from_str_radix(digits, 16).ok().map(PartitionId)
    }

    pub(super) fn failed(
        operation: &'static str,
        object: impl Display,
        store: impl Display,
        cause: Failure,
    ) -> Self {
        StoreError::Failed { operation, object: object.to_string(), store: store.to_string(), cause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_an_object_is_its_name_says_or_nobody() {
        let missing = |object: &str| StoreError::Missing { object: object.to_owned(), store: String::new() };
        for object in
            ["manifests/000000000000001f", "manifests/000000000000001f/hot-00000001-0000000000000007"]
        {
            assert_eq!(missing(object).partition(), Some(PartitionId(31)), "{object}");
        }
        for object in ["manifests", "segments/000000000000001f", "terms/00000001"] {
            assert_eq!(missing(object).partition(), None, "{object}");
        }
        assert_eq!(StoreError::TooManyTerms { store: String::new() }.partition(), None);
    }
}
