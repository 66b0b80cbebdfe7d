//! The extended query protocol: Parse, Bind, Describe, Execute, Close, Sync.

use std::sync::Arc;

use fulmar_engine::{
    CommandTag, Error, Known, Scope, Statement, StatementKind, sqlstate, statement_too_long,
};

use super::held::{MAX_WAIT, Share};
use super::portals::{Answer, Portal, Progress};
use super::rows::{Layout, Output};
use super::statements::{self, Plan, Prepared};
use super::{Fault, Ran, Session};
use crate::Result;
use crate::dialect::token::{LONG_BYTES, Lexer, measure};
use crate::dialect::{self, Front};
use crate::protocol::frontend::{self, Bind, Message, Oids, Target};
use crate::protocol::{Format, backend};
use crate::system::Viewer;
use crate::types::infer::Inference;
use crate::types::{Column, Type, decode};

/// Memory per token while a statement is prepared. The gateway and the engine each keep a list of tokens, one after the other.
const TOKEN_BYTES: usize = 48;
/// Memory per token while a statement is translated: its tokens, and the pieces of the new text.
const TRANSLATED_TOKEN_BYTES: usize = 128;

impl Session {
    /// Handles a message of the extended protocol. `next` is what follows it in the receive buffer.
    ///
    /// Thousands of messages can arrive with one read, and nothing but Sync and Flush sends their answers. So each message may
    /// end the time slice, and a large output is sent after each, as PostgreSQL sends a full buffer.
    pub(super) async fn extended(&mut self, message: Message<'_>, next: &[u8]) -> Result<(), Fault> {
        self.link.give_way().await?;
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

    /// After an error nothing is done until Sync.
    pub(super) fn extended_failed(&mut self, error: &Error) {
        self.report(error);
        self.skipping = true;
        self.link.engine.fail();
    }

    /// Ends the implicit transaction and what an error left to be skipped.
    pub(super) async fn sync(&mut self) -> Result<(), Fault> {
        self.skipping = false;
        match self.link.finish().await.map_err(Fault::from) {
            Ok(()) => {}
            Err(Fault::Statement(error)) => self.report(&error),
            Err(end) => return Err(end),
        }
        self.end_of_transaction(true);
        self.ready().await
    }

    async fn parse(&mut self, name: &str, sql: &[u8], types: Oids<'_>) -> Result<(), Fault> {
        self.statements.check_free(name)?;
        let (plan, rest) = self.plan(decode::utf8(sql)?).await?;
        if !super::simple::is_blank(rest) {
            let message = "cannot insert multiple commands into a prepared statement";
            return Err(Error::new(sqlstate::SYNTAX_ERROR, message).into());
        }
        let prepared = match plan {
            Plan::Engine(statement) => self.describe_statement(statement, types).await?,
            command => {
                let columns = statements::columns(&command);
                self.statements.hold(Prepared::new(command, types, columns), sql.len())?
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
        if let Some(known) = self.statements.described(&statement, types) {
            return Ok(known);
        }
        let plan = Plan::Engine(statement.clone());
        let mut columns = statements::columns(&plan);
        if statements::is_open(&columns) {
            self.infer_types(&statement, &mut columns).await;
        }
        let prepared = self.statements.hold(Prepared::new(plan, types, columns), statement.sql.len())?;
        self.statements.remember(prepared.clone(), types);
        Ok(prepared)
    }

    /// Gives expressions the types that their text tells.
    pub(super) async fn infer_types(&mut self, statement: &Statement, columns: &mut [Column]) {
        let logical = if statement.uses_system() { Type::Bool } else { Type::Int8 };
        let mut work = Share::default();
        if statement.sql.len() >= LONG_BYTES {
            let bytes = Lexer::new(&statement.sql).count() * TOKEN_BYTES;
            // Without memory, columns keep the types that SQLite declares.
            if !work.covers(self.statements.memory(), bytes as u64) {
                return;
            }
        }
        let inference = Inference::of(&statement.sql, logical);
        if inference.guesses.len() != columns.len() {
            return;
        }
        let mut probed = Vec::new();
        // A probe that SQLite does not understand was no good guess.
        if let Some(probe) = inference.probe()
            && let Ok(probe) = self
                .link
                .prepare_as(&probe, Known { system: statement.uses_system(), once: true, ..Known::default() })
                .await
        {
            probed = statements::columns(&Plan::Engine(probe)).iter().map(|column| column.kind).collect();
        }
        for (column, guess) in columns.iter_mut().zip(&inference.guesses) {
            column.kind = column.kind.or_else(|| guess.resolve(&probed));
        }
    }

    /// The session, as system tables are to see it.
    pub(super) fn viewer(&mut self) -> Arc<Viewer> {
        self.note_snapshot();
        let (shared, settings) = (self.shared.clone(), self.settings.clone());
        Arc::new(Viewer::new(shared, self.identity.clone(), self.link.handle.pid, settings))
    }

    /// Finds out how to run the first statement of `sql`; answers what follows it too.
    pub(super) async fn plan<'a>(&mut self, sql: &'a str) -> Result<(Plan, &'a str)> {
        if sql.len() < LONG_BYTES {
            return self.plan_only(sql).await;
        }
        Box::pin(self.plan_of_long(sql)).await
    }

    /// The same for a text that may be long: its first statement is measured before its tokens are kept, and the memory of its
    /// translation is charged. Other statements of the text are not looked at.
    async fn plan_of_long<'a>(&mut self, sql: &'a str) -> Result<(Plan, &'a str)> {
        let limit_bytes = self.shared.engine.max_statement_bytes();
        let extent = measure(sql, limit_bytes).ok_or_else(|| statement_too_long(limit_bytes))?;
        let text = &sql[extent.start..extent.end];
        let mut work = Share::default();
        if text.len() >= LONG_BYTES {
            let token_bytes = if dialect::translates(text) { TRANSLATED_TOKEN_BYTES } else { TOKEN_BYTES };
            let memory = self.statements.memory().clone();
            work.cover_or_wait(&memory, (extent.tokens * token_bytes) as u64, MAX_WAIT).await?;
            self.link.give_way().await?;
        }
        let (plan, rest) = self.plan_only(text).await?;
        Ok((plan, &sql[extent.end - rest.len()..]))
    }

    async fn plan_only<'a>(&mut self, sql: &'a str) -> Result<(Plan, &'a str)> {
        let context = dialect::Context {
            database: &self.identity.tenant.name,
            user: &self.identity.user,
            pid: self.link.handle.pid,
        };
        let front = dialect::front(sql, &context)?;
        if sql.len() >= LONG_BYTES {
            self.link.give_way().await?;
        }
        match front {
            Front::Pass => {
                let (statement, rest) = self.link.prepare(sql).await?;
                Ok((Plan::Engine(statement), rest))
            }
            Front::Rewritten(text, rest) => {
                let (statement, _) = self.link.prepare(&text).await?;
                Ok((Plan::Engine(statement), rest))
            }
            Front::Translated(translated, rest) => {
                if translated.system {
                    let viewer = self.viewer();
                    self.link.engine.set_system(viewer);
                }
                let (system, parameters) = (translated.system, &translated.parameters);
                let known = Known { system, parameters, ..Known::default() };
                // A place in this text would mislead.
                let statement = self.link.prepare_as(&translated.sql, known).await;
                Ok((Plan::Engine(statement.map_err(Error::without_position)?), rest))
            }
            Front::Command(command, rest) => {
                self.link.check_not_failed()?;
                let text = sql.get(..sql.len().saturating_sub(rest.len())).unwrap_or_default();
                let shown = super::slow::shown(text).into();
                Ok((Plan::Command { command: Arc::from(command), shown }, rest))
            }
        }
    }

