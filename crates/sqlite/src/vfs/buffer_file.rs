//! Temporary files of SQLite (journals, sorters, temporary tables): buffers that spill to disk.

use std::ffi::{c_int, c_void};
use std::io;

use libsqlite3_sys as ffi;

use super::callbacks::{
    device_characteristics, guarded, guarded_for, no_lock, no_reserved_lock, sector_size, sync,
};
use crate::link::Link;
use crate::spill::{SpillBuffer, refusal};

#[repr(C)]
struct BufferFile {
    base: ffi::sqlite3_file,
    file: *mut TemporaryFile,
}

/// A buffer, and the connection that it is charged to.
struct TemporaryFile {
    buffer: SpillBuffer,
    /// Memory of the buffer that is charged to the connection.
    held_bytes: u64,
    link: *const Link,
}

pub(super) const SIZE: c_int = size_of::<BufferFile>() as c_int;

static METHODS: ffi::sqlite3_io_methods = ffi::sqlite3_io_methods {
    iVersion: 1,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(sync),
    xFileSize: Some(file_size),
    xLock: Some(no_lock),
    xUnlock: Some(no_lock),
    xCheckReservedLock: Some(no_reserved_lock),
    xFileControl: Some(file_control),
    xSectorSize: Some(sector_size),
    xDeviceCharacteristics: Some(device_characteristics),
    xShmMap: None,
    xShmLock: None,
    xShmBarrier: None,
    xShmUnmap: None,
    xFetch: None,
    xUnfetch: None,
};

/// # Safety
/// `file` has space for [`SIZE`] bytes; `link` outlives the connection's handle.
pub(super) unsafe fn open(file: *mut ffi::sqlite3_file, link: &Link) {
    let buffer = SpillBuffer::new(link.files().clone());
    let temporary = Box::into_raw(Box::new(TemporaryFile { buffer, held_bytes: 0, link }));
    let opened = BufferFile { base: ffi::sqlite3_file { pMethods: &METHODS }, file: temporary };
    // SAFETY: the caller's contract.
    unsafe { file.cast::<BufferFile>().write(opened) };
}

/// # Safety
/// `file` was made by [`open`] and is not closed; SQLite does not use a file concurrently.
unsafe fn temporary<'a>(file: *mut ffi::sqlite3_file) -> &'a mut TemporaryFile {
    // SAFETY: the caller's contract.
    unsafe { &mut *(*file.cast::<BufferFile>()).file }
}

impl TemporaryFile {
    fn link(&self) -> &Link {
        // SAFETY: the link outlives the connection's handle, which closes its files.
        unsafe { &*self.link }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> c_int {
        if self.buffer.needs_file(0) {
            self.link().yield_between_pages();
        }
        match self.buffer.read_at(offset, out) {
            Ok(there) if there == out.len() => ffi::SQLITE_OK,
            Ok(_) => ffi::SQLITE_IOERR_SHORT_READ,
            Err(e) => self.failed(&e, ffi::SQLITE_IOERR_READ),
        }
    }

    /// Records why a file could not be used, and returns SQLite's code for it.
    fn failed(&self, error: &io::Error, otherwise: c_int) -> c_int {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => return ffi::SQLITE_FULL,
            _ if refusal(error).is_some() => self.link().spill_failed(error),
            _ => {}
        }
        otherwise
    }

    /// Charges the buffer's memory at a size of `length` bytes to the connection. If the
    /// connection's memory limit does not allow it, the buffer moves to a file.
    fn hold(&mut self, length: u64) -> io::Result<()> {
        if self.buffer.needs_file(length) {
            return Ok(());
        }
        self.buffer.take_memory();
        let bytes = self.buffer.memory_bytes(length);
        let more = bytes.saturating_sub(self.held_bytes);
        if more == 0 {
            return Ok(());
        }
        if self.link().charge(more) {
            self.held_bytes = bytes;
            return Ok(());
        }
        self.buffer.move_to_file()
    }

    /// Releases the memory of a buffer that has moved to a file, or is empty.
    fn release(&mut self) {
        if self.held_bytes > 0 && self.buffer.memory_bytes(self.buffer.len()) == 0 {
            let bytes = std::mem::take(&mut self.held_bytes);
            self.link().release(bytes);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> c_int {
        if self.buffer.needs_file(0) {
            self.link().yield_between_pages();
        }
        let end = offset + data.len() as u64;
        let growth = end.saturating_sub(self.buffer.len());
        if growth > 0 && !self.link().grow_buffer(growth, self.buffer.needs_file(end)) {
            return ffi::SQLITE_IOERR_WRITE;
        }
        let written = self.hold(end).and_then(|()| self.buffer.write_at(offset, data));
        self.release();
        match written {
            Ok(()) => ffi::SQLITE_OK,
            Err(e) => {
                self.link().shrink_buffer(growth);
                self.failed(&e, ffi::SQLITE_IOERR_WRITE)
            }
        }
    }

    fn truncate(&mut self, length: u64) -> c_int {
        let before = self.buffer.len();
        match self.buffer.truncate(length) {
            Ok(()) => {
                self.link().shrink_buffer(before - self.buffer.len());
                self.release();
                ffi::SQLITE_OK
            }
            Err(_) => ffi::SQLITE_IOERR_TRUNCATE,
        }
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        self.link().shrink_buffer(self.buffer.len());
        self.link().release(self.held_bytes);
    }
}

unsafe extern "C" fn close(file: *mut ffi::sqlite3_file) -> c_int {
    guarded(|| {
        // SAFETY: SQLite closes a file once.
        drop(unsafe { Box::from_raw((*file.cast::<BufferFile>()).file) });
        ffi::SQLITE_OK
    })
}

unsafe extern "C" fn read(
    file: *mut ffi::sqlite3_file,
    out: *mut c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    // SAFETY: SQLite's buffer of `length` bytes.
    let out = unsafe { std::slice::from_raw_parts_mut(out.cast::<u8>(), length as usize) };
    // SAFETY: an open temporary file, whose link outlives it.
    let (file, link) = unsafe { (temporary(file), &*temporary(file).link) };
    guarded_for(link, || file.read(offset as u64, out))
}

unsafe extern "C" fn write(
    file: *mut ffi::sqlite3_file,
    data: *const c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    // SAFETY: SQLite's buffer of `length` bytes.
    let data = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length as usize) };
    // SAFETY: an open temporary file, whose link outlives it.
    let (file, link) = unsafe { (temporary(file), &*temporary(file).link) };
    guarded_for(link, || file.write(offset as u64, data))
}

unsafe extern "C" fn truncate(file: *mut ffi::sqlite3_file, length: i64) -> c_int {
    // SAFETY: an open temporary file, whose link outlives it.
    let (file, link) = unsafe { (temporary(file), &*temporary(file).link) };
    guarded_for(link, || file.truncate(length as u64))
}

unsafe extern "C" fn file_size(file: *mut ffi::sqlite3_file, out: *mut i64) -> c_int {
    // SAFETY: an open temporary file, and SQLite's out parameter.
    unsafe { *out = temporary(file).buffer.len() as i64 };
    ffi::SQLITE_OK
}

unsafe extern "C" fn file_control(
    _file: *mut ffi::sqlite3_file,
    _op: c_int,
    _argument: *mut c_void,
) -> c_int {
    ffi::SQLITE_NOTFOUND
}
