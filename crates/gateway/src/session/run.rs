//! Runs statements, and sends responses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_dialect::Command;
use fulmar_engine::{CommandTag, Completion, Error, RowSink, Scope, TransactionStatus, Value};
use fulmar_pgwire::protocol::backend::{self, Severity};
use fulmar_pgwire::wire::Closed;

use super::outcome::{End, MessageError, PlanOutcome};
use super::rows::{FLUSH_THRESHOLD_BYTES, Layout, Output, RowWriter, Spill};
use super::slow::redact;
use super::state::Session;
use super::statements::Plan;
use crate::Result;
use crate::activity::now_ms;
use crate::statement_stats::{Execution, SlowStatement, StatementText};
use crate::tenant_stats::DataAccess;

impl Session {
    /// Writes an error response, and counts the error.
    pub(super) fn report(&mut self, error: &Error) {
        self.metrics.record_error();
        if self.counts_statements {
            self.stats.record_error();
        }
        backend::error(&mut self.output, error, Severity::Error);
    }

    /// Sends the collected responses.
    pub(super) async fn flush(&mut self) -> Result<(), Closed> {
        self.metrics.sent(self.output.len());
        self.link.send(&self.output).await?;
        self.output.clear();
        Ok(())
    }

    /// Sends the collected responses if they exceed [`FLUSH_THRESHOLD_BYTES`] or their memory
    /// cannot be charged.
    pub(super) async fn flush_if_large(&mut self) -> Result<(), Closed> {
        let is_large =
            self.output.len() > FLUSH_THRESHOLD_BYTES || !self.output.grow(0, self.statements.memory());
        if is_large { self.flush().await } else { Ok(()) }
    }

    /// Sends the spilled part of a result, and the output before it.
    pub(super) async fn send_spilled(&mut self, spill: Option<(usize, Spill)>) -> Result<(), Closed> {
        let Some((mark, spill)) = spill else { return Ok(()) };
        self.link.send(&self.output[..mark]).await?;
        self.output.drain(..mark);
        let (mut piece, mut sent) = (Vec::new(), 0);
        while spill.read_at(sent, &mut piece).map_err(|_| Closed::Server)? > 0 {
            self.link.send(&piece).await?;
            sent += piece.len() as u64;
            piece.clear();
        }
        Ok(())
    }

    /// Sends changed parameters and ReadyForQuery.
    pub(super) async fn ready(&mut self) -> Result<(), MessageError> {
        for name in self.settings.take_reports() {
            let value = self.settings.get(name).unwrap_or_default();
            backend::parameter_status(&mut self.output, name, value);
            if name == "application_name" {
                self.link.handle.activity.set_application(value);
            }
        }
        let status = self.link.status();
        if status == TransactionStatus::Idle {
            self.statements.close_portals();
        }
        self.has_ended_transaction = false;
        self.tell_settings(status);
        self.tell_tables();
        backend::ready(&mut self.output, status);
        self.flush().await?;
        self.release_after_copy(status);
        Ok(())
    }

    /// Runs a plan and writes its rows to `output`.
    pub(super) async fn run_plan(
        &mut self,
        plan: &Plan,
        values: &[Value],
        scope: Scope,
        layout: Layout<'_>,
        output: &mut Output,
    ) -> Result<PlanOutcome, MessageError> {
        let started = Instant::now();
        let ran = match plan {
            Plan::Engine(statement) => {
                let viewer = match statement.uses_system() {
                    // Boxed because it is rare.
                    true => Some(Box::pin(self.viewer_with_loads(&statement.sql)).await),
                    false => None,
                };
                if let Some(viewer) = &viewer {
                    self.link.partition.session_mut().set_system(viewer.clone());
                }
                let spills = self.statements.spills(&self.context.temporary_directory, &self.temporary);
                let mut writer = RowWriter::new(output, layout, spills);
                if scope == Scope::Auto && viewer.is_none() {
                    writer.tell_early(self.link.early.clone());
                }
                let outcome = self.link.execute(statement, values, scope, &mut writer).await;
                match outcome {
                    Ok(completion) => {
                        let (rows, spill) = writer.finish();
                        if let Some(viewer) = viewer {
                            let changes = std::mem::take(&mut *viewer.viewer().changes.lock());
                            if !changes.is_empty() {
                                Box::pin(self.configure(changes, output)).await?;
                            }
                        }
                        self.completed(&completion, output);
                        Ok(PlanOutcome::Done { tag: completion.tag, rows, spill })
                    }
                    Err(error) => {
                        writer.reset();
                        self.end_of_transaction(false);
                        Err(error.into())
                    }
                }
            }
            // Boxed because it is rare. Unboxed, it would enlarge the future of every session.
            Plan::Command { command, .. } => {
                let ran = Box::pin(self.command(command, scope, layout, output)).await;
                self.has_ended_transaction |=
                    ran.is_ok() && changes_data(command) && self.is_outside_of_transactions();
                ran
            }
        };
        let (time, rows) =
            (started.elapsed(), if let Ok(PlanOutcome::Done { rows, .. }) = &ran { *rows } else { 0 });
        self.metrics.record_statement(time, rows);
        if self.counts_statements {
            let access = plan.uses();
            self.stats.record_statement(access, time, rows);
            if access != DataAccess::None {
                let partition = self.identity.tenant.partition;
                self.context.keys.record(&mut self.keys, partition, plan.keys(), values);
            }
        }
        self.count_statement(plan, time, rows, &ran);
        ran
    }

