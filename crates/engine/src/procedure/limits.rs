//! What a call may use: steps, memory, and time until it is told to end.

use std::cell::Cell;

use mlua::Lua;

use crate::{Error, Result, heap, sqlstate};

/// Memory that a call may use at most, bytes. On a small node it is a part of what a tenant may hold.
pub(super) const MAX_MEMORY_BYTES: usize = 64 << 20;
/// A machine that holds more after a call is not kept.
pub(super) const KEPT_BYTES: usize = 2 << 20;
/// Turns of loops and calls of functions that a call may make.
pub(super) const MOST_STEPS: u64 = 20_000_000;
/// Steps between two looks at the clock, at the cancel flag and at the memory.
const STEPS_PER_CHECKPOINT: u64 = 32;
/// Who holds more may have texts that a single step works long on: it looks at each.
const LARGE_BYTES: usize = 4 << 20;

/// What a call has used, and whether it was told to end. Lua may catch the error that tells it.
pub(super) struct Limits {
    /// Memory that a call may use.
    memory_bytes: usize,
    steps: Cell<u64>,
    ended: Cell<bool>,
    /// A step may take long: there is a look at each.
    watched: Cell<bool>,
    /// Memory of the machine before its first call. Without that no call can run, so it need not be
    /// charged.
    empty_bytes: Cell<usize>,
    /// Charged to the connection, bytes.
    held: Cell<usize>,
    /// It was told to end since its tenant, or the node, holds too much.
    crowded: Cell<bool>,
}

impl Limits {
    pub(super) fn new(memory_bytes: usize) -> Self {
        Limits {
            memory_bytes,
            steps: Cell::new(0),
            ended: Cell::new(false),
            watched: Cell::new(false),
            empty_bytes: Cell::new(0),
            held: Cell::new(0),
            crowded: Cell::new(false),
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    /// Notes what the machine holds before its first call.
    pub(super) fn set_empty(&self, lua: &Lua) {
        self.empty_bytes.set(lua.used_memory());
    }

    pub(super) fn begin(&self) {
        self.steps.set(0);
        self.ended.set(false);
        self.watched.set(false);
        self.crowded.set(false);
    }

    /// From here on there is a look at each step of the call.
    pub(super) fn watch(&self) {
        self.watched.set(true);
    }

    /// Counts a step. Answers whether the call must end.
    pub(super) fn step(&self, lua: &Lua) -> bool {
        let taken = self.steps.get() + 1;
        self.steps.set(taken);
        if self.watched.get() || taken.is_multiple_of(STEPS_PER_CHECKPOINT) {
            self.charge(lua);
            self.ended.set(self.ended.get() || crate::vfs::checkpoint_here());
        }
        taken > MOST_STEPS || self.ended.get()
    }

    /// Charges what Lua holds now. Returns false if the call must end, since its tenant or the node holds too much.
    pub(super) fn charge(&self, lua: &Lua) -> bool {
        let bytes = lua.used_memory();
        self.watched.set(self.watched.get() || bytes > LARGE_BYTES);
        if !self.hold(bytes) && bytes > self.empty_bytes.get() {
            self.crowded.set(true);
            self.ended.set(true);
        }
        !self.crowded.get()
    }

    /// The call has ended. Answers the limit that ended it, if one did.
    pub(super) fn end(&self, name: &str) -> Result<()> {
        self.hold(0);
        if self.steps.get() > MOST_STEPS {
            let message = format!("procedure \"{name}\" takes more than {MOST_STEPS} steps");
            return Err(Error::new(sqlstate::PROGRAM_LIMIT, message).hint("let SQL do the work on many rows"));
        }
        if self.crowded.get() {
            return Err(heap::exhausted());
        }
        if self.ended.get() {
            return Err(Error::new(sqlstate::QUERY_CANCELED, "the procedure was ended"));
        }
        Ok(())
    }

    /// Charges what the machine holds to the connection that calls. Answers whether it may hold as much.
    fn hold(&self, bytes: usize) -> bool {
        let may = heap::change(self.held.get() as u64, bytes as u64);
        if may {
            self.held.set(bytes);
        }
        may
    }
}

impl Drop for Limits {
    /// A call that panicked gives back here what it held: still on its fiber.
    fn drop(&mut self) {
        self.hold(0);
    }
}
