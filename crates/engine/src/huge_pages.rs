//! Huge pages for memory that is in use through and through, while the process works.
//!
//! The thousands of tenants of a busy node have a few hundred KiB each on the heap, and every statement touches another one's: with
//! pages of 4 KiB nearly each touch begins with a walk through the processor's page tables, and 500 tenants cost 7 % more processor
//! time. With huge pages from the first byte on an idle node would be twice as large, and stay large when its tenants are closed
//! (decisions 0013, 0016). So whether 2 MiB get a huge page is decided when it is seen what they are used for:
//!
//! ```text
//!   once a second, if the process has worked ──> its large mappings ──> 2 MiB of which 15/16 are in use ──> MADV_COLLAPSE
//! ```
//!
//! The kernel copies such a piece into a huge page; who touches it or maps memory meanwhile waits for some part of a millisecond. A piece
//! costs a sixteenth of its memory more at most. What the allocator gives back to the system later takes the huge page apart again, as soon
//! as the system needs the memory. (A piece that is emptied and filled between two looks stays apart.)
//!
//! Nothing depends on it: where the system has no huge pages, does not know that request (Linux before 6.1), forbids it to the
//! process (`PR_SET_THP_DISABLE`), or has none at hand, the memory stays as it is. Memory for pages of data asks for huge pages by itself
//! ([`crate::page_memory`]).

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::ClockId;

/// A huge page.
const HUGE_BYTES: usize = 2 << 20;
/// Other pages.
const SMALL_BYTES: usize = 4096;
const SMALL_PAGES: usize = HUGE_BYTES / SMALL_BYTES;
/// So many of a piece's pages must be in use.
const DENSE: usize = SMALL_PAGES / 16 * 15;
/// Mappings that are smaller (stacks, buffers) are not looked at.
const LEAST_BYTES: usize = 32 << 20;

/// The time between two passes.
const PERIOD: Duration = Duration::from_secs(1);
/// The processor time in which the process has worked, of a period.
const WORKED: Duration = Duration::from_millis(250);
/// The longest that a pass takes: one piece takes about a millisecond. The next one goes on where it ended.
const PASS: Duration = Duration::from_millis(20);

/// The most passes that are left out after one for which there were no huge pages: the system looks for them long.
const MOST_LEFT_OUT: u32 = 60;

/// Whether huge pages may be had at all: `always [madvise] never`.
const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Follows this process's memory in a thread of its own, for as long as the process lives, where the system can do something for it.
pub fn follow() {
    if is_known() {
        // Without the thread the memory stays as it is.
        let _ = thread::Builder::new().name("fulmar-memory".to_owned()).spawn(run);
    }
}

/// Whether the system knows the request and grants it to this process.
fn is_known() -> bool {
    // SAFETY: of no memory at all; the kernel looks at the request first.
    let is_known = unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_COLLAPSE) } == 0;
    // SAFETY: a question about this process, with arguments that must be zero.
    let is_forbidden = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) } > 0;
    is_known && !is_forbidden
}

/// Whether the system's owner lets it have any, as of now.
fn may_have_any() -> bool {
    fs::read_to_string(SETTING).is_ok_and(|setting| !setting.contains("[never]"))
}

fn run() {
    let mut pieces = Pieces::default();
    let mut worked = processor_time();
    loop {
        thread::sleep(PERIOD);
        let now = processor_time();
        if now.saturating_sub(worked) >= WORKED
            && may_have_any()
            && let Ok(maps) = fs::read_to_string("/proc/self/maps")
        {
            pieces.pass(&maps, Instant::now() + PASS);
        }
        worked = now;
    }
}

/// What all threads of the process have used.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// What is known of the process's memory.
#[derive(Default)]
struct Pieces {
    /// The addresses of pieces that were seen to and are in use since.
    done: BTreeSet<usize>,
    /// Where the next pass begins.
    at: usize,
    /// So many passes are left out now, and after the next failure.
    leave_out: u32,
    then_leave_out: u32,
}

