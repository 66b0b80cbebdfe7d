//! Linear-time replacements of SQLite's text search functions.
//!
//! SQLite's `instr`, `replace`, `trim` and `unhex` compare every position of one text with another
//! text. One call is one step of SQLite's virtual machine, and the clock and the cancel flag are
//! only checked between steps. With two texts of tens of megabytes a call takes days. During that
//! time it cannot be cancelled, and no other session of the thread runs. These replacements return
//! the same results (the tests compare them), also for invalid UTF-8.
//!
//! The one exception: very large sets of characters, and trimming a long text by a large set, are
//! rejected. SQLite tries the characters in the order of the set, which matters only for invalid
//! UTF-8, so a faster algorithm is not worth it.
//!
//! `LIKE` and `GLOB` remain SQLite's; the length of their patterns is limited
//! (`max_pattern_length`). Replacements could not use indexes.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use hashbrown::HashSet;
use libsqlite3_sys as ffi;
use memchr::memmem;

use super::callback::{Function, answer, fail};
use crate::{Error, sqlstate};

/// Name, number of arguments, implementation. The results depend on the arguments only, so that
/// indexes may use them.
pub(super) const FUNCTIONS: [(&CStr, c_int, Function); 6] = [
    (c"instr", 2, instr),
    (c"replace", 3, replace),
    (c"trim", 2, trim),
    (c"ltrim", 2, trim_left),
    (c"rtrim", 2, trim_right),
    (c"unhex", 2, unhex),
];

/// Maximum of distinct characters in a set.
const MAX_SET_CHARACTERS: usize = 1 << 16;
/// Maximum of character comparisons per call of `trim`.
const MAX_TRIM_STEPS: usize = 1 << 27;

type Context = *mut ffi::sqlite3_context;
type Arguments = *mut *mut ffi::sqlite3_value;

/// The bytes of an argument as text; `None` for NULL, or if there is no memory to convert it.
///
/// # Safety
/// `value` is an argument of the running function, or a copy. The bytes are valid until it is
/// converted again.
unsafe fn text<'a>(value: *mut ffi::sqlite3_value) -> Option<&'a [u8]> {
    // SAFETY: the length is read after the conversion, as SQLite requires.
    unsafe {
        let start = ffi::sqlite3_value_text(value);
        (!start.is_null())
            .then(|| std::slice::from_raw_parts(start, ffi::sqlite3_value_bytes(value) as usize))
    }
}

/// The bytes of a blob argument.
///
/// # Safety
/// As [`text`].
unsafe fn blob<'a>(value: *mut ffi::sqlite3_value) -> &'a [u8] {
    // SAFETY: the caller's contract; an empty blob has no address.
    unsafe {
        let start = ffi::sqlite3_value_blob(value).cast::<u8>();
        match start.is_null() {
            true => &[],
            false => std::slice::from_raw_parts(start, ffi::sqlite3_value_bytes(value) as usize),
        }
    }
}

/// Returns true if the byte is a UTF-8 continuation byte.
fn continues(byte: u8) -> bool {
    byte & 0xc0 == 0x80
}

unsafe extern "C" fn instr(context: Context, _: c_int, arguments: Arguments) {
    // SAFETY: called by SQLite with two arguments; copies are freed after the last use of their
    // bytes.
    unsafe {
        answer(context, |_| {
            let (hay, needle) = (*arguments, *arguments.add(1));
            let types = [hay, needle].map(|value| ffi::sqlite3_value_type(value));
            if types.contains(&ffi::SQLITE_NULL) {
                return;
            }
            let place = match types.map(|of| of == ffi::SQLITE_BLOB) {
                [true, true] => Some(byte_place(blob(hay), blob(needle))),
                [false, false] => text(hay).zip(text(needle)).map(|(hay, needle)| place(hay, needle)),
                // Copies, since reading an argument as text converts it.
                _ => {
                    let copies = [hay, needle].map(|value| ffi::sqlite3_value_dup(value));
                    let found = match copies.contains(&ptr::null_mut()) {
                        true => None,
                        false => text(copies[0]).zip(text(copies[1])).map(|(hay, needle)| place(hay, needle)),
                    };
                    copies.into_iter().for_each(|copy| ffi::sqlite3_value_free(copy));
                    found
                }
            };
            match place {
                Some(place) => ffi::sqlite3_result_int64(context, place as i64),
                None => ffi::sqlite3_result_error_nomem(context),
            }
        });
    }
}

/// The position of the first occurrence in a blob, from 1; 0 if there is none.
fn byte_place(hay: &[u8], needle: &[u8]) -> usize {
    memmem::find(hay, needle).map_or(0, |at| at + 1)
}

