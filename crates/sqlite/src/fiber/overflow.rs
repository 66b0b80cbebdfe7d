//! Reports which statement kills the process.
//!
//! The process cannot survive a fatal signal in a statement: C frames cannot be unwound from the
//! middle of a function, and the connection may be in any state. A handler therefore only reports:
//!
//! - a stack overflow, which [`super::stack`] explains should never happen, with its tenant and
//!   statement, so that the operator learns which statement to avoid;
//! - on a node of a cluster, the partition, in a file ([`record_to`]), so that a statement does not
//!   kill one node after the other.
//!
//! The handler runs on the thread's alternate signal stack, which Rust sets up for every thread that
//! it starts, and it only calls functions that are async-signal-safe. Then it passes the signal to
//! the previous handler (Rust's), or lets it end the process.
//!
//! Signals that another process has sent are not recorded: the thread that gets them is arbitrary.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

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
    /// The address of the fault is in the guard page of the fiber's stack.
    pub has_overflowed: bool,
}

/// Describes the statement of the fiber with this environment pointer, for a fault at an address.
/// `None` outside fibers. Must be async-signal-safe.
pub(crate) type Describe = unsafe fn(*const (), usize) -> Option<Running>;

/// The signals that end the process.
const FATAL: [c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT];

struct Installed {
    /// The previous actions for the signals of [`FATAL`].
    previous: [libc::sigaction; FATAL.len()],
    describe: Describe,
}

/// Where crashes are recorded.
struct Record {
    path: CString,
    /// Renamed to `path` when it is complete.
    temporary: CString,
    incarnation: u64,
}

static INSTALLED: OnceLock<Installed> = OnceLock::new();
static RECORD: OnceLock<Record> = OnceLock::new();
static IS_RECORDED: AtomicBool = AtomicBool::new(false);

/// If a statement kills this process, its partition and `incarnation` are written to a file, as
/// JSON. Later calls do nothing.
pub fn record_to(path: &Path, incarnation: u64) -> io::Result<()> {
    let name = |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from);
    let record = Record { path: name(path)?, temporary: name(&path.with_extension("crash"))?, incarnation };
    let _ = RECORD.set(record);
    Ok(())
}

