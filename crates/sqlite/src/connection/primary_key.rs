//! Reads the primary key of a table from SQLite's schema.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;

use libsqlite3_sys as ffi;

use super::Connection;
use crate::Result;
use crate::sql::TableKey;

/// A primary key with more columns counts as none.
const MAX_KEY_COLUMNS: usize = 16;

impl Connection {
    /// The primary key of a table; on the fiber. It has no columns if there is none. A unique index
    /// TABLE_pkey counts as one: `ALTER TABLE ... ADD PRIMARY KEY` creates it.
    pub fn primary_key_here(&mut self, table: &str) -> Result<TableKey> {
        let tables = self.columns_here(&[table.to_owned()])?;
        let names = || tables.iter().flatten().enumerate();
        let mut columns: Vec<(String, usize)> = names()
            .filter(|(_, (name, _))| self.is_in_primary_key(table, name))
            .map(|(position, (name, _))| (name.to_ascii_lowercase(), position))
            .collect();
        if columns.is_empty() {
            let place = |key: &String| {
                let (position, _) = names().find(|(_, (name, _))| name.eq_ignore_ascii_case(key))?;
                Some((key.to_ascii_lowercase(), position))
            };
            // An expression is no column.
            columns =
                self.key_index_here(table)?.iter().map(place).collect::<Option<_>>().unwrap_or_default();
        }
        if columns.len() > MAX_KEY_COLUMNS {
            columns.clear();
        }
        Ok(TableKey { table: table.into(), columns })
    }

    fn is_in_primary_key(&self, table: &str, column: &str) -> bool {
        let (Ok(table), Ok(column)) = (CString::new(table), CString::new(column)) else { return false };
        let mut is_in_key: c_int = 0;
        // SAFETY: an open connection, and texts that end with a zero byte. SQLite ignores results
        // whose pointer is null.
        let code = unsafe {
            ffi::sqlite3_table_column_metadata(
                self.db,
                ptr::null(),
                table.as_ptr(),
                column.as_ptr(),
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
                &mut is_in_key,
                ptr::null_mut(),
            )
        };
        code == ffi::SQLITE_OK && is_in_key != 0
    }

    /// The columns of the unique index TABLE_pkey, if there is one.
    fn key_index_here(&mut self, table: &str) -> Result<Vec<String>> {
        let table = table.replace('\'', "''");
        let sql = format!(
            "SELECT i.name FROM pragma_index_list('{table}') l, pragma_index_info(l.name) i \
             WHERE l.name = '{table}_pkey' COLLATE NOCASE AND l.\"unique\" AND NOT l.partial"
        );
        let Ok(sql) = CString::new(sql) else { return Ok(Vec::new()) };
        let mut names: Vec<String> = Vec::new();
        let target: *mut Vec<String> = &mut names;
        // SAFETY: an open connection, a C string, and a callback that gets the vector, which
        // outlives the call.
        let code = unsafe {
            ffi::sqlite3_exec(self.db, sql.as_ptr(), Some(add_name), target.cast(), ptr::null_mut())
        };
        self.link.heap_account.end_compiling();
        if code == ffi::SQLITE_OK { Ok(names) } else { Err(self.error(code)) }
    }
}

/// Adds the first column of a row to a vector of names. An expression of an index has an empty
/// name.
///
/// # Safety
/// `names` is a `Vec<String>`, and `values` has `count` values, each null or a C string.
unsafe extern "C" fn add_name(
    names: *mut c_void,
    count: c_int,
    values: *mut *mut c_char,
    _: *mut *mut c_char,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        let names: &mut Vec<String> = &mut *names.cast();
        let value = if count > 0 { *values } else { ptr::null_mut() };
        let name = if value.is_null() { "".into() } else { CStr::from_ptr(value).to_string_lossy() };
        names.push(name.into_owned());
    }
    0
}