/// The same for texts, in characters. A match is at the beginning of a character, or of the text.
fn place(hay: &[u8], needle: &[u8]) -> usize {
    let at = match needle.first() {
        Some(first) if continues(*first) => hay.starts_with(needle).then_some(0),
        // Any other first byte begins a character.
        _ => memmem::find(hay, needle),
    };
    at.map_or(0, |at| 1 + hay.iter().take(at + 1).skip(1).filter(|byte| !continues(**byte)).count())
}

unsafe extern "C" fn replace(context: Context, _: c_int, arguments: Arguments) {
    // SAFETY: called by SQLite with three arguments.
    unsafe {
        answer(context, |_| {
            let Some(old) = text(*arguments) else { return };
            let Some(pattern) = text(*arguments.add(1)) else { return };
            // SQLite treats a pattern that begins with a zero byte as empty.
            if pattern.first().is_none_or(|first| *first == 0) {
                return give_text(context, old);
            }
            let Some(new) = text(*arguments.add(2)) else { return };
            let finder = memmem::Finder::new(pattern);
            let length = replaced(old, &finder, new).map(<[u8]>::len).sum::<usize>();
            let limit =
                ffi::sqlite3_limit(ffi::sqlite3_context_db_handle(context), ffi::SQLITE_LIMIT_LENGTH, -1);
            if length > limit as usize {
                return ffi::sqlite3_result_error_toobig(context);
            }
            give(context, length, ffi::SQLITE_UTF8, |mut out| {
                for piece in replaced(old, &finder, new) {
                    let (here, rest) = std::mem::take(&mut out).split_at_mut(piece.len());
                    here.copy_from_slice(piece);
                    out = rest;
                }
                length
            });
        });
    }
}

/// The pieces of `old`, with `new` in place of each match.
fn replaced<'a>(old: &'a [u8], finder: &memmem::Finder<'_>, new: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let length = finder.needle().len();
    let mut after = 0;
    let places = finder.find_iter(old).map(Some).chain([None]);
    places.flat_map(move |place| {
        let kept = &old[after..place.unwrap_or(old.len())];
        after = place.map_or(old.len(), |at| at + length);
        [Some(kept), place.map(|_| new)].into_iter().flatten()
    })
}

/// # Safety
/// `context` belongs to a running function.
unsafe fn give_text(context: Context, text: &[u8]) {
    let (start, length) = (text.as_ptr().cast::<c_char>(), text.len() as u64);
    // SAFETY: the text is copied.
    unsafe {
        ffi::sqlite3_result_text64(context, start, length, ffi::SQLITE_TRANSIENT(), ffi::SQLITE_UTF8 as u8);
    }
}

/// Returns bytes to SQLite that `fill` writes into memory from SQLite's allocator, which is
/// accounted. `fill` returns how many it has written. With an encoding of 0 the result is a blob.
///
/// # Safety
/// `context` belongs to a running function.
pub(super) unsafe fn give(
    context: Context,
    most: usize,
    encoding: c_int,
    fill: impl FnOnce(&mut [u8]) -> usize,
) {
    // SAFETY: the memory is initialized before it becomes a slice. It is passed to SQLite, which
    // frees it.
    unsafe {
        let start = ffi::sqlite3_malloc64(most as u64 + 1).cast::<u8>();
        if start.is_null() {
            return ffi::sqlite3_result_error_nomem(context);
        }
        ptr::write_bytes(start, 0, most + 1);
        let length = fill(std::slice::from_raw_parts_mut(start, most)) as u64;
        match encoding {
            0 => ffi::sqlite3_result_blob64(context, start.cast(), length, Some(free)),
            encoding => {
                ffi::sqlite3_result_text64(
                    context,
                    start.cast::<c_char>(),
                    length,
                    Some(free),
                    encoding as u8,
                );
            }
        }
    }
}

unsafe extern "C" fn free(memory: *mut c_void) {
    // SAFETY: memory from SQLite's allocator.
    unsafe { ffi::sqlite3_free(memory) }
}

unsafe extern "C" fn trim(context: Context, _: c_int, arguments: Arguments) {
    // SAFETY: called by SQLite with two arguments.
    unsafe { trim_ends(context, arguments, true, true) }
}

unsafe extern "C" fn trim_left(context: Context, _: c_int, arguments: Arguments) {
    // SAFETY: called by SQLite with two arguments.
    unsafe { trim_ends(context, arguments, true, false) }
}

unsafe extern "C" fn trim_right(context: Context, _: c_int, arguments: Arguments) {
    // SAFETY: called by SQLite with two arguments.
    unsafe { trim_ends(context, arguments, false, true) }
}

