//! What the callbacks of all functions share.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use libsqlite3_sys as ffi;

use crate::Error;
use crate::link::Link;

pub(super) type Function =
    unsafe extern "C" fn(*mut ffi::sqlite3_context, c_int, *mut *mut ffi::sqlite3_value);

/// Runs the body of a function with its link. Converts a panic into an SQL error.
///
/// # Safety
/// `context` belongs to a running function registered by `register`.
pub(super) unsafe fn answer(context: *mut ffi::sqlite3_context, body: impl FnOnce(&Link)) {
    // SAFETY: the user data is the link.
    let link = unsafe { &*ffi::sqlite3_user_data(context).cast::<Link>() };
    if catch_unwind(AssertUnwindSafe(|| body(link))).is_err() {
        // SAFETY: a running function's context.
        unsafe { ffi::sqlite3_result_error_code(context, ffi::SQLITE_INTERNAL) };
    }
}

/// # Safety
/// As [`answer`].
pub(super) unsafe fn fail(context: *mut ffi::sqlite3_context, link: &Link, error: Error) {
    link.fail(error);
    // SAFETY: a running function's context.
    unsafe { ffi::sqlite3_result_error_code(context, ffi::SQLITE_ERROR) };
}
