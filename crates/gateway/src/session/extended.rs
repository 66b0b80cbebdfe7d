//! The extended query protocol: Parse, Bind, Describe, Execute, Close, Sync.

use std::sync::Arc;

use fulmar_dialect::Dispatch;
use fulmar_dialect::infer::Inference;
use fulmar_dialect::system::Catalog;
use fulmar_dialect::token::{LONG_BYTES, Lexer, first_statement_extent, is_blank};
use fulmar_engine::{CommandTag, Error, Scope, Statement, StatementContext, sqlstate, statement_too_long};
use fulmar_pgwire::protocol::frontend::{self, Bind, Message, Oids, Target};
use fulmar_pgwire::protocol::{Format, Formats, backend};
use fulmar_pgwire::types::{Column, Type, decode};
use fulmar_service::PartitionService;

use super::memory_quota::{MAX_WAIT, Reservation};
use super::outcome::{MessageError, PlanOutcome};
use super::portals::{Portal, Progress, SuspendedResult};
use super::rows::{Layout, Output};
use super::slow::redact;
use super::state::Session;
use super::statements::{self, Plan, Prepared};
use crate::system::{self, Remote, Viewer};
use crate::{Result, fair};

/// Memory per token while a statement is prepared. The gateway and the engine each keep a list of
/// tokens, one after the other.
const TOKEN_BYTES: usize = 48;
/// Memory per token while a statement is translated: its tokens and the pieces of the new text.
const TRANSLATED_TOKEN_BYTES: usize = 128;

impl Session {
    /// Handles a message of the extended protocol. `next` is the rest of the receive buffer.
    ///
    /// One read can receive thousands of messages, and only Sync and Flush require that responses
    /// are sent. Therefore the session may yield between messages, and sends a large output
    /// after each message, as PostgreSQL sends a full buffer.
    pub(super) async fn extended(&mut self, message: Message<'_>, next: &[u8]) -> Result<(), MessageError> {
        if fair::count_message(matches!(message, Message::Parse { .. } | Message::Execute { .. })) {
            self.link.yield_if_slice_is_over().await?;
        }
        match message {
            Message::Parse { name, sql, types } => Box::pin(self.parse(name, sql, types)).await?,
            Message::Bind(bind) => self.bind(&bind)?,
            Message::Describe { target, name } => self.describe(target, name, next)?,
            Message::Execute { portal, limit_rows } => self.execute(portal, limit_rows, next).await?,
            Message::Close { target, name } => {
                match target {
                    Target::Statement => drop(self.statements.close_statement(name)),
                    Target::Portal => self.statements.close_portal(name),
                }
                backend::close_complete(&mut self.output);
            }
            _ => {}
        }
        Ok(self.flush_if_large().await?)
    }

    /// Reports an error. All messages until the next Sync are skipped.
    pub(super) fn extended_failed(&mut self, error: &Error) {
        self.report(error);
        self.skipping = true;
        self.link.partition.fail();
    }

    /// Handles Sync: ends the implicit transaction, and skipping after an error.
    pub(super) async fn sync(&mut self) -> Result<(), MessageError> {
        self.skipping = false;
        match self.finish().await.map_err(MessageError::from) {
            Ok(()) => {}
            Err(MessageError::Statement(error)) => self.report(&error),
            Err(end) => return Err(end),
        }
        self.end_of_transaction(true);
        self.ready().await
    }

    async fn parse(&mut self, name: &str, sql: &[u8], types: Oids<'_>) -> Result<(), MessageError> {
        self.statements.check_free(name)?;
        let (plan, rest) = self.plan(decode::utf8(sql)?).await?;
        if !is_blank(rest) {
            let message = "cannot insert multiple commands into a prepared statement";
            return Err(Error::new(sqlstate::SYNTAX_ERROR, message).into());
        }
        let prepared = match plan {
            Plan::Engine(statement) => self.describe_statement(statement, types).await?,
            command => {
                let columns = statements::columns(&command);
                self.statements.charge(Prepared::new(command, types, columns), sql.len())?
            }
        };
        self.statements.insert(name, prepared)?;
        backend::parse_complete(&mut self.output);
        Ok(())
    }

    async fn describe_statement(
        &mut self,
        statement: Arc<Statement>,
        types: Oids<'_>,
    ) -> Result<Arc<Prepared>> {
        if let Some(cached) = self.statements.described(&statement, types) {
            return Ok(cached);
        }
        let plan = Plan::Engine(statement.clone());
        let mut columns = statements::columns(&plan);
        if statements::has_untyped_columns(&columns) {
            self.infer_types(&statement, &mut columns).await;
        }
        let prepared = self.statements.charge(Prepared::new(plan, types, columns), statement.sql.len())?;
        self.statements.remember(prepared.clone(), types);
        Ok(prepared)
    }