/// # Safety
/// Called by SQLite with two arguments.
unsafe fn trim_ends(context: Context, arguments: Arguments, left: bool, right: bool) {
    // SAFETY: the context and arguments of a running function.
    unsafe {
        answer(context, |link| {
            let Some(whole) = text(*arguments) else { return };
            let Some(set) = text(*arguments.add(1)) else { return };
            match trimmed(whole, set, left, right) {
                Some(rest) => give_text(context, rest),
                None => fail(context, link, too_many_characters()),
            }
        });
    }
}

fn too_many_characters() -> Error {
    Error::new(sqlstate::PROGRAM_LIMIT, "too many distinct characters in the set for a string of this length")
        .hint("Use a set with fewer characters.")
}

/// The trimmed text; `None` if it would take too many steps, or the set has too many characters.
fn trimmed<'a>(whole: &'a [u8], set: &[u8], left: bool, right: bool) -> Option<&'a [u8]> {
    let mut seen = HashSet::new();
    let set = characters(set).filter(|character| seen.insert(*character)).take(MAX_SET_CHARACTERS + 1);
    let set: Vec<_> = set.collect();
    if set.len() > MAX_SET_CHARACTERS {
        return None;
    }
    let mut steps = 0;
    let mut match_length = |is_end: &dyn Fn(&&[u8]) -> bool| {
        steps += set.len();
        (steps <= MAX_TRIM_STEPS).then(|| set.iter().copied().find(is_end).map_or(0, <[u8]>::len))
    };
    let mut rest = whole;
    while left && !rest.is_empty() {
        match match_length(&|character| rest.starts_with(character))? {
            0 => break,
            length => rest = &rest[length..],
        }
    }
    while right && !rest.is_empty() {
        match match_length(&|character| rest.ends_with(character))? {
            0 => break,
            length => rest = &rest[..rest.len() - length],
        }
    }
    Some(rest)
}

/// The characters of a text up to its first zero byte. A byte that begins no valid character is a
/// character.
fn characters(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = text.split(|byte| *byte == 0).next().unwrap_or_default();
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let more = rest[1..].iter().take_while(|byte| first >= 0xc0 && continues(**byte)).count();
        let (character, after) = rest.split_at(1 + more);
        rest = after;
        Some(character)
    })
}

unsafe extern "C" fn unhex(context: Context, _: c_int, arguments: Arguments) {
    // SAFETY: called by SQLite with two arguments.
    unsafe {
        answer(context, |link| {
            let Some(hex) = text(*arguments) else { return };
            let Some(mut passed) = text(*arguments.add(1)) else { return };
            let mut set = HashSet::new();
            while let Some(character) = next_character(&mut passed) {
                set.insert(character);
                if set.len() > MAX_SET_CHARACTERS {
                    return fail(context, link, too_many_characters());
                }
            }
            // The result is NULL if the text is not hexadecimal.
            if decoded(hex, &set).any(|digits| digits.is_none()) {
                return;
            }
            give(context, hex.len() / 2, 0, |out| {
                let bytes = decoded(hex, &set).flatten();
                out.iter_mut().zip(bytes).map(|(place, byte)| *place = byte).count()
            });
        });
    }
}

/// The decoded pairs of digits up to the first zero byte, without the ignored characters between
/// pairs. `None` for anything else.
fn decoded(hex: &[u8], passed: &HashSet<u32>) -> impl Iterator<Item = Option<u8>> {
    let mut rest = hex.split(|byte| *byte == 0).next().unwrap_or_default();
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    std::iter::from_fn(move || {
        loop {
            let high = digit(*rest.first()?);
            let Some(high) = high else {
                match next_character(&mut rest).is_some_and(|character| passed.contains(&character)) {
                    true => continue,
                    false => return Some(None),
                }
            };
            let low = rest.get(1).copied().and_then(digit);
            rest = rest.get(2..).unwrap_or_default();
            return Some(low.map(|low| high << 4 | low));
        }
    })
}

/// Decodes a character as SQLite does: an invalid one is U+FFFD.
fn next_character(text: &mut &[u8]) -> Option<u32> {
    let (first, mut rest) = text.split_first()?;
    let mut character = u32::from(*first);
    if character >= 0xc0 {
        // The bits of the first byte that belong to the character, from SQLite's table.
        character = match *first {
            0xc0..=0xdf => character & 0x1f,
            0xe0..=0xef => character & 0x0f,
            0xf0..=0xf7 => character & 0x07,
            0xf8..=0xfb => character & 0x03,
            0xfc..=0xfd => character & 0x01,
            _ => 0,
        };
        while let Some((next, after)) = rest.split_first().filter(|(next, _)| continues(**next)) {
            character = (character << 6).wrapping_add(u32::from(next & 0x3f));
            rest = after;
        }
        if character < 0x80 || character & 0xffff_f800 == 0xd800 {
            character = 0xfffd;
        }
    }
    *text = rest;
    Some(character)
}

#[cfg(test)]
mod tests;
