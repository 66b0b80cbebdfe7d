//! Copies of a connection's temporary tables, which its session takes to another node.
//!
//! ```text
//!   connection: "temp"  --backup-->  Image: a database in the caller's memory
//!   Image               --backup-->  "temp" of another connection
//! ```
//!
//! SQLite's backup copies pages. It neither reads the main database, which may have moved away, nor
//! runs a statement on the connection.

use std::ffi::{CStr, c_int, c_uint};
use std::ptr;

use libsqlite3_sys as ffi;

use super::{Connection, sqlite_error};
use crate::heap;
use crate::link::Link;
use crate::{Error, Result, sqlstate};

/// Pages that are copied between two checks of the time slice.
const PAGES_PER_STEP: c_int = 256;
const MAIN: &CStr = c"main";
const TEMPORARY: &CStr = c"temp";

/// A connection to a database in memory.
struct Image(*mut ffi::sqlite3);

impl Image {
    /// Opens an empty database.
    fn open() -> Result<Image> {
        const FLAGS: c_int = ffi::SQLITE_OPEN_READWRITE
            | ffi::SQLITE_OPEN_CREATE
            | ffi::SQLITE_OPEN_NOMUTEX
            | ffi::SQLITE_OPEN_PRIVATECACHE;
        let mut db = ptr::null_mut();
        // SAFETY: valid pointers. Dropping the image closes the handle, also after an error.
        let code = unsafe { ffi::sqlite3_open_v2(c":memory:".as_ptr(), &raw mut db, FLAGS, ptr::null()) };
        let image = Image(db);
        image.check(code)?;
        Ok(image)
    }

    /// Makes `memory` the database, whose first `length` bytes are its content.
    ///
    /// # Safety
    /// Until the image is dropped, `memory` has `capacity` bytes, and nothing else changes them.
    /// They may be written unless `flags` contain `SQLITE_DESERIALIZE_READONLY`.
    unsafe fn set_memory(
        &self,
        memory: *mut u8,
        length: usize,
        capacity: usize,
        flags: c_uint,
    ) -> Result<()> {
        let (length, capacity) = (length as i64, capacity as i64);
        // SAFETY: a valid handle, and the caller's contract. SQLite does not free the memory.
        let code =
            unsafe { ffi::sqlite3_deserialize(self.0, MAIN.as_ptr(), memory, length, capacity, flags) };
        self.check(code)
    }

    /// The size of a database in the caller's memory.
    fn len(&self) -> usize {
        let mut length = 0;
        // SAFETY: a valid handle. With this flag SQLite copies nothing.
        let memory = unsafe {
            ffi::sqlite3_serialize(self.0, MAIN.as_ptr(), &raw mut length, ffi::SQLITE_SERIALIZE_NOCOPY)
        };
        if memory.is_null() { 0 } else { usize::try_from(length).unwrap_or_default() }
    }

    fn check(&self, code: c_int) -> Result<()> {
        if code == ffi::SQLITE_OK { Ok(()) } else { Err(error(self.0, code)) }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: the handle is not used again. No statement and no backup uses it.
        unsafe { ffi::sqlite3_close(self.0) };
    }
}

/// The error of a call that has returned `code`.
fn error(db: *mut ffi::sqlite3, code: c_int) -> Error {
    if db.is_null() {
        return heap::exhausted();
    }
    // SAFETY: a valid handle; the message is copied immediately.
    let message = unsafe { CStr::from_ptr(ffi::sqlite3_errmsg(db)) }.to_string_lossy().into_owned();
    sqlite_error(code, message, -1)
}

/// A copy of a database to another one.
struct Backup {
    backup: *mut ffi::sqlite3_backup,
    to: *mut ffi::sqlite3,
}

impl Backup {
    /// Begins a copy. Both handles must outlive it.
    fn begin(
        (to, to_name): (*mut ffi::sqlite3, &CStr),
        (from, from_name): (*mut ffi::sqlite3, &CStr),
    ) -> Result<Backup> {
        // SAFETY: valid handles and C strings.
        let backup = unsafe { ffi::sqlite3_backup_init(to, to_name.as_ptr(), from, from_name.as_ptr()) };
        match backup.is_null() {
            // SAFETY: a valid handle.
            true => Err(error(to, unsafe { ffi::sqlite3_errcode(to) })),
            false => Ok(Backup { backup, to }),
        }
    }

