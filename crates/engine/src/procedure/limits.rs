//! What a call may use: steps, memory, and time until it is told to end.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use mlua::Lua;

use crate::{Error, Result, sqlstate};

/// Memory that a call may use, bytes.
pub(super) const MEMORY_BYTES: usize = 64 << 20;
/// A machine that holds more after a call is not kept.
pub(super) const KEPT_BYTES: usize = 2 << 20;
/// Memory that all calls of a node may use together, bytes.
const NODE_BYTES: usize = 1 << 30;
/// Turns of loops and calls of functions that a call may make.
pub(super) const MOST_STEPS: u64 = 20_000_000;
/// Steps between two looks at the clock, at the cancel flag and at the memory of all.
const STEPS_PER_CHECKPOINT: u64 = 32;

/// Memory of all machines at work, bytes, as of their last looks.
pub(super) type HeldByAll = Arc<AtomicUsize>;

/// What a call has used, and whether it was told to end. Lua may catch the error that tells it.
pub(super) struct Limits {
    steps: Cell<u64>,
    ended: Cell<bool>,
    /// Of `of_all`, bytes.
    held: Cell<usize>,
    of_all: HeldByAll,
    /// It was told to end since all together hold too much.
    crowded: Cell<bool>,
}

impl Limits {
    pub(super) fn new(of_all: &HeldByAll) -> Self {
        let of_all = of_all.clone();
        Limits {
            steps: Cell::new(0),
            ended: Cell::new(false),
            held: Cell::new(0),
            of_all,
            crowded: Cell::new(false),
        }
    }

    pub(super) fn begin(&self) {
        self.steps.set(0);
        self.ended.set(false);
        self.crowded.set(false);
    }

    /// Counts a step. Answers whether the call must end.
    pub(super) fn step(&self, lua: &Lua) -> bool {
        let taken = self.steps.get() + 1;
        self.steps.set(taken);
        if taken.is_multiple_of(STEPS_PER_CHECKPOINT) {
            self.crowded.set(self.hold(lua.used_memory()));
            self.ended.set(self.ended.get() || self.crowded.get() || crate::vfs::checkpoint_here());
        }
        taken > MOST_STEPS || self.ended.get()
    }

    /// The call has ended. Answers the limit that ended it, if one did.
    pub(super) fn end(&self, name: &str) -> Result<()> {
        self.hold(0);
        if self.steps.get() > MOST_STEPS {
            let message = format!("procedure \"{name}\" takes more than {MOST_STEPS} steps");
            return Err(Error::new(sqlstate::PROGRAM_LIMIT, message).hint("let SQL do the work on many rows"));
        }
        if self.crowded.get() {
            let message = format!("all procedures together use more than {} MiB", NODE_BYTES >> 20);
            return Err(Error::new(sqlstate::OUT_OF_MEMORY, message).hint("try again when fewer of them run"));
        }
        if self.ended.get() {
            return Err(Error::new(sqlstate::QUERY_CANCELED, "the procedure was ended"));
        }
        Ok(())
    }

    /// Notes what the machine holds. Answers whether all together hold too much, and this one a good part of it.
    fn hold(&self, bytes: usize) -> bool {
        let before = self.held.replace(bytes);
        let all = if bytes >= before {
            self.of_all.fetch_add(bytes - before, Relaxed) + (bytes - before)
        } else {
            self.of_all.fetch_sub(before - bytes, Relaxed) - (before - bytes)
        };
        all > NODE_BYTES && bytes > KEPT_BYTES
    }
}

impl Drop for Limits {
    fn drop(&mut self) {
        self.hold(0);
    }
}
