//! The main file: its pages are those of the connection's [`Pages`].
//!
//! The callbacks are compiled for each implementation, so that reading a page is a direct call.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;

use fulmar_pages::{PAGE_SIZE, Page, PageNo};
use libsqlite3_sys as ffi;

use super::callbacks::{device_characteristics, guarded, guarded_for, no_reserved_lock, sector_size, sync};
use crate::link::Link;
use crate::pages::{Pages, Refusal};

#[repr(C)]
struct MainFile<P> {
    base: ffi::sqlite3_file,
    link: *const Link,
    pages: *const P,
}

/// The size of every main file: it does not depend on the type of the pages.
pub(super) const SIZE: c_int = size_of::<MainFile<()>>() as c_int;

struct Methods<P>(PhantomData<P>);

impl<P: Pages> Methods<P> {
    const METHODS: &'static ffi::sqlite3_io_methods = &ffi::sqlite3_io_methods {
        iVersion: 3,
        xClose: Some(close),
        xRead: Some(read::<P>),
        xWrite: Some(write::<P>),
        xTruncate: Some(truncate::<P>),
        xSync: Some(sync),
        xFileSize: Some(file_size::<P>),
        xLock: Some(lock::<P>),
        xUnlock: Some(unlock::<P>),
        xCheckReservedLock: Some(no_reserved_lock),
        xFileControl: Some(file_control::<P>),
        xSectorSize: Some(sector_size),
        xDeviceCharacteristics: Some(device_characteristics),
        // Without shared memory SQLite refuses WAL mode.
        xShmMap: None,
        xShmLock: None,
        xShmBarrier: None,
        xShmUnmap: None,
        xFetch: Some(fetch::<P>),
        xUnfetch: Some(unfetch::<P>),
    };
}

/// # Safety
/// `file` has space for [`SIZE`] bytes; `link` outlives the connection's handle, and its pages are
/// a `P`.
pub(crate) unsafe fn open<P: Pages>(file: *mut ffi::sqlite3_file, link: &Link) {
    let pages = std::rc::Rc::as_ptr(&link.pages).cast::<P>();
    let opened = MainFile { base: ffi::sqlite3_file { pMethods: Methods::<P>::METHODS }, link, pages };
    // SAFETY: the caller's contract.
    unsafe { file.cast::<MainFile<P>>().write(opened) };
}

/// # Safety
/// `file` was made by [`open`] for `P`.
unsafe fn parts<'a, P>(file: *mut ffi::sqlite3_file) -> (&'a Link, &'a P) {
    // SAFETY: the caller's contract. The link holds the pages.
    unsafe {
        let file = &*file.cast::<MainFile<P>>();
        (&*file.link, &*file.pages)
    }
}

unsafe extern "C" fn close(_file: *mut ffi::sqlite3_file) -> c_int {
    ffi::SQLITE_OK
}

unsafe extern "C" fn read<P: Pages>(
    file: *mut ffi::sqlite3_file,
    out: *mut c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    // SAFETY: SQLite's buffer of `length` bytes, and an open main file.
    let (out, (link, pages)) =
        unsafe { (std::slice::from_raw_parts_mut(out.cast::<u8>(), length as usize), parts::<P>(file)) };
    guarded_for(link, || {
        let code = read_at(link, pages, offset as u64, out);
        link.step_aside_if_offloaded();
        code
    })
}

fn read_at<P: Pages>(link: &Link, pages: &P, offset: u64, out: &mut [u8]) -> c_int {
    let within = (offset % PAGE_SIZE as u64) as usize;
    if link.yield_between_pages() || within + out.len() > PAGE_SIZE {
        return ffi::SQLITE_IOERR_READ;
    }
    match pages.read(link, page_at(offset), within, out) {
        Ok(true) => ffi::SQLITE_OK,
        Ok(false) => {
            out.fill(0);
            ffi::SQLITE_IOERR_SHORT_READ
        }
        Err(refusal) => link.refused(refusal, ffi::SQLITE_IOERR_READ),
    }
}

unsafe extern "C" fn write<P: Pages>(
    file: *mut ffi::sqlite3_file,
    data: *const c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    // SAFETY: SQLite's buffer of `length` bytes, and an open main file.
    let (data, (link, pages)) =
        unsafe { (std::slice::from_raw_parts(data.cast::<u8>(), length as usize), parts::<P>(file)) };
    guarded_for(link, || {
        let Ok(data) = <&Page>::try_from(data) else { return ffi::SQLITE_IOERR_WRITE };
        link.yield_between_pages();
        match pages.write(link, page_at(offset as u64), data) {
            Ok(()) => ffi::SQLITE_OK,
            Err(refusal) => link.refused(refusal, ffi::SQLITE_IOERR_WRITE),
        }
    })
}