impl Pieces {
    /// Goes on through the memory (`/proc/self/maps`) until all has been looked at, the time has come, or there are no huge pages.
    fn pass(&mut self, maps: &str, until: Instant) {
        if self.leave_out > 0 {
            self.leave_out -= 1;
            return;
        }
        let pieces = maps.lines().filter_map(mapping).flat_map(pieces);
        for piece in pieces.skip_while(|piece| *piece < self.at) {
            if Instant::now() >= until {
                self.at = piece;
                return;
            }
            if !is_dense(piece) {
                self.done.remove(&piece);
            } else if !self.done.contains(&piece) {
                match collapse(piece) {
                    Ok(()) => self.then_leave_out = 0,
                    // The system wants this piece small: it will the next time, too.
                    Err(libc::EINVAL) => {}
                    // Somebody writes from there to a disk, or has unmapped it.
                    Err(libc::EAGAIN) => continue,
                    Err(_) => {
                        self.then_leave_out = (2 * self.then_leave_out + 1).min(MOST_LEFT_OUT);
                        (self.leave_out, self.at) = (self.then_leave_out, piece + HUGE_BYTES);
                        return;
                    }
                }
                self.done.insert(piece);
            }
        }
        self.at = 0;
    }
}

/// The addresses of a large mapping of memory without a file, by its line in `/proc/self/maps`.
fn mapping(line: &str) -> Option<Range<usize>> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
    let is_memory = fields.next()? == "rw-p" && fields.nth(3).is_none_or(|name| name.starts_with("[anon:"));
    (is_memory && range.len() >= LEAST_BYTES).then_some(range)
}

/// The addresses of what a huge page could back of it.
fn pieces(mapping: Range<usize>) -> impl Iterator<Item = usize> {
    let first = mapping.start.next_multiple_of(HUGE_BYTES);
    (first..=mapping.end - HUGE_BYTES).step_by(HUGE_BYTES)
}

/// Whether most of a piece is in use. (Of what is in a huge page already all is.)
fn is_dense(piece: usize) -> bool {
    let mut in_memory = [0_u8; SMALL_PAGES];
    // SAFETY: the kernel writes a byte for each page, and refuses what is not mapped.
    let told = unsafe { libc::mincore(address(piece), HUGE_BYTES, in_memory.as_mut_ptr()) } == 0;
    told && in_memory.iter().filter(|page| **page & 1 == 1).count() >= DENSE
}

/// Moves a piece into a huge page. Fails with the system's number of the error.
fn collapse(piece: usize) -> Result<(), i32> {
    // SAFETY: this does not change what the memory holds, whosever it is.
    match unsafe { libc::madvise(address(piece), HUGE_BYTES, libc::MADV_COLLAPSE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or_default()),
    }
}

