//! Between SQLite and its allocator: what SQLite asks for is counted, and what it gives back is kept at hand.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use libsqlite3_sys as ffi;

use super::blocks;

/// SQLite's way to the allocator.
struct Allocator {
    malloc: unsafe extern "C" fn(c_int) -> *mut c_void,
    realloc: unsafe extern "C" fn(*mut c_void, c_int) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void),
    size: unsafe extern "C" fn(*mut c_void) -> c_int,
}

static ALLOCATOR: OnceLock<Allocator> = OnceLock::new();

/// Puts us between SQLite and its allocator. That must be before SQLite is first used, by whoever in this process: before `main`.
#[used]
// SAFETY: the section holds pointers to functions of this type, which the system calls once when the program begins.
#[unsafe(link_section = ".init_array")]
static INSTALL: extern "C" fn() = install;

extern "C" fn install() {
    // SAFETY: SQLite fills the structure in, copies it, and is not in use yet; its functions live as long as the process.
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
        // With SQLite's own statistics each allocation holds a global mutex, and a fiber may be suspended in one.
        ffi::sqlite3_config(ffi::SQLITE_CONFIG_MEMSTATUS, 0 as c_int);
    }
}

/// More memory is wanted by the connection that runs on this thread; answers whether it may have it. Who is no connection of a
/// partition's (the metadata store) may.
fn take(bytes: c_int) -> bool {
    super::change(0, u64::from(bytes.unsigned_abs()))
}

fn give(bytes: c_int) {
    super::change(u64::from(bytes.unsigned_abs()), 0);
}

unsafe extern "C" fn counted_malloc(bytes: c_int) -> *mut c_void {
    let Some(allocator) = ALLOCATOR.get() else { return ptr::null_mut() };
    let bytes = blocks::rounded(bytes);
    if !super::admit(bytes) || !take(bytes) {
        return ptr::null_mut();
    }
    if let Some(kept) = blocks::take(bytes) {
        return kept.as_ptr();
    }
    // SAFETY: SQLite's own call.
    let memory = unsafe { (allocator.malloc)(bytes) };
    if memory.is_null() {
        give(bytes);
    }
    memory
}

unsafe extern "C" fn counted_realloc(memory: *mut c_void, bytes: c_int) -> *mut c_void {
    let Some(allocator) = ALLOCATOR.get() else { return ptr::null_mut() };
    let bytes = blocks::rounded(bytes);
    // SAFETY: SQLite's own call, with memory that it had from here.
    let before = unsafe { (allocator.size)(memory) };
    if bytes > before && !(super::admit(bytes) && take(bytes - before)) {
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
    // SAFETY: SQLite's own call, with memory that it had from here and uses no more.
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

/// Gives back to the allocator what a thread has kept.
///
/// # Safety
/// The block was given to [`blocks::keep`], and was not taken since.
pub(super) unsafe fn free(block: NonNull<c_void>) {
    if let Some(allocator) = ALLOCATOR.get() {
        // SAFETY: the caller's promise.
        unsafe { (allocator.free)(block.as_ptr()) };
    }
}
