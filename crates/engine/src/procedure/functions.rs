//! The functions of `db`, the Lua side.
//!
//! `query` and `exec` are C functions: they read their arguments from the Lua stack and push their
//! results. A wrapped Rust closure would create a handle for each argument and convert each result
//! in a protected call, which costs as many instructions as a short statement.
//!
//! # Errors
//! A Lua error is an exception that unwinds through the frames of its raiser. So no error is raised
//! here while a Rust value is alive: the error is stored in [`Lent`], and a wrapped closure, the
//! function's second upvalue, takes it from there and raises it as the library does, with a
//! traceback.
//!
//! A panic must not enter Lua, which could catch it and continue. It is stored until the call has
//! ended, and then resumed; meanwhile all calls of `db` fail.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::rc::Rc;

use fulmar_sqlite::{Error, Lease, Result, Value, sqlstate};
use mlua::{Function, Lua, Table, ffi};

use super::host::Host;
use super::limits::Limits;
use super::values::{ValueBudget, ended, from_stack, text_at};

/// Indexes of the upvalues: the lent host, and the closure that raises errors.
const LENT: c_int = 1;
const RAISE: c_int = 2;
const UPVALUES: c_int = 2;

/// Creates the `db` table of a machine, which all its calls use.
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
    // SAFETY: two values on a stack with enough space become the upvalues. The raising closure
    // keeps `lent` alive as long as the function has it.
    unsafe {
        lua.exec_raw(raise, |state| {
            ffi::lua_pushlightuserdata(state, lent);
            ffi::lua_insert(state, -2);
            ffi::lua_pushcclosure(state, function, UPVALUES);
        })
    }
}

/// `db.query(sql, ...)`: runs a statement and returns its rows, a list of tables with a field per
/// column.
unsafe extern "C-unwind" fn query(state: *mut ffi::lua_State) -> c_int {
    // SAFETY: Lua calls it with its state, as a function created by `function`.
    unsafe {
        answer(state, |host, lua, sql, parameters| {
            host.query(lua, sql, parameters)?;
            let _trusted = Trusted::new(lua, host.memory_bytes())?;
            host.rows().push(state)
        })
    }
}

/// `db.exec(sql, ...)`: runs a statement and returns the number of changed rows.
unsafe extern "C-unwind" fn exec(state: *mut ffi::lua_State) -> c_int {
    // SAFETY: as above; there is space for one value, since a C function has space for 20.
    unsafe {
        answer(state, |host, _, sql, parameters| {
            let changed = host.exec(sql, parameters)?;
            ffi::lua_pushnumber(state, changed as f64);
            Ok(())
        })
    }
}

/// Runs `ask` with the arguments on the stack. The value that `ask` has pushed is the result.
///
/// # Safety
/// `state` must be the state of a running function created by [`function`].
unsafe fn answer(
    state: *mut ffi::lua_State,
    ask: impl FnOnce(&mut Host<'_>, &Lua, &str, &[Value]) -> mlua::Result<()>,
) -> c_int {
    // SAFETY: the upvalue is a `Lent` that lives as long as the function; the arguments stay on the
    // stack while they are read.
    let answered = unsafe {
        let lent = &*ffi::lua_tolightuserdata(state, ffi::lua_upvalueindex(LENT)).cast::<Lent>();
        let asked = catch_unwind(AssertUnwindSafe(|| {
            let mut budget = ValueBudget::new(lent.limits.memory_bytes());
            let (sql, parameters) = arguments(state, &mut budget).map_err(mlua::Error::external)?;
            lent.with(|host, lua| {
                let _held = Lease::new(budget.taken()).map_err(mlua::Error::external)?;
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
        // SAFETY: no Rust value is left in this frame or in those of its callers up to Lua.
        unsafe {
            ffi::lua_pushvalue(state, ffi::lua_upvalueindex(RAISE));
            ffi::lua_call(state, 0, 0);
        }
    }
    1
}

/// Reads the statement and its parameters.
///
/// # Safety
/// The stack must contain the arguments, which must not change while the text is used.
unsafe fn arguments<'s>(
    state: *mut ffi::lua_State,
    budget: &mut ValueBudget,
) -> Result<(&'s str, Vec<Value>)> {
    // SAFETY: guaranteed by the caller; indexes up to the top are arguments.
    unsafe {
        let sql = match ffi::lua_type(state, 1) {
            ffi::LUA_TSTRING => text_at(state, 1, || "the statement".to_owned()),
            _ => Err(Error::new(sqlstate::DATATYPE_MISMATCH, "the statement must be a string")
                .hint("For example: db.query(\"SELECT ... WHERE id = $1\", id)")),
        }?;
        let parameters = (2..=ffi::lua_gettop(state))
            .map(|index| from_stack(state, index, budget, || format!("argument ${}", index - 1)));
        Ok((sql, parameters.collect::<Result<_>>()?))
    }
}

/// The host of the running call. The functions of `db` outlive calls, so they access it through
/// this.
pub(super) struct Lent {
    limits: Rc<Limits>,
    host: Cell<Option<(NonNull<c_void>, NonNull<Lua>)>>,
    /// The error to be raised.
    failure: RefCell<Option<mlua::Error>>,
    panic: Cell<Option<Box<dyn Any + Send>>>,
}

impl Lent {
    pub(super) fn new(limits: Rc<Limits>) -> Self {
        Lent { limits, host: Cell::default(), failure: RefCell::default(), panic: Cell::default() }
    }

    /// Lends `host` to the functions of `lua`'s `db` for the duration of `call`.
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
            return Err(mlua::Error::runtime("`db` is not available in this context"));
        };
        // SAFETY: both were lent by a call that is still running and does not use the host
        // meanwhile. The host was taken out of the cell, so there is one user at a time. After a
        // panic it is not put back.
        let answer = unsafe {
            let (host, lua) = (lent.0.cast::<Host<'_>>().as_mut(), lent.1.as_ref());
            // A statement may wait, so Lua's memory is charged first.
            if self.limits.charge(lua) { ask(host, lua) } else { Err(ended()) }
        };
        self.host.set(Some(lent));
        answer
    }

    /// Stores the error to be raised. Returns false.
    fn leave(&self, error: mlua::Error) -> bool {
        *self.failure.borrow_mut() = Some(error);
        false
    }

    fn take_failure(&self) -> mlua::Error {
        self.failure.borrow_mut().take().unwrap_or_else(|| mlua::Error::runtime("no error to raise"))
    }
}

/// Disables Lua's memory limit while it lives. With a limit, each string and field is created in a
/// protected call, which costs more than the query, and a call into Lua may raise an error. The
/// callers account for the memory instead.
pub(super) struct Trusted<'l> {
    lua: &'l Lua,
    memory_bytes: usize,
}

impl<'l> Trusted<'l> {
    /// `memory_bytes` is the limit that is restored on drop.
    pub(super) fn new(lua: &'l Lua, memory_bytes: usize) -> mlua::Result<Self> {
        lua.set_memory_limit(0)?;
        Ok(Trusted { lua, memory_bytes })
    }
}

impl Drop for Trusted<'_> {
    fn drop(&mut self) {
        // Cannot fail: the machine uses the built-in allocator and had a limit before.
        let _ = self.lua.set_memory_limit(self.memory_bytes);
    }
}
