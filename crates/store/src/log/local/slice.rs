//! A short slice of the processor's time for the log's writer.
//!
//! The writer works for some ten microseconds at a time, and everybody who commits waits for it. Where other threads keep the
//! processors busy, Linux lets one of them come to the end of its slice (some 3 ms) before a thread that wakes up has its turn,
//! unless that one has asked for a shorter slice (since Linux 6.12): what it wants is little, so it is due earlier. Its share of
//! the time is the same. Threads that it starts would have the same slices; it starts none.

use std::time::Duration;

/// The shortest that Linux knows.
const SLICE: Duration = Duration::from_micros(100);

/// Asks for short slices for this thread. Where the system does not know of that, nothing changes.
pub(super) fn shorten() {
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: plain numbers, for which zero is a value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: of this thread; the kernel writes at most `size` bytes.
    let known = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) } == 0;
    // Whoever has chosen another policy for the process knows better; those for real time mean something else by it.
    if known && attributes.sched_policy == libc::SCHED_OTHER as u32 {
        attributes.size = size;
        attributes.sched_runtime = SLICE.as_nanos() as u64;
        // SAFETY: of this thread; the kernel reads `size` bytes. It may refuse: then the thread has what others have.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `None` where the system does not tell.
    fn attributes() -> Option<libc::sched_attr> {
        // SAFETY: as above.
        unsafe {
            let mut attributes: libc::sched_attr = std::mem::zeroed();
            let size = size_of::<libc::sched_attr>();
            let told = libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) == 0;
            told.then_some(attributes)
        }
    }

    #[test]
    fn a_thread_keeps_all_but_its_slice() {
        let Some(before) = attributes() else { return };
        shorten();
        let after = attributes().expect("it was told a moment ago");
        assert_eq!(
            (after.sched_policy, after.sched_nice, after.sched_flags),
            (before.sched_policy, before.sched_nice, before.sched_flags)
        );
        // Where nothing may be changed it has what it had.
        let slices = [SLICE.as_nanos() as u64, before.sched_runtime];
        assert!(slices.contains(&after.sched_runtime), "{} ns", after.sched_runtime);
    }
}
