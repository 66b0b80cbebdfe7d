//! Session state that SQL functions read. It is fixed when a transaction begins, so that a replay
//! computes the same results as the first run.

/// A session's state on a connection.
#[derive(Clone, Debug, Default)]
pub struct Variables {
    /// "now", in milliseconds since 1970.
    pub clock_ms: u64,
    /// State of `random()` and `randomblob()`.
    pub random: u64,
    /// The result of `changes()` until a statement of the session has changed rows on this
    /// connection.
    pub changes: i64,
    /// `total_changes()` when the session got this connection, minus the connection's own count at
    /// that time.
    pub total_changes_base: i64,
    /// True once a statement of the session that changes rows has run on this connection.
    pub changed: bool,
    /// The transaction's id, assigned when the client first asks for it.
    pub transaction_id: u64,
    /// Whether the session's user may write. If not, asking for a transaction's outcome must not
    /// decide it.
    pub may_write: bool,
}

impl Variables {
    /// The next 64 random bits (SplitMix64).
    pub(crate) fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}
