//! The functions of `db`, as Lua calls them.
//!
//! `query` and `exec` are C functions: they take their arguments off Lua's stack and leave the answer there. A wrapped closure
//! would make a handle for each argument and run each answer in a protected call, which takes as many instructions as a short statement.
//!
//! # Errors
//! An error of Lua's is an exception that leaves through the frames of whoever raises it. So nothing is raised here while a value
//! of Rust's lives: the error is left with [`Lent`], and a wrapped closure, the function's second upvalue, takes it from there and
//! raises it as the library does, with a traceback.
//!
//! A panic does not enter Lua, which could catch it and go on. It is kept until the call has ended, to which `db` answers nothing any
//! more, and goes on then.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::rc::Rc;

use mlua::{Function, Lua, Table, ffi};

use super::host::Host;
use super::limits::Limits;
use super::values::{Room, from_stack, text_at};
use super::vm::ended;
use crate::heap::Lease;
use crate::{Error, Result, Value, sqlstate};

/// The upvalues: whom to ask, and who raises what went wrong.
const LENT: c_int = 1;
const RAISE: c_int = 2;
const UPVALUES: c_int = 2;

/// The `db` that procedures are given: one for all calls of a machine.
pub(super) fn database(lua: &Lua, lent: &Rc<Lent>) -> mlua::Result<Table> {
    let db = lua.create_table()?;
    db.raw_set("query", function(lua, lent, query)?)?;
    db.raw_set("exec", function(lua, lent, exec)?)?;
    let host = lent.clone();
    let abort = move |_: &Lua, message: mlua::LuaString| -> mlua::Result<()> {
        let message = message.to_string_lossy();
        host.with(|host, _| Err(host.abort(&message)))
    };
    db.raw_set("abort", lua.create_function(abort)?)?;
    db.set_readonly(true);
    Ok(db)
}

fn function(lua: &Lua, lent: &Rc<Lent>, function: ffi::lua_CFunction) -> mlua::Result<Function> {
    let left = lent.clone();
    let raise = lua.create_function(move |_, ()| -> mlua::Result<()> { Err(left.take_failure()) })?;
    let lent = Rc::as_ptr(lent).cast_mut().cast::<c_void>();
    // SAFETY: two values on a stack with room for them become the upvalues. The closure that raises keeps what is lent alive
    // for as long as the function has it.
    unsafe {
        lua.exec_raw(raise, |state| {
            ffi::lua_pushlightuserdata(state, lent);
            ffi::lua_insert(state, -2);
            ffi::lua_pushcclosure(state, function, UPVALUES);
        })
    }
}

/// `db.query(sql, ...)`: runs a statement and answers its rows, a list of tables with a field for each column.
unsafe extern "C-unwind" fn query(state: *mut ffi::lua_State) -> c_int {
    // SAFETY: Lua calls it with its state, as one of `function`'s.
    unsafe {
        answer(state, |host, lua, sql, parameters| {
            host.query(lua, sql, parameters)?;
            let _trusted = Trusted::new(lua, host.memory_bytes())?;
            host.rows().push(state)
        })
    }
}

/// `db.exec(sql, ...)`: runs a statement and answers how many rows it has changed.
unsafe extern "C-unwind" fn exec(state: *mut ffi::lua_State) -> c_int {
    // SAFETY: as above; there is room for one value, since each function of C's has room for twenty.
    unsafe {
        answer(state, |host, _, sql, parameters| {
            let changed = host.exec(sql, parameters)?;
            ffi::lua_pushnumber(state, changed as f64);
            Ok(())
        })
    }
}

