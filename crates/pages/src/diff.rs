//! What changed in a page, as runs of bytes.
//!
//! ```text
//!   diff     = form, then
//!     form 0   runs upon the page as it was (its base)
//!     form 1   runs upon a page of zeros
//!     form 2   the 4096 bytes themselves
//!   runs     = (skip, length, `length` bytes)*        skip and length are varints, length >= 1
//! ```
//!
//! An update of 100 bytes in a row costs little more than 100 bytes, whatever the page holds. Two runs that are
//! only three equal bytes apart are one run, since a run's own head costs as much. When the runs would not
//! be shorter than the page, form 1 is tried (a page that was emptied), then form 2 taken: a diff is never longer
//! than the page and one byte.
//!
//! Applying a diff twice gives the same page as applying it once, but the diffs of one page must be applied in
//! the order in which they were made.

use crate::codec::{self, Reader};
use crate::{FormatError, PAGE_SIZE, Page, Problem, ZERO_PAGE};

const FORMAT: &str = "page diff";
const FORM_BASE: u8 = 0;
const FORM_ZEROS: u8 = 1;
const FORM_WHOLE: u8 = 2;

/// Equal bytes that do not end a run: a new run's head would take two to four.
const MERGE_GAP: usize = 3;

/// Bytes that are compared at once where nothing has changed.
const BLOCK: usize = 64;

/// The most bytes that [`encode`] appends.
pub const MAX_BYTES: usize = PAGE_SIZE + 1;

/// Appends the diff that makes `page` from `base` (without one: from zeros) to `out`.
pub fn encode(base: Option<&Page>, page: &Page, out: &mut Vec<u8>) {
    let start = out.len();
    if let Some(base) = base {
        out.push(FORM_BASE);
        if encode_runs(base, page, out) {
            return;
        }
        out.truncate(start);
    }
    out.push(FORM_ZEROS);
    if encode_runs(&ZERO_PAGE, page, out) {
        return;
    }
    out.truncate(start);
    out.push(FORM_WHOLE);
    out.extend_from_slice(page);
}

/// Changes `page`, which holds the diff's base (whatever it holds, if the diff needs none), into the page that was
/// encoded. After an error the page's contents are unspecified.
pub fn apply(diff: &[u8], page: &mut Page) -> Result<(), FormatError> {
    let mut reader = Reader::new(FORMAT, diff);
    match reader.u8()? {
        FORM_BASE => apply_runs(reader, page),
        FORM_ZEROS => {
            page.fill(0);
            apply_runs(reader, page)
        }
        FORM_WHOLE => {
            page.copy_from_slice(reader.take(PAGE_SIZE)?);
            reader.end()
        }
        _ => Err(codec::error(FORMAT, 0, Problem::Invalid("the form of the diff is not known"))),
    }
}

/// Whether the diff makes its page without a base.
pub fn is_full(diff: &[u8]) -> bool {
    matches!(diff.first(), Some(&(FORM_ZEROS | FORM_WHOLE)))
}

/// Appends the runs, unless they would be no shorter than the page.
fn encode_runs(base: &Page, page: &Page, out: &mut Vec<u8>) -> bool {
    let limit = out.len() + PAGE_SIZE;
    let differences = Differences::between(base, page);
    let mut end = 0;
    loop {
        let start = differences.next(true, end);
        if start == PAGE_SIZE {
            return true;
        }
        let skip = start - end;
        end = differences.end_of_run(start);
        let length = end - start;
        let cost = codec::varint_len(skip as u64) + codec::varint_len(length as u64) + length;
        if out.len() + cost >= limit {
            return false;
        }
        codec::put_varint(out, skip as u64);
        codec::put_varint(out, length as u64);
        out.extend_from_slice(&page[start..end]);
    }
}

fn apply_runs(mut reader: Reader<'_>, page: &mut Page) -> Result<(), FormatError> {
    let mut end = 0;
    while reader.remaining() > 0 {
        let at = reader.at();
        let skip = reader.varint()?;
        let length = reader.varint()?;
        let room = (PAGE_SIZE - end) as u64;
        if length == 0 || skip > room || length > room - skip {
            return Err(codec::error(FORMAT, at, Problem::Invalid("a run is empty or leaves the page")));
        }
        let start = end + skip as usize;
        end = start + length as usize;
        page[start..end].copy_from_slice(reader.take(length as usize)?);
    }
    Ok(())
}

/// In which bytes two pages differ: a bit for each, the first of a block in its lowest.
struct Differences([u64; PAGE_SIZE / BLOCK]);

impl Differences {
    fn between(a: &Page, b: &Page) -> Differences {
        let (a, b) = (a.as_chunks::<BLOCK>().0, b.as_chunks::<BLOCK>().0);
        Differences(std::array::from_fn(|block| differences(&a[block], &b[block])))
    }

    /// The first byte from `from` on that differs, or does not, as asked; `PAGE_SIZE` if there is none.
    fn next(&self, differs: bool, from: usize) -> usize {
        let flip = if differs { 0 } else { !0 };
        let mut mask = !0 << (from % BLOCK);
        for block in from / BLOCK..self.0.len() {
            let bits = (self.0[block] ^ flip) & mask;
            if bits != 0 {
                return block * BLOCK + bits.trailing_zeros() as usize;
            }
            mask = !0;
        }
        PAGE_SIZE
    }

