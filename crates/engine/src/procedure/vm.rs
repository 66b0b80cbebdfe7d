//! Lua machines: created once, sandboxed, and used by one call at a time.
//!
//! A machine belongs to no tenant. Only compiled code survives a call: libraries and globals are
//! read-only, a chunk is called with new locals each time, and a machine that holds much memory
//! after a call is discarded.
//!
//! Lua runs on a separate stack: it nests C calls up to 200 deep, and the statements that it runs
//! need the budget of a fiber's stack in addition.

use std::rc::Rc;

use corosensei::on_stack;
use fulmar_sqlite::{Error, FiberStack, Heap, Result, RowSink, Value, sqlstate};
use hashbrown::HashMap;
use mlua::{Function, Lua, LuaOptions, MultiValue, StdLib, Table, VmState};
use parking_lot::Mutex;

use super::answer::send_rows;
use super::functions::{Lent, Trusted, database};
use super::host::Host;
use super::limits::{Limits, MAX_IDLE_MACHINE_BYTES, MAX_MEMORY_BYTES};
use super::loaded::Loaded;
use super::values::{ended, to_lua};

/// Maximum number of idle machines.
const MAX_IDLE: usize = 16;
/// Maximum number of compiled chunks that a machine caches.
const MAX_CHUNKS: usize = 64;
/// Longer chunks are compiled for each call.
const MAX_CACHED_CHUNK_BYTES: usize = 16 << 10;

/// The globals that are kept. Anything that reads a clock, randomness, files or the machine itself
/// is removed.
const GLOBALS: [&str; 26] = [
    "assert",
    "bit32",
    "buffer",
    "error",
    "getmetatable",
    "ipairs",
    "math",
    "next",
    "pairs",
    "pcall",
    "rawequal",
    "rawget",
    "rawlen",
    "rawset",
    "select",
    "setmetatable",
    "string",
    "table",
    "tonumber",
    "tostring",
    "type",
    "typeof",
    "unpack",
    "utf8",
    "xpcall",
    "_VERSION",
];

/// Replacements of Lua library functions.
///
/// A call into Lua's library cannot be interrupted, so none may take long: pattern functions can
/// compare a long text with a long pattern at every position, `table.move` moves elements that do
/// not exist, and `sort` without a comparator compares whole strings. `tostring` reveals the memory
/// address of a table, which must stay private and differs when the procedure is run again.
const PRELUDE: &str = include_str!("prelude.lua");

/// The machines of a node.
pub(crate) struct LuaPool {
    kept: Mutex<Vec<Machine>>,
    /// Maximum memory of a call.
    memory_bytes: usize,
    /// Maximum memory of all idle machines.
    kept_bytes: usize,
}

/// Idle machines may use 1/16 of the node's statement memory.
const IDLE_DIVISOR: u64 = 16;

