//! Inputs worth changing, in memory; those that long runs found also on the disk, for the next run.

use std::path::{Path, PathBuf};

use rand::RngExt;
use rand::rngs::StdRng;

/// Inputs that are found in a run at most.
const MOST: usize = 20_000;

/// The inputs, the first of which is empty.
pub(crate) struct Corpus {
    inputs: Vec<Vec<u8>>,
    /// Where those that are found are written.
    directory: Option<PathBuf>,
}

impl Corpus {
    /// A corpus that is kept below `work` if `lasts`.
    pub(crate) fn open(work: PathBuf, lasts: bool) -> Corpus {
        let directory = lasts.then(|| work.join("corpus"));
        if let Some(directory) = &directory {
            std::fs::create_dir_all(directory).expect("the fuzzer needs target/fuzz");
        }
        Corpus { inputs: vec![Vec::new()], directory }
    }

    /// What earlier runs found.
    pub(crate) fn take_earlier(&self) -> Vec<Vec<u8>> {
        self.directory.as_deref().map(read_all).unwrap_or_default()
    }

    pub(crate) fn begin_with(&mut self, input: Vec<u8>) {
        self.inputs.push(input);
    }

    /// An input that reached new code.
    pub(crate) fn found(&mut self, input: Vec<u8>) {
        if self.inputs.len() >= MOST {
            return;
        }
        if let Some(directory) = &self.directory {
            let written = std::fs::write(directory.join(name(&input)), &input);
            written.expect("the fuzzer keeps what it finds in target/fuzz");
        }
        self.inputs.push(input);
    }

    /// One of them; half of the time one of the newest.
    pub(crate) fn choose(&self, random: &mut StdRng) -> &[u8] {
        let newest = self.inputs.len().saturating_sub(50);
        let from = if random.random() { newest } else { 0 };
        &self.inputs[random.random_range(from..self.inputs.len())]
    }

    pub(crate) fn len(&self) -> usize {
        self.inputs.len()
    }
}

/// A name for an input, by its bytes (FNV-1a).
pub(crate) fn name(input: &[u8]) -> String {
    let hash = input.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// The contents of a directory's files, in the order of their names; nothing if there is no such directory.
pub(crate) fn read_all(directory: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.sort();
    files.iter().map(|file| std::fs::read(file).expect("a kept input can be read")).collect()
}
