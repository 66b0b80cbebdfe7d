//! The cache of a connection's prepared statements.

use std::ffi::c_int;

use hashbrown::HashMap;
use libsqlite3_sys as ffi;

/// Maximum of cached statements per connection, and of their memory.
const MAX_CACHED_STATEMENTS: usize = 64;
const MAX_CACHED_BYTES: usize = 1 << 20;

/// A statement that takes more memory (a large multi-row INSERT, for example) stays cached only
/// until the end of the transaction.
const BULKY_BYTES: usize = 48 << 10;

/// A SQLite statement, and the numbers of its parameters.
pub(super) struct Handle {
    pub(super) raw: *mut ffi::sqlite3_stmt,
    /// The client's number (from 1) of each SQLite parameter. SQLite numbers `$2, $1` by
    /// appearance.
    pub(super) numbers: Box<[u16]>,
    pub(super) used: u64,
    /// Its memory when it was put into the cache.
    pub(super) bytes: usize,
}

impl Handle {
    pub(super) fn without_parameters(raw: *mut ffi::sqlite3_stmt) -> Self {
        Handle { raw, numbers: Box::default(), used: 0, bytes: 0 }
    }

    /// Memory that SQLite uses for the statement.
    fn memory_bytes(&self) -> c_int {
        if self.raw.is_null() {
            return 0;
        }
        // SAFETY: a valid statement.
        unsafe { ffi::sqlite3_stmt_status(self.raw, ffi::SQLITE_STMTSTATUS_MEMUSED, 0) }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: owned, and finalized once; null is allowed.
        unsafe { ffi::sqlite3_finalize(self.raw) };
    }
}

/// The most recently used statements of a connection, by the id of [`crate::Statement`].
#[derive(Default)]
pub(super) struct Cache {
    pub(super) handles: HashMap<u64, Handle>,
    /// Memory of the handles.
    pub(super) bytes: usize,
    pub(super) clock: u64,
    bulky: bool,
    /// Ids of SQL texts that have no [`crate::Statement`].
    pub(super) texts: HashMap<Box<str>, u64>,
    pub(super) text_bytes: usize,
}

impl Cache {
    pub(super) fn clear(&mut self) {
        self.handles.clear();
        self.bytes = 0;
    }

    /// Adds a statement, and evicts the least recently used ones if necessary.
    pub(super) fn insert(&mut self, id: u64, mut handle: Handle) {
        handle.bytes = handle.memory_bytes() as usize;
        self.remove(id);
        while self.handles.len() >= MAX_CACHED_STATEMENTS || self.bytes + handle.bytes > MAX_CACHED_BYTES {
            let oldest = self.handles.iter().min_by_key(|(_, handle)| handle.used).map(|(id, _)| *id);
            let Some(oldest) = oldest else { break };
            self.remove(oldest);
        }
        self.bulky |= handle.bytes > BULKY_BYTES;
        self.bytes += handle.bytes;
        self.handles.insert(id, handle);
    }

    pub(super) fn remove(&mut self, id: u64) {
        if let Some(handle) = self.handles.remove(&id) {
            self.bytes -= handle.bytes;
        }
    }

    /// Evicts statements that take much memory.
    pub(super) fn trim(&mut self) {
        if std::mem::take(&mut self.bulky) {
            self.handles.retain(|_, handle| handle.bytes <= BULKY_BYTES);
            self.bytes = self.handles.values().map(|handle| handle.bytes).sum();
        }
    }
}
