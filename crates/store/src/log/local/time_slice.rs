//! Requests a short scheduler time slice for the log's writer thread.
//!
//! The writer runs for about 10 us at a time, and every committing session waits for it. If other
//! threads keep the CPUs busy, Linux lets the running one finish its slice (about 3 ms) before a
//! thread that wakes up is scheduled, unless that thread has requested a shorter slice (since Linux
//! 6.12): its request is small, so its deadline is earlier. Its share of CPU time does not change.
//! Child threads would inherit the slice; the writer starts none.

use std::time::Duration;

/// The shortest slice that Linux supports.
const SLICE: Duration = Duration::from_micros(100);

/// Requests short slices for the current thread. Has no effect if the kernel does not support it.
pub(super) fn request_short_slice() {
    request(SLICE);
}

fn request(slice: Duration) {
    let Some(mut attributes) = attributes() else { return };
    // Do not change a policy that was chosen explicitly for the process. Real-time policies
    // interpret the field differently.
    if attributes.sched_policy == libc::SCHED_OTHER as u32 {
        attributes.sched_runtime = slice.as_nanos() as u64;
        // SAFETY: applies to this thread; the kernel reads `size` bytes. If the call fails, the
        // slice does not change.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    }
}

/// Returns the scheduling attributes of the current thread, or None if they are not available.
fn attributes() -> Option<libc::sched_attr> {
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: the struct consists of integers, for which zero is a valid value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: applies to this thread; the kernel writes at most `size` bytes.
    let succeeded = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) } == 0;
    succeeded.then_some(libc::sched_attr { size, ..attributes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_slice_of_the_thread_changes() {
        let slice_ns = || attributes().map_or(0, |attributes| attributes.sched_runtime);
        let other_attributes =
            || attributes().map(|it| (it.sched_policy, it.sched_nice, it.sched_priority, it.sched_flags));
        let before = other_attributes();
        request(2 * SLICE);
        let slices_supported = slice_ns() == (2 * SLICE).as_nanos() as u64;
        request_short_slice();
        assert_eq!(other_attributes(), before);
        // A kernel that accepted the first request accepts the second.
        assert!(!slices_supported || slice_ns() == SLICE.as_nanos() as u64, "{} ns", slice_ns());
    }
}
