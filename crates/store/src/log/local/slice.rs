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
    ask_for(SLICE);
}

fn ask_for(slice: Duration) {
    let Some(mut attributes) = attributes() else { return };
    // Whoever has chosen another policy for the process knows better; those for real time mean something else by it.
    if attributes.sched_policy == libc::SCHED_OTHER as u32 {
        attributes.sched_runtime = slice.as_nanos() as u64;
        // SAFETY: of this thread; the kernel reads as many bytes as `size` says. It may refuse: then the thread has what others have.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    }
}

/// How this thread is scheduled; `None` where the system does not tell.
fn attributes() -> Option<libc::sched_attr> {
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: plain numbers, for which zero is a value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: of this thread; the kernel writes at most `size` bytes.
    let told = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) } == 0;
    told.then_some(libc::sched_attr { size, ..attributes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_all_but_its_slice() {
        let slice_ns = || attributes().map_or(0, |attributes| attributes.sched_runtime);
        let rest =
            || attributes().map(|it| (it.sched_policy, it.sched_nice, it.sched_priority, it.sched_flags));
        let before = rest();
        ask_for(2 * SLICE);
        let takes_slices = slice_ns() == (2 * SLICE).as_nanos() as u64;
        shorten();
        assert_eq!(rest(), before);
        // A system that has taken the one takes the other.
        assert!(!takes_slices || slice_ns() == SLICE.as_nanos() as u64, "{} ns", slice_ns());
    }
}
