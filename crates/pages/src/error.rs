//! The error type of all decoders.

/// The input is not valid in its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{format}: {problem} (at byte {at})")]
pub struct FormatError {
    /// The format being decoded, such as `page diff`, `log record`, `segment` or `manifest`.
    pub format: &'static str,
    /// Byte position of the problem, counted from the start of the decoder's input.
    pub at: usize,
    /// The problem.
    pub problem: Problem,
}

/// Why an input is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The input ends too early.
    #[error("unexpected end of data")]
    Truncated,
    /// Bytes follow the last field.
    #[error("trailing data after the last field")]
    Trailing,
    /// The input was written by a newer version of Fulmar, or is not of this format.
    #[error("unsupported format version {found} (newest supported: {newest}); use a newer version of Fulmar")]
    FormatVersion {
        /// The version found.
        found: u32,
        /// The newest version that this build reads.
        newest: u32,
    },
    /// The input has changed since it was written.
    #[error("checksum mismatch: computed {computed:08x}, stored {stored:08x}")]
    Checksum {
        /// The checksum stored in the data.
        stored: u32,
        /// The checksum computed from the data.
        computed: u32,
    },
    /// A field has an invalid value.
    #[error("{0}")]
    Invalid(&'static str),
}