    /// Applies the changes of `set_config` calls.
    pub(super) async fn configure(
        &mut self,
        changes: Vec<(String, String, bool)>,
        output: &mut Output,
    ) -> Result<()> {
        for (name, value, local) in changes {
            self.set(&name, Some(&value), local, output).await?;
        }
        Ok(())
    }

    /// Sends the notices of a completed statement, and ends the transaction's settings if it has
    /// ended.
    pub(super) fn completed(&mut self, completion: &Completion, output: &mut Output) {
        for (state, message) in &completion.notices {
            backend::notice(output, state, message);
        }
        // A COMMIT among the statements of an implicit transaction commits what precedes it.
        let is_commit = completion.tag == CommandTag::Plain("COMMIT");
        self.has_ended_transaction |= is_commit || self.is_outside_of_transactions();
        self.end_of_transaction(is_commit);
    }

    fn is_outside_of_transactions(&self) -> bool {
        !self.link.implicit && self.link.status() == TransactionStatus::Idle
    }

    /// Ends the implicit transaction, if one is open.
    pub(super) async fn finish(&mut self) -> Result<()> {
        let was_open = self.link.implicit;
        self.link.finish().await?;
        self.has_ended_transaction |= was_open;
        Ok(())
    }

    /// If the transaction has ended, commits or rolls back its changes of parameters.
    pub(super) fn end_of_transaction(&mut self, committed: bool) {
        if self.settings.is_changed() && self.link.status() == TransactionStatus::Idle {
            self.settings.end_transaction(committed);
            self.apply_settings();
        }
    }

    /// Adds a completed statement to the statistics of its text, and reports it if it was slow.
    fn count_statement(
        &self,
        plan: &Plan,
        time: Duration,
        rows: u64,
        ran: &Result<PlanOutcome, MessageError>,
    ) {
        // It is repeated at another node.
        if matches!(ran, Err(MessageError::End(End::Moved | End::Fenced))) {
            return;
        }
        let tenants = &self.context.tenants;
        let execution = Execution { time, rows, has_failed: ran.is_err() };
        match plan {
            _ if !self.counts_statements => {}
            Plan::Engine(statement) => {
                let note = statement.note.get_or_init(|| Box::new(tenants.texts.get(&statement.sql)));
                if let Some(text) = note.downcast_ref::<Arc<StatementText>>() {
                    tenants.count_statement(&self.stats, text, execution);
                }
            }
            Plan::Command { redacted, .. } => {
                tenants.count_statement(&self.stats, &tenants.texts.get(redacted), execution);
            }
        }
        if self.context.slow.is_slow(time) {
            self.report_slow(plan, time, rows, ran);
        }
    }

    /// Keeps a slow statement for `fulmar.slow_statements`, and logs it.
    #[cold]
    fn report_slow(&self, plan: &Plan, time: Duration, rows: u64, ran: &Result<PlanOutcome, MessageError>) {
        let sqlstate = match ran {
            Err(MessageError::Statement(error) | MessageError::End(End::Fatal(error))) => Some(error.state()),
            _ => None,
        };
        let statement = match plan {
            Plan::Engine(statement) => &redact(&statement.sql),
            Plan::Command { redacted: shown, .. } => &**shown,
        };
        if self.counts_statements {
            let text = StatementText::of(match plan {
                Plan::Engine(statement) => &statement.sql,
                Plan::Command { redacted, .. } => redacted,
            });
            self.context.tenants.slow.add(SlowStatement {
                partition: self.identity.tenant.partition.0,
                at_unix_ms: now_ms(),
                user: self.identity.user.clone(),
                time_us: time.as_micros() as u64,
                rows,
                sqlstate: sqlstate.map(str::to_owned),
                fingerprint: text.fingerprint,
                text: text.text.into(),
            });
        }
        let Some(left_out) = self.context.slow.admit(Instant::now()) else { return };
        let (tenant, user) = (self.identity.tenant.name.as_str(), self.identity.user.as_str());
        let milliseconds = time.as_millis() as u64;
        // Recorded as strings, not with `%`: the log's writer then escapes line breaks.
        tracing::warn!(tenant, user, milliseconds, rows, sqlstate, statement, left_out, "slow statement");
    }
}

/// Returns true if a command may change data, or databases and users.
fn changes_data(command: &Command) -> bool {
    matches!(
        command,
        Command::Batch { .. }
            | Command::AddPrimaryKey(_)
            | Command::Copy(_)
            | Command::Procedure(_)
            | Command::Admin(_)
    )
}
