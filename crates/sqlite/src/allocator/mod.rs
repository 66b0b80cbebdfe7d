//! Wraps SQLite's allocator: counts allocations, and caches freed blocks ([`blocks`]).

mod blocks;

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use libsqlite3_sys as ffi;

pub(crate) use blocks::free_cached_blocks;

use crate::lease;

/// The allocator that SQLite would use without the wrapper.
struct Allocator {
    malloc: unsafe extern "C" fn(c_int) -> *mut c_void,
    realloc: unsafe extern "C" fn(*mut c_void, c_int) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void),
    size: unsafe extern "C" fn(*mut c_void) -> c_int,
}

static ALLOCATOR: OnceLock<Allocator> = OnceLock::new();

/// Installs the wrapper. This must happen before any code in the process uses SQLite: before
/// `main`.
#[used]
// SAFETY: the section contains pointers to functions of this type, which the system calls once when
// the program starts.
#[unsafe(link_section = ".init_array")]
static INSTALL: extern "C" fn() = install;

extern "C" fn install() {
    // SAFETY: SQLite fills in the structure, copies it, and is not in use yet. Its functions exist
    // as long as the process.
    unsafe {
        let mut methods = std::mem::zeroed::<ffi::sqlite3_mem_methods>();
        if ffi::sqlite3_config(ffi::SQLITE_CONFIG_GETMALLOC, &raw mut methods) != ffi::SQLITE_OK {
            return;
        }
        let (Some(malloc), Some(realloc), Some(free), Some(size)) =
            (methods.xMalloc, methods.xRealloc, methods.xFree, methods.xSize)
        else {
            return;
        };
        let _ = ALLOCATOR.set(Allocator { malloc, realloc, free, size });
        methods.xMalloc = Some(counted_malloc);
        methods.xRealloc = Some(counted_realloc);
        methods.xFree = Some(counted_free);
        methods.xRoundup = Some(rounded);
        ffi::sqlite3_config(ffi::SQLITE_CONFIG_MALLOC, &raw mut methods);
        // With SQLite's statistics each allocation would hold a global mutex, and a fiber may be
        // suspended in an allocation.
        ffi::sqlite3_config(ffi::SQLITE_CONFIG_MEMSTATUS, 0 as c_int);
    }
}

/// Charges memory to the connection that runs on this thread. Returns false if a limit is reached.
/// Without such a connection (the metadata store) it always succeeds.
fn take(bytes: c_int) -> bool {
    lease::change(0, u64::from(bytes.unsigned_abs()))
}

fn give(bytes: c_int) {
    lease::change(u64::from(bytes.unsigned_abs()), 0);
}

unsafe extern "C" fn counted_malloc(bytes: c_int) -> *mut c_void {
    let Some(allocator) = ALLOCATOR.get() else { return ptr::null_mut() };
    let bytes = blocks::rounded(bytes);
    if !lease::admit(bytes) || !take(bytes) {
        return ptr::null_mut();
    }
    if let Some(cached) = blocks::take(bytes) {
        return cached.as_ptr();
    }
    // SAFETY: the call that SQLite would make.
    let memory = unsafe { (allocator.malloc)(bytes) };
    if memory.is_null() {
        give(bytes);
    }
    memory
}

unsafe extern "C" fn counted_realloc(memory: *mut c_void, bytes: c_int) -> *mut c_void {
    let Some(allocator) = ALLOCATOR.get() else { return ptr::null_mut() };
    let bytes = blocks::rounded(bytes);
    // SAFETY: the call that SQLite would make, with memory that was allocated here.
    let before = unsafe { (allocator.size)(memory) };
    if bytes > before && !(lease::admit(bytes) && take(bytes - before)) {
        return ptr::null_mut();
    }
    // SAFETY: the same.
    let moved = unsafe { (allocator.realloc)(memory, bytes) };
    match moved.is_null() {
        true if bytes > before => give(bytes - before),
        false if bytes < before => give(before - bytes),
        _ => {}
    }
    moved
}

unsafe extern "C" fn counted_free(memory: *mut c_void) {
    let (Some(allocator), Some(block)) = (ALLOCATOR.get(), NonNull::new(memory)) else { return };
    // SAFETY: the call that SQLite would make, with memory that was allocated here and is no longer
    // used.
    unsafe {
        let bytes = (allocator.size)(memory);
        give(bytes);
        if !blocks::keep(block, bytes) {
            (allocator.free)(memory);
        }
    }
}

unsafe extern "C" fn rounded(bytes: c_int) -> c_int {
    blocks::rounded(bytes)
}

/// Frees a cached block.
///
/// # Safety
/// The block was given to [`blocks::keep`], and was not taken since.
pub(super) unsafe fn free(block: NonNull<c_void>) {
    if let Some(allocator) = ALLOCATOR.get() {
        // SAFETY: the caller's contract.
        unsafe { (allocator.free)(block.as_ptr()) };
    }
}