    fn bind(&mut self, bind: &Bind<'_>) -> Result<()> {
        let prepared = self.statements.statement(bind.statement)?.clone();
        let (given, wanted) = (bind.values.len(), prepared.parameters.len());
        if given != wanted {
            let message = format!(
                "bind message supplies {given} parameters, but prepared statement \"{}\" requires {wanted}",
                bind.statement
            );
            return Err(Error::new(sqlstate::PROTOCOL_VIOLATION, message));
        }
        if !bind.result_formats.fits(prepared.columns.len()) {
            let columns = prepared.columns.len();
            let message = format!(
                "bind message has another number of result formats than the query's {columns} columns"
            );
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
            prepared.describe(&mut self.output, &statements::TEXT);
            return Ok(());
        }
        let mut portal = self.statements.take_portal(name)?;
        let mut charged = Ok(());
        if let Some(prepared) = &portal.prepared {
            // Where the first row is to name types, and is about to come, the description waits for it.
            portal.describe = prepared.is_open() && frontend::execute_follows(next, name);
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

    async fn execute(&mut self, name: &str, limit_rows: u32, next: &[u8]) -> Result<(), Fault> {
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
    ) -> Result<(), Fault> {
        match std::mem::replace(&mut portal.progress, Progress::Done) {
            Progress::Bound => {}
            Progress::Suspended(answer) => return self.send_portion(answer, portal, limit_rows).await,
            Progress::Done if prepared.columns.is_empty() => {
                const OBJECT_NOT_IN_STATE: &str = "55000";
                return Err(Error::new(OBJECT_NOT_IN_STATE, "the portal has been run already").into());
            }
            Progress::Done => {
                backend::command_complete(&mut self.output, CommandTag::Select(0));
                return Ok(());
            }
        }
        let alone = !self.link.implicit && frontend::sync_follows(next);
        let scope = if alone { Scope::Auto } else { Scope::Implicit };
        let layout =
            Layout { columns: &prepared.columns, formats: portal.formats(), describe: portal.describe };
        let values = &portal.values[..statement_parameters(&prepared.plan).min(portal.values.len())];
        if limit_rows == 0 || prepared.columns.is_empty() {
            let mut output = std::mem::take(&mut self.output);
            let ran = self.run_plan(&prepared.plan, values, scope, layout, &mut output).await;
            self.output = output;
            portal.forget_values();
            if let Ran::Done { tag, spill, .. } = ran? {
                self.send_spilled(spill).await?;
                backend::command_complete(&mut self.output, tag);
            }
            return Ok(());
        }
        let mut bytes = Output::default();
        let ran = self.run_plan(&prepared.plan, values, scope, layout, &mut bytes).await?;
        portal.forget_values();
        let Ran::Done { tag, spill, .. } = ran else { return Ok(()) };
        let answer = Answer::new(bytes, spill.map(|(_, spill)| spill), tag);
        self.send_portion(Box::new(answer), portal, limit_rows).await
    }

    /// Sends the next rows of an answer. As in Postgres, the tag counts the rows of the last portion.
    async fn send_portion(
        &mut self,
        mut answer: Box<Answer>,
        portal: &mut Portal,
        limit_rows: u32,
    ) -> Result<(), Fault> {
        let mut sent = 0;
        loop {
            /// Rows that gather before they are sent.
            const PORTION_ROWS: u32 = 1000;
            let left =
                if limit_rows == 0 { PORTION_ROWS } else { (limit_rows - sent as u32).min(PORTION_ROWS) };
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

/// How many parameters the engine wants: a client may have given types for more.
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
                .map_err(|error| error.detail(format!("parameter ${}", index + 1)))?,
            (Some(bytes), None, Format::Text) => fulmar_engine::Value::Text(decode::utf8(bytes)?.to_owned()),
            (Some(_), None, Format::Binary) => {
                let message = format!(
                    "parameter ${} is of a type (oid {}) that is not supported in binary",
                    index + 1,
                    parameter.oid
                );
                return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
                    .hint("Send it as text, or as one of the types that docs/sql.md lists."));
            }
        };
        portal.values.push(value);
    }
    Ok(())
}

/// Whether a statement is only white space and comments.
pub(super) fn is_empty(statement: &Statement) -> bool {
    statement.kind == StatementKind::Empty
}