    /// Infers the types of result columns that are expressions from the statement's text.
    pub(super) async fn infer_types(&mut self, statement: &Statement, columns: &mut [Column]) {
        let logical = if statement.uses_system() { Type::Bool } else { Type::Int8 };
        let mut work = Reservation::default();
        if statement.sql.len() >= LONG_BYTES {
            let bytes = Lexer::new(&statement.sql).count() * TOKEN_BYTES;
            // If memory is short, columns keep the types that SQLite declares.
            if !work.try_grow_to(self.statements.memory(), bytes as u64) {
                return;
            }
        }
        let inference = Inference::of(&statement.sql, logical);
        if inference.types.len() != columns.len() {
            return;
        }
        let mut probed = Vec::new();
        // If SQLite rejects the probe, the guess was wrong and is ignored.
        if let Some(probe) = inference.probe()
            && let Ok(probe) = self
                .link
                .prepare_as(
                    &probe,
                    StatementContext {
                        system: statement.uses_system(),
                        once: true,
                        ..StatementContext::default()
                    },
                )
                .await
        {
            probed = statements::columns(&Plan::Engine(probe)).iter().map(|column| column.kind).collect();
        }
        for (column, inferred) in columns.iter_mut().zip(&inference.types) {
            column.kind = column.kind.or_else(|| inferred.resolve(&probed));
        }
    }

    /// A snapshot of the session's state for system tables.
    pub(super) fn viewer(&mut self) -> Arc<Catalog<Viewer>> {
        self.viewer_of(Remote::default())
    }

    /// Like [`Session::viewer`], with the loads and statistics of all nodes and the forecasts of
    /// the controller if the statement reads their tables.
    pub(super) async fn viewer_with_loads(&mut self, sql: &str) -> Arc<Catalog<Viewer>> {
        let sources = &self.context.sources;
        let mut remote = Remote::default();
        if let Some(with_keys) = system::loads_needed(sql) {
            remote.loads = sources.load.reports(with_keys).await;
        }
        if let Some(cluster) = sources.cluster.as_ref().filter(|_| system::forecasts_needed(sql)) {
            remote.forecasts = cluster.forecasts().await;
        }
        if system::statements_needed(sql) {
            let owned = (!self.identity.superuser).then(|| {
                let tenants = system::owned_tenants(&self.context.catalog, &self.identity);
                tenants.iter().map(|tenant| tenant.partition.0).collect::<Vec<u64>>()
            });
            remote.statements = sources.statement_reports(owned.as_deref()).await;
        }
        self.viewer_of(remote)
    }

    fn viewer_of(&mut self, remote: Remote) -> Arc<Catalog<Viewer>> {
        self.update_snapshot_parameters();
        let (sources, settings) = (self.context.sources.clone(), self.settings.clone());
        let viewer = Viewer::new(sources, self.identity.clone(), self.link.handle.pid, settings);
        Arc::new(Catalog::new(viewer.with_remote(remote)))
    }

