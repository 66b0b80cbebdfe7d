//! The authorizer for tenants' SQL: everything inside the tenant's database is allowed, nothing
//! outside it.
//!
//! A statement could not reach anything outside: the VFS opens one main file per connection and
//! rejects all others, and there are no extensions to load and no functions that access the
//! machine. The authorizer rejects such statements early, with a clear error. It also allows only
//! those PRAGMAs that cannot break the engine's use of SQLite.

use std::ffi::{CStr, c_char, c_int, c_void};

use libsqlite3_sys as ffi;

use crate::link::Link;

/// PRAGMAs that may be read, and may be given an argument if they take one (the name of a table,
/// for example).
const READABLE: [&str; 23] = [
    "application_id",
    "collation_list",
    "compile_options",
    "data_version",
    "database_list",
    "defer_foreign_keys",
    "encoding",
    "foreign_key_check",
    "foreign_key_list",
    "foreign_keys",
    "freelist_count",
    "function_list",
    "index_info",
    "index_list",
    "index_xinfo",
    "integrity_check",
    "module_list",
    "optimize",
    "page_count",
    "quick_check",
    "table_info",
    "table_list",
    "table_xinfo",
];

/// PRAGMAs that may be set: they are part of the data, or of the session's transaction.
const SETTABLE: [&str; 4] = ["application_id", "defer_foreign_keys", "optimize", "user_version"];

/// Functions that access files or memory, in case a build of SQLite has them.
const FORBIDDEN_FUNCTIONS: [&str; 6] =
    ["load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "sqlite_dbpage"];

/// Installs the authorizer.
pub(super) fn install(db: *mut ffi::sqlite3, link: &Link) {
    let link: *const Link = link;
    // SAFETY: the link outlives the handle.
    unsafe { ffi::sqlite3_set_authorizer(db, Some(authorize), link as *mut c_void) };
}

unsafe extern "C" fn authorize(
    link: *mut c_void,
    action: c_int,
    first: *const c_char,
    second: *const c_char,
    _database: *const c_char,
    _trigger: *const c_char,
) -> c_int {
    // SAFETY: the link outlives the handle; SQLite's strings are valid during the call.
    let (link, first, second) = unsafe { (&*link.cast::<Link>(), text(first), text(second)) };
    // SQLite calls this while it compiles. It compiles a running statement again after a schema
    // change.
    link.heap_account.begin_compiling();
    let allowed = match action {
        // VACUUM attaches a nameless temporary database.
        ffi::SQLITE_ATTACH => link.trusted.get() && first.unwrap_or_default().is_empty(),
        ffi::SQLITE_DETACH => link.trusted.get(),
        ffi::SQLITE_PRAGMA => pragma_allowed(link, first.unwrap_or_default(), second),
        ffi::SQLITE_FUNCTION => {
            !FORBIDDEN_FUNCTIONS.iter().any(|f| second.is_some_and(|s| s.eq_ignore_ascii_case(f)))
        }
        _ => true,
    };
    if allowed { ffi::SQLITE_OK } else { ffi::SQLITE_DENY }
}

fn pragma_allowed(link: &Link, name: &str, argument: Option<&str>) -> bool {
    let listed = |list: &[&str]| list.iter().any(|known| known.eq_ignore_ascii_case(name));
    match argument {
        None => {
            listed(&READABLE)
                || listed(&["page_size", "schema_version", "user_version"])
                || link.trusted.get()
        }
        // Connection settings would outlive the session in the pool, and the encoding is always
        // UTF-8.
        Some(_) if name.eq_ignore_ascii_case("foreign_keys") || name.eq_ignore_ascii_case("encoding") => {
            false
        }
        Some(_) => listed(&SETTABLE) || listed(&READABLE) || link.trusted.get(),
    }
}

/// # Safety
/// `pointer` is null or a C string that is valid for `'a`.
unsafe fn text<'a>(pointer: *const c_char) -> Option<&'a str> {
    // SAFETY: the caller's contract.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_str().unwrap_or("?"))
}