unsafe extern "C" fn truncate<P: Pages>(file: *mut ffi::sqlite3_file, size: i64) -> c_int {
    guarded(|| {
        // SAFETY: an open main file.
        let (_, pages) = unsafe { parts::<P>(file) };
        pages.truncate((size as u64).div_ceil(PAGE_SIZE as u64) as u32);
        ffi::SQLITE_OK
    })
}

unsafe extern "C" fn file_size<P: Pages>(file: *mut ffi::sqlite3_file, out: *mut i64) -> c_int {
    guarded(|| {
        // SAFETY: an open main file, and SQLite's out parameter.
        unsafe { *out = i64::from(parts::<P>(file).1.page_count()) * PAGE_SIZE as i64 };
        ffi::SQLITE_OK
    })
}

unsafe extern "C" fn lock<P: Pages>(file: *mut ffi::sqlite3_file, level: c_int) -> c_int {
    // SAFETY: an open main file.
    let (link, pages) = unsafe { parts::<P>(file) };
    guarded_for(link, || match level {
        ffi::SQLITE_LOCK_SHARED => {
            pages.begin();
            ffi::SQLITE_OK
        }
        ffi::SQLITE_LOCK_RESERVED => match pages.reserve() {
            Ok(()) => ffi::SQLITE_OK,
            Err(refusal) => link.refused(refusal, ffi::SQLITE_IOERR),
        },
        _ => ffi::SQLITE_OK,
    })
}

unsafe extern "C" fn unlock<P: Pages>(file: *mut ffi::sqlite3_file, level: c_int) -> c_int {
    guarded(|| {
        if level == ffi::SQLITE_LOCK_NONE {
            // SAFETY: an open main file.
            let (link, pages) = unsafe { parts::<P>(file) };
            pages.end(link);
        }
        ffi::SQLITE_OK
    })
}

unsafe extern "C" fn file_control<P: Pages>(
    file: *mut ffi::sqlite3_file,
    operation: c_int,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: an open main file.
    let (link, pages) = unsafe { parts::<P>(file) };
    guarded_for(link, || match operation {
        // A super-journal means a commit of several files, which is not supported.
        ffi::SQLITE_FCNTL_SYNC if !argument.is_null() => ffi::SQLITE_IOERR,
        ffi::SQLITE_FCNTL_SYNC => match pages.commit(link) {
            Ok(()) => ffi::SQLITE_OK,
            Err(Refusal::Interrupted) => ffi::SQLITE_INTERRUPT,
            Err(refusal) => link.refused(refusal, ffi::SQLITE_IOERR),
        },
        _ => ffi::SQLITE_NOTFOUND,
    })
}

unsafe extern "C" fn fetch<P: Pages>(
    file: *mut ffi::sqlite3_file,
    offset: i64,
    _length: c_int,
    out: *mut *mut c_void,
) -> c_int {
    // SAFETY: an open main file.
    let (link, pages) = unsafe { parts::<P>(file) };
    guarded_for(link, || {
        if link.yield_between_pages() {
            return ffi::SQLITE_IOERR_READ;
        }
        let found = pages.fetch(link, page_at(offset as u64));
        link.step_aside_if_offloaded();
        match found {
            Ok(page) => {
                let page = page.map_or(std::ptr::null(), |page| page.as_ptr());
                // SAFETY: SQLite's out parameter. It does not write through the pointer.
                unsafe { *out = page.cast_mut().cast() };
                ffi::SQLITE_OK
            }
            Err(refusal) => link.refused(refusal, ffi::SQLITE_IOERR_READ),
        }
    })
}

/// Releases a page that SQLite has fetched. Without a page SQLite asks to drop the mapping, which
/// does not exist here.
unsafe extern "C" fn unfetch<P: Pages>(
    file: *mut ffi::sqlite3_file,
    _offset: i64,
    page: *mut c_void,
) -> c_int {
    guarded(|| {
        // SAFETY: an open main file.
        let (_, pages) = unsafe { parts::<P>(file) };
        pages.unfetch(page.cast_const().cast());
        ffi::SQLITE_OK
    })
}

fn page_at(offset: u64) -> PageNo {
    (offset / PAGE_SIZE as u64) as PageNo + 1
}