    /// Plans the first statement of `sql`. Also returns the text that follows it.
    pub(super) async fn plan<'a>(&mut self, sql: &'a str) -> Result<(Plan, &'a str)> {
        if sql.len() < LONG_BYTES {
            return self.plan_only(sql).await;
        }
        Box::pin(self.plan_of_long(sql)).await
    }

    /// [`Session::plan`] for a long text: charges the memory for tokens and translation before they
    /// are allocated. Only the first statement is measured; the statements after it are not
    /// scanned.
    async fn plan_of_long<'a>(&mut self, sql: &'a str) -> Result<(Plan, &'a str)> {
        let limit_bytes = self.context.engine.max_statement_bytes();
        let extent =
            first_statement_extent(sql, limit_bytes).ok_or_else(|| statement_too_long(limit_bytes))?;
        let text = &sql[extent.start..extent.end];
        let mut work = Reservation::default();
        if text.len() >= LONG_BYTES {
            let token_bytes =
                if fulmar_dialect::needs_translation(text) { TRANSLATED_TOKEN_BYTES } else { TOKEN_BYTES };
            let memory = self.statements.memory().clone();
            work.grow_to_or_wait(&memory, (extent.tokens * token_bytes) as u64, MAX_WAIT).await?;
            self.link.yield_if_slice_is_over().await?;
        }
        let (plan, rest) = self.plan_only(text).await?;
        Ok((plan, &sql[extent.end - rest.len()..]))
    }

    async fn plan_only<'a>(&mut self, sql: &'a str) -> Result<(Plan, &'a str)> {
        let context = fulmar_dialect::Context {
            database: &self.identity.tenant.name,
            user: &self.identity.user,
            pid: self.link.handle.pid,
        };
        let dispatch = fulmar_dialect::translate(sql, &context)?;
        if sql.len() >= LONG_BYTES {
            self.link.yield_if_slice_is_over().await?;
        }
        match dispatch {
            Dispatch::Pass => {
                let (statement, rest) = self.link.prepare(sql).await?;
                Ok((Plan::Engine(statement), rest))
            }
            Dispatch::Rewritten(text, rest) => {
                let (statement, _) = self.link.prepare(&text).await?;
                Ok((Plan::Engine(statement), rest))
            }
            Dispatch::Translated(translated, rest) => {
                if translated.system {
                    let viewer = self.viewer();
                    self.link.partition.session_mut().set_system(viewer);
                }
                let (system, parameters) = (translated.system, &translated.parameters);
                let known = StatementContext { system, parameters, ..StatementContext::default() };
                // A position in the translated text would be misleading.
                let statement = self.link.prepare_as(&translated.sql, known).await;
                Ok((Plan::Engine(statement.map_err(Error::without_position)?), rest))
            }
            Dispatch::Command(command, rest) => {
                self.link.check_not_failed()?;
                let text = sql.get(..sql.len().saturating_sub(rest.len())).unwrap_or_default();
                let redacted = redact(text).into();
                Ok((Plan::Command { command: Arc::from(command), redacted }, rest))
            }
        }
    }

    fn bind(&mut self, bind: &Bind<'_>) -> Result<()> {
        let prepared = self.statements.statement(bind.statement)?.clone();
        let (given, wanted) = (bind.values.count(), prepared.parameters.len());
        if given != wanted {
            let message = format!(
                "bind message supplies {given} parameters, but prepared statement \"{}\" requires {wanted}",
                bind.statement
            );
            return Err(Error::new(sqlstate::PROTOCOL_VIOLATION, message));
        }
        if !bind.result_formats.fits(prepared.columns.len()) {
            let columns = prepared.columns.len();
            let formats = match &bind.result_formats {
                Formats::All(_) => 1,
                Formats::Each(formats) => formats.len(),
            };
            let message =
                format!("bind message has {formats} result formats but query has {columns} columns");
            return Err(Error::new(sqlstate::PROTOCOL_VIOLATION, message));
        }
        let memory = self.statements.memory().clone();
        let portal = self.statements.new_portal(bind.portal)?;
        portal.set_formats(bind.result_formats.clone());
        let bound = portal
            .reserve_values(given, bind.values.bytes(), &memory)
            .and_then(|()| bind_values(portal, bind, &prepared))
            .and_then(|()| portal.hold_values(&memory));
        if let Err(error) = bound {
            self.statements.close_portal(bind.portal);
            return Err(error);
        }
        portal.prepared = Some(prepared);
        backend::bind_complete(&mut self.output);
        Ok(())
    }

    fn describe(&mut self, target: Target, name: &str, next: &[u8]) -> Result<()> {
        if target == Target::Statement {
            let prepared = self.statements.statement(name)?;
            self.output.must_grow(prepared.description_bytes(), self.statements.memory())?;
            backend::parameter_description(
                &mut self.output,
                prepared.parameters.iter().map(|parameter| parameter.oid),
            );
            prepared.describe(&mut self.output, &statements::ALL_TEXT);
            return Ok(());
        }
        let mut portal = self.statements.take_portal(name)?;
        let mut charged = Ok(());
        if let Some(prepared) = &portal.prepared {
            // If column types depend on the first row and Execute follows, RowDescription is sent
            // with the first row.
            portal.describe = prepared.has_untyped_columns() && frontend::execute_follows(next, name);
            if !portal.describe {
                charged = self.output.must_grow(prepared.description_bytes(), self.statements.memory());
                if charged.is_ok() {
                    prepared.describe(&mut self.output, portal.formats());
                }
            }
        }
        self.statements.put_portal(name, portal);
        charged
    }

    async fn execute(&mut self, name: &str, limit_rows: u32, next: &[u8]) -> Result<(), MessageError> {
        let mut portal = self.statements.take_portal(name)?;
        let outcome = match portal.prepared.clone() {
            Some(prepared) => self.run_portal(&prepared, &mut portal, limit_rows, next).await,
            None => Ok(()),
        };
        self.statements.put_portal(name, portal);
        outcome
    }

    async fn run_portal(
        &mut self,
        prepared: &Prepared,
        portal: &mut Portal,
        limit_rows: u32,
        next: &[u8],
    ) -> Result<(), MessageError> {
        match std::mem::replace(&mut portal.progress, Progress::Done) {
            Progress::Bound => {}
            Progress::Suspended(answer) => return self.send_portion(answer, portal, limit_rows).await,
            Progress::Done if prepared.columns.is_empty() => {
                const OBJECT_NOT_IN_STATE: &str = "55000";
                return Err(Error::new(OBJECT_NOT_IN_STATE, "portal has already been run").into());
            }
            Progress::Done => {
                backend::command_complete(&mut self.output, CommandTag::Select(0));
                return Ok(());
            }
        }
        let autocommit = !self.link.implicit && frontend::sync_follows(next);
        let scope = if autocommit { Scope::Auto } else { Scope::Implicit };
        let layout = Layout {
            columns: &prepared.columns,
            formats: portal.formats(),
            describe: portal.describe,
            is_whole: limit_rows == 0 || prepared.columns.is_empty(),
        };
        let values = &portal.values[..statement_parameters(&prepared.plan).min(portal.values.len())];
        if layout.is_whole {
            let mut output = std::mem::take(&mut self.output);
            let ran = self.run_plan(&prepared.plan, values, scope, layout, &mut output).await;
            self.output = output;
            portal.forget_values();
            if let PlanOutcome::Done { tag, spill, .. } = ran? {
                self.send_spilled(spill).await?;
                backend::command_complete(&mut self.output, tag);
            }
            return Ok(());
        }
        let mut bytes = Output::default();
        let ran = self.run_plan(&prepared.plan, values, scope, layout, &mut bytes).await?;
        portal.forget_values();
        let PlanOutcome::Done { tag, spill, .. } = ran else { return Ok(()) };
        let answer = SuspendedResult::new(bytes, spill.map(|(_, spill)| spill), tag);
        self.send_portion(Box::new(answer), portal, limit_rows).await
    }

    /// Sends the next rows of a result. As in PostgreSQL, the command tag counts the rows of this
    /// Execute only.
    async fn send_portion(
        &mut self,
        mut answer: Box<SuspendedResult>,
        portal: &mut Portal,
        limit_rows: u32,
    ) -> Result<(), MessageError> {
        let mut sent = 0;
        loop {
            /// Rows to buffer before they are sent.
            const BATCH_ROWS: u32 = 1000;
            let left = if limit_rows == 0 { BATCH_ROWS } else { (limit_rows - sent as u32).min(BATCH_ROWS) };
            let (rows, end) = answer.take_rows(left, &mut self.output)?;
            sent += rows;
            if end {
                portal.forget_values();
                let tag = match answer.tag {
                    CommandTag::Select(_) => CommandTag::Select(sent),
                    other => other,
                };
                backend::command_complete(&mut self.output, tag);
                return Ok(());
            }
            if limit_rows > 0 && sent >= u64::from(limit_rows) {
                portal.suspend(answer, self.statements.memory())?;
                backend::portal_suspended(&mut self.output);
                return Ok(());
            }
            self.flush_if_large().await?;
        }
    }
}

