//! The one error of the decoders.

/// Bytes that are not what their format says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{format}: {problem} (at byte {at})")]
pub struct FormatError {
    /// The format that was being read: `page diff`, `log record`, `segment`, `manifest`.
    pub format: &'static str,
    /// Where the trouble is: bytes from the beginning of what was given to the decoder.
    pub at: usize,
    /// What the trouble is.
    pub problem: Problem,
}

/// What is wrong with some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// They end too early.
    #[error("the data end in the middle of a field")]
    Truncated,
    /// They go on after their end.
    #[error("there are data after the end")]
    Trailing,
    /// A newer Fulmar wrote them, or they are something else.
    #[error(
        "format version {found} is not known here (newest: {newest}); a newer Fulmar may be able to read it"
    )]
    FormatVersion {
        /// The version found.
        found: u32,
        /// The newest version that this build reads.
        newest: u32,
    },
    /// They have changed since they were written.
    #[error("the checksum is {computed:08x}, but {stored:08x} was written; the data are damaged")]
    Checksum {
        /// The checksum in the data.
        stored: u32,
        /// The checksum of the data.
        computed: u32,
    },
    /// A field has a value that it cannot have.
    #[error("{0}")]
    Invalid(&'static str),
}