    /// The end of the run that starts at `start`: more than `MERGE_GAP` equal bytes follow, or only equal ones.
    fn end_of_run(&self, start: usize) -> usize {
        let mut end = self.next(false, start);
        loop {
            let again = self.next(true, end);
            if again == PAGE_SIZE || again - end > MERGE_GAP {
                return end;
            }
            end = self.next(false, again);
        }
    }
}

/// A bit for each byte in which the blocks differ. Eight bytes at a time, without a branch: where something has changed, much
/// of what is near has too.
fn differences(a: &[u8; BLOCK], b: &[u8; BLOCK]) -> u64 {
    const HIGH: u64 = 0x8080_8080_8080_8080;
    /// Moves the lowest bits of eight bytes side by side, into the highest byte.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    if a == b {
        return 0;
    }
    let words = a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0);
    words.rev().fold(0, |bits, (a, b)| {
        let difference = u64::from_le_bytes(*a) ^ u64::from_le_bytes(*b);
        // The highest bit of each byte that is not zero.
        let changed = (((difference & !HIGH) + !HIGH) | difference) & HIGH;
        bits << 8 | (changed >> 7).wrapping_mul(GATHER) >> 56
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn diff(base: Option<&Page>, page: &Page) -> Vec<u8> {
        let mut out = Vec::new();
        encode(base, page, &mut out);
        out
    }

    fn noise(seed: u64) -> Page {
        let mut state = seed | 1;
        std::array::from_fn(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        })
    }

    #[test]
    fn an_update_costs_its_bytes_and_a_few_more() {
        let base = noise(1);
        let mut page = base;
        for byte in &mut page[1000..1100] {
            *byte ^= 0x55;
        }
        assert_eq!(diff(Some(&base), &page).len(), 1 + 2 + 1 + 100);
    }

    #[test]
    fn equal_pages_need_one_byte_and_zeros_too() {
        let base = noise(1);
        assert_eq!(diff(Some(&base), &base), [FORM_BASE]);
        assert_eq!(diff(None, &ZERO_PAGE), [FORM_ZEROS]);
    }

    #[test]
    fn near_runs_are_merged_and_far_ones_are_not() {
        let base = ZERO_PAGE;
        let mut page = base;
        page[10] = 1;
        page[14] = 1;
        assert_eq!(diff(Some(&base), &page), [FORM_BASE, 10, 5, 1, 0, 0, 0, 1]);
        page[14] = 0;
        page[15] = 1;
        assert_eq!(diff(Some(&base), &page), [FORM_BASE, 10, 1, 1, 4, 1, 1]);
    }

    #[test]
    fn a_rewritten_page_is_no_longer_than_itself_and_an_emptied_one_is_short() {
        let (base, page) = (noise(1), noise(2));
        let whole = diff(Some(&base), &page);
        assert_eq!((whole[0], whole.len()), (FORM_WHOLE, MAX_BYTES));
        assert!(is_full(&whole));
        let mut emptied = ZERO_PAGE;
        emptied[4095] = 9;
        assert_eq!(diff(Some(&base), &emptied), [FORM_ZEROS, 0xff, 0x1f, 1, 9]);
    }

    #[test]
    fn runs_that_leave_the_page_are_refused() {
        let mut page = ZERO_PAGE;
        for bad in [
            &[][..],
            &[3],
            &[FORM_WHOLE, 0],
            &[FORM_BASE, 0, 0],
            &[FORM_BASE, 0x80, 0x20, 1, 7],
            &[FORM_BASE, 0xff, 0x1f, 2, 7, 7],
            &[FORM_BASE, 0, 2, 7],
            &[FORM_BASE, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0xff, 1],
        ] {
            assert!(apply(bad, &mut page).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn a_diff_makes_the_page(
            seed: u64,
            edits in prop::collection::vec((0..PAGE_SIZE, 1..200usize, any::<u8>()), 0..40),
            zero_from in 0..=PAGE_SIZE,
        ) {
            let mut base = noise(seed);
            base[zero_from..].fill(0);
            let mut page = base;
            for (start, length, value) in edits {
                page[start..(start + length).min(PAGE_SIZE)].fill(value);
            }
            for from in [None, Some(&base)] {
                let diff = diff(from, &page);
                prop_assert!(diff.len() <= MAX_BYTES);
                let mut made = base;
                prop_assert_eq!(apply(&diff, &mut made), Ok(()));
                prop_assert!(made == page);
                prop_assert_eq!(apply(&diff, &mut made), Ok(()));
                prop_assert!(made == page, "twice is as once");
            }
        }

        #[test]
        fn any_diff_is_rejected_or_applies_twice_as_once(
            form in 0..4u8,
            rest in prop::collection::vec(prop_oneof![0..8u8, any::<u8>()], 0..300),
        ) {
            let diff = [&[form][..], &rest].concat();
            let (mut zeros, mut ones) = (ZERO_PAGE, [1; PAGE_SIZE]);
            let applied = apply(&diff, &mut zeros);
            prop_assert_eq!(&apply(&diff, &mut ones), &applied);
            if applied.is_ok() {
                prop_assert!(!is_full(&diff) || zeros == ones, "a full diff needs no base");
                let once = zeros;
                prop_assert_eq!(apply(&diff, &mut zeros), Ok(()));
                prop_assert!(zeros == once);
            }
        }
    }
}
