//! SQL functions that the engine implements:
//!
//! - functions that read from the session and its transaction instead of the connection, so that a
//!   replay computes the same values;
//! - functions that PostgreSQL clients call;
//! - replacements of SQLite functions that can take too long ([`texts`]).

mod callback;
mod texts;

use std::ffi::{CStr, c_int, c_void};

use libsqlite3_sys as ffi;

use self::callback::{Function, answer, fail};
use crate::lease::Lease;
use crate::link::Link;
use crate::pages::{Refusal, TransactionOutcome};
use crate::{Error, Result, sqlstate};

/// Name, number of arguments, implementation.
const FUNCTIONS: [(&CStr, c_int, Function); 12] = [
    (c"random", 0, random),
    (c"randomblob", 1, randomblob),
    (c"changes", 0, changes),
    (c"total_changes", 0, total_changes),
    (c"pg_current_xact_id", 0, current_transaction),
    (c"pg_current_xact_id_if_assigned", 0, current_transaction_if_assigned),
    (c"txid_current", 0, current_transaction),
    (c"pg_xact_status", 1, transaction_status),
    (c"txid_status", 1, transaction_status),
    (c"now", 0, now),
    (c"clock_timestamp", 0, now),
    (c"pg_array_json", 1, array_json),
];

pub(super) fn register(db: *mut ffi::sqlite3, link: &Link) -> Result<()> {
    let texts =
        texts::FUNCTIONS.map(|function| (function, ffi::SQLITE_DETERMINISTIC | ffi::SQLITE_INNOCUOUS));
    for ((name, arguments, function), properties) in
        FUNCTIONS.map(|function| (function, 0)).into_iter().chain(texts)
    {
        let link: *const Link = link;
        // SAFETY: the link outlives the handle; the implementations follow SQLite's rules for
        // functions.
        let code = unsafe {
            ffi::sqlite3_create_function_v2(
                db,
                name.as_ptr(),
                arguments,
                ffi::SQLITE_UTF8 | properties,
                link as *mut c_void,
                Some(function),
                None,
                None,
                None,
            )
        };
        if code != ffi::SQLITE_OK {
            return Err(Error::new(
                sqlstate::INTERNAL,
                format!("could not register function {name:?} ({code})"),
            ));
        }
    }
    Ok(())
}

unsafe extern "C" fn random(context: *mut ffi::sqlite3_context, _: c_int, _: *mut *mut ffi::sqlite3_value) {
    // SAFETY: called by SQLite.
    unsafe {
        answer(context, |link| {
            let value = link.variables.borrow_mut().next_random() as i64;
            ffi::sqlite3_result_int64(context, value);
        });
    }
}

unsafe extern "C" fn randomblob(
    context: *mut ffi::sqlite3_context,
    _: c_int,
    arguments: *mut *mut ffi::sqlite3_value,
) {
    // SAFETY: called by SQLite with one argument.
    unsafe {
        answer(context, |link| {
            let length = ffi::sqlite3_value_int64(*arguments).max(1);
            let db = ffi::sqlite3_context_db_handle(context);
            if length > ffi::sqlite3_limit(db, ffi::SQLITE_LIMIT_LENGTH, -1).into() {
                ffi::sqlite3_result_error_toobig(context);
                return;
            }
            let mut variables = link.variables.borrow_mut();
            texts::give(context, length as usize, 0, |blob| {
                for chunk in blob.chunks_mut(8) {
                    chunk.copy_from_slice(&variables.next_random().to_le_bytes()[..chunk.len()]);
                }
                blob.len()
            });
        });
    }
}

unsafe extern "C" fn changes(context: *mut ffi::sqlite3_context, _: c_int, _: *mut *mut ffi::sqlite3_value) {
    // SAFETY: called by SQLite.
    unsafe {
        answer(context, |link| {
            let variables = link.variables.borrow();
            let here = ffi::sqlite3_changes64(ffi::sqlite3_context_db_handle(context));
            ffi::sqlite3_result_int64(context, if variables.changed { here } else { variables.changes });
        });
    }
}

unsafe extern "C" fn total_changes(
    context: *mut ffi::sqlite3_context,
    _: c_int,
    _: *mut *mut ffi::sqlite3_value,
) {
    // SAFETY: called by SQLite.
    unsafe {
        answer(context, |link| {
            let here = ffi::sqlite3_total_changes64(ffi::sqlite3_context_db_handle(context));
            ffi::sqlite3_result_int64(context, link.variables.borrow().total_changes_base + here);
        });
    }
}

unsafe extern "C" fn now(context: *mut ffi::sqlite3_context, _: c_int, _: *mut *mut ffi::sqlite3_value) {
    // SAFETY: called by SQLite.
    unsafe {
        answer(context, |link| {
            let text = crate::calendar::timestamp(link.variables.borrow().clock_ms);
            ffi::sqlite3_result_text(
                context,
                text.as_ptr().cast(),
                text.len() as c_int,
                ffi::SQLITE_TRANSIENT(),
            );
        });
    }
}

