//! Charges memory to the connection that runs on this thread.

use crate::Result;
use crate::heap::exhausted;
use crate::link::current;

/// Called before each of SQLite's allocations. Returns false if the connection that runs on this
/// thread has too little stack left for it ([`crate::fiber::stack`]), or its fiber was dropped. A
/// large allocation first moves the connection's fiber to the offload pool, so this may return on
/// another thread.
#[inline(never)]
pub fn admit(bytes: std::ffi::c_int) -> bool {
    // SAFETY: called by SQLite; the running fiber uses the link.
    unsafe { current() }.is_none_or(|link| link.admit_allocation(bytes as usize))
}

/// Memory outside SQLite that the connection which runs on this thread holds until this is dropped
/// (on its fiber).
#[derive(Debug, Default)]
pub struct Lease(u64);

impl Lease {
    /// Fails with 53200 if the connection has reached its limit.
    pub fn new(bytes: u64) -> Result<Lease> {
        let mut lease = Lease(0);
        lease.set(bytes)?;
        Ok(lease)
    }

    /// Changes the amount that is held.
    pub fn set(&mut self, bytes: u64) -> Result<()> {
        if !change(self.0, bytes) {
            return Err(exhausted());
        }
        self.0 = bytes;
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        change(self.0, 0);
    }
}

/// Changes the memory that the connection on this thread holds from `before` to `now` bytes.
/// Returns false, and changes nothing, if a limit is reached. Nothing is counted if no connection
/// runs here (the metadata store).
pub fn change(before: u64, now: u64) -> bool {
    // SAFETY: called by SQLite, or by code that a connection has called; the result is not kept.
    let Some(link) = (unsafe { current() }) else { return true };
    if now > before {
        return link.charge(now - before);
    }
    link.release(before - now);
    true
}
