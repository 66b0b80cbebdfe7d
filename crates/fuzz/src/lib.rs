//! A small fuzzer for tests: whatever comes from outside is answered or refused, never with a panic, never with more
//! memory than its length accounts for, never without an end.
//!
//! ```text
//!   kept seeds, seeds of the target, corpus of earlier runs
//!      |
//!      +--> choose one --> mutate (bytes, numbers, words, pieces of others) --> run the target
//!      ^                                                                           |
//!      +------------------ reached code that no input had reached before <---------+
//! ```
//!
//! A target is an ordinary test that names itself `fuzz_...` and calls [`Target::run`]. In `make test` it runs the kept
//! seeds and a fixed number of mutations from a fixed seed, the same each time. `make fuzz MINUTES=n TARGET=x` runs it
//! for so long, from a seed of its own that is printed, with the workspace's crates compiled to count which code an
//! input reaches ([`coverage`]).
//!
//! An input that fails is written to `target/fuzz/`. When what it found is mended, the input is kept: a file in
//! `tests/fuzz/<target>/` of the crate, which every run begins with.
//!
//! Why our own: the usual fuzzers (cargo-fuzz and libFuzzer, AFL) need a nightly compiler or programs beside cargo,
//! and want a binary for each target, outside of the tests that know how to start a node. What they do that matters
//! (coverage, a dictionary, a corpus) is a few hundred lines on the compiler that is here anyway.

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

/// How many minutes each target is to run: what `make fuzz` sets.
const MINUTES: &str = "FUZZ_MINUTES";
/// The seed of the mutations, to run once more what a run has printed.
const SEED: &str = "FUZZ_SEED";
/// How long one input may take.
const LIMIT: Duration = Duration::from_secs(20);
/// The seed of runs in `make test`.
const FIXED_SEED: u64 = 7;

/// Something that reads input from outside.
pub struct Target {
    name: &'static str,
    crate_directory: &'static Path,
    seeds: Vec<Vec<u8>>,
    words: &'static [&'static str],
    longest_bytes: usize,
    allowance: Allowance,
    resident_bytes: Option<usize>,
    runs: u32,
}

/// The heap that a run may take.
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
            longest_bytes: 4096,
            allowance: Allowance { bytes: 1 << 20, per_input_byte: 64 },
            resident_bytes: None,
            runs: 2000,
        }
    }

    /// Inputs to begin with: whole and right ones, as different as can be.
    pub fn seeds(mut self, seeds: impl IntoIterator<Item = impl Into<Vec<u8>>>) -> Target {
        self.seeds.extend(seeds.into_iter().map(Into::into));
        self
    }

    /// Words that mean something to the target, to be put into inputs.
    pub fn words(mut self, words: &'static [&'static str]) -> Target {
        self.words = words;
        self
    }

    /// No input is made longer than this.
    pub fn longest(mut self, bytes: usize) -> Target {
        self.longest_bytes = bytes;
        self
    }

    /// What the running thread may have allocated at once: so much, and so much for each byte of the input.
    pub fn allocates(mut self, bytes: usize, per_input_byte: usize) -> Target {
        self.allowance = Allowance { bytes, per_input_byte };
        self
    }

    /// The target is a server in this process: a panic of any thread counts, and instead of what the running thread
    /// allocates how much of the process is in memory.
    pub fn whole_process(mut self, resident_bytes: usize) -> Target {
        self.resident_bytes = Some(resident_bytes);
        self
    }

    /// How many inputs are tried in `make test`.
    pub fn runs(mut self, runs: u32) -> Target {
        self.runs = runs;
        self
    }

    /// Runs the target with inputs until time or number is up. It fails by panicking.
    pub fn run(self, mut target: impl FnMut(&[u8])) {
        let minutes = number(MINUTES);
        let seed = number(SEED).unwrap_or(if minutes.is_some() { rand::random() } else { FIXED_SEED });
        let work = work_directory(self.crate_directory).join(self.name);
        let mut corpus = Corpus::open(work.clone(), minutes.is_some());
        let kept = corpus::read_all(&self.crate_directory.join("tests/fuzz").join(self.name));
        let watch = Watch::new(work, LIMIT);
        if self.resident_bytes.is_some() {
            watch::count_panics();
        }
        let mut run = Run { target: &self, call: &mut target, watch, seed, count: 0 };
        let earlier = corpus.take_earlier();
        for input in kept.into_iter().chain(self.seeds.iter().cloned()).chain(earlier) {
            run.one(&input);
            corpus.begin_with(input);
        }
        let until = minutes.map(|minutes| Instant::now() + Duration::from_secs(minutes * 60));
        let mut random = StdRng::seed_from_u64(seed);
        let mut progress = Progress::new(self.name, seed, minutes.is_some());
        while until.map_or(run.count < u64::from(self.runs), |until| Instant::now() < until) {
            let input = mutate::mutate(&corpus, self.words, self.longest_bytes, &mut random);
            if run.one(&input) {
                corpus.found(input);
            }
            progress.tell(run.count, corpus.len(), false);
        }
        progress.tell(run.count, corpus.len(), true);
    }
}

