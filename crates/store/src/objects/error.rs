//! Errors of the page store.

use std::fmt::Display;

use fulmar_pages::{FormatError, PartitionId};

use super::MANIFESTS;
use crate::store::Failure;

/// Why an object could not be read or written. Messages name the object and the store.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// The object does not exist.
    #[error(
        "{object} is not in the store {store}; restore it from a copy, or check that this is the \
         store of the node's data directory"
    )]
    Missing {
        /// Name of the object.
        object: String,
        /// Name of the store.
        store: String,
    },
    /// Another object has the same name.
    #[error(
        "{object} already exists in {store} with other contents: another node writes for the \
         partition, or an old store is in use; check which node owns the partition"
    )]
    Exists {
        /// Name of the object.
        object: String,
        /// Name of the store.
        store: String,
    },
    /// The object is damaged.
    #[error("{object} in {store} is damaged: {cause}; restore it from a copy of the store")]
    Damaged {
        /// Name of the object.
        object: String,
        /// Name of the store.
        store: String,
        /// The damage.
        cause: FormatError,
    },
    /// The object belongs to another partition or version.
    #[error(
        "{object} in {store} contains data of another partition or version; restore it from a \
         copy of the store"
    )]
    WrongIdentity {
        /// Name of the object.
        object: String,
        /// Name of the store.
        store: String,
    },
    /// Other processes repeatedly won the race for the object.
    #[error(
        "{object} in {store} is contended: other processes repeatedly created it first; check \
         which processes use this store"
    )]
    Contended {
        /// Name of the object, or a prefix of it.
        object: String,
        /// Name of the store.
        store: String,
    },
    /// The numbers of terms are exhausted.
    #[error(
        "the store {store} has reached the maximum of 8,388,607 terms; export its databases and \
         import them into a new store"
    )]
    TooManyTerms {
        /// Name of the store.
        store: String,
    },
    /// The store could not perform an operation.
    #[error("could not {operation} {object} in {store}: {cause}; {}", cause.kind().remedy())]
    Failed {
        /// The operation.
        operation: &'static str,
        /// Name of the object.
        object: String,
        /// Name of the store.
        store: String,
        /// The error.
        cause: Failure,
    },
}

impl StoreError {
    /// Message for clients. Does not contain the store's location or responses of its server.
    pub fn for_tenants(&self) -> String {
        match self {
            StoreError::Missing { object, .. } => format!("{object} is not in the store"),
            StoreError::Exists { object, .. } => {
                format!("{object} already exists in the store with other contents")
            }
            StoreError::Damaged { object, .. } => format!("{object} in the store is damaged"),
            StoreError::WrongIdentity { object, .. } => {
                format!("{object} in the store contains data of another partition or version")
            }
            StoreError::Contended { object, .. } => format!("{object} in the store is contended"),
            StoreError::TooManyTerms { .. } => "the store has reached its maximum number of terms".to_owned(),
            StoreError::Failed { operation, object, cause, .. } => {
                format!(
                    "the store could not {operation} {object}: {}",
                    cause.kind().label().replace('_', " ")
                )
            }
        }
    }

    /// Returns true if the store did not respond or asked to retry later.
    pub fn is_transient(&self) -> bool {
        matches!(self, StoreError::Failed { cause, .. } if cause.kind().is_transient())
    }

    /// Returns the object if it is damaged, missing, or belongs to another name.
    pub fn damaged_object(&self) -> Option<&str> {
        match self {
            StoreError::Missing { object, .. }
            | StoreError::Damaged { object, .. }
            | StoreError::WrongIdentity { object, .. } => Some(object),
            _ => None,
        }
    }

    /// Returns the object's partition, if its name contains one.
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
    fn partition_is_parsed_from_object_names() {
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
