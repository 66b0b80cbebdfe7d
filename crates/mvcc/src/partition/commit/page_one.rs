//! The fields of page 1 that commits validate separately: database size and free list, and
//! counters.

use std::ops::Range;

use fulmar_pages::Page;

/// File change counter.
pub(crate) const COUNTER: Range<usize> = 24..28;
/// Size in pages, first free-list trunk, length of the free list.
pub const ALLOCATION: Range<usize> = 28..40;
/// Version-valid-for and the library's version.
pub(crate) const VALID_FOR: Range<usize> = 92..100;

/// The size in pages from the header.
pub fn page_count(page: &Page) -> u32 {
    u32::from_be_bytes([page[28], page[29], page[30], page[31]])
}

/// Sets the counters, which are no transaction's data.
pub fn stamp(page: &mut Page, number: u64) {
    let stamp = (number as u32).to_be_bytes();
    page[COUNTER].copy_from_slice(&stamp);
    page[VALID_FOR.start..VALID_FOR.start + 4].copy_from_slice(&stamp);
}

/// The change counter.
pub fn counter(page: &Page) -> u32 {
    u32::from_be_bytes([page[24], page[25], page[26], page[27]])
}

/// Increments the schema cookie, as a schema change does: other connections parse the schema again.
pub(crate) fn raise_schema_cookie(page: &mut Page) {
    let cookie = u32::from_be_bytes([page[40], page[41], page[42], page[43]]).wrapping_add(1);
    page[40..44].copy_from_slice(&cookie.to_be_bytes());
}

pub(crate) fn same_allocation(a: &Page, b: &Page) -> bool {
    a[ALLOCATION] == b[ALLOCATION]
}

/// Returns true if two versions of page 1 are the same except for counters and allocation.
pub(crate) fn same_rest(a: &Page, b: &Page) -> bool {
    a[..COUNTER.start] == b[..COUNTER.start]
        && a[ALLOCATION.end..VALID_FOR.start] == b[ALLOCATION.end..VALID_FOR.start]
        && a[VALID_FOR.end..] == b[VALID_FOR.end..]
}
