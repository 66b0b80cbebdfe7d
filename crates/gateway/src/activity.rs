//! The current activity of each session, for `pg_stat_activity`.
//!
//! A statement is recorded only when it has to wait: one that completes without waiting could not
//! be observed, so it costs nothing here.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use fulmar_engine::{Statement, TransactionStatus};
use parking_lot::Mutex;

/// The identity of a session, which does not change.
pub(crate) struct SessionIdentity {
    pub(crate) user: String,
    pub(crate) address: Option<IpAddr>,
    /// Milliseconds since 1970.
    pub(crate) since_ms: u64,
}

/// The state of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    /// Waiting for the client, outside a transaction.
    #[default]
    Idle,
    /// Executing a statement.
    Active,
    /// Waiting for the client, in a transaction.
    InTransaction,
    /// Waiting for the client, in a failed transaction.
    Failed,
}

impl State {
    /// The name in `pg_stat_activity`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            State::Idle => "idle",
            State::Active => "active",
            State::InTransaction => "idle in transaction",
            State::Failed => "idle in transaction (aborted)",
        }
    }
}

/// A snapshot of a session's activity.
#[derive(Clone, Default)]
pub(crate) struct ActivitySnapshot {
    pub(crate) state: State,
    pub(crate) changed_ms: u64,
    /// The text of the last recorded statement and its start. Long texts are truncated, since this
    /// copy is not charged to the session's memory.
    pub(crate) statement: Option<(Arc<str>, u64)>,
    /// The start of the transaction, as first recorded.
    pub(crate) transaction_ms: Option<u64>,
    pub(crate) application: Arc<str>,
}

/// Up to this length, the text is shared with the statement.
const SHARED_TEXT_BYTES: usize = 8 << 10;
/// A longer text is truncated to this length, PostgreSQL's default for `track_activity_query_size`.
const TRUNCATED_TEXT_BYTES: usize = 1 << 10;

/// The current activity of a session.
#[derive(Default)]
pub(crate) struct Activity(Mutex<ActivitySnapshot>);

impl Activity {
    /// Records a statement that has to wait.
    pub(crate) fn begin(&self, statement: &Arc<Statement>) {
        let now_ms = now_ms();
        let text = match statement.sql.len() {
            0..=SHARED_TEXT_BYTES => statement.sql.clone(),
            _ => statement.sql[..statement.sql.floor_char_boundary(TRUNCATED_TEXT_BYTES)].into(),
        };
        let mut snapshot = self.0.lock();
        snapshot.statement = Some((text, now_ms));
        snapshot.change(State::Active, now_ms);
    }

    /// Records that the session waits for its client.
    pub(crate) fn set_waiting(&self, transaction: TransactionStatus) {
        let state = match transaction {
            TransactionStatus::Idle => State::Idle,
            TransactionStatus::InTransaction => State::InTransaction,
            TransactionStatus::Failed => State::Failed,
        };
        self.0.lock().change(state, now_ms());
    }

    /// Sets the client's `application_name`.
    pub(crate) fn set_application(&self, application: &str) {
        self.0.lock().application = application.into();
    }

    /// The current activity.
    pub(crate) fn snapshot(&self) -> ActivitySnapshot {
        self.0.lock().clone()
    }
}

impl ActivitySnapshot {
    fn change(&mut self, state: State, now_ms: u64) {
        (self.state, self.changed_ms) = (state, now_ms);
        self.transaction_ms = match state {
            State::Idle => None,
            _ => self.transaction_ms.or(Some(now_ms)),
        };
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transaction_start_is_kept_until_the_transaction_ends() {
        let activity = Activity::default();
        activity.set_waiting(TransactionStatus::InTransaction);
        let begun = activity.snapshot().transaction_ms;
        assert!(begun.is_some());
        activity.set_waiting(TransactionStatus::Failed);
        assert_eq!(
            (activity.snapshot().transaction_ms, activity.snapshot().state.name()),
            (begun, "idle in transaction (aborted)")
        );
        activity.set_waiting(TransactionStatus::Idle);
        assert_eq!(activity.snapshot().transaction_ms, None);
    }
}
