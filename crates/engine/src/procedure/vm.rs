//! Machines that run Lua: made once, sandboxed, used for one call at a time by whoever calls.
//!
//! A machine belongs to no tenant. Nothing of a call outlives it but what Lua compiled: libraries and globals are
//! read-only, a chunk is called anew each time, and a machine that holds much memory after a call is thrown away.
//!
//! Lua runs on a stack of its own: it nests calls into C up to 200 deep, and the statements that it runs need the budget of a
//! fiber's stack below that.

use std::rc::Rc;

use corosensei::on_stack;
use hashbrown::HashMap;
use mlua::{Function, Lua, LuaOptions, MultiValue, StdLib, Table, VmState};
use parking_lot::Mutex;

use super::answer::send_rows;
use super::definition::Loaded;
use super::functions::{Lent, Trusted, database};
use super::host::Host;
use super::limits::{KEPT_BYTES, Limits, MAX_MEMORY_BYTES};
use super::values::to_lua;
use crate::fiber::stack::FiberStack;
use crate::heap::Heap;
use crate::statement::RowSink;
use crate::{Error, Result, Value, sqlstate};

/// Machines that wait for a call.
const KEPT: usize = 16;
/// Chunks that a machine keeps compiled.
const KEPT_CHUNKS: usize = 64;
/// A longer chunk is compiled for each call.
const LONGEST_KEPT_CHUNK_BYTES: usize = 16 << 10;

/// What is left of Lua's globals. Not here: anything that reads a clock, randomness, files or the machine itself.
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

/// Functions of Lua's that must be other than they are.
///
/// A call into Lua's library cannot be ended, so none may take long: those that look for a pattern compare a long text with a
/// long pattern at every place, `table.move` moves what is not there, and `sort` without an order compares whole strings. `tostring` shows where a table lies in
/// memory, which is nobody's business and another place when the procedure is run again.
const PRELUDE: &str = include_str!("prelude.lua");

/// The machines of a node.
pub(crate) struct Machines {
    kept: Mutex<Vec<Machine>>,
    /// Memory that a call may use.
    memory_bytes: usize,
    /// Memory of all machines that are kept.
    kept_bytes: usize,
}

/// Machines that are kept may take this part of the memory for statements of the node.
const KEPT_PART: u64 = 16;

impl Machines {
    /// Of a node whose connections may hold what `heap` says.
    pub(crate) fn new(heap: &Heap) -> Machines {
        let call_bytes = heap.partition_limit_bytes() / 4;
        Machines {
            kept: Mutex::default(),
            memory_bytes: call_bytes.min(MAX_MEMORY_BYTES as u64) as usize,
            kept_bytes: (heap.limit_bytes() / KEPT_PART) as usize,
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
        if kept.len() < KEPT && bytes <= KEPT_BYTES && kept_bytes + bytes <= self.kept_bytes {
            kept.push(machine);
        }
    }
}

/// Compiles a chunk; tells what is wrong with it.
pub(crate) fn check(name: &str, chunk: &str) -> Result<()> {
    let mut machine = Machine::new(MAX_CHECK_BYTES)?;
    let Machine { lua, stack, .. } = &mut machine;
    on_stack(stack, || load(lua, name, chunk))
        .map(drop)
        .map_err(|cause| failure(name, MAX_CHECK_BYTES, &cause))
}

/// Memory to compile a chunk with, which has 1 MiB at most, when it is created. No call is suspended meanwhile.
const MAX_CHECK_BYTES: usize = MAX_MEMORY_BYTES;

/// One of them.
pub(super) struct Machine {
    /// By their texts, each with the name that it was compiled under. Before `lua`: they belong to it.
    chunks: HashMap<Box<str>, (Box<str>, Function)>,
    /// Likewise: the functions of a procedure's `db`, which are for whom it is lent to.
    db: Table,
    lent: Rc<Lent>,
    lua: Lua,
    stack: FiberStack,
    limits: Rc<Limits>,
}

// SAFETY: all that refers to the machine is in it, or on the fiber that runs it and moves between threads with it; Lua
// keeps nothing of its thread.
unsafe impl Send for Machine {}

impl Machine {
    fn new(memory_bytes: usize) -> Result<Machine> {
        let stack = FiberStack::new().map_err(|cause| {
            Error::new(sqlstate::OUT_OF_MEMORY, format!("no stack for a procedure: {cause}"))
                .hint("too many procedures run at once; run fewer, or raise vm.max_map_count")
        })?;
        let limits = Rc::new(Limits::new(memory_bytes));
        let lent = Rc::new(Lent::new(limits.clone()));
        let (lua, db) = sandbox(&limits)
            .and_then(|lua| database(&lua, &lent).map(|db| (lua, db)))
            .map_err(|cause| Error::new(sqlstate::INTERNAL, format!("Lua cannot be started: {cause}")))?;
        limits.set_empty(&lua);
        Ok(Machine { chunks: HashMap::new(), db, lent, lua, stack, limits })
    }

