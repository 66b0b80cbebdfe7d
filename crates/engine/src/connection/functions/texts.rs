//! SQLite's functions that compare two texts with each other, in time that is the sum of their lengths.
//!
//! `instr`, `replace`, `trim` and `unhex` of SQLite's look at each place of one text for all of another. That is one step of
//! its virtual machine, between two looks at the clock and at a cancel: with two texts of tens of megabytes it takes days, in
//! which nothing ends it and no other session of the thread runs. These answer what SQLite's do (the tests compare
//! them), also of texts that are no UTF-8.
//!
//! The one exception: sets of very many characters, and the trimming of a long text by many, are refused. SQLite tries them in the
//! order of the set, which makes a difference in broken UTF-8 only, and is not worth a faster way.
//!
//! What is left is `LIKE` and `GLOB`, of a pattern of limited length (`max_pattern_length`). Functions in their place would lose their indexes.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use hashbrown::HashSet;
use libsqlite3_sys as ffi;
use memchr::memmem;

use super::{Function, answer, fail};
use crate::{Error, sqlstate};

/// Name, number of arguments, implementation. They depend on their arguments alone, so that indexes may have them.
pub(super) const FUNCTIONS: [(&CStr, c_int, Function); 6] = [
    (c"instr", 2, instr),
    (c"replace", 3, replace),
    (c"trim", 2, trim),
    (c"ltrim", 2, trim_left),
    (c"rtrim", 2, trim_right),
    (c"unhex", 2, unhex),
];

/// Different characters that a set may have.
const MOST_CHARACTERS: usize = 1 << 16;
/// Comparisons of characters that a call of `trim` may make.
const MOST_TRIM_STEPS: usize = 1 << 27;

type Context = *mut ffi::sqlite3_context;
type Arguments = *mut *mut ffi::sqlite3_value;

/// The bytes of an argument as a text; `None` for NULL, or if there is no memory to convert it.
///
/// # Safety
/// `value` is an argument of the running function, or a copy; the bytes live until it is converted again.
unsafe fn text<'a>(value: *mut ffi::sqlite3_value) -> Option<&'a [u8]> {
    // SAFETY: the length is asked for after the conversion, as SQLite wants it.
    unsafe {
        let start = ffi::sqlite3_value_text(value);
        (!start.is_null())
            .then(|| std::slice::from_raw_parts(start, ffi::sqlite3_value_bytes(value) as usize))
    }
}

/// The bytes of an argument that is a blob.
///
/// # Safety
/// As [`text`].
unsafe fn blob<'a>(value: *mut ffi::sqlite3_value) -> &'a [u8] {
    // SAFETY: as the caller says; an empty blob has no address.
    unsafe {
        let start = ffi::sqlite3_value_blob(value).cast::<u8>();
        match start.is_null() {
            true => &[],
            false => std::slice::from_raw_parts(start, ffi::sqlite3_value_bytes(value) as usize),
        }
    }
}

/// Whether a character of UTF-8 goes on with this byte.
fn continues(byte: u8) -> bool {
    byte & 0xc0 == 0x80
}

unsafe extern "C" fn instr(context: Context, _: c_int, arguments: Arguments) {
    // SAFETY: called by SQLite with two arguments; copies are freed after the last use of their bytes.
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
                // Of copies, since to read an argument as a text makes it one.
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

/// Where a blob first holds another, counted from 1; 0: nowhere.
fn byte_place(hay: &[u8], needle: &[u8]) -> usize {
    memmem::find(hay, needle).map_or(0, |at| at + 1)
}

/// The same of texts, counted in characters. A place is where a character begins, or the beginning.
fn place(hay: &[u8], needle: &[u8]) -> usize {
    let at = match needle.first() {
        Some(first) if continues(*first) => hay.starts_with(needle).then_some(0),
        // Whatever else it begins with begins a character.
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
            // To SQLite a pattern that begins with a byte of zero is an empty one.
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

/// The pieces of `old` with `new` in the place of what the finder finds.
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
/// `context` is that of a running function.
unsafe fn give_text(context: Context, text: &[u8]) {
    let (start, length) = (text.as_ptr().cast::<c_char>(), text.len() as u64);
    // SAFETY: the text is copied.
    unsafe {
        ffi::sqlite3_result_text64(context, start, length, ffi::SQLITE_TRANSIENT(), ffi::SQLITE_UTF8 as u8);
    }
}

/// Answers bytes that `fill` writes into fresh memory of SQLite's, which counts it; it answers how many it has written. An encoding
/// of 0 makes them a blob.
///
/// # Safety
/// `context` is that of a running function.
pub(super) unsafe fn give(
    context: Context,
    most: usize,
    encoding: c_int,
    fill: impl FnOnce(&mut [u8]) -> usize,
) {
    // SAFETY: the memory is initialised before it is a slice, and given to SQLite, which frees it.
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
    // SAFETY: SQLite's own memory.
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
    // SAFETY: a running function's context and arguments.
    unsafe {
        answer(context, |link| {
            let Some(whole) = text(*arguments) else { return };
            let Some(set) = text(*arguments.add(1)) else { return };
            match trimmed(whole, set, left, right) {
                Some(rest) => give_text(context, rest),
                None => fail(context, link, too_many()),
            }
        });
    }
}

fn too_many() -> Error {
    Error::new(sqlstate::PROGRAM_LIMIT, "so many different characters cannot be looked for in so long a text")
        .hint("name fewer characters to take away")
}

/// What is left of a text; `None`: it took too many steps, or there are too many characters.
fn trimmed<'a>(whole: &'a [u8], set: &[u8], left: bool, right: bool) -> Option<&'a [u8]> {
    let mut seen = HashSet::new();
    let set = characters(set).filter(|character| seen.insert(*character)).take(MOST_CHARACTERS + 1);
    let set: Vec<_> = set.collect();
    if set.len() > MOST_CHARACTERS {
        return None;
    }
    let mut steps = 0;
    let mut look = |is_end: &dyn Fn(&&[u8]) -> bool| {
        steps += set.len();
        (steps <= MOST_TRIM_STEPS).then(|| set.iter().copied().find(is_end).map_or(0, <[u8]>::len))
    };
    let mut rest = whole;
    while left && !rest.is_empty() {
        match look(&|character| rest.starts_with(character))? {
            0 => break,
            length => rest = &rest[length..],
        }
    }
    while right && !rest.is_empty() {
        match look(&|character| rest.ends_with(character))? {
            0 => break,
            length => rest = &rest[..rest.len() - length],
        }
    }
    Some(rest)
}

/// The characters of a text up to its first byte of zero. A byte that begins none is one.
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
                if set.len() > MOST_CHARACTERS {
                    return fail(context, link, too_many());
                }
            }
            // Nothing at all is answered for what is no number.
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

/// The bytes that pairs of digits are, up to the first byte of zero, without what is passed over between two pairs. `None`: anything
/// else.
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

/// Reads a character as SQLite does: what is none of Unicode's is U+FFFD.
fn next_character(text: &mut &[u8]) -> Option<u32> {
    let (first, mut rest) = text.split_first()?;
    let mut character = u32::from(*first);
    if character >= 0xc0 {
        // What is left of the first byte, as the table of SQLite's has it.
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
