//! What each session is doing, for those who look after the node.
//!
//! Nobody can see a statement that is answered before anybody looks. So what runs is noted only when it has to wait: a
//! statement that is ready at once costs nothing here.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use fulmar_engine::{Statement, TransactionStatus};
use parking_lot::Mutex;

/// Whose session it is; what does not change while it lasts.
pub(crate) struct Who {
    pub(crate) user: String,
    pub(crate) address: Option<IpAddr>,
    /// Milliseconds since 1970.
    pub(crate) since_ms: u64,
}

/// What a session does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    /// It waits for its client.
    #[default]
    Idle,
    /// A statement runs.
    Active,
    /// It waits for its client, who has begun a transaction.
    InTransaction,
    /// The same, and the transaction has failed.
    Failed,
}

impl State {
    /// As `pg_stat_activity` has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            State::Idle => "idle",
            State::Active => "active",
            State::InTransaction => "idle in transaction",
            State::Failed => "idle in transaction (aborted)",
        }
    }
}

/// A moment of a session.
#[derive(Clone, Default)]
pub(crate) struct Moment {
    pub(crate) state: State,
    pub(crate) changed_ms: u64,
    /// The text of the statement that was noted last, and when. Long texts are cut, since this copy is not charged.
    pub(crate) statement: Option<(Arc<str>, u64)>,
    /// When its transaction was noted.
    pub(crate) transaction_ms: Option<u64>,
    pub(crate) application: Arc<str>,
}

/// A text up to this length is shared with the statement.
const SHARED_TEXT_BYTES: usize = 8 << 10;
/// A longer one is cut to this length, PostgreSQL's default of `track_activity_query_size`.
const CUT_TEXT_BYTES: usize = 1 << 10;

/// What a session does now.
#[derive(Default)]
pub(crate) struct Activity(Mutex<Moment>);

impl Activity {
    /// A statement has begun that is not ready at once.
    pub(crate) fn begin(&self, statement: &Arc<Statement>) {
        let now_ms = now_ms();
        let text = match statement.sql.len() {
            0..=SHARED_TEXT_BYTES => statement.sql.clone(),
            _ => statement.sql[..statement.sql.floor_char_boundary(CUT_TEXT_BYTES)].into(),
        };
        let mut moment = self.0.lock();
        moment.statement = Some((text, now_ms));
        moment.change(State::Active, now_ms);
    }

    /// The session waits for its client.
    pub(crate) fn wait(&self, transaction: TransactionStatus) {
        let state = match transaction {
            TransactionStatus::Idle => State::Idle,
            TransactionStatus::InTransaction => State::InTransaction,
            TransactionStatus::Failed => State::Failed,
        };
        self.0.lock().change(state, now_ms());
    }

    /// What the client calls itself.
    pub(crate) fn name(&self, application: &str) {
        self.0.lock().application = application.into();
    }

    /// What it does now.
    pub(crate) fn now(&self) -> Moment {
        self.0.lock().clone()
    }
}

impl Moment {
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
    fn a_transaction_begins_once() {
        let activity = Activity::default();
        activity.wait(TransactionStatus::InTransaction);
        let begun = activity.now().transaction_ms;
        assert!(begun.is_some());
        activity.wait(TransactionStatus::Failed);
        assert_eq!(
            (activity.now().transaction_ms, activity.now().state.name()),
            (begun, "idle in transaction (aborted)")
        );
        activity.wait(TransactionStatus::Idle);
        assert_eq!(activity.now().transaction_ms, None);
    }
}