/// Asks the host with the arguments that are on the stack; what `ask` has pushed is the answer.
///
/// # Safety
/// `state` is that of a running function of [`function`]'s.
unsafe fn answer(
    state: *mut ffi::lua_State,
    ask: impl FnOnce(&mut Host<'_>, &Lua, &str, &[Value]) -> mlua::Result<()>,
) -> c_int {
    // SAFETY: the upvalue is a `Lent`, which lives as long as the function; the arguments are read where they are.
    let answered = unsafe {
        let lent = &*ffi::lua_tolightuserdata(state, ffi::lua_upvalueindex(LENT)).cast::<Lent>();
        let asked = catch_unwind(AssertUnwindSafe(|| {
            let mut room = Room::new(lent.limits.memory_bytes());
            let (sql, parameters) = arguments(state, &mut room).map_err(mlua::Error::external)?;
            lent.with(|host, lua| {
                let _held = Lease::new(room.taken()).map_err(mlua::Error::external)?;
                ask(host, lua, sql, &parameters)
            })
        }));
        match asked {
            Ok(Ok(())) => true,
            Ok(Err(error)) => lent.leave(error),
            Err(panic) => {
                lent.panic.set(Some(panic));
                lent.leave(mlua::Error::runtime("the transaction has ended"))
            }
        }
    };
    if !answered {
        // SAFETY: nothing of Rust's is left in this frame or its callers' up to Lua's.
        unsafe {
            ffi::lua_pushvalue(state, ffi::lua_upvalueindex(RAISE));
            ffi::lua_call(state, 0, 0);
        }
    }
    1
}

/// The statement and its parameters.
///
/// # Safety
/// The stack holds the arguments, and nobody touches them while the text is used.
unsafe fn arguments<'s>(state: *mut ffi::lua_State, room: &mut Room) -> Result<(&'s str, Vec<Value>)> {
    // SAFETY: the caller's promise; indexes up to the top are arguments.
    unsafe {
        let sql = match ffi::lua_type(state, 1) {
            ffi::LUA_TSTRING => text_at(state, 1, || "a statement".to_owned()),
            _ => Err(Error::new(sqlstate::DATATYPE_MISMATCH, "a statement is a string")
                .hint("db.query(\"SELECT ... WHERE id = $1\", id)")),
        }?;
        let parameters = (2..=ffi::lua_gettop(state))
            .map(|index| from_stack(state, index, room, || format!("argument ${}", index - 1)));
        Ok((sql, parameters.collect::<Result<_>>()?))
    }
}

/// The host of the call that a machine runs, while it runs; the functions of `db` outlive calls.
pub(super) struct Lent {
    limits: Rc<Limits>,
    host: Cell<Option<(NonNull<c_void>, NonNull<Lua>)>>,
    /// What a function is about to raise.
    failure: RefCell<Option<mlua::Error>>,
    panic: Cell<Option<Box<dyn Any + Send>>>,
}

impl Lent {
    pub(super) fn new(limits: Rc<Limits>) -> Self {
        Lent { limits, host: Cell::default(), failure: RefCell::default(), panic: Cell::default() }
    }

    /// Lends `host` to the functions of `lua`'s `db` for the time of `call`.
    pub(super) fn lend<R>(&self, host: &mut Host<'_>, lua: &Lua, call: impl FnOnce() -> R) -> R {
        struct Back<'a>(&'a Lent);
        impl Drop for Back<'_> {
            fn drop(&mut self) {
                self.0.host.set(None);
            }
        }
        self.host.set(Some((NonNull::from(host).cast(), NonNull::from(lua))));
        let _back = Back(self);
        let called = call();
        if let Some(panic) = self.panic.take() {
            resume_unwind(panic);
        }
        called
    }

    fn with<R>(&self, ask: impl FnOnce(&mut Host<'_>, &Lua) -> mlua::Result<R>) -> mlua::Result<R> {
        let Some(lent) = self.host.take() else {
            return Err(mlua::Error::runtime("the database is not to be had here"));
        };
        // SAFETY: both were lent by a call that still runs, which does not touch the host meanwhile; whoever uses it has
        // taken it, so there is one at a time. Who panics does not put it back.
        let answer = unsafe {
            let (host, lua) = (lent.0.cast::<Host<'_>>().as_mut(), lent.1.as_ref());
            // A statement may wait: what Lua holds meanwhile is charged before.
            if self.limits.charge(lua) { ask(host, lua) } else { Err(ended()) }
        };
        self.host.set(Some(lent));
        answer
    }

    /// Keeps what is to be raised; answers `false`.
    fn leave(&self, error: mlua::Error) -> bool {
        *self.failure.borrow_mut() = Some(error);
        false
    }

    fn take_failure(&self) -> mlua::Error {
        self.failure.borrow_mut().take().unwrap_or_else(|| mlua::Error::runtime("nothing has failed"))
    }
}

/// While it lives, Lua's memory is not limited: with a limit each string and field that we make is made in a protected
/// call, which costs more than the query, and a call of ours into Lua may raise an error. What we make is counted by who makes it.
pub(super) struct Trusted<'l> {
    lua: &'l Lua,
    memory_bytes: usize,
}

impl<'l> Trusted<'l> {
    /// `memory_bytes` is the limit afterwards.
    pub(super) fn new(lua: &'l Lua, memory_bytes: usize) -> mlua::Result<Self> {
        lua.set_memory_limit(0)?;
        Ok(Trusted { lua, memory_bytes })
    }
}

impl Drop for Trusted<'_> {
    fn drop(&mut self) {
        // It cannot fail: the machine's memory is ours, and was limited before.
        let _ = self.lua.set_memory_limit(self.memory_bytes);
    }
}
