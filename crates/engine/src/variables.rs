//! What SQL functions see of the session and its transaction. It is fixed when a transaction begins, so that a replay
//! computes what the first run computed.

/// The session's side of a connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct Variables {
    /// "now", in milliseconds since 1970.
    pub clock_ms: u64,
    /// State of `random()` and `randomblob()`.
    pub random: u64,
    /// What `changes()` answers before this connection has changed anything for the session.
    pub changes: i64,
    /// What `total_changes()` answered when the session got this connection, less the connection's own count then.
    pub total_changes_base: i64,
    /// Whether this connection has run a statement of the session that changes rows.
    pub changed: bool,
    /// The transaction's id, once the client has asked for it.
    pub transaction_id: u64,
    /// Whether the session's user may write: else asking how a transaction ended must not decide it.
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
