//! What the transactions of a session may take. The session is told by whoever knows its tenant; the VFS keeps to it,
//! since every page and every temporary byte passes there.

use fulmar_pages::PAGE_SIZE;

use crate::{Error, sqlstate};

/// What each transaction of a session may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransactionLimits {
    /// Bytes of changed pages, journals and temporary data, in memory and spilled together.
    pub held_bytes: u64,
    /// How large the database may grow, in bytes. One that is larger already may stay so.
    pub database_bytes: u64,
    /// Bytes in temporary files of all sessions of the tenant together.
    pub temporary_bytes: u64,
    /// Bytes of a value or row. A part of the memory for statements is the upper bound.
    pub value_bytes: u64,
    /// Bytes of a pattern of LIKE or GLOB.
    pub pattern_bytes: u64,
    /// Parameters of a statement.
    pub parameters: u64,
}

impl Default for TransactionLimits {
    /// None.
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
    /// Refuses a transaction that would hold so much.
    pub(crate) fn check_held(&self, bytes: u64) -> Result<(), Error> {
        if bytes <= self.held_bytes {
            return Ok(());
        }
        let limit_kb = self.held_bytes / 1024;
        let message =
            format!("the transaction would take more than its database's transaction_memory of {limit_kb}kB");
        Err(Error::new(sqlstate::CONFIGURATION_LIMIT, message)
            .detail("Changed pages, journals, sorts and temporary tables count.")
            .hint(
                "Change fewer rows in a transaction. A superuser can raise the limit with ALTER DATABASE ... SET \
                 transaction_memory.",
            ))
    }

    /// Refuses a database that grows from so many pages to so many.
    pub(crate) fn check_size(&self, from_pages: u32, to_pages: u32) -> Result<(), Error> {
        if to_pages <= from_pages || u64::from(to_pages) * PAGE_SIZE as u64 <= self.database_bytes {
            return Ok(());
        }
        let limit_kb = self.database_bytes / 1024;
        Err(Error::new(
            sqlstate::DISK_FULL,
            format!("the database would grow beyond its max_size of {limit_kb}kB"),
        )
        .detail(format!("It has {}kB.", u64::from(from_pages) * (PAGE_SIZE as u64 / 1024)))
        .hint(
            "Delete what is not needed: its space is used again. A superuser can raise the limit with ALTER DATABASE \
             ... SET max_size.",
        ))
    }
}