unsafe extern "C" fn current_transaction(
    context: *mut ffi::sqlite3_context,
    _: c_int,
    _: *mut *mut ffi::sqlite3_value,
) {
    // SAFETY: called by SQLite.
    unsafe {
        answer(context, |link| {
            // The outcome of the transaction could not be recorded.
            if let Err(error) = link.pages.check_writable() {
                return fail(context, link, error);
            }
            let mut variables = link.variables.borrow_mut();
            if !variables.may_write {
                let error = Error::new(
                    sqlstate::READ_ONLY_TRANSACTION,
                    "cannot assign a transaction id to a read-only user",
                );
                return fail(
                    context,
                    link,
                    error.hint("Use pg_current_xact_id_if_assigned(), which returns NULL."),
                );
            }
            if variables.transaction_id == 0 {
                variables.transaction_id = link.pages.new_transaction_id();
            }
            link.pages.set_transaction_id(variables.transaction_id);
            ffi::sqlite3_result_int64(context, variables.transaction_id as i64);
        });
    }
}

unsafe extern "C" fn current_transaction_if_assigned(
    context: *mut ffi::sqlite3_context,
    _: c_int,
    _: *mut *mut ffi::sqlite3_value,
) {
    // SAFETY: called by SQLite.
    unsafe {
        answer(context, |link| match link.variables.borrow().transaction_id {
            0 => ffi::sqlite3_result_null(context),
            id => ffi::sqlite3_result_int64(context, id as i64),
        });
    }
}

/// Asking decides, if the session's user may write: see [`crate::pages::Pages::outcome`].
unsafe extern "C" fn transaction_status(
    context: *mut ffi::sqlite3_context,
    _: c_int,
    arguments: *mut *mut ffi::sqlite3_value,
) {
    // SAFETY: called by SQLite with one argument.
    unsafe {
        answer(context, |link| {
            let id = ffi::sqlite3_value_int64(*arguments);
            let Ok(id @ 1..) = u64::try_from(id) else {
                let error =
                    Error::new(sqlstate::INVALID_PARAMETER_VALUE, format!("invalid transaction id: {id}"));
                return fail(context, link, error);
            };
            let (own, decides) = {
                let variables = link.variables.borrow();
                (variables.transaction_id, variables.may_write)
            };
            let status = match own == id {
                true => Ok(TransactionOutcome::Open),
                false => link.pages.outcome(link, id, decides),
            };
            let word = match status {
                Ok(TransactionOutcome::Open) => c"in progress",
                Ok(TransactionOutcome::Ended(true)) => c"committed",
                Ok(TransactionOutcome::Ended(false)) => c"aborted",
                Ok(TransactionOutcome::Forgotten) => return ffi::sqlite3_result_null(context),
                Err(Refusal::Failed(error)) => return fail(context, link, error),
                Err(_) => return ffi::sqlite3_result_error_code(context, ffi::SQLITE_INTERRUPT),
            };
            ffi::sqlite3_result_text(context, word.as_ptr(), -1, None);
        });
    }
}

/// Maximum bytes of an array that is expanded.
const MAX_ARRAY_BYTES: usize = 16 << 20;

/// Converts an array into a JSON array. The gateway rewrites `= ANY (array)` to use it.
unsafe extern "C" fn array_json(
    context: *mut ffi::sqlite3_context,
    _: c_int,
    arguments: *mut *mut ffi::sqlite3_value,
) {
    // SAFETY: called by SQLite with one argument; its text is valid until the value is converted
    // again.
    unsafe {
        answer(context, |link| {
            let pointer = ffi::sqlite3_value_text(*arguments);
            let length = ffi::sqlite3_value_bytes(*arguments) as usize;
            let bytes =
                if pointer.is_null() { None } else { Some(std::slice::from_raw_parts(pointer, length)) };
            if length > MAX_ARRAY_BYTES {
                let message = format!("array size exceeds the maximum of {} MiB", MAX_ARRAY_BYTES >> 20);
                return fail(context, link, Error::new(sqlstate::PROGRAM_LIMIT, message));
            }
            // For the text as UTF-8, its elements and the JSON.
            let Ok(_held) = Lease::new(4 * length as u64) else {
                return ffi::sqlite3_result_error_nomem(context);
            };
            let text = bytes.map(String::from_utf8_lossy);
            let json = crate::array::json(text.as_deref());
            let (start, length) = (json.as_ptr().cast(), json.len() as u64);
            let encoding = ffi::SQLITE_UTF8 as std::ffi::c_uchar;
            ffi::sqlite3_result_text64(context, start, length, ffi::SQLITE_TRANSIENT(), encoding);
        });
    }
}
