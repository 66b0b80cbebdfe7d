//! Saves failing inputs, including those that a panic handler cannot catch. A watchdog thread
//! detects an input that hangs. The file `running` holds the current input, in case it kills the
//! process.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use crate::corpus;

static PANICS: AtomicU64 = AtomicU64::new(0);

/// Counts panics of all threads from this call on.
pub(crate) fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default_hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            default_hook(panic);
        }));
    });
}

/// Number of panics so far.
pub(crate) fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

pub(crate) struct Watch {
    directory: PathBuf,
    running: File,
    events: Sender<Event>,
}

enum Event {
    Begin,
    End,
}

impl Watch {
    /// Watches the inputs of a target. Aborts the process if one takes longer than `timeout`.
    pub(crate) fn new(directory: PathBuf, timeout: Duration) -> Watch {
        std::fs::create_dir_all(&directory).expect("target/fuzz must be writable");
        let path = directory.join("running");
        let running = File::create(&path).expect("target/fuzz must be writable");
        let (events, received) = channel();
        std::thread::spawn(move || {
            if !all_complete(&received, timeout) {
                eprintln!("fuzz: an input took longer than {timeout:?}; it is in {}", path.display());
                std::process::abort();
            }
        });
        Watch { directory, running, events }
    }

    pub(crate) fn begin(&self, input: &[u8]) {
        let written =
            self.running.write_all_at(input, 0).and_then(|()| self.running.set_len(input.len() as u64));
        written.expect("target/fuzz must be writable");
        let _ = self.events.send(Event::Begin);
    }

    pub(crate) fn end(&self) {
        let _ = self.events.send(Event::End);
    }

    /// Writes an input to a permanent file.
    pub(crate) fn keep(&self, input: &[u8]) -> PathBuf {
        let path = self.directory.join(format!("failed-{}", corpus::name(input)));
        std::fs::write(&path, input).expect("target/fuzz must be writable");
        path
    }
}

/// Returns false as soon as an input takes longer than `timeout`.
fn all_complete(received: &Receiver<Event>, timeout: Duration) -> bool {
    while let Ok(Event::Begin) = received.recv() {
        match received.recv_timeout(timeout) {
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => return true, // The input panicked.
        }
    }
    true
}