    /// Copies some pages. Returns SQLite's code.
    fn step(&mut self, pages: c_int) -> c_int {
        // SAFETY: a backup that was not finished.
        unsafe { ffi::sqlite3_backup_step(self.backup, pages) }
    }

    /// The number of pages of the source, after a step.
    fn page_count(&self) -> usize {
        // SAFETY: a backup that was not finished.
        usize::try_from(unsafe { ffi::sqlite3_backup_pagecount(self.backup) }).unwrap_or_default()
    }

    /// Copies everything.
    fn run(mut self, link: &Link) -> Result<()> {
        let code = loop {
            match self.step(PAGES_PER_STEP) {
                ffi::SQLITE_OK => drop(link.yield_if_due()),
                code => break code,
            }
        };
        match code {
            ffi::SQLITE_DONE => Ok(()),
            code => Err(link.failure().unwrap_or_else(|| error(self.to, code))),
        }
    }
}

impl Drop for Backup {
    fn drop(&mut self) {
        // SAFETY: finished once. After an error this rolls the destination back.
        unsafe { ffi::sqlite3_backup_finish(self.backup) };
    }
}

impl Connection {
    /// Copies the committed temporary tables, with at most `limit_bytes`; on the fiber. No
    /// transaction is open. Empty if there are none. The bytes are charged to the connection
    /// ([`Link::release`]).
    pub fn save_temporary_here(&mut self, limit_bytes: usize) -> Result<Vec<u8>> {
        let page_count = {
            let target = Image::open()?;
            let mut backup = Backup::begin((target.0, MAIN), (self.db, TEMPORARY))?;
            match backup.step(0) {
                ffi::SQLITE_OK => backup.page_count(),
                ffi::SQLITE_DONE => return Ok(Vec::new()),
                code => return Err(self.error(code)),
            }
        };
        let bytes = page_count * fulmar_pages::PAGE_SIZE;
        if bytes > limit_bytes {
            let text = format!("temporary tables are larger than {limit_bytes} bytes");
            return Err(Error::new(sqlstate::PROGRAM_LIMIT, text));
        }
        if !self.link.charge(bytes as u64) {
            return Err(heap::exhausted());
        }
        let copied = self.copy_temporary_here(bytes);
        if copied.is_err() {
            self.link.release(bytes as u64);
        }
        copied
    }

    /// Copies temporary tables of this size.
    fn copy_temporary_here(&mut self, bytes: usize) -> Result<Vec<u8>> {
        let mut memory: Vec<u8> = Vec::new();
        memory.try_reserve_exact(bytes).map_err(|_| heap::exhausted())?;
        let image = Image::open()?;
        // SAFETY: the vector has the capacity, and is not used before the image is dropped.
        unsafe { image.set_memory(memory.as_mut_ptr(), 0, bytes, 0)? };
        Backup::begin((image.0, MAIN), (self.db, TEMPORARY))?.run(&self.link)?;
        let length = image.len().min(bytes);
        drop(image);
        // SAFETY: SQLite has written as many bytes.
        unsafe { memory.set_len(length) };
        Ok(memory)
    }

    /// Replaces the temporary tables by a copy; on the fiber. No transaction is open.
    pub fn load_temporary_here(&mut self, copy: &[u8]) -> Result<()> {
        self.tainted = true;
        if copy.is_empty() {
            return Ok(());
        }
        let image = Image::open()?;
        let memory = copy.as_ptr().cast_mut();
        // SAFETY: the slice is borrowed until the image is dropped, and a read-only image does not
        // change it.
        unsafe { image.set_memory(memory, copy.len(), copy.len(), ffi::SQLITE_DESERIALIZE_READONLY)? };
        Backup::begin((self.db, TEMPORARY), (image.0, MAIN))?.run(&self.link)
    }
}
