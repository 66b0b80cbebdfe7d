//! Transparent huge pages for densely used heap memory.
//!
//! The thousands of tenants of a busy node have a few hundred KiB each on the heap, and every
//! statement touches another tenant's. With 4 KiB pages nearly every touch starts with a page table
//! walk, and 500 tenants cost 7 % more CPU time. Backing all memory with huge pages would double
//! the size of an idle node, and keep it large after its tenants are closed (decision 0016).
//! Each block of 2 MiB is therefore collapsed into a huge page only once it is mostly in use:
//!
//! ```text
//!   once per second, if the process was busy
//!     ──> its large mappings ──> 2 MiB blocks that are 15/16 in use ──> MADV_COLLAPSE
//! ```
//!
//! The kernel copies such a block into a huge page; concurrent touches and mappings wait for a
//! fraction of a millisecond. A block costs at most 1/16 of its memory more. When the allocator
//! later returns part of it, the kernel splits the huge page once it needs the memory. (A block
//! that is emptied and refilled between two passes stays split.)
//!
//! Nothing depends on huge pages. The memory is left as it is if the system has none, does not
//! support the request (Linux before 6.1), forbids it to the process (`PR_SET_THP_DISABLE`), or has
//! none free. Page memory requests huge pages by itself ([`crate::page_memory`]).

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::ClockId;

/// Size of a huge page.
const HUGE_BYTES: usize = 2 << 20;
/// Size of a normal page.
const SMALL_BYTES: usize = 4096;
const SMALL_PAGES: usize = HUGE_BYTES / SMALL_BYTES;
/// Minimum number of a block's pages in use.
const MIN_USED_PAGES: usize = SMALL_PAGES / 16 * 15;
/// Minimum size of a mapping. Smaller ones (stacks, buffers) are ignored.
const MIN_MAPPING_BYTES: usize = 32 << 20;

/// Time between two passes.
const INTERVAL: Duration = Duration::from_secs(1);
/// Minimum CPU time that the process must have used since the last pass.
const MIN_CPU_TIME: Duration = Duration::from_millis(250);
/// Maximum duration of a pass; one block takes about a millisecond. The next pass continues at that
/// block.
const MAX_PASS_TIME: Duration = Duration::from_millis(20);

/// Maximum number of passes skipped after the system had no huge pages, since its search takes
/// long.
const MAX_SKIPPED_PASSES: u32 = 60;

/// The system-wide setting: `always [madvise] never`.
const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Starts the thread that collapses this process's memory, if the system supports it. It runs until
/// the process ends.
pub fn follow() {
    if is_supported() {
        // Without the thread the memory is left as it is.
        let _ = thread::Builder::new().name("fulmar-memory".to_owned()).spawn(run);
    }
}

/// Whether the system supports the request, and allows it for this process.
fn is_supported() -> bool {
    // SAFETY: an empty range; the kernel validates the request first.
    let is_supported = unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_COLLAPSE) } == 0;
    // SAFETY: a query about this process; the unused arguments must be zero.
    let is_forbidden = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) } > 0;
    is_supported && !is_forbidden
}

/// Whether the system-wide setting currently allows huge pages.
fn is_enabled() -> bool {
    fs::read_to_string(SETTING).is_ok_and(|setting| !setting.contains("[never]"))
}

fn run() {
    let mut collapser = Collapser::default();
    let mut worked = cpu_time();
    loop {
        thread::sleep(INTERVAL);
        let now = cpu_time();
        if now.saturating_sub(worked) >= MIN_CPU_TIME
            && is_enabled()
            && let Ok(maps) = fs::read_to_string("/proc/self/maps")
        {
            collapser.pass(&maps, Instant::now() + MAX_PASS_TIME);
        }
        worked = now;
    }
}

/// CPU time of all threads of the process.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// State of the passes over the process's memory.
#[derive(Default)]
struct Collapser {
    /// Addresses of blocks that were collapsed and have been in use since.
    collapsed: BTreeSet<usize>,
    /// Where the next pass begins.
    at: usize,
    /// Number of passes to skip now, and the last number after a failure.
    skip: u32,
    last_skip: u32,
}

impl Collapser {
    /// Examines the memory (`/proc/self/maps`) from the last position until its end, the deadline,
    /// or a lack of huge pages.
    fn pass(&mut self, maps: &str, until: Instant) {
        if self.skip > 0 {
            self.skip -= 1;
            return;
        }
        let blocks = maps.lines().filter_map(mapping).flat_map(blocks);
        for block in blocks.skip_while(|block| *block < self.at) {
            if Instant::now() >= until {
                self.at = block;
                return;
            }
            if !is_dense(block) {
                self.collapsed.remove(&block);
            } else if !self.collapsed.contains(&block) {
                match collapse(block) {
                    Ok(()) => self.last_skip = 0,
                    // The system keeps this block split, and will do so next time.
                    Err(libc::EINVAL) => {}
                    // The block is being written to a disk, or was unmapped.
                    Err(libc::EAGAIN) => continue,
                    Err(_) => {
                        self.last_skip = (2 * self.last_skip + 1).min(MAX_SKIPPED_PASSES);
                        (self.skip, self.at) = (self.last_skip, block + HUGE_BYTES);
                        return;
                    }
                }
                self.collapsed.insert(block);
            }
        }
        self.at = 0;
    }
}