/// A target at work.
struct Run<'a> {
    target: &'a Target,
    call: &'a mut dyn FnMut(&[u8]),
    watch: Watch,
    seed: u64,
    count: u64,
}

impl Run<'_> {
    /// Runs one input; whether it reached new code.
    fn one(&mut self, input: &[u8]) -> bool {
        self.count += 1;
        self.watch.begins(input);
        memory::begin();
        let outcome = catch_unwind(AssertUnwindSafe(|| (self.call)(input)));
        let excess = self.excess(input.len());
        if let Err(panic) = outcome {
            self.failed(input, "it panicked");
            resume_unwind(panic);
        }
        if let Some(what) = excess {
            self.failed(input, &what);
            panic!("{}: {what}", self.target.name);
        }
        self.watch.ended();
        coverage::is_new()
    }

    /// What an input did that is not allowed, though it ended well.
    fn excess(&self, input_bytes: usize) -> Option<String> {
        let Some(resident_bytes) = self.target.resident_bytes else {
            let Allowance { bytes, per_input_byte } = self.target.allowance;
            let allocated = memory::peak_allocated_bytes();
            let too_much = allocated > bytes + per_input_byte * input_bytes;
            return too_much.then(|| format!("it allocated {allocated} bytes for an input of {input_bytes}"));
        };
        if watch::panics() > 0 {
            return Some("a thread panicked".to_owned());
        }
        let resident = memory::resident_bytes();
        (resident > resident_bytes).then(|| format!("{resident} bytes of the process are in memory"))
    }

    fn failed(&self, input: &[u8], what: &str) {
        let Target { name, crate_directory, .. } = self.target;
        let file = self.watch.keep(input);
        eprintln!(
            "\nfuzz {name}: {what}, at input {} of seed {}. The input is in {}; when the fault is mended, keep it in \
             {}/tests/fuzz/{name}/.",
            self.count,
            self.seed,
            file.display(),
            crate_directory.display(),
        );
    }
}

/// What is told while it runs.
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

    fn tell(&mut self, count: u64, corpus: usize, last: bool) {
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
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is to be a number, not {text}")))
}

/// `target/fuzz` of the workspace.
fn work_directory(crate_directory: &Path) -> PathBuf {
    let workspace = crate_directory.ancestors().find(|above| above.join("Cargo.lock").exists());
    workspace.unwrap_or(crate_directory).join("target/fuzz")
}

/// Makes decisions of bytes, for targets whose input is a program or a conversation: the same bytes make the same
/// decisions, and a small change of the bytes is a small change of what is made of them. At their end all is zero.
pub struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    /// Decisions by these bytes.
    pub fn new(bytes: &'a [u8]) -> Choices<'a> {
        Choices(bytes)
    }

    /// Whether all bytes have been used.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A byte.
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A number below `count`, which is not 0.
    pub fn below(&mut self, count: usize) -> usize {
        let (high, low) = if count > 256 { (self.byte(), self.byte()) } else { (0, self.byte()) };
        usize::from(u16::from_be_bytes([high, low])) % count
    }

    /// One of these.
    pub fn one_of<'t, T: ?Sized>(&mut self, choices: &[&'t T]) -> &'t T {
        choices[self.below(choices.len())]
    }

    /// The next bytes, at most `count`.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// What is left.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }
}

#[cfg(test)]
mod tests;
