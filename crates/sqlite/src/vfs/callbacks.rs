//! What the callbacks of all files share.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use libsqlite3_sys as ffi;

use crate::link::Link;

/// Runs the body of a callback. A panic becomes `SQLITE_IOERR`.
pub(super) fn guarded(body: impl FnOnce() -> c_int) -> c_int {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        tracing::error!("caught a panic in a SQLite callback; the statement fails");
        ffi::SQLITE_IOERR
    })
}

/// The same for a file of a connection; failures are recorded in its link.
pub(super) fn guarded_for(link: &Link, body: impl FnOnce() -> c_int) -> c_int {
    let code = guarded(body);
    if !matches!(code, ffi::SQLITE_OK | ffi::SQLITE_IOERR_SHORT_READ | ffi::SQLITE_NOTFOUND) {
        link.failed.set(true);
    }
    code
}

/// The smallest size that SQLite accepts: a journal begins with a sector of header, which is not
/// needed here.
pub(super) unsafe extern "C" fn sector_size(_file: *mut ffi::sqlite3_file) -> c_int {
    512
}

pub(super) unsafe extern "C" fn device_characteristics(_file: *mut ffi::sqlite3_file) -> c_int {
    0
}

pub(super) unsafe extern "C" fn sync(_file: *mut ffi::sqlite3_file, _flags: c_int) -> c_int {
    ffi::SQLITE_OK
}

pub(super) unsafe extern "C" fn no_lock(_file: *mut ffi::sqlite3_file, _level: c_int) -> c_int {
    ffi::SQLITE_OK
}

pub(super) unsafe extern "C" fn no_reserved_lock(_file: *mut ffi::sqlite3_file, answer: *mut c_int) -> c_int {
    // SAFETY: SQLite's out parameter.
    unsafe { *answer = 0 };
    ffi::SQLITE_OK
}
