//! Limits of a call: steps, memory, and the time until it notices a cancel.

use std::cell::Cell;

use mlua::Lua;

use fulmar_sqlite::{Error, Result, checkpoint_here, lease, sqlstate};

/// Maximum memory of a call in bytes. On a small node the limit is a share of the tenant's.
pub(super) const MAX_MEMORY_BYTES: usize = 64 << 20;
/// A machine that holds more memory after a call is discarded.
pub(super) const MAX_IDLE_MACHINE_BYTES: usize = 2 << 20;
/// Maximum number of steps of a call: loop iterations and function calls.
pub(super) const MAX_STEPS: u64 = 20_000_000;
/// Steps between two checks of the clock, the cancel flag and the memory.
const STEPS_PER_CHECKPOINT: u64 = 32;
/// A call that holds more memory may have texts on which a single step takes long, so every step is
/// checked.
const LARGE_BYTES: usize = 4 << 20;

/// The resources that a call has used, and whether it must end. Lua code may catch the error that
/// ends it, so the decision is stored here.
pub(super) struct Limits {
    /// Maximum memory of the call.
    memory_bytes: usize,
    steps: Cell<u64>,
    ended: Cell<bool>,
    /// Every step is checked, since a step may take long.
    watched: Cell<bool>,
    /// Memory of the machine before its first call. Without it no call can run, so a call that
    /// needs no more is not rejected.
    empty_bytes: Cell<usize>,
    /// Bytes charged to the connection.
    held: Cell<usize>,
    /// The call must end because its tenant or the node is out of memory.
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

    /// Records the machine's memory before its first call.
    pub(super) fn set_empty(&self, lua: &Lua) {
        self.empty_bytes.set(lua.used_memory());
    }

    pub(super) fn begin(&self) {
        self.steps.set(0);
        self.ended.set(false);
        self.watched.set(false);
        self.crowded.set(false);
    }

    /// Checks every further step of the call.
    pub(super) fn watch(&self) {
        self.watched.set(true);
    }

    /// Counts a step. Returns true if the call must end.
    pub(super) fn step(&self, lua: &Lua) -> bool {
        let taken = self.steps.get() + 1;
        self.steps.set(taken);
        if self.watched.get() || taken.is_multiple_of(STEPS_PER_CHECKPOINT) {
            self.charge(lua);
            self.ended.set(self.ended.get() || checkpoint_here());
        }
        taken > MAX_STEPS || self.ended.get()
    }

    /// Charges Lua's current memory. Returns false if the call must end because its tenant or the
    /// node is out of memory.
    pub(super) fn charge(&self, lua: &Lua) -> bool {
        let bytes = lua.used_memory();
        self.watched.set(self.watched.get() || bytes > LARGE_BYTES);
        if !self.hold(bytes) && bytes > self.empty_bytes.get() {
            self.crowded.set(true);
            self.ended.set(true);
        }
        !self.crowded.get()
    }

    /// Ends the call. Returns the limit that ended it, if any.
    pub(super) fn end(&self, name: &str) -> Result<()> {
        self.hold(0);
        if self.steps.get() > MAX_STEPS {
            let message = format!("procedure \"{name}\" exceeded the limit of {MAX_STEPS} steps");
            return Err(
                Error::new(sqlstate::PROGRAM_LIMIT, message).hint("Process large numbers of rows in SQL.")
            );
        }
        if self.crowded.get() {
            return Err(fulmar_sqlite::exhausted());
        }
        if self.ended.get() {
            return Err(Error::new(sqlstate::QUERY_CANCELED, "procedure was terminated"));
        }
        Ok(())
    }

    /// Charges the machine's memory to the calling connection. Returns false if that exceeds a
    /// limit.
    fn hold(&self, bytes: usize) -> bool {
        let fits = lease::change(self.held.get() as u64, bytes as u64);
        if fits {
            self.held.set(bytes);
        }
        fits
    }
}

impl Drop for Limits {
    /// Releases the charge of a call that panicked, still on its fiber.
    fn drop(&mut self) {
        self.hold(0);
    }
}