/// The address range of a large anonymous mapping, from its line in `/proc/self/maps`.
fn mapping(line: &str) -> Option<Range<usize>> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
    let is_memory = fields.next()? == "rw-p" && fields.nth(3).is_none_or(|name| name.starts_with("[anon:"));
    (is_memory && range.len() >= MIN_MAPPING_BYTES).then_some(range)
}

/// The addresses in a mapping that a huge page could back.
fn blocks(mapping: Range<usize>) -> impl Iterator<Item = usize> {
    let first = mapping.start.next_multiple_of(HUGE_BYTES);
    (first..=mapping.end - HUGE_BYTES).step_by(HUGE_BYTES)
}

/// Whether most of a block is in use. (True for a block that is in a huge page already.)
fn is_dense(block: usize) -> bool {
    let mut in_memory = [0_u8; SMALL_PAGES];
    // SAFETY: the kernel writes one byte per page, and rejects unmapped memory.
    let reported = unsafe { libc::mincore(address(block), HUGE_BYTES, in_memory.as_mut_ptr()) } == 0;
    reported && in_memory.iter().filter(|page| **page & 1 == 1).count() >= MIN_USED_PAGES
}

/// Collapses a block into a huge page. Fails with the errno.
fn collapse(block: usize) -> Result<(), i32> {
    // SAFETY: this does not change the contents of the memory.
    match unsafe { libc::madvise(address(block), HUGE_BYTES, libc::MADV_COLLAPSE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or_default()),
    }
}

/// The pointer is passed to the kernel only.
fn address(block: usize) -> *mut libc::c_void {
    std::ptr::without_provenance_mut(block)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn large_anonymous_mappings_are_examined() {
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
    fn blocks_are_aligned_and_complete() {
        let mb = |mb: usize| mb << 20;
        assert_eq!(blocks(mb(3)..mb(9)).collect::<Vec<_>>(), [mb(4), mb(6)]);
        assert_eq!(blocks(mb(4)..mb(8)).collect::<Vec<_>>(), [mb(4), mb(6)]);
        assert_eq!(blocks(mb(3)..mb(5)).count(), 0);
    }

    /// Allocates memory that contains a huge page's address, with its line in `/proc/self/maps`.
    fn memory() -> (Vec<u8>, usize, String) {
        let memory = vec![0_u8; MIN_MAPPING_BYTES + HUGE_BYTES];
        let offset = memory.as_ptr().addr().next_multiple_of(HUGE_BYTES) - memory.as_ptr().addr();
        let start = memory.as_ptr().addr() + offset;
        let line = format!("{start:x}-{:x} rw-p 00000000 00:00 0 ", start + MIN_MAPPING_BYTES);
        (memory, offset, line)
    }

    /// A dense block is collapsed once and keeps its contents; a sparse one is not collapsed until
    /// it is dense.
    #[test]
    fn dense_blocks_are_collapsed_and_keep_their_contents() {
        let (mut memory, offset, line) = memory();
        let dense = memory.as_ptr().addr() + offset;
        let sparse = dense + HUGE_BYTES;
        memory[offset..][..HUGE_BYTES].fill(7);
        memory[offset + HUGE_BYTES..][..HUGE_BYTES / 2].fill(8);
        assert!(is_dense(dense));

        let mut collapser = Collapser::default();
        collapser.pass(&line, Instant::now() + HOUR);
        // If huge pages are always on, its first byte has allocated one.
        if !is_dense(sparse) {
            assert!(!collapser.collapsed.contains(&sparse));
        }
        assert!(memory[offset..][..HUGE_BYTES].iter().all(|byte| *byte == 7));
        memory[offset + HUGE_BYTES..][..HUGE_BYTES].fill(8);
        collapser.pass(&line, Instant::now() + HOUR);
        assert!(memory[offset + HUGE_BYTES..][..HUGE_BYTES].iter().all(|byte| *byte == 8));
        // Older systems do not support the request, and any system may be short of huge pages.
        if is_supported() && collapse(dense).is_ok() {
            assert!(huge_bytes(dense) >= HUGE_BYTES);
        }
    }

    #[test]
    fn pass_stops_at_its_deadline_and_the_next_one_continues() {
        let (memory, offset, line) = memory();
        let mut collapser = Collapser::default();
        let start = memory.as_ptr().addr() + offset;
        for _ in 0..2 {
            collapser.pass(&line, Instant::now());
            assert_eq!((collapser.collapsed.len(), collapser.at), (0, start));
        }
        collapser.pass(&line, Instant::now() + HOUR);
        assert_eq!(collapser.at, 0);
    }

    #[test]
    fn passes_are_skipped_after_a_failure() {
        let (memory, offset, line) = memory();
        let start = memory.as_ptr().addr() + offset;
        let mut collapser = Collapser { skip: 2, ..Collapser::default() };
        for left in [1, 0] {
            collapser.pass(&line, Instant::now());
            assert_eq!((collapser.skip, collapser.at), (left, 0));
        }
        collapser.pass(&line, Instant::now());
        assert_eq!(collapser.at, start);
    }

    /// Bytes in huge pages of the mapping that contains an address.
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
