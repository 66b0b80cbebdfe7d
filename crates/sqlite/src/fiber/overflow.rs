//! Reports a stack overflow with its tenant and statement, before the process ends.
//!
//! A process cannot survive an overflow: C frames cannot be unwound from the middle of a function,
//! and the connection may be in any state. [`super::stack`] explains why it should never happen. If
//! it does, the operator must learn which statement to avoid. The handler runs on the thread's
//! alternate signal stack, which Rust sets up for every thread that it starts, and it only calls
//! `write`. Then it passes the signal to the previous handler (Rust's).

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

use libc::{c_int, c_void, siginfo_t};

/// Maximum bytes of the statement's text in the report.
const MAX_TEXT_BYTES: usize = 1024;

/// The statement that runs on the current fiber.
#[derive(Clone, Copy)]
pub(crate) struct Running {
    /// The tenant's name; empty if it is not known.
    pub tenant: (*const u8, usize),
    pub partition: u64,
    /// The statement's text; empty between statements.
    pub text: (*const u8, usize),
}

/// Describes the statement of the fiber with this environment pointer, if the address is in its
/// guard page. Must be async-signal-safe.
pub(crate) type Describe = unsafe fn(*const (), usize) -> Option<Running>;

struct Installed {
    previous: libc::sigaction,
    describe: Describe,
}

static INSTALLED: OnceLock<Installed> = OnceLock::new();

/// Installs the handler for the process; later calls do nothing.
pub(crate) fn install(describe: Describe) -> io::Result<()> {
    if INSTALLED.get().is_some() {
        return Ok(());
    }
    // SAFETY: plain calls with valid pointers. The handler ignores signals until `INSTALLED` is
    // set.
    unsafe {
        let mut previous = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        if libc::sigaction(libc::SIGSEGV, ptr::null(), &mut previous) != 0 {
            return Err(io::Error::last_os_error());
        }
        let _ = INSTALLED.set(Installed { previous, describe });
        let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        if libc::sigaction(libc::SIGSEGV, &action, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

unsafe extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let Some(installed) = INSTALLED.get() else { return };
    // SAFETY: the kernel's arguments. The environment of the faulting fiber is valid while the
    // fiber runs.
    unsafe {
        let address = (*info).si_addr() as usize;
        if let Some(running) = (installed.describe)(super::current(), address) {
            report(&running);
        }
        let previous = installed.previous.sa_sigaction;
        if previous == libc::SIG_DFL || previous == libc::SIG_IGN {
            // The faulting instruction runs again, and ends the process.
            libc::signal(signal, libc::SIG_DFL);
        } else if installed.previous.sa_flags & libc::SA_SIGINFO != 0 {
            let previous: unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                std::mem::transmute(previous);
            previous(signal, info, context);
        } else {
            let previous: unsafe extern "C" fn(c_int) = std::mem::transmute(previous);
            previous(signal);
        }
    }
}

/// Writes to standard error, as the node's log does.
///
/// # Safety
/// The pointers in `running` must be valid.
unsafe fn report(running: &Running) {
    let mut digits = [0_u8; 20];
    let partition = decimal(running.partition, &mut digits);
    // SAFETY: the caller's contract.
    let (tenant, text) =
        unsafe { (text_of(running.tenant, usize::MAX), text_of(running.text, MAX_TEXT_BYTES)) };
    for part in [
        b"FATAL: stack overflow in a statement; terminating the node. Database \"",
        tenant,
        b"\", partition ",
        partition,
        b", statement: ",
        text,
        b"\n",
    ] as [&[u8]; 7]
    {
        // SAFETY: a valid slice; nothing can be done if the write fails.
        unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
    }
}

unsafe fn text_of<'a>((start, bytes): (*const u8, usize), max_bytes: usize) -> &'a [u8] {
    if start.is_null() {
        return b"";
    }
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(start, bytes.min(max_bytes)) }
}

fn decimal(mut number: u64, digits: &mut [u8; 20]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &digits[at..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fiber::{Fiber, Suspender, poll_once};

    #[test]
    fn numbers_are_written_in_decimal() {
        let text = |number| String::from_utf8(decimal(number, &mut [0; 20]).to_vec()).unwrap();
        assert_eq!([text(0), text(907), text(u64::MAX)], ["0", "907", "18446744073709551615"]);
    }

    const CHILD: &str = "FULMAR_TEST_OVERFLOWS";

    unsafe fn describe(environment: *const (), address: usize) -> Option<Running> {
        // SAFETY: the environment of the test's fiber is its suspender.
        let suspender = unsafe { environment.cast::<Suspender>().as_ref() }?;
        const TEXTS: (&str, &str) = ("shop", "SELECT deep");
        suspender.is_in_guard(address).then(|| Running {
            tenant: (TEXTS.0.as_ptr(), TEXTS.0.len()),
            partition: 42,
            text: (TEXTS.1.as_ptr(), TEXTS.1.len()),
        })
    }

    /// Runs this test again in a child process, which overflows a fiber's stack.
    #[test]
    fn overflow_is_reported_before_the_process_ends() {
        #[expect(unconditional_recursion, reason = "it overflows the stack")]
        fn recurse(depth: u64) -> u64 {
            let frame = std::hint::black_box([depth; 128]);
            recurse(depth + 1) + frame[0]
        }
        if std::env::var_os(CHILD).is_some() {
            install(describe).unwrap();
            let suspender = Suspender::new();
            let environment = (&raw const suspender).cast();
            // SAFETY: the suspender outlives the fiber.
            let fiber = unsafe { Fiber::new(&raw const suspender, environment, || recurse(0)) };
            let _ = poll_once(fiber.unwrap());
            return;
        }
        let name = "fiber::overflow::tests::overflow_is_reported_before_the_process_ends";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&child.stderr);
        assert!(!child.status.success());
        assert!(errors.contains("Database \"shop\", partition 42, statement: SELECT deep"), "{errors}");
    }
}
