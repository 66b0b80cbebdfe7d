//! Definitions of procedures as they were read in a transaction, and a connection's cache of them.

use std::sync::Arc;

use hashbrown::HashMap;

/// The Lua chunk: parameters become locals on the line where the source begins, so that line
/// numbers are preserved.
pub(super) fn chunk<'a>(parameters: impl Iterator<Item = &'a str>, source: &str) -> String {
    let mut chunk = String::from("local db");
    parameters.for_each(|name| chunk.extend([", ", name]));
    chunk.push_str(" = ...; ");
    chunk.push_str(source);
    chunk
}

/// Parses lines into names and declared types.
fn columns(lines: &str) -> Vec<(String, String)> {
    let split = |line: &str| {
        let (name, declared) = line.split_once(' ').unwrap_or((line, ""));
        (name.to_owned(), declared.to_owned())
    };
    lines.lines().map(split).collect()
}

/// A definition that was read in a transaction.
pub(crate) struct Loaded {
    /// The stored texts: parameters, returns, source.
    texts: [Box<[u8]>; 3],
    /// Names and declared types.
    parameters: Vec<(String, String)>,
    returns: Vec<(String, String)>,
    /// The Lua chunk.
    pub(super) chunk: String,
}

impl Loaded {
    pub(super) fn new(texts: [&[u8]; 3]) -> Loaded {
        let [parameters, returns, source] = texts.map(String::from_utf8_lossy);
        let parameters = columns(&parameters);
        Loaded {
            texts: texts.map(Box::from),
            returns: columns(&returns),
            chunk: chunk(parameters.iter().map(|(name, _)| name.as_str()), &source),
            parameters,
        }
    }

    /// Memory used by the definition.
    pub(super) fn memory_bytes(&self) -> u64 {
        let texts = self.texts.iter().map(|text| text.len()).sum::<usize>();
        // Each name and type is a separate allocation.
        const COLUMN_BYTES: usize = size_of::<(String, String)>() + 64;
        let columns = (self.parameters.len() + self.returns.len()) * COLUMN_BYTES;
        (2 * texts + self.chunk.len() + columns) as u64
    }

    /// Whether it was parsed from these texts.
    pub(super) fn is_of(&self, texts: [&[u8]; 3]) -> bool {
        self.texts.each_ref().map(|text| &**text) == texts
    }

    /// The parameters, with their declared types.
    pub(super) fn parameters(&self) -> &[(String, String)] {
        &self.parameters
    }

    /// Number of parameters.
    pub(super) fn parameter_count(&self) -> usize {
        self.parameters.len()
    }

    /// The result columns, with their declared types.
    pub(super) fn returns(&self) -> &[(String, String)] {
        &self.returns
    }
}

/// A connection's cache of definitions. The texts are read for each call, in its transaction; the
/// cache saves parsing unchanged texts.
#[derive(Default)]
pub(crate) struct Known(HashMap<Box<str>, Arc<Loaded>>);

impl Known {
    const MAX_DEFINITIONS: usize = 16;
    /// Larger definitions are parsed for each call.
    const MAX_DEFINITION_BYTES: u64 = 64 << 10;

    /// The cached definition of a name.
    pub(super) fn get(&self, name: &str) -> Option<Arc<Loaded>> {
        self.0.get(name).cloned()
    }

    pub(super) fn keep(&mut self, name: &str, loaded: &Arc<Loaded>) {
        if self.0.len() >= Known::MAX_DEFINITIONS {
            self.0.clear();
        }
        if loaded.memory_bytes() <= Known::MAX_DEFINITION_BYTES {
            self.0.insert(name.into(), loaded.clone());
        }
    }
}
