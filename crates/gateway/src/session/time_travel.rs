//! `fulmar.as_of`: time travel, read-only access to an earlier version of the database.
//!
//! ```text
//! SET fulmar.as_of = '2026-11-21 12:00:00'    opens the version, or fails if it is not available
//!   NOTICE: showing the database as of 2026-11-21 11:59:17.204+00
//! SELECT ...                                  transactions read that version, read-only
//! RESET fulmar.as_of
//! ```
//!
//! On a replica, each transaction reads a version that is at most `fulmar.staleness` old, and
//! reports its time in the same way.
//!
//! SET opens the version immediately. If `fulmar.as_of` is set by a connection option, or changed
//! back because a transaction rolls back, the next statement that reads the database opens the
//! version.

use fulmar_dialect::admin::parse_timestamp_unix_ms;
use fulmar_engine::{Error, Value, sqlstate};
use fulmar_pgwire::protocol::backend;
use fulmar_pgwire::types::datetime::timestamp_text;

use super::rows::Output;
use super::state::Session;
use crate::Result;
use crate::settings::{SNAPSHOT_AGE, SNAPSHOT_TIME};

impl Session {
    /// Switches the session to the version as of another time (`None` or empty: the newest
    /// version), and reports the version's time in a notice.
    pub(super) async fn set_as_of(&mut self, value: Option<&str>, output: &mut Output) -> Result<()> {
        let text = value.map(str::trim).filter(|text| !text.is_empty());
        let at_unix_ms = text.map(parse_timestamp_unix_ms).transpose()?;
        let before = self.link.partition.session().as_of();
        if at_unix_ms == before {
            return Ok(());
        }
        if self.link.partition.session().has_read() {
            let message = "fulmar.as_of must be set before any query in the transaction";
            return Err(Error::new(sqlstate::ACTIVE_TRANSACTION, message)
                .hint("Run SET LOCAL fulmar.as_of directly after BEGIN."));
        }
        self.link.partition.session_mut().set_as_of(at_unix_ms);
        if let Err(error) = self.link.open_snapshot().await {
            self.link.partition.session_mut().set_as_of(before);
            return Err(error);
        }
        if let Some(time) = self.snapshot_time() {
            let message = format!("showing the database as of {time}");
            backend::notice(output, sqlstate::SUCCESSFUL_COMPLETION, &message);
        }
        Ok(())
    }

    /// Returns true if the parameter describes the session's snapshot.
    pub(super) fn is_snapshot_parameter(name: &str) -> bool {
        [SNAPSHOT_TIME, SNAPSHOT_AGE].into_iter().any(|own| name.eq_ignore_ascii_case(own))
    }

    /// Stores the time and the age of the session's snapshot in the parameters that show them.
    pub(super) fn update_snapshot_parameters(&mut self) {
        let time = self.snapshot_time().unwrap_or_default();
        let age = format!("{}ms", self.link.partition.session().snapshot_age().as_millis());
        for (name, value) in [(SNAPSHOT_TIME, time), (SNAPSHOT_AGE, age)] {
            if self.settings.get(name).is_ok_and(|current| current != value) {
                self.settings.set_fixed(name, &value);
            }
        }
    }

    fn snapshot_time(&self) -> Option<String> {
        match timestamp_text(self.link.partition.session().snapshot_time()?) {
            Value::Text(text) => Some(text + "+00"),
            _ => None,
        }
    }
}
