//! The VFS: maps SQLite's main file to the pages of a database ([`crate::pages`]).
//!
//! A connection has one main file, its database, and any number of temporary files: rollback
//! journal, statement journal, sorter, temporary tables. These are the calls that matter:
//!
//! | SQLite | VFS |
//! | --- | --- |
//! | `xLock(SHARED)` | pins a snapshot: the newest version, or the newest durable one |
//! | `xFetch`, `xRead` | read the page at the snapshot, or the transaction's change; recorded |
//! | `xWrite`, `xTruncate` | go to the transaction's overlay, which other transactions do not see |
//! | `xLock(RESERVED)` and above | always granted: writers are optimistic |
//! | `SQLITE_FCNTL_SYNC` | commits; a conflict is `SQLITE_BUSY_SNAPSHOT` |
//! | `xUnlock(NONE)` | unpins the snapshot and drops the overlay |
//!
//! A rollback syncs as well. A commit is distinguished from it by the change counter of page 1:
//! each SHARED lock returns a new one, a commit increments it, a rollback restores it. The new
//! counter also makes SQLite drop its cached pages, so that every read of a transaction passes
//! through the VFS and is recorded.
//!
//! Exception: a single-statement transaction whose snapshot has the version of SQLite's cache gets
//! the old counter, and SQLite keeps its cache. Reads from the cache are not recorded. If the
//! statement only reads, that is not necessary: it is serializable at its snapshot. If it writes,
//! all pages count as read: any other commit in between is a conflict. After a commit the cache has
//! the new version, unless another commit came in between. After anything else that had begun to
//! write (an error, a conflict, a rollback) the cache has no valid version.
//!
//! All `unsafe` code that calls SQLite is in this module, in [`crate::connection`] and in
//! [`crate::allocator`]. A panic in a callback is caught and becomes an I/O error: it must not
//! unwind through C.

mod buffer_file;
mod callbacks;
pub(crate) mod main_file;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Once;

use libsqlite3_sys as ffi;

use self::callbacks::guarded;
use crate::fiber::overflow;
use crate::link::{current, describe};

/// The name of the registered VFS.
pub(crate) const NAME: &CStr = c"fulmar";

/// Registers the VFS, once per process.
pub(crate) fn register() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        let vfs = Box::leak(Box::new(ffi::sqlite3_vfs {
            iVersion: 2,
            szOsFile: main_file::SIZE.max(buffer_file::SIZE),
            mxPathname: 64,
            pNext: std::ptr::null_mut(),
            zName: NAME.as_ptr(),
            pAppData: std::ptr::null_mut(),
            xOpen: Some(open),
            xDelete: Some(delete),
            xAccess: Some(access),
            xFullPathname: Some(full_pathname),
            xDlOpen: None,
            xDlError: None,
            xDlSym: None,
            xDlClose: None,
            xRandomness: Some(randomness),
            xSleep: Some(sleep),
            xCurrentTime: Some(current_time),
            xGetLastError: None,
            xCurrentTimeInt64: Some(current_time_int64),
            xSetSystemCall: None,
            xGetSystemCall: None,
            xNextSystemCall: None,
        }));
        // SAFETY: the structure lives as long as the process.
        unsafe { ffi::sqlite3_vfs_register(vfs, 0) };
        if let Err(error) = overflow::install(describe) {
            tracing::warn!(%error, "could not install the stack overflow handler");
        }
    });
}

const TEMPORARY: c_int = ffi::SQLITE_OPEN_MAIN_JOURNAL
    | ffi::SQLITE_OPEN_SUBJOURNAL
    | ffi::SQLITE_OPEN_TEMP_DB
    | ffi::SQLITE_OPEN_TEMP_JOURNAL
    | ffi::SQLITE_OPEN_TRANSIENT_DB;

unsafe extern "C" fn open(
    _vfs: *mut ffi::sqlite3_vfs,
    _name: ffi::sqlite3_filename,
    file: *mut ffi::sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: SQLite provides `szOsFile` bytes, and calls from the connection's fiber.
        unsafe {
            (*file).pMethods = std::ptr::null();
            let Some(link) = current() else { return ffi::SQLITE_CANTOPEN };
            // A second main file of a connection would be an attached one: there is no other file
            // to open.
            if flags & ffi::SQLITE_OPEN_MAIN_DB != 0 && !link.opened.replace(true) {
                (link.open_main)(file, link);
            } else if flags & TEMPORARY != 0 {
                buffer_file::open(file, link);
            } else {
                return ffi::SQLITE_CANTOPEN;
            }
            if !out_flags.is_null() {
                *out_flags = flags;
            }
        }
        ffi::SQLITE_OK
    })
}

unsafe extern "C" fn delete(_vfs: *mut ffi::sqlite3_vfs, _name: *const c_char, _sync: c_int) -> c_int {
    ffi::SQLITE_OK
}

/// No file ever exists: journals are private to their connection, so there are no hot journals.
unsafe extern "C" fn access(
    _vfs: *mut ffi::sqlite3_vfs,
    _name: *const c_char,
    _flags: c_int,
    answer: *mut c_int,
) -> c_int {
    // SAFETY: SQLite's out parameter.
    unsafe { *answer = 0 };
    ffi::SQLITE_OK
}

unsafe extern "C" fn full_pathname(
    _vfs: *mut ffi::sqlite3_vfs,
    name: *const c_char,
    length: c_int,
    out: *mut c_char,
) -> c_int {
    // SAFETY: `name` is a C string, `out` has room for `length` bytes.
    let bytes = unsafe { CStr::from_ptr(name) }.to_bytes_with_nul();
    if bytes.len() > length as usize {
        return ffi::SQLITE_CANTOPEN;
    }
    // SAFETY: checked above.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), out, bytes.len()) };
    ffi::SQLITE_OK
}

/// Seeds SQLite's generator, which the engine's `random()` and `randomblob()` replace.
unsafe extern "C" fn randomness(_vfs: *mut ffi::sqlite3_vfs, length: c_int, out: *mut c_char) -> c_int {
    // SAFETY: `out` has room for `length` bytes; the call fills it or fails.
    let filled = unsafe { libc::getrandom(out as *mut c_void, length as usize, 0) };
    filled.max(0) as c_int
}

unsafe extern "C" fn sleep(_vfs: *mut ffi::sqlite3_vfs, microseconds: c_int) -> c_int {
    microseconds
}

/// The time of the transaction: it does not change while the transaction runs, nor in a replay.
unsafe extern "C" fn current_time_int64(_vfs: *mut ffi::sqlite3_vfs, out: *mut ffi::sqlite3_int64) -> c_int {
    const JULIAN_1970_MS: i64 = 210_866_760_000_000;
    // SAFETY: called by SQLite on the connection's fiber, or elsewhere (`current` is null then).
    let unix_ms = unsafe { current() }.map_or(0, |link| link.variables.borrow().clock_ms);
    // SAFETY: SQLite's out parameter.
    unsafe { *out = unix_ms as i64 + JULIAN_1970_MS };
    ffi::SQLITE_OK
}

unsafe extern "C" fn current_time(vfs: *mut ffi::sqlite3_vfs, out: *mut f64) -> c_int {
    let mut ms = 0;
    // SAFETY: as above.
    unsafe {
        current_time_int64(vfs, &mut ms);
        *out = ms as f64 / 86_400_000.0;
    }
    ffi::SQLITE_OK
}
