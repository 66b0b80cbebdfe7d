//! The corpus: inputs to mutate. Long runs also store the inputs that they find on disk, for the
//! next run.

use std::path::{Path, PathBuf};

use rand::RngExt;
use rand::rngs::StdRng;

/// Maximum number of inputs in the corpus.
const MAX_INPUTS: usize = 20_000;

/// The inputs. The first one is empty.
pub(crate) struct Corpus {
    inputs: Vec<Vec<u8>>,
    /// Directory for found inputs. `None` in short runs.
    directory: Option<PathBuf>,
}

impl Corpus {
    /// Opens a corpus. With `is_persistent`, found inputs are stored below `work`.
    pub(crate) fn open(work: PathBuf, is_persistent: bool) -> Corpus {
        let directory = is_persistent.then(|| work.join("corpus"));
        if let Some(directory) = &directory {
            std::fs::create_dir_all(directory).expect("target/fuzz must be writable");
        }
        Corpus { inputs: vec![Vec::new()], directory }
    }

    /// The inputs that earlier runs found.
    pub(crate) fn load_earlier(&self) -> Vec<Vec<u8>> {
        self.directory.as_deref().map(read_all).unwrap_or_default()
    }

    pub(crate) fn add_seed(&mut self, input: Vec<u8>) {
        self.inputs.push(input);
    }

    /// Adds an input that reached new code.
    pub(crate) fn add_found(&mut self, input: Vec<u8>) {
        if self.inputs.len() >= MAX_INPUTS {
            return;
        }
        if let Some(directory) = &self.directory {
            let written = std::fs::write(directory.join(name(&input)), &input);
            written.expect("target/fuzz must be writable");
        }
        self.inputs.push(input);
    }

    /// A random input. With probability 1/2 one of the 50 newest.
    pub(crate) fn choose(&self, random: &mut StdRng) -> &[u8] {
        let newest = self.inputs.len().saturating_sub(50);
        let from = if random.random() { newest } else { 0 };
        &self.inputs[random.random_range(from..self.inputs.len())]
    }

    pub(crate) fn len(&self) -> usize {
        self.inputs.len()
    }
}

/// A file name for an input: the FNV-1a hash of its bytes.
pub(crate) fn name(input: &[u8]) -> String {
    let hash = input.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// The contents of a directory's files, in the order of their names. Empty if there is no such
/// directory.
pub(crate) fn read_all(directory: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.sort();
    files.iter().map(|file| std::fs::read(file).expect("kept inputs must be readable")).collect()
}
