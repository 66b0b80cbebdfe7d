//! The simple query protocol: a Query message contains any number of statements.
//!
//! - The statements share one implicit transaction, unless they begin and commit their own.
//! - The first error ends the Query.
//! - A single statement is autocommitted.
//! - The last statement's CommandComplete is written after the implicit transaction has committed,
//!   so that a failed commit is reported as the failure of the statement.

use fulmar_dialect::token::is_blank;
use fulmar_engine::{Error, Scope, StatementKind};
use fulmar_pgwire::protocol::backend;
use fulmar_pgwire::types::decode;
use fulmar_service::PartitionService;

use super::copy_in::RemainingText;
use super::outcome::{MessageError, PlanOutcome};
use super::rows::Layout;
use super::state::Session;
use super::statements::{ALL_TEXT, Plan, columns};

impl Session {
    /// Handles a Query message.
    pub(super) async fn query(&mut self, sql: &[u8]) -> Result<(), MessageError> {
        let outcome = match decode::utf8(sql) {
            Ok(text) if is_blank(text) => {
                backend::empty_query(&mut self.output);
                Ok(())
            }
            Ok(text) => self.run_text(text).await,
            Err(error) => Err(error.into()),
        };
        self.end_of_text(outcome).await
    }

    /// Ends a Query, unless a COPY is in progress.
    pub(super) async fn end_of_text(
        &mut self,
        outcome: Result<(), MessageError>,
    ) -> Result<(), MessageError> {
        match outcome {
            Ok(()) if self.copy.is_some() => return Ok(()),
            Ok(()) => {}
            Err(MessageError::Statement(error)) => self.text_failed(&error),
            Err(end) => return Err(end),
        }
        // The implicit transaction is still open if the Query failed, or if an empty statement
        // followed the last one.
        match self.link.finish().await.map_err(MessageError::from) {
            Ok(()) => {}
            Err(MessageError::Statement(error)) => self.report(&error),
            Err(end) => return Err(end),
        }
        self.ready().await
    }

    fn text_failed(&mut self, error: &Error) {
        self.report(error);
        self.copy = None;
        self.link.partition.fail();
        self.end_of_transaction(false);
    }

    /// Runs the statements of a Query.
    pub(super) async fn run_text(&mut self, text: &str) -> Result<(), MessageError> {
        let mut rest = text;
        while !is_blank(rest) {
            self.link.yield_if_slice_is_over().await?;
            self.apply_privileges()?;
            let (plan, after) = self.plan(rest).await?;
            rest = after;
            let last = is_blank(rest);
            if !self.run_one(&plan, last).await? {
                if let Some(copy) = &mut self.copy {
                    copy.reservation.grow_to(self.statements.memory(), rest.len() as u64)?;
                    copy.rest = Some(RemainingText(rest.to_owned()));
                }
                return Ok(self.flush().await?);
            }
        }
        Ok(())
    }

    /// Runs one statement. Returns false if it is a COPY whose data the client sends next.
    async fn run_one(&mut self, plan: &Plan, last: bool) -> Result<bool, MessageError> {
        if matches!(plan, Plan::Engine(statement) if statement.kind == StatementKind::Empty) {
            return Ok(true);
        }
        let scope = if last && !self.link.implicit { Scope::Auto } else { Scope::Implicit };
        let mut columns = columns(plan);
        if let Plan::Engine(statement) = plan
            && statement.uses_system()
        {
            // Catalog queries need PostgreSQL's types: clients compare booleans with 't'.
            self.infer_types(statement, &mut columns).await;
        }
        let layout = Layout { columns: &columns, formats: &ALL_TEXT, describe: true, is_whole: true };
        let mut output = std::mem::take(&mut self.output);
        let ran = self.run_plan(plan, &[], scope, layout, &mut output).await;
        self.output = output;
        let PlanOutcome::Done { tag, spill, .. } = ran? else { return Ok(false) };
        self.send_spilled(spill).await?;
        if last {
            self.link.finish().await?;
            self.end_of_transaction(true);
        }
        backend::command_complete(&mut self.output, tag);
        self.flush_if_large().await?;
        Ok(true)
    }
}