impl LuaPool {
    /// Creates the machines of a node whose statement memory is limited by `heap`.
    pub(crate) fn new(heap: &Heap) -> LuaPool {
        let call_bytes = heap.partition_limit_bytes() / 4;
        LuaPool {
            kept: Mutex::default(),
            memory_bytes: call_bytes.min(MAX_MEMORY_BYTES as u64) as usize,
            kept_bytes: (heap.limit_bytes() / IDLE_DIVISOR) as usize,
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    pub(super) fn take(&self) -> Result<Machine> {
        let kept = self.kept.lock().pop();
        kept.map_or_else(|| Machine::new(self.memory_bytes), Ok)
    }

    pub(super) fn give(&self, machine: Machine) {
        let bytes = machine.lua.used_memory();
        let mut kept = self.kept.lock();
        let kept_bytes = kept.iter().map(|machine| machine.lua.used_memory()).sum::<usize>();
        if kept.len() < MAX_IDLE && bytes <= MAX_IDLE_MACHINE_BYTES && kept_bytes + bytes <= self.kept_bytes {
            kept.push(machine);
        }
    }
}

/// Compiles a chunk, and returns its syntax error, if any.
pub(crate) fn check(name: &str, chunk: &str) -> Result<()> {
    let mut machine = Machine::new(MAX_CHECK_BYTES)?;
    let Machine { lua, stack, .. } = &mut machine;
    on_stack(stack, || load(lua, name, chunk))
        .map(drop)
        .map_err(|cause| failure(name, MAX_CHECK_BYTES, &cause))
}

/// Memory for compiling a chunk, which is limited to 1 MiB, at its creation. No fiber is suspended
/// meanwhile.
const MAX_CHECK_BYTES: usize = MAX_MEMORY_BYTES;

/// A Lua machine.
pub(super) struct Machine {
    /// Compiled chunks by text, each with the name that it was compiled under. Dropped before
    /// `lua`, to which they belong.
    chunks: HashMap<Box<str>, (Box<str>, Function)>,
    /// Likewise: the functions of a procedure's `db`, valid while a host is lent.
    db: Table,
    lent: Rc<Lent>,
    lua: Lua,
    stack: FiberStack,
    limits: Rc<Limits>,
}

// SAFETY: everything that refers to the machine is inside it, or on the fiber that runs it and
// moves between threads with it; Lua stores no thread-specific state.
unsafe impl Send for Machine {}

impl Machine {
    fn new(memory_bytes: usize) -> Result<Machine> {
        let stack = FiberStack::new().map_err(|cause| {
            Error::new(
                sqlstate::OUT_OF_MEMORY,
                format!("could not allocate a stack for a procedure: {cause}"),
            )
            .hint("Run fewer procedures concurrently, or raise vm.max_map_count.")
        })?;
        let limits = Rc::new(Limits::new(memory_bytes));
        let lent = Rc::new(Lent::new(limits.clone()));
        let (lua, db) = sandbox(&limits)
            .and_then(|lua| database(&lua, &lent).map(|db| (lua, db)))
            .map_err(|cause| Error::new(sqlstate::INTERNAL, format!("could not start Lua: {cause}")))?;
        limits.set_empty(&lua);
        Ok(Machine { chunks: HashMap::new(), db, lent, lua, stack, limits })
    }

    /// Calls a procedure and passes its rows to `sink`. Returns their number.
    pub(super) fn run(
        &mut self,
        name: &str,
        loaded: &Loaded,
        arguments: &[Value],
        host: &mut Host<'_>,
        sink: &mut dyn RowSink,
    ) -> Result<u64> {
        let Machine { chunks, db, lent, lua, stack, limits } = self;
        let memory_bytes = limits.memory_bytes();
        limits.begin();
        let suspender = host.suspender();
        // SAFETY: the link is part of the connection, which outlives the call.
        let called = unsafe { &*suspender }.on_stack(stack, || {
            // Looked up by the whole text: a hash collision could be provoked, and tenants share
            // machines.
            let chunk = loaded.chunk.as_str();
            let function = match chunks.get(chunk) {
                // The name must match too, since errors contain it.
                Some((kept, function)) if **kept == *name => function.clone(),
                _ => {
                    let function = load(lua, name, chunk)?;
                    if chunks.len() >= MAX_CHUNKS {
                        chunks.clear();
                    }
                    if chunk.len() <= MAX_CACHED_CHUNK_BYTES {
                        chunks.insert(chunk.into(), (name.into(), function.clone()));
                    }
                    function
                }
            };
            let answer =
                lent.lend(host, lua, || function.call(chunk_arguments(lua, memory_bytes, db, arguments)?))?;
            if loaded.returns().is_empty() {
                Ok(0)
            } else {
                send_rows(lua, memory_bytes, answer, loaded.returns(), sink)
            }
        });
        limits.end(name)?;
        called.map_err(|cause| failure(name, memory_bytes, &cause))
    }
}

fn sandbox(limits: &Rc<Limits>) -> mlua::Result<Lua> {
    let libraries =
        StdLib::BIT | StdLib::BUFFER | StdLib::MATH | StdLib::STRING | StdLib::TABLE | StdLib::UTF8;
    let lua = Lua::new_with(libraries, LuaOptions::new())?;
    lua.set_memory_limit(limits.memory_bytes())?;
    let globals = lua.globals();
    for pair in globals.pairs::<mlua::Value, mlua::Value>() {
        let name = pair?.0;
        let kept = name
            .as_string()
            .and_then(|name| name.to_str().ok())
            .is_some_and(|name| GLOBALS.contains(&&*name));
        if !kept {
            globals.raw_set(name, mlua::Value::Nil)?;
        }
    }
    let math: Table = globals.raw_get("math")?;
    for name in ["random", "randomseed", "noise"] {
        math.raw_set(name, mlua::Value::Nil)?;
    }
    let watching = limits.clone();
    let watch = lua.create_function(move |_, ()| {
        watching.watch();
        Ok(())
    })?;
    lua.load(PRELUDE).set_name("=prelude").call::<()>(watch)?;
    lua.sandbox(true)?;
    // Otherwise a procedure's globals would be visible to the next call, perhaps of another tenant.
    lua.globals().set_readonly(true);
    let limits = limits.clone();
    lua.set_interrupt(move |lua| if limits.step(lua) { Err(ended()) } else { Ok(VmState::Continue) });
    Ok(lua)
}

fn load(lua: &Lua, name: &str, chunk: &str) -> mlua::Result<Function> {
    // Text only: Lua trusts bytecode, so it must not come from a tenant.
    lua.load(chunk).set_mode(mlua::chunk::ChunkMode::Text).set_name(format!("={name}")).into_function()
}

/// The arguments of a chunk: `db`, then the procedure's arguments.
fn chunk_arguments(
    lua: &Lua,
    memory_bytes: usize,
    db: &Table,
    arguments: &[Value],
) -> mlua::Result<MultiValue> {
    let _trusted = Trusted::new(lua, memory_bytes)?;
    let mut values = MultiValue::with_capacity(arguments.len() + 1);
    values.push_back(mlua::Value::Table(db.clone()));
    for argument in arguments {
        values.push_back(to_lua(lua, argument.as_ref()).map_err(mlua::Error::external)?);
    }
    Ok(values)
}

/// Converts a Lua error for the client. An engine error that was passed through Lua is returned as
/// it was.
fn failure(name: &str, memory_bytes: usize, cause: &mlua::Error) -> Error {
    const EXTERNAL_ROUTINE: &str = "38000";
    match cause {
        mlua::Error::CallbackError { cause, traceback } => {
            let failed = failure(name, memory_bytes, cause);
            let line = traceback.lines().map(str::trim).find(|line| line.starts_with(&format!("{name}:")));
            match line {
                Some(line) if failed.get_detail().is_none() => failed.detail(format!("In procedure {line}")),
                _ => failed,
            }
        }
        mlua::Error::ExternalError(ours) => match ours.downcast_ref::<Error>() {
            Some(ours) => ours.clone().without_position(),
            None => Error::new(EXTERNAL_ROUTINE, ours.to_string()),
        },
        mlua::Error::MemoryError(_) => {
            let message =
                format!("procedure \"{name}\" exceeded its memory limit of {} MiB", memory_bytes >> 20);
            Error::new(sqlstate::OUT_OF_MEMORY, message).hint("Process large numbers of rows in SQL.")
        }
        mlua::Error::SyntaxError { message, .. } => Error::new(sqlstate::SYNTAX_ERROR, message.clone()),
        mlua::Error::RuntimeError(message) => match message.split_once("\nstack traceback:\n") {
            Some((message, traceback)) => Error::new(EXTERNAL_ROUTINE, message).detail(traceback.trim()),
            None => Error::new(EXTERNAL_ROUTINE, message.clone()),
        },
        other => Error::new(EXTERNAL_ROUTINE, other.to_string()),
    }
}
