//! Format of a page diff: the changed byte runs of a page.
//!
//! ```text
//!   diff     = form, then
//!     form 0   runs applied to the previous page (the base)
//!     form 1   runs applied to a page of zeros
//!     form 2   the 4096 bytes of the page
//!   runs     = (skip, length, `length` bytes)*        skip and length are varints, length >= 1
//! ```
//!
//! An update of 100 consecutive bytes costs a little more than 100 bytes, whatever the page holds.
//! Two runs that are at most three equal bytes apart are encoded as one, because the header of a
//! second run costs as much.
//!
//! If the runs would not be shorter than the page, form 1 is tried, which is short for a page that
//! was emptied. If that is not shorter either, form 2 is used. A diff is therefore at most one byte
//! longer than the page.
//!
//! Applying a diff is idempotent. Diffs of the same page must be applied in the order in which they
//! were made.

use crate::codec::{self, Reader};
use crate::{FormatError, PAGE_SIZE, Page, Problem, ZERO_PAGE};

const FORMAT: &str = "page diff";
const FORM_BASE: u8 = 0;
const FORM_ZEROS: u8 = 1;
const FORM_WHOLE: u8 = 2;

/// Number of equal bytes that do not end a run. The header of a new run takes two to four bytes.
const MERGE_GAP: usize = 3;

/// Bytes compared in one step.
const BLOCK: usize = 64;

/// Maximum number of bytes that [`encode`] appends.
pub const MAX_BYTES: usize = PAGE_SIZE + 1;

/// Appends to `out` the diff from `base` (or from zeros) to `page`.
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

/// Applies a diff. `page` must hold the diff's base, unless [`is_full`]. After an error the page's
/// contents are unspecified.
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

/// Returns true if the diff needs no base.
pub fn is_full(diff: &[u8]) -> bool {
    matches!(diff.first(), Some(&(FORM_ZEROS | FORM_WHOLE)))
}

/// Appends the runs. Returns false if they would not be shorter than the page.
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
            return Err(codec::error(FORMAT, at, Problem::Invalid("run is empty or exceeds the page")));
        }
        let start = end + skip as usize;
        end = start + length as usize;
        page[start..end].copy_from_slice(reader.take(length as usize)?);
    }
    Ok(())
}

/// A bitmap of the bytes in which two pages differ. The lowest bit stands for a block's first byte.
struct Differences([u64; PAGE_SIZE / BLOCK]);

impl Differences {
    fn between(a: &Page, b: &Page) -> Differences {
        let (a, b) = (a.as_chunks::<BLOCK>().0, b.as_chunks::<BLOCK>().0);
        Differences(std::array::from_fn(|block| differences(&a[block], &b[block])))
    }

    /// The first byte at or after `from` that differs (or, with `differs` false, is equal).
    /// `PAGE_SIZE` if there is none.
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

    /// The end of the run that starts at `start`: more than `MERGE_GAP` equal bytes follow, or the
    /// rest of the page is equal.
    fn end_of_run(&self, start: usize) -> usize {
        let mut end = self.next(false, start);
        loop {
            let next_start = self.next(true, end);
            if next_start == PAGE_SIZE || next_start - end > MERGE_GAP {
                return end;
            }
            end = self.next(false, next_start);
        }
    }
}

/// One bit for each byte in which the blocks differ. Compares eight bytes at a time without a
/// branch, because changed bytes are usually close to other changed bytes.
fn differences(a: &[u8; BLOCK], b: &[u8; BLOCK]) -> u64 {
    const HIGH: u64 = 0x8080_8080_8080_8080;
    /// Multiplier that collects the lowest bits of eight bytes in the highest byte.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    if a == b {
        return 0;
    }
    let words = a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0);
    words.rev().fold(0, |bits, (a, b)| {
        let difference = u64::from_le_bytes(*a) ^ u64::from_le_bytes(*b);
        // The highest bit of each nonzero byte.
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
    fn update_of_100_bytes_takes_104_bytes() {
        let base = noise(1);
        let mut page = base;
        for byte in &mut page[1000..1100] {
            *byte ^= 0x55;
        }
        assert_eq!(diff(Some(&base), &page).len(), 1 + 2 + 1 + 100);
    }

    #[test]
    fn diff_of_an_equal_or_zero_page_is_one_byte() {
        let base = noise(1);
        assert_eq!(diff(Some(&base), &base), [FORM_BASE]);
        assert_eq!(diff(None, &ZERO_PAGE), [FORM_ZEROS]);
    }

    #[test]
    fn runs_are_merged_across_gaps_of_up_to_three_bytes() {
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
    fn rewritten_page_is_stored_whole_and_emptied_page_as_zeros() {
        let (base, page) = (noise(1), noise(2));
        let whole = diff(Some(&base), &page);
        assert_eq!((whole[0], whole.len()), (FORM_WHOLE, MAX_BYTES));
        assert!(is_full(&whole));
        let mut emptied = ZERO_PAGE;
        emptied[4095] = 9;
        assert_eq!(diff(Some(&base), &emptied), [FORM_ZEROS, 0xff, 0x1f, 1, 9]);
    }

    #[test]
    fn invalid_runs_are_rejected() {
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
        fn applied_diff_gives_the_page(
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
                prop_assert!(made == page, "applying a diff must be idempotent");
            }
        }

        #[test]
        fn any_bytes_are_rejected_or_apply_idempotently(
            form in 0..4u8,
            rest in prop::collection::vec(prop_oneof![0..8u8, any::<u8>()], 0..300),
        ) {
            let diff = [&[form][..], &rest].concat();
            let (mut zeros, mut ones) = (ZERO_PAGE, [1; PAGE_SIZE]);
            let applied = apply(&diff, &mut zeros);
            prop_assert_eq!(&apply(&diff, &mut ones), &applied);
            if applied.is_ok() {
                prop_assert!(!is_full(&diff) || zeros == ones, "a full diff must not depend on its base");
                let once = zeros;
                prop_assert_eq!(apply(&diff, &mut zeros), Ok(()));
                prop_assert!(zeros == once, "applying a diff must be idempotent");
            }
        }
    }
}
