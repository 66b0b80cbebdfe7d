//! A coverage-guided fuzzer that runs as ordinary tests. It checks that code which reads untrusted
//! input never panics, never hangs, and never allocates more than the input's length justifies.
//!
//! ```text
//!   kept inputs, seeds of the target, corpus of earlier runs
//!      |
//!      +--> choose one --> mutate (bytes, numbers, words, pieces of others) --> run the target
//!      ^                                                                           |
//!      +------------------ add to the corpus if it reached new code <--------------+
//! ```
//!
//! A target is a test named `fuzz_...` that calls [`Target::run`]:
//!
//! - `make test` runs the kept inputs, the seeds, and a fixed number of mutations from a fixed
//!   seed, so every run is the same.
//! - `make fuzz MINUTES=n TARGET=x` runs it for n minutes with a random seed, which is printed. The
//!   workspace's crates are compiled to count which code an input reaches ([`coverage`]).
//!
//! A failing input is written to `target/fuzz/`. After the fault is fixed, the input is committed
//! as a file in `tests/fuzz/<target>/` of the crate. Every run begins with these files.
//!
//! Existing fuzzers (cargo-fuzz with libFuzzer, AFL) need a nightly compiler or additional
//! programs, and a separate binary for each target, outside of the tests that know how to start a
//! node. The features that matter (coverage, a dictionary, a corpus) take a few hundred lines on
//! the stable compiler.

mod corpus;
pub mod coverage;
mod memory;
mod mutate;
mod watch;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;

use corpus::Corpus;
use watch::Watch;

/// Environment variable: how many minutes each target runs. Set by `make fuzz`.
const MINUTES: &str = "FUZZ_MINUTES";
/// Environment variable: the seed of the mutations, to repeat an earlier run.
const SEED: &str = "FUZZ_SEED";
/// Time limit of one input. An input that takes longer is a hang, not a slow machine.
const INPUT_TIMEOUT: Duration = Duration::from_secs(120);
/// The seed of runs in `make test`.
const FIXED_SEED: u64 = 7;

/// Code under test that reads untrusted input.
pub struct Target {
    name: &'static str,
    crate_directory: &'static Path,
    seeds: Vec<Vec<u8>>,
    words: &'static [&'static str],
    max_bytes: usize,
    allowance: Allowance,
    resident_bytes: Option<usize>,
    runs: u32,
}

/// Limit on the memory that one input may allocate.
#[derive(Clone, Copy)]
struct Allowance {
    bytes: usize,
    per_input_byte: usize,
}

impl Target {
    /// A target of the crate in `crate_directory` (`env!("CARGO_MANIFEST_DIR")`).
    pub fn new(name: &'static str, crate_directory: &'static str) -> Target {
        Target {
            name,
            crate_directory: Path::new(crate_directory),
            seeds: Vec::new(),
            words: &[],
            max_bytes: 4096,
            allowance: Allowance { bytes: 1 << 20, per_input_byte: 64 },
            resident_bytes: None,
            runs: 2000,
        }
    }

    /// Initial inputs. They should be valid, and as different as possible.
    pub fn seeds(mut self, seeds: impl IntoIterator<Item = impl Into<Vec<u8>>>) -> Target {
        self.seeds.extend(seeds.into_iter().map(Into::into));
        self
    }

    /// A dictionary of words that are meaningful to the target. They are inserted into inputs.
    pub fn words(mut self, words: &'static [&'static str]) -> Target {
        self.words = words;
        self
    }

    /// Maximum length of an input.
    pub fn max_length(mut self, bytes: usize) -> Target {
        self.max_bytes = bytes;
        self
    }

    /// Maximum memory that the running thread may hold: `bytes`, plus `per_input_byte` for each
    /// byte of the input.
    pub fn max_allocation(mut self, bytes: usize, per_input_byte: usize) -> Target {
        self.allowance = Allowance { bytes, per_input_byte };
        self
    }

    /// The target is a server in this process. A panic of any thread is a failure, and the limit
    /// applies to the resident memory of the process, not to the allocations of the running thread.
    pub fn whole_process(mut self, resident_bytes: usize) -> Target {
        self.resident_bytes = Some(resident_bytes);
        self
    }

    /// Number of inputs in `make test`.
    pub fn runs(mut self, runs: u32) -> Target {
        self.runs = runs;
        self
    }

    /// Runs the target until the time or the number of inputs is used up. Panics on a failure.
    pub fn run(self, mut target: impl FnMut(&[u8])) {
        let minutes = number(MINUTES);
        let seed = number(SEED).unwrap_or(if minutes.is_some() { rand::random() } else { FIXED_SEED });
        let work = work_directory(self.crate_directory).join(self.name);
        let mut corpus = Corpus::open(work.clone(), minutes.is_some());
        let kept = corpus::read_all(&self.crate_directory.join("tests/fuzz").join(self.name));
        let watch = Watch::new(work, INPUT_TIMEOUT);
        if self.resident_bytes.is_some() {
            watch::count_panics();
        }
        let mut run = Run { target: &self, call: &mut target, watch, seed, count: 0 };
        let earlier = corpus.load_earlier();
        for input in kept.into_iter().chain(self.seeds.iter().cloned()).chain(earlier) {
            run.run_input(&input);
            corpus.add_seed(input);
        }
        let until = minutes.map(|minutes| Instant::now() + Duration::from_secs(minutes * 60));
        let mut random = StdRng::seed_from_u64(seed);
        let mut progress = Progress::new(self.name, seed, minutes.is_some());
        while until.map_or(run.count < u64::from(self.runs), |until| Instant::now() < until) {
            let input = mutate::mutate(&corpus, self.words, self.max_bytes, &mut random);
            if run.run_input(&input) {
                corpus.add_found(input);
            }
            progress.report(run.count, corpus.len(), false);
        }
        progress.report(run.count, corpus.len(), true);
    }
}