/// Installs the handler for the process; later calls do nothing.
pub(crate) fn install(describe: Describe) -> io::Result<()> {
    if INSTALLED.get().is_some() {
        return Ok(());
    }
    // SAFETY: plain calls with valid pointers. The handler ignores signals until `INSTALLED` is
    // set.
    unsafe {
        let mut previous = MaybeUninit::<[libc::sigaction; FATAL.len()]>::zeroed().assume_init();
        for (signal, previous) in FATAL.into_iter().zip(&mut previous) {
            if libc::sigaction(signal, ptr::null(), previous) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        let _ = INSTALLED.set(Installed { previous, describe });
        let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        for signal in FATAL {
            if libc::sigaction(signal, &action, ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

unsafe extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let Some(installed) = INSTALLED.get() else { return };
    let Some(index) = FATAL.iter().position(|fatal| *fatal == signal) else { return };
    let previous = &installed.previous[index];
    // SAFETY: the kernel's arguments. The environment of the faulting fiber is valid while the
    // fiber runs.
    unsafe {
        // A signal that was sent has no address.
        let is_fault = (*info).si_code > 0;
        let is_own = is_fault || ((*info).si_code == libc::SI_TKILL && (*info).si_pid() == libc::getpid());
        let address = if is_fault { (*info).si_addr() as usize } else { 0 };
        if let Some(running) = (installed.describe)(super::current(), address).filter(|_| is_own) {
            if is_fault && running.has_overflowed {
                report(&running);
            }
            record(running.partition);
        }
        let handler = previous.sa_sigaction;
        if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
            // The faulting instruction, or abort(), runs again, and ends the process.
            libc::signal(signal, libc::SIG_DFL);
            if !is_fault {
                libc::raise(signal); // delivered when the handler returns
            }
        } else if previous.sa_flags & libc::SA_SIGINFO != 0 {
            let handler: unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                std::mem::transmute(handler);
            handler(signal, info, context);
        } else {
            let handler: unsafe extern "C" fn(c_int) = std::mem::transmute(handler);
            handler(signal);
        }
    }
}

/// Writes the partition of the statement that kills the process to the file of [`record_to`].
///
/// # Safety
/// Async-signal-safe. Only the first call writes.
unsafe fn record(partition: u64) {
    let Some(Record { path, temporary, incarnation }) = RECORD.get() else { return };
    if IS_RECORDED.swap(true, Ordering::Relaxed) {
        return;
    }
    let (mut first, mut second) = ([0; 20], [0; 20]);
    let parts: [&[u8]; 5] = [
        b"{\"partition\":",
        decimal(partition, &mut first),
        b",\"incarnation\":",
        decimal(*incarnation, &mut second),
        b"}",
    ];
    // SAFETY: valid strings and slices. If a call fails, the death is not reported.
    unsafe {
        let file = libc::open(temporary.as_ptr(), libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC, 0o600);
        if file < 0 {
            return;
        }
        let written = parts
            .iter()
            .all(|part| libc::write(file, part.as_ptr().cast(), part.len()) == part.len() as isize);
        if written && libc::fsync(file) == 0 {
            libc::rename(temporary.as_ptr(), path.as_ptr());
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
        Some(Running {
            tenant: (TEXTS.0.as_ptr(), TEXTS.0.len()),
            partition: 42,
            text: (TEXTS.1.as_ptr(), TEXTS.1.len()),
            has_overflowed: suspender.is_in_guard(address),
        })
    }

    /// Runs a test again in a child process, with a file for its record. Returns its standard error
    /// and the record.
    fn run_child(test: &str) -> (String, Option<String>) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("crash.json");
        let name = format!("fiber::overflow::tests::{test}");
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--nocapture"])
            .env(CHILD, &file)
            .output()
            .unwrap();
        assert!(!child.status.success());
        (String::from_utf8_lossy(&child.stderr).into_owned(), std::fs::read_to_string(file).ok())
    }

    /// Runs `body` on a fiber of a child process.
    fn in_fiber(file: &std::ffi::OsStr, body: impl FnOnce() -> u64) {
        install(describe).unwrap();
        record_to(Path::new(file), 7).unwrap();
        let suspender = Suspender::new();
        let environment = (&raw const suspender).cast();
        // SAFETY: the suspender outlives the fiber.
        let fiber = unsafe { Fiber::new(&raw const suspender, environment, body) };
        let _ = poll_once(fiber.unwrap());
    }

    const RECORDED: &str = "{\"partition\":42,\"incarnation\":7}";

    #[test]
    fn overflow_is_reported_before_the_process_ends() {
        #[expect(unconditional_recursion, reason = "it overflows the stack")]
        fn recurse(depth: u64) -> u64 {
            let frame = std::hint::black_box([depth; 128]);
            recurse(depth + 1) + frame[0]
        }
        if let Some(file) = std::env::var_os(CHILD) {
            return in_fiber(&file, || recurse(0));
        }
        let (errors, record) = run_child("overflow_is_reported_before_the_process_ends");
        assert!(errors.contains("Database \"shop\", partition 42, statement: SELECT deep"), "{errors}");
        assert_eq!(record.as_deref(), Some(RECORDED));
    }

    #[test]
    fn abort_is_recorded_in_a_statement() {
        if let Some(file) = std::env::var_os(CHILD) {
            return in_fiber(&file, || std::process::abort());
        }
        let (errors, record) = run_child("abort_is_recorded_in_a_statement");
        assert!(!errors.contains("stack overflow"), "{errors}");
        assert_eq!(record.as_deref(), Some(RECORDED));
    }

    #[test]
    fn abort_is_not_recorded_outside_of_statements() {
        if let Some(file) = std::env::var_os(CHILD) {
            in_fiber(&file, || 1);
            std::process::abort();
        }
        assert_eq!(run_child("abort_is_not_recorded_outside_of_statements").1, None);
    }

    #[test]
    fn signal_of_another_process_is_not_recorded() {
        if let Some(file) = std::env::var_os(CHILD) {
            return in_fiber(&file, || {
                // SAFETY: plain calls. The signal is sent to this process, and not raised by it.
                unsafe {
                    match libc::fork() {
                        0 => {
                            libc::kill(libc::getppid(), libc::SIGABRT);
                            libc::_exit(0)
                        }
                        _ => loop {
                            libc::pause();
                        },
                    }
                }
            });
        }
        assert_eq!(run_child("signal_of_another_process_is_not_recorded").1, None);
    }
}
