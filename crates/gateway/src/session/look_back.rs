//! `fulmar.as_of`: a session looks at its database as it was.
//!
//! ```text
//! SET fulmar.as_of = '2026-11-21 12:00:00'    the version is opened, so that what cannot be seen is refused here
//!   NOTICE: the database is shown as it was at 2026-11-21 11:59:17.204+00
//! SELECT ...                                  every transaction sees that version, and can only read
//! RESET fulmar.as_of
//! ```
//!
//! Where another node owns the database each transaction sees what that has committed at least until some time ago
//! (`fulmar.staleness`); what is told of the time is the same.
//!
//! Given when connecting, or when a transaction that had set it otherwise rolls back, the version is opened by the first
//! statement that sees it.

use fulmar_engine::{Error, Value, sqlstate};

use super::Session;
use super::rows::Output;
use super::settings::{SNAPSHOT_AGE, SNAPSHOT_TIME};
use crate::Result;
use crate::dialect::admin::parse_moment;
use crate::protocol::backend;
use crate::system::moment;

impl Session {
    /// Looks at another time (`None` or nothing: at what is now), and tells the client which version it sees.
    pub(super) async fn look_back(&mut self, value: Option<&str>, output: &mut Output) -> Result<()> {
        let text = value.map(str::trim).filter(|text| !text.is_empty());
        let at_unix_ms = text.map(parse_moment).transpose()?;
        let before = self.link.engine.as_of();
        if at_unix_ms == before {
            return Ok(());
        }
        if self.link.engine.has_seen_something() {
            let message = "fulmar.as_of cannot be changed after the transaction has seen the database";
            return Err(Error::new(sqlstate::ACTIVE_TRANSACTION, message)
                .hint("SET LOCAL fulmar.as_of has to be the first statement after BEGIN."));
        }
        self.link.engine.set_as_of(at_unix_ms);
        if let Err(error) = self.link.look_back().await {
            self.link.engine.set_as_of(before);
            return Err(error);
        }
        if let Some(time) = self.snapshot_time() {
            let message = format!("the database is shown as it was at {time}");
            backend::notice(output, sqlstate::SUCCESSFUL_COMPLETION, &message);
        }
        Ok(())
    }

    /// Whether what a parameter shows is known when a transaction has looked.
    pub(super) fn is_of_snapshot(name: &str) -> bool {
        [SNAPSHOT_TIME, SNAPSHOT_AGE].into_iter().any(|known| name.eq_ignore_ascii_case(known))
    }

    /// Puts time and age of what the session sees where they are shown.
    pub(super) fn note_snapshot(&mut self) {
        let time = self.snapshot_time().unwrap_or_default();
        let age = format!("{}ms", self.link.engine.snapshot_age().as_millis());
        for (name, value) in [(SNAPSHOT_TIME, time), (SNAPSHOT_AGE, age)] {
            if self.settings.get(name).is_ok_and(|known| known != value) {
                self.settings.set_fixed(name, &value);
            }
        }
    }

    fn snapshot_time(&self) -> Option<String> {
        match moment(self.link.engine.snapshot_time()?) {
            Value::Text(text) => Some(text + "+00"),
            _ => None,
        }
    }
}