    /// Calls a procedure; its rows go to `sink`. Answers how many.
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
        // SAFETY: the link lives in the connection, which outlives the call.
        let called = unsafe { &*suspender }.on_stack(stack, || {
            // By the whole text: a hash could be made to collide, and machines are shared by tenants.
            let chunk = loaded.chunk.as_str();
            let function = match chunks.get(chunk) {
                // It names itself in errors.
                Some((kept, function)) if **kept == *name => function.clone(),
                _ => {
                    let function = load(lua, name, chunk)?;
                    if chunks.len() >= KEPT_CHUNKS {
                        chunks.clear();
                    }
                    if chunk.len() <= LONGEST_KEPT_CHUNK_BYTES {
                        chunks.insert(chunk.into(), (name.into(), function.clone()));
                    }
                    function
                }
            };
            let answer = lent.lend(host, lua, || function.call(given(lua, memory_bytes, db, arguments)?))?;
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
    // Without this a procedure's globals would stay for the next call, which may be another tenant's.
    lua.globals().set_readonly(true);
    let limits = limits.clone();
    lua.set_interrupt(move |lua| if limits.step(lua) { Err(ended()) } else { Ok(VmState::Continue) });
    Ok(lua)
}

/// What Lua is told when a limit, a cancel or a conflict ends it; the client is told the reason.
pub(super) fn ended() -> mlua::Error {
    mlua::Error::runtime("the procedure was ended")
}

fn load(lua: &Lua, name: &str, chunk: &str) -> mlua::Result<Function> {
    // Text only: bytecode is trusted by Lua, and must not come from a tenant.
    lua.load(chunk).set_mode(mlua::chunk::ChunkMode::Text).set_name(format!("={name}")).into_function()
}

/// What a chunk is called with: `db`, then the arguments.
fn given(lua: &Lua, memory_bytes: usize, db: &Table, arguments: &[Value]) -> mlua::Result<MultiValue> {
    let _trusted = Trusted::new(lua, memory_bytes)?;
    let mut given = MultiValue::with_capacity(arguments.len() + 1);
    given.push_back(mlua::Value::Table(db.clone()));
    for argument in arguments {
        given.push_back(to_lua(lua, argument.as_ref()).map_err(mlua::Error::external)?);
    }
    Ok(given)
}

/// An error of Lua's for the client. One of ours that Lua handed on is what it was.
fn failure(name: &str, memory_bytes: usize, cause: &mlua::Error) -> Error {
    const EXTERNAL_ROUTINE: &str = "38000";
    match cause {
        mlua::Error::CallbackError { cause, traceback } => {
            let failed = failure(name, memory_bytes, cause);
            let line = traceback.lines().map(str::trim).find(|line| line.starts_with(&format!("{name}:")));
            match line {
                Some(line) if failed.get_detail().is_none() => failed.detail(format!("in procedure {line}")),
                _ => failed,
            }
        }
        mlua::Error::ExternalError(ours) => match ours.downcast_ref::<Error>() {
            Some(ours) => ours.clone().without_position(),
            None => Error::new(EXTERNAL_ROUTINE, ours.to_string()),
        },
        mlua::Error::MemoryError(_) => {
            let message = format!("procedure \"{name}\" uses more than {} MiB", memory_bytes >> 20);
            Error::new(sqlstate::OUT_OF_MEMORY, message).hint("let SQL do the work on many rows")
        }
        mlua::Error::SyntaxError { message, .. } => Error::new(sqlstate::SYNTAX_ERROR, message.clone()),
        mlua::Error::RuntimeError(message) => match message.split_once("\nstack traceback:\n") {
            Some((message, traceback)) => Error::new(EXTERNAL_ROUTINE, message).detail(traceback.trim()),
            None => Error::new(EXTERNAL_ROUTINE, message.clone()),
        },
        other => Error::new(EXTERNAL_ROUTINE, other.to_string()),
    }
}