/// The number of parameters of the engine's statement. The client may have declared more.
fn statement_parameters(plan: &Plan) -> usize {
    match plan {
        Plan::Engine(statement) => statement.parameters.len(),
        Plan::Command { .. } => 0,
    }
}

fn bind_values(portal: &mut Portal, bind: &Bind<'_>, prepared: &Prepared) -> Result<()> {
    for (index, (bytes, parameter)) in bind.values.iter().zip(&prepared.parameters).enumerate() {
        let format = bind.formats.get(index).unwrap_or(Format::Text);
        let value = match (bytes, parameter.kind, format) {
            (None, ..) => fulmar_engine::Value::Null,
            (Some(bytes), Some(kind), format) => decode::value(bytes, kind, format)
                .map_err(|error| error.detail(format!("The value is parameter ${}.", index + 1)))?,
            (Some(bytes), None, Format::Text) => fulmar_engine::Value::Text(decode::utf8(bytes)?.to_owned()),
            (Some(_), None, Format::Binary) => {
                let message = format!(
                    "binary format is not supported for the type of parameter ${} (OID {})",
                    index + 1,
                    parameter.oid
                );
                return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
                    .hint("Send the value as text, or use one of the types listed in docs/sql.md."));
            }
        };
        portal.values.push(value);
    }
    Ok(())
}
