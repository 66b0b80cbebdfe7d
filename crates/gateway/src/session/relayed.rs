//! Messages between a session and the front that its client is connected to ([`crate::relay`]),
//! sent between those for the client.

use fulmar_engine::TransactionStatus;
use fulmar_pgwire::protocol::frontend::Frame;
use fulmar_pgwire::wire::Interrupts;
use fulmar_service::PartitionService;

use super::link::EarlyMessages;
use super::outcome::{End, MessageError};
use super::rows::Output;
use super::state::Session;
use crate::relay::message;

impl Session {
    /// Makes this the session of a front.
    pub(crate) fn begin_relayed(&mut self) {
        self.relayed = true;
        self.link.early = Some(EarlyMessages::default());
        self.settings.take_stored();
    }

    /// Handles a message of the front.
    pub(super) async fn handle_front_message(&mut self, frame: &Frame<'_>) -> Result<(), End> {
        if frame.kind == message::REPETITION_ENDED {
            self.link.partition.session_mut().end_repetition();
            self.tables.repeats = false;
            return Ok(());
        }
        if frame.kind == message::FAILED_ENDED && self.link.status() == TransactionStatus::Failed {
            return self.run_control("ROLLBACK").await;
        }
        if self.link.status() != TransactionStatus::Idle || self.link.implicit {
            return Ok(());
        }
        match frame.kind {
            message::TABLES => {
                self.receive_tables(frame.body).await;
                Ok(())
            }
            message::TABLES_END => self.load_tables().await,
            message::TRANSACTION => {
                if let Ok(id) = frame.body.try_into() {
                    self.link.partition.session_mut().set_transaction_id(u64::from_be_bytes(id));
                }
                Ok(())
            }
            message::ABANDONED => {
                if let Ok(id) = frame.body.try_into() {
                    self.link.partition.session_mut().abandon_transaction(u64::from_be_bytes(id));
                }
                Ok(())
            }
            message::REPEATED => {
                self.tables.repeats = true;
                if let Ok(origin) = frame.body.try_into() {
                    self.link.partition.session_mut().repeat_transaction(u64::from_be_bytes(origin));
                }
                Ok(())
            }
            message::FAILED => {
                self.run_control("BEGIN").await?;
                self.link.partition.fail();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Runs a statement of transaction control for the front.
    async fn run_control(&mut self, sql: &str) -> Result<(), End> {
        match self.link.run_alone(sql).await.map_err(MessageError::from) {
            Ok(_) => Ok(()),
            Err(MessageError::Statement(error)) => Err(End::Fatal(error)),
            Err(MessageError::End(end)) => Err(end),
        }
    }

    /// Tells the parameters before a ReadyForQuery, if they have changed. In a transaction, tells those
    /// after a COMMIT.
    pub(super) fn tell_settings(&mut self, status: TransactionStatus) {
        let (kind, values) = match status {
            _ if !self.relayed => return,
            TransactionStatus::Idle if self.settings.take_stored() => {
                (message::SETTINGS, self.settings.save())
            }
            TransactionStatus::InTransaction if self.settings.take_stored_in_transaction() => {
                (message::PENDING_SETTINGS, self.settings.save_committed())
            }
            _ => return,
        };
        let [values, _] = values;
        if let Ok(body) = serde_json::to_vec(&values) {
            message::put(&mut self.output, kind, &body);
        }
    }

    /// Tells that a statement was closed, or all of them.
    pub(super) fn tell_deallocated(&self, name: Option<&str>, output: &mut Output) {
        if self.relayed {
            message::put(output, message::DEALLOCATED, name.unwrap_or_default().as_bytes());
        }
    }

    /// Tells why the session ends. The front then ends, or continues with another session.
    pub(super) async fn tell_end(&mut self, end: End) {
        let has_moved = match &end {
            // The connection breaks: what happened is for the front to find out.
            End::Fenced | End::Client => return,
            End::Moved => true,
            // At a shutdown the client stays connected.
            End::Server => !self.link.handle.is_killed(),
            End::Malformed(_) | End::Fatal(_) => false,
        };
        if !has_moved {
            self.send_shutdown_notice(end).await;
            let mut last = Vec::new();
            message::put(&mut last, message::END, &[]);
            let _ = self.link.send(&last).await; // the front may be gone
            return;
        }
        if !self.has_ended_transaction {
            // What the unfinished statements have answered is repeated by the next session.
            self.output.clear();
        }
        self.tell_tables();
        message::put(&mut self.output, message::MOVED, &[self.has_ended_transaction.into()]);
        let _ = self.link.send(&self.output).await; // the front may be gone
    }
}
