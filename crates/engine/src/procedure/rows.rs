//! Transfers the rows of a query to Lua.
//!
//! While SQLite runs, the rows are collected in one buffer; then all Lua tables are created from
//! it.

use std::ffi::c_int;

use fulmar_sqlite::{Lease, Result, Row, RowSink, ValueRef};
use mlua::ffi;

use super::values::{memory_exceeded, number_of};

/// Memory of a field in a Lua table, including its value's header.
const FIELD_BYTES: usize = 64;
/// Lua stack slots in addition to the column names: the list, a row, a name and a value.
const EXTRA_SLOTS: usize = 8;
/// Size of a value's tag and its length or number.
const HEAD_BYTES: usize = 1 + size_of::<f64>();
/// Maximum size of a buffer that is kept for the next query.
const MAX_IDLE_BUFFER_BYTES: usize = 64 << 10;

/// Encoded rows: for each value a tag, then a number, or a length and bytes.
#[derive(Default)]
pub(super) struct Rows {
    bytes: Vec<u8>,
    count: c_int,
    /// The column names, each after its length.
    names: Vec<u8>,
    columns: usize,
    /// Remaining memory for the tables.
    room: usize,
    /// Memory limit of the call.
    memory_bytes: usize,
    /// The charge of `bytes`.
    lease: Lease,
}

const NULL: u8 = 0;
const NUMBER: u8 = 1;
const TEXT: u8 = 2;
const BLOB: u8 = 3;

impl Rows {
    /// Discards the rows of the previous query. `used` is Lua's current memory.
    pub(super) fn begin(&mut self, used: usize, memory_bytes: usize) {
        self.reset();
        self.memory_bytes = memory_bytes;
        self.room = memory_bytes.saturating_sub(used);
    }

    fn take_room(&mut self, bytes: usize) -> Result<()> {
        self.room = self.room.checked_sub(bytes).ok_or_else(|| memory_exceeded(self.memory_bytes))?;
        Ok(())
    }

    /// Reserves space for the bytes of a value, which are charged first.
    fn reserve(&mut self, bytes: usize) -> Result<()> {
        let needed = self.bytes.len() + bytes;
        if needed > self.bytes.capacity() {
            let capacity = needed.next_power_of_two();
            self.lease.set(capacity as u64)?;
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        Ok(())
    }

    fn note(&mut self, value: ValueRef<'_>) -> Result<()> {
        let mut sized = |tag, bytes: &[u8]| -> Result<()> {
            self.take_room(bytes.len())?;
            self.reserve(HEAD_BYTES + bytes.len())?;
            self.bytes.push(tag);
            // Values are at most 256 MiB long.
            self.bytes.extend_from_slice(&(bytes.len() as u32).to_ne_bytes());
            self.bytes.extend_from_slice(bytes);
            Ok(())
        };
        match value {
            ValueRef::Text(text) => return sized(TEXT, text),
            ValueRef::Blob(blob) => return sized(BLOB, blob),
            _ => {}
        }
        self.reserve(HEAD_BYTES)?;
        match number_of(value)? {
            None => self.bytes.push(NULL),
            Some(number) => {
                self.bytes.push(NUMBER);
                self.bytes.extend_from_slice(&number.to_ne_bytes());
            }
        }
        Ok(())
    }

    /// Adds the name of the next column.
    pub(super) fn name(&mut self, name: &[u8]) {
        self.names.extend_from_slice(&(name.len() as u32).to_ne_bytes());
        self.names.extend_from_slice(name);
        self.columns += 1;
    }

    /// Pushes a list of tables with a field for each value that is not NULL, and frees a large
    /// buffer.
    ///
    /// # Safety
    /// `state` must be the state of a running C function, and Lua's memory limit must be disabled:
    /// then the called Lua functions can only fail for lack of stack space, which is checked first.
    pub(super) unsafe fn push(&mut self, state: *mut ffi::lua_State) -> mlua::Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if ffi::lua_checkstack(state, (self.columns + EXTRA_SLOTS) as c_int) == 0 {
                return Err(mlua::Error::StackError);
            }
            self.push_list(state);
        }
        if self.bytes.capacity() > MAX_IDLE_BUFFER_BYTES {
            self.bytes = Vec::new();
            self.lease = Lease::default();
        }
        Ok(())
    }

    /// # Safety
    /// The stack must have space for the names and [`EXTRA_SLOTS`] more.
    unsafe fn push_list(&self, state: *mut ffi::lua_State) {
        let (mut names, mut rest) = (&self.names[..], &self.bytes[..]);
        // SAFETY: every index refers to a value that was pushed here.
        unsafe {
            ffi::lua_createtable(state, self.count, 0);
            let list = ffi::lua_gettop(state);
            for _ in 0..self.columns {
                push_value(state, TEXT, &mut names);
            }
            for number in 1..=self.count {
                ffi::lua_createtable(state, 0, self.columns as c_int);
                for name in (list + 1..).take(self.columns) {
                    let [tag] = take(&mut rest);
                    if tag == NULL {
                        continue;
                    }
                    ffi::lua_pushvalue(state, name);
                    push_value(state, tag, &mut rest);
                    ffi::lua_rawset(state, -3);
                }
                ffi::lua_rawseti_(state, list, number);
            }
            ffi::lua_settop(state, list);
        }
    }
}

/// Takes `bytes` bytes from the front.
fn take_slice<'a>(rest: &mut &'a [u8], bytes: usize) -> &'a [u8] {
    let (taken, behind) = rest.split_at(bytes);
    *rest = behind;
    taken
}

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(take_slice(rest, N));
    bytes
}

/// # Safety
/// The stack must have space for one value.
unsafe fn push_value(state: *mut ffi::lua_State, tag: u8, rest: &mut &[u8]) {
    // SAFETY: guaranteed by the caller; a new buffer has the requested size.
    unsafe {
        if tag == NUMBER {
            return ffi::lua_pushnumber(state, f64::from_ne_bytes(take(rest)));
        }
        let length = u32::from_ne_bytes(take(rest)) as usize;
        let bytes = take_slice(rest, length);
        match tag {
            TEXT => ffi::lua_pushlstring_(state, bytes.as_ptr().cast(), length),
            _ => {
                let buffer = ffi::lua_newbuffer(state, length).cast::<u8>();
                bytes.as_ptr().copy_to_nonoverlapping(buffer, length);
            }
        }
    }
}

impl RowSink for Rows {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        let taken = (row.len() + 1) * FIELD_BYTES;
        self.take_room(taken)?;
        self.count += 1;
        (0..row.len()).try_for_each(|column| self.note(row.get(column)))
    }

    fn reset(&mut self) {
        self.bytes.clear();
        self.names.clear();
        (self.count, self.columns) = (0, 0);
    }
}
