//! `fulmar.as_of`: a session looks at its database as it was.
//!
//! ```text
//! SET fulmar.as_of = '2026-11-21 12:00:00'    the version is opened, so that what cannot be seen is refused here
//!   NOTICE: the database is shown as it was at 2026-11-21 11:59:17.204+00
//! SELECT ...                                  every transaction sees that version, and can only read
//! RESET fulmar.as_of
//! ```
//!
//! Given when connecting, or when a transaction that had set it otherwise rolls back, the version is opened by the first
//! statement that sees it.

use fulmar_engine::{Error, Value, sqlstate};

use super::Session;
use super::settings::SNAPSHOT_TIME;
use crate::Result;
use crate::dialect::admin::parse_moment;
use crate::protocol::backend;
use crate::system::moment;

impl Session {
    /// Looks at another time (`None` or nothing: at what is now), and tells the client which version it sees.
    pub(super) async fn look_back(&mut self, value: Option<&str>, output: &mut Vec<u8>) -> Result<()> {
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

    /// Puts the time of what the session sees where it is shown.
    pub(super) fn note_snapshot(&mut self) {
        let time = self.snapshot_time().unwrap_or_default();
        if self.settings.get(SNAPSHOT_TIME).is_ok_and(|known| known != time) {
            self.settings.set_fixed(SNAPSHOT_TIME, &time);
        }
    }

    fn snapshot_time(&self) -> Option<String> {
        match moment(self.link.engine.snapshot_time()?) {
            Value::Text(text) => Some(text + "+00"),
            _ => None,
        }
    }
}
