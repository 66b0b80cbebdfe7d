//! The main file: SQLite's callbacks, which call the operations in [`super::pages`].

use std::ffi::{c_int, c_void};

use fulmar_pages::{PAGE_SIZE, Page, PageNo};
use libsqlite3_sys as ffi;

use super::{Link, guarded, guarded_for};

#[repr(C)]
struct MainFile {
    base: ffi::sqlite3_file,
    link: *const Link,
}

pub(super) const SIZE: c_int = size_of::<MainFile>() as c_int;

static METHODS: ffi::sqlite3_io_methods = ffi::sqlite3_io_methods {
    iVersion: 3,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(super::sync),
    xFileSize: Some(file_size),
    xLock: Some(lock),
    xUnlock: Some(unlock),
    xCheckReservedLock: Some(super::no_reserved_lock),
    xFileControl: Some(file_control),
    xSectorSize: Some(super::sector_size),
    xDeviceCharacteristics: Some(super::device_characteristics),
    // Without shared memory SQLite refuses WAL mode.
    xShmMap: None,
    xShmLock: None,
    xShmBarrier: None,
    xShmUnmap: None,
    xFetch: Some(fetch),
    xUnfetch: Some(unfetch),
};

/// # Safety
/// `file` has space for [`SIZE`] bytes; `link` outlives the connection's handle.
pub(super) unsafe fn open(file: *mut ffi::sqlite3_file, link: &Link) {
    // SAFETY: the caller's contract.
    unsafe {
        file.cast::<MainFile>().write(MainFile { base: ffi::sqlite3_file { pMethods: &METHODS }, link })
    };
}

/// # Safety
/// `file` was made by [`open`].
unsafe fn link<'a>(file: *mut ffi::sqlite3_file) -> &'a Link {
    // SAFETY: the caller's contract.
    unsafe { &*(*file.cast::<MainFile>()).link }
}

unsafe extern "C" fn close(_file: *mut ffi::sqlite3_file) -> c_int {
    ffi::SQLITE_OK
}

unsafe extern "C" fn read(
    file: *mut ffi::sqlite3_file,
    out: *mut c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    // SAFETY: SQLite's buffer of `length` bytes, and an open main file.
    let (out, link) =
        unsafe { (std::slice::from_raw_parts_mut(out.cast::<u8>(), length as usize), link(file)) };
    guarded_for(link, || {
        let code = link.read(offset as u64, out);
        link.step_aside_if_offloaded();
        code
    })
}

unsafe extern "C" fn write(
    file: *mut ffi::sqlite3_file,
    data: *const c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    // SAFETY: SQLite's buffer of `length` bytes, and an open main file.
    let (data, link) =
        unsafe { (std::slice::from_raw_parts(data.cast::<u8>(), length as usize), link(file)) };
    guarded_for(link, || {
        let Ok(page) = <&Page>::try_from(data) else { return ffi::SQLITE_IOERR_WRITE };
        link.write(page_at(offset as u64), page)
    })
}

unsafe extern "C" fn truncate(file: *mut ffi::sqlite3_file, size: i64) -> c_int {
    guarded(|| {
        // SAFETY: an open main file.
        let mut transaction = unsafe { link(file) }.transaction.borrow_mut();
        let page_count = (size as u64).div_ceil(PAGE_SIZE as u64) as u32;
        transaction.overlay.truncate(page_count);
        transaction.page_count = page_count;
        ffi::SQLITE_OK
    })
}

unsafe extern "C" fn file_size(file: *mut ffi::sqlite3_file, out: *mut i64) -> c_int {
    guarded(|| {
        // SAFETY: an open main file.
        let link = unsafe { link(file) };
        let transaction = link.transaction.borrow();
        let pages = if transaction.snapshot.is_some() {
            transaction.page_count
        } else {
            link.partition.current().page_count
        };
        // SAFETY: SQLite's out parameter.
        unsafe { *out = i64::from(pages) * PAGE_SIZE as i64 };
        ffi::SQLITE_OK
    })
}

unsafe extern "C" fn lock(file: *mut ffi::sqlite3_file, level: c_int) -> c_int {
    // SAFETY: an open main file.
    let link = unsafe { link(file) };
    guarded_for(link, || match level {
        ffi::SQLITE_LOCK_SHARED => link.begin(),
        ffi::SQLITE_LOCK_RESERVED => link.reserve(),
        _ => ffi::SQLITE_OK,
    })
}

unsafe extern "C" fn unlock(file: *mut ffi::sqlite3_file, level: c_int) -> c_int {
    guarded(|| {
        if level == ffi::SQLITE_LOCK_NONE {
            // SAFETY: an open main file.
            unsafe { link(file) }.end();
        }
        ffi::SQLITE_OK
    })
}

unsafe extern "C" fn file_control(
    file: *mut ffi::sqlite3_file,
    operation: c_int,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: an open main file.
    let link = unsafe { link(file) };
    guarded_for(link, || match operation {
        // A super-journal means a commit of several files, which is not supported.
        ffi::SQLITE_FCNTL_SYNC if !argument.is_null() => ffi::SQLITE_IOERR,
        ffi::SQLITE_FCNTL_SYNC => link.sync(),
        _ => ffi::SQLITE_NOTFOUND,
    })
}

unsafe extern "C" fn fetch(
    file: *mut ffi::sqlite3_file,
    offset: i64,
    _length: c_int,
    out: *mut *mut c_void,
) -> c_int {
    // SAFETY: an open main file.
    let link = unsafe { link(file) };
    guarded_for(link, || {
        let found = link.fetch(page_at(offset as u64));
        link.step_aside_if_offloaded();
        match found {
            Ok(page) => {
                // SAFETY: SQLite's out parameter. It does not write through the pointer.
                unsafe { *out = page.cast_mut().cast() };
                ffi::SQLITE_OK
            }
            Err(code) => code,
        }
    })
}

/// Releases a page that SQLite has fetched. Without a page SQLite asks to drop the mapping, which
/// does not exist here.
unsafe extern "C" fn unfetch(file: *mut ffi::sqlite3_file, _offset: i64, page: *mut c_void) -> c_int {
    guarded(|| {
        // SAFETY: an open main file.
        unsafe { link(file) }.reader.released(page.cast_const().cast());
        ffi::SQLITE_OK
    })
}

pub(super) fn page_at(offset: u64) -> PageNo {
    (offset / PAGE_SIZE as u64) as PageNo + 1
}
