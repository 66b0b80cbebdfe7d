//! Resource limits of a session's transactions. The session's creator sets them per tenant; the VFS
//! enforces them, since all pages and temporary data pass through it.

use fulmar_pages::PAGE_SIZE;

use crate::{Error, sqlstate};

/// Limits of each transaction of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransactionLimits {
    /// Bytes of changed pages, journals and temporary data, in memory and spilled together.
    pub held_bytes: u64,
    /// Maximum size of the database in bytes. A database that is already larger may keep its size.
    pub database_bytes: u64,
    /// Bytes in temporary files, over all sessions of the tenant.
    pub temporary_bytes: u64,
    /// Bytes of a value or row. A share of the statement memory is the upper bound.
    pub value_bytes: u64,
    /// Bytes of a LIKE or GLOB pattern.
    pub pattern_bytes: u64,
    /// Parameters of a statement.
    pub parameters: u64,
}

impl Default for TransactionLimits {
    /// No limits.
    fn default() -> Self {
        TransactionLimits {
            held_bytes: u64::MAX,
            database_bytes: u64::MAX,
            temporary_bytes: u64::MAX,
            value_bytes: u64::MAX,
            pattern_bytes: u64::MAX,
            parameters: u64::MAX,
        }
    }
}

impl TransactionLimits {
    /// Fails if a transaction that holds this many bytes exceeds its limit.
    pub(crate) fn check_held(&self, bytes: u64) -> Result<(), Error> {
        if bytes <= self.held_bytes {
            return Ok(());
        }
        let limit_kb = self.held_bytes / 1024;
        let message = format!("transaction would exceed its database's transaction_memory of {limit_kb}kB");
        Err(Error::new(sqlstate::CONFIGURATION_LIMIT, message)
            .detail("Changed pages, journals, sorts and temporary tables count towards the limit.")
            .hint(
                "Change fewer rows in a transaction. A superuser can raise the limit with ALTER DATABASE ... SET \
                 transaction_memory.",
            ))
    }

    /// Fails if the database would grow beyond its limit.
    pub(crate) fn check_size(&self, from_pages: u32, to_pages: u32) -> Result<(), Error> {
        if to_pages <= from_pages || u64::from(to_pages) * PAGE_SIZE as u64 <= self.database_bytes {
            return Ok(());
        }
        let limit_kb = self.database_bytes / 1024;
        Err(Error::new(sqlstate::DISK_FULL, format!("database would exceed its max_size of {limit_kb}kB"))
            .detail(format!("Its current size is {}kB.", u64::from(from_pages) * (PAGE_SIZE as u64 / 1024)))
            .hint(
                "Delete rows that are not needed: their space is reused. A superuser can raise the \
                 limit with ALTER DATABASE ... SET max_size.",
            ))
    }
}
