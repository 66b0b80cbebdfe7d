//! Keeps an input that fails, also where nothing is left to catch: an input that does not end is noticed by a thread
//! beside it, and one that takes the process down stands in the file `running`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use crate::corpus;

static PANICS: AtomicU64 = AtomicU64::new(0);

/// Counts panics of all threads from now on.
pub(crate) fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            usual(panic);
        }));
    });
}

/// How many there have been.
pub(crate) fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

pub(crate) struct Watch {
    directory: PathBuf,
    running: File,
    events: Sender<Event>,
}

enum Event {
    Begins,
    Ended,
}

impl Watch {
    /// Watches the inputs of a target; each may take as long as `limit`.
    pub(crate) fn new(directory: PathBuf, limit: Duration) -> Watch {
        std::fs::create_dir_all(&directory).expect("the fuzzer needs target/fuzz");
        let path = directory.join("running");
        let running = File::create(&path).expect("the fuzzer needs target/fuzz");
        let (events, told) = channel();
        std::thread::spawn(move || {
            if !all_end(&told, limit) {
                eprintln!("fuzz: an input takes longer than {limit:?}; it is in {}", path.display());
                std::process::abort();
            }
        });
        Watch { directory, running, events }
    }

    pub(crate) fn begins(&self, input: &[u8]) {
        let written =
            self.running.write_all_at(input, 0).and_then(|()| self.running.set_len(input.len() as u64));
        written.expect("the fuzzer notes each input");
        let _ = self.events.send(Event::Begins);
    }

    pub(crate) fn ended(&self) {
        let _ = self.events.send(Event::Ended);
    }

    /// Writes an input to a file that stays.
    pub(crate) fn keep(&self, input: &[u8]) -> PathBuf {
        let path = self.directory.join(format!("failed-{}", corpus::name(input)));
        std::fs::write(&path, input).expect("the fuzzer keeps an input that fails");
        path
    }
}

/// Whether all inputs ended in time.
fn all_end(told: &Receiver<Event>, limit: Duration) -> bool {
    while let Ok(Event::Begins) = told.recv() {
        match told.recv_timeout(limit) {
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => return true, // it panicked
        }
    }
    true
}