/// A run of a target.
struct Run<'a> {
    target: &'a Target,
    call: &'a mut dyn FnMut(&[u8]),
    watch: Watch,
    seed: u64,
    count: u64,
}

impl Run<'_> {
    /// Runs one input. Returns true if it reached new code.
    fn run_input(&mut self, input: &[u8]) -> bool {
        self.count += 1;
        self.watch.begin(input);
        memory::begin();
        let outcome = catch_unwind(AssertUnwindSafe(|| (self.call)(input)));
        let violation = self.violation(input.len());
        if let Err(panic) = outcome {
            self.report_failure(input, "panic");
            resume_unwind(panic);
        }
        if let Some(reason) = violation {
            self.report_failure(input, &reason);
            panic!("{}: {reason}", self.target.name);
        }
        self.watch.end();
        coverage::is_new()
    }

    /// The violated limit, if an input completed without a panic but exceeded one.
    fn violation(&self, input_bytes: usize) -> Option<String> {
        let Some(resident_bytes) = self.target.resident_bytes else {
            let Allowance { bytes, per_input_byte } = self.target.allowance;
            let allocated = memory::peak_allocated_bytes();
            let too_much = allocated > bytes + per_input_byte * input_bytes;
            return too_much.then(|| format!("allocated {allocated} bytes for {input_bytes} bytes of input"));
        };
        if watch::panics() > 0 {
            return Some("a thread panicked".to_owned());
        }
        let resident = memory::resident_bytes();
        (resident > resident_bytes).then(|| format!("resident memory of the process is {resident} bytes"))
    }

    fn report_failure(&self, input: &[u8], reason: &str) {
        let Target { name, crate_directory, .. } = self.target;
        let file = self.watch.keep(input);
        eprintln!(
            "\nfuzz {name}: {reason} (input {} of seed {}). The input is in {}; after the fault is fixed, \
             copy it to {}/tests/fuzz/{name}/.",
            self.count,
            self.seed,
            file.display(),
            crate_directory.display(),
        );
    }
}

/// Prints progress every 10 seconds.
struct Progress {
    name: &'static str,
    seed: u64,
    shown: bool,
    began: Instant,
    next: Duration,
}

impl Progress {
    fn new(name: &'static str, seed: u64, shown: bool) -> Progress {
        Progress { name, seed, shown, began: Instant::now(), next: Duration::from_secs(10) }
    }

    fn report(&mut self, count: u64, corpus: usize, last: bool) {
        let elapsed = self.began.elapsed();
        if self.shown && (last || elapsed >= self.next) {
            self.next = elapsed + Duration::from_secs(10);
            let (name, seconds, reached, seed) =
                (self.name, elapsed.as_secs(), coverage::reached(), self.seed);
            println!(
                "fuzz {name}: {seconds} s, {count} inputs, {corpus} in the corpus, {reached} edges, seed {seed}"
            );
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} must be a number: {text}")))
}

/// The workspace's `target/fuzz`.
fn work_directory(crate_directory: &Path) -> PathBuf {
    let workspace = crate_directory.ancestors().find(|above| above.join("Cargo.lock").exists());
    workspace.unwrap_or(crate_directory).join("target/fuzz")
}

/// Derives decisions from bytes, for targets whose input is a program or a conversation. The same
/// bytes give the same decisions, and a small change of the bytes changes few of them. After the
/// last byte every decision is zero.
pub struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    /// Decisions derived from `bytes`.
    pub fn new(bytes: &'a [u8]) -> Choices<'a> {
        Choices(bytes)
    }

    /// Returns true if all bytes have been used.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A number below `count`, which must not be 0.
    pub fn below(&mut self, count: usize) -> usize {
        let (high, low) = if count > 256 { (self.byte(), self.byte()) } else { (0, self.byte()) };
        usize::from(u16::from_be_bytes([high, low])) % count
    }

    /// One of `choices`.
    pub fn one_of<'t, T: ?Sized>(&mut self, choices: &[&'t T]) -> &'t T {
        choices[self.below(choices.len())]
    }

    /// The next bytes, at most `count`.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// The remaining bytes.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }
}

#[cfg(test)]
mod tests;
