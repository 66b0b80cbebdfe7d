//! What a tenant's SQL may do: everything inside its own database, nothing outside it.
//!
//! There is no other file to open (the VFS opens one main file a connection and refuses the rest), no extension to
//! load, and no function that reaches the machine; this authorizer makes the refusals early and clear, and lets only
//! those PRAGMAs through that cannot break how we run SQLite.

use std::ffi::{CStr, c_char, c_int, c_void};

use libsqlite3_sys as ffi;

use crate::vfs::Link;

/// PRAGMAs that may be read, and given an argument where they take one (a table's name, say).
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

/// PRAGMAs that may be set: they are part of the data, or of the session's own transaction.
const SETTABLE: [&str; 4] = ["application_id", "defer_foreign_keys", "optimize", "user_version"];

/// Functions that would reach outside, should a build of SQLite ever have them.
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
    // SAFETY: the link outlives the handle; SQLite's strings live during the call.
    let (link, first, second) = unsafe { (&*link.cast::<Link>(), text(first), text(second)) };
    // SQLite asks while it compiles. A statement that it runs is compiled again when the schema has
    // changed.
    link.held.begin_compiling();
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
        None => listed(&READABLE) || listed(&["page_size", "schema_version", "user_version"]),
        // Settings of the connection would outlive the session in the pool; and text is UTF-8.
        Some(_) if name.eq_ignore_ascii_case("foreign_keys") || name.eq_ignore_ascii_case("encoding") => {
            false
        }
        Some(_) => listed(&SETTABLE) || listed(&READABLE) || link.trusted.get(),
    }
}

/// # Safety
/// `pointer` is null or a C string that lives long enough.
unsafe fn text<'a>(pointer: *const c_char) -> Option<&'a str> {
    // SAFETY: the caller's promise.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_str().unwrap_or("?"))
}