/// Only the kernel looks behind it.
fn address(piece: usize) -> *mut libc::c_void {
    std::ptr::without_provenance_mut(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn large_memory_without_a_file_is_looked_at() {
        let range = |line| mapping(line).map(|range| (range.start, range.len() >> 20));
        assert_eq!(range("20000800000-20040800000 rw-p 00000000 00:00 0 "), Some((0x200_0080_0000, 1024)));
        assert_eq!(
            range("20000800000-20040800000 rw-p 00000000 00:00 0  [anon:heap]"),
            Some((0x200_0080_0000, 1024))
        );
        for other in [
            "20000800000-20001800000 rw-p 00000000 00:00 0 ",
            "20000800000-20040800000 ---p 00000000 00:00 0 ",
            "20000800000-20040800000 rw-s 00000000 00:00 0 ",
            "20000800000-20040800000 rw-p 00000000 fe:00 9978368    /a/file",
            "20000800000-20040800000 rw-p 00000000 00:00 0  [stack]",
            "nonsense",
            "",
        ] {
            assert_eq!(range(other), None, "{other}");
        }
    }

    #[test]
    fn pieces_are_whole() {
        let mb = |mb: usize| mb << 20;
        assert_eq!(pieces(mb(3)..mb(9)).collect::<Vec<_>>(), [mb(4), mb(6)]);
        assert_eq!(pieces(mb(4)..mb(8)).collect::<Vec<_>>(), [mb(4), mb(6)]);
        assert_eq!(pieces(mb(3)..mb(5)).count(), 0);
    }

    /// New memory of its own, at a huge page's address, and its line in `/proc/self/maps`.
    fn memory() -> (Vec<u8>, usize, String) {
        let memory = vec![0_u8; LEAST_BYTES + HUGE_BYTES];
        let offset = memory.as_ptr().addr().next_multiple_of(HUGE_BYTES) - memory.as_ptr().addr();
        let start = memory.as_ptr().addr() + offset;
        let line = format!("{start:x}-{:x} rw-p 00000000 00:00 0 ", start + LEAST_BYTES);
        (memory, offset, line)
    }

    /// What is in use is seen to once, and holds what it held; what is hardly used is not, until it is.
    #[test]
    fn what_is_in_use_is_seen_to() {
        let (mut memory, offset, line) = memory();
        let dense = memory.as_ptr().addr() + offset;
        let sparse = dense + HUGE_BYTES;
        memory[offset..][..HUGE_BYTES].fill(7);
        memory[offset + HUGE_BYTES..][..HUGE_BYTES / 2].fill(8);
        assert!(is_dense(dense));

        let mut seen = Pieces::default();
        seen.pass(&line, Instant::now() + HOUR);
        // Where huge pages are given to everybody its first byte has brought one.
        if !is_dense(sparse) {
            assert!(!seen.done.contains(&sparse));
        }
        assert!(memory[offset..][..HUGE_BYTES].iter().all(|byte| *byte == 7));
        memory[offset + HUGE_BYTES..][..HUGE_BYTES].fill(8);
        seen.pass(&line, Instant::now() + HOUR);
        assert!(memory[offset + HUGE_BYTES..][..HUGE_BYTES].iter().all(|byte| *byte == 8));
        // An older system does not know it, and any may be short of huge pages.
        if is_known() && collapse(dense).is_ok() {
            assert!(huge_bytes(dense) >= HUGE_BYTES);
        }
    }

    #[test]
    fn a_pass_ends_in_time_and_the_next_one_goes_on() {
        let (memory, offset, line) = memory();
        let mut seen = Pieces::default();
        let start = memory.as_ptr().addr() + offset;
        for _ in 0..2 {
            seen.pass(&line, Instant::now());
            assert_eq!((seen.done.len(), seen.at), (0, start));
        }
        seen.pass(&line, Instant::now() + HOUR);
        assert_eq!(seen.at, 0);
    }

    #[test]
    fn after_a_failure_passes_are_left_out() {
        let (memory, offset, line) = memory();
        let start = memory.as_ptr().addr() + offset;
        let mut seen = Pieces { leave_out: 2, ..Pieces::default() };
        for left in [1, 0] {
            seen.pass(&line, Instant::now());
            assert_eq!((seen.leave_out, seen.at), (left, 0));
        }
        seen.pass(&line, Instant::now());
        assert_eq!(seen.at, start);
    }

    /// Bytes in huge pages of the mapping that an address lies in.
    fn huge_bytes(address: usize) -> usize {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut within = false;
        for line in smaps.lines() {
            if let Some((start, rest)) = line.split_once('-')
                && let Ok(start) = usize::from_str_radix(start, 16)
                && let Some((end, _)) = rest.split_once(' ')
            {
                within = (start..usize::from_str_radix(end, 16).unwrap()).contains(&address);
            } else if within && let Some(kib) = line.strip_prefix("AnonHugePages:") {
                return kib.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10;
            }
        }
        0
    }
}
