//! Execution of statements that the gateway handles itself instead of passing them to SQLite: SET,
//! SHOW, DISCARD, DEALLOCATE, COPY, procedures, administration and VERIFY.

use fulmar_dialect::Command;
use fulmar_dialect::admin::AdminStatement;
use fulmar_dialect::copy::Copy;
use fulmar_dialect::procedure::Procedure;
use fulmar_engine::{
    CREATE_PROCEDURES, CommandTag, Damage, Error, PROCEDURES, RowSink, Scope, TransactionStatus, Value,
    sqlstate,
};
use fulmar_pgwire::protocol::backend;

use super::link::Interrupted;
use super::outcome::{MessageError, PlanOutcome};
use super::rows::{Collector, Layout, Output, RowWriter, ValueRow};
use super::state::Session;
use crate::admin::MoveStatement;
use crate::events::{Event, Kind};
use crate::settings::AS_OF;
use crate::{Result, admin};

impl Session {
    /// Runs a command and writes its rows to `output`.
    pub(super) async fn command(
        &mut self,
        command: &Command,
        scope: Scope,
        layout: Layout<'_>,
        output: &mut Output,
    ) -> Result<PlanOutcome, MessageError> {
        self.link.check_not_failed()?;
        let tag = match command {
            Command::Set { name, value, local } => {
                self.set(name, value.as_deref(), *local, output).await?;
                if value.is_some() || *local { "SET" } else { "RESET" }
            }
            Command::SetTransaction { read_only, session } => {
                self.set_transaction(*read_only, *session)?;
                "SET"
            }
            Command::Show(name) => {
                if Self::is_snapshot_parameter(name) {
                    self.link.open_snapshot().await?;
                }
                self.update_snapshot_parameters();
                let value = self.settings.get(name)?.to_owned();
                return self.write_rows(
                    vec![vec![Value::Text(value)]],
                    CommandTag::Plain("SHOW"),
                    layout,
                    output,
                );
            }
            Command::ShowAll => {
                self.update_snapshot_parameters();
                let row = |row: [&str; 3]| row.map(|text| Value::Text(text.to_owned())).to_vec();
                let rows = self.settings.all().into_iter().map(row).collect();
                return self.write_rows(rows, CommandTag::Plain("SHOW"), layout, output);
            }
            Command::ResetAll => {
                self.settings.reset_all();
                self.apply_settings();
                "RESET"
            }
            Command::DiscardAll => {
                self.discard_all().await?;
                self.tell_deallocated(None, output);
                "DISCARD ALL"
            }
            Command::DiscardPlans => "DISCARD PLANS",
            Command::Deallocate(name) => {
                let tag = self.deallocate(name.as_deref())?;
                self.tell_deallocated(name.as_deref(), output);
                tag
            }
            Command::Batch { statements, tag } => {
                self.batch(statements, scope, output).await?;
                tag
            }
            Command::AddPrimaryKey(key) => {
                self.add_primary_key(key).await?;
                "ALTER TABLE"
            }
            Command::Copy(copy) => return self.copy(copy, output).await,
            Command::Procedure(procedure) => {
                self.procedure(procedure, output).await?;
                procedure.tag()
            }
            Command::Admin(admin) => {
                self.outside_transaction(admin.tag())?;
                let answer = match self.move_databases(admin).await? {
                    Some(report) => report,
                    None => admin::run(admin, &self.context.administration, &self.identity).await?,
                };
                if matches!(admin, AdminStatement::AlterPassword { name, .. } if *name == self.identity.user)
                {
                    self.renew_account();
                }
                if let Some(answer) = answer {
                    let rows = vec![vec![Value::Text(answer)]];
                    return self.write_rows(rows, CommandTag::Plain(admin.tag()), layout, output);
                }
                admin.tag()
            }
            Command::Verify => return self.verify(layout, output).await,
        };
        Ok(PlanOutcome::Done { tag: CommandTag::Plain(tag), rows: 0, spill: None })
    }

    /// Begins or runs a COPY. The database does not move meanwhile, except in an import, which makes a
    /// new one.
    async fn copy(&mut self, copy: &Copy, output: &mut Output) -> Result<PlanOutcome, MessageError> {
        if !matches!(copy, Copy::DatabaseIn { .. }) {
            self.hold_for_copy().await?;
        }
        match copy {
            Copy::In { table, columns, format } => self.begin_copy(table, columns, format, output).await?,
            Copy::TableOut { table, format } => {
                let query = self.table_query(table).await?;
                return self.copy_out(&query, format, output).await;
            }
            Copy::Out { query, format } => return self.copy_out(query, format, output).await,
            Copy::DatabaseOut => return self.export(output).await,
            Copy::DatabaseIn { name, owner } => self.begin_import(name, owner.as_deref(), output).await?,
        }
        Ok(PlanOutcome::Copying)
    }

    /// Runs a statement that moves databases, and returns its report if it has one; returns `None`
    /// if it is another statement. A cancel request, or `statement_timeout`, cancels moves that are
    /// still copying. If the client disconnects, moves in progress continue.
    async fn move_databases(
        &mut self,
        admin: &AdminStatement,
    ) -> Result<Option<Option<String>>, MessageError> {
        let Some(moving) = MoveStatement::new(admin, &self.context.administration, &self.identity) else {
            return Ok(None);
        };
        match self.link.run_cancellable(moving.run()).await {
            Ok(ended) => Ok(Some(ended?)),
            Err(Interrupted { error, is_client_gone: false })
                if error.state() == sqlstate::QUERY_CANCELED =>
            {
                Err(moving.cancel(error).await.into())
            }
            Err(Interrupted { error, .. }) => Err(error.into()),
        }
    }

    /// Verifies the checksums of all data, and writes a row for each damaged file.
    async fn verify(&mut self, layout: Layout<'_>, output: &mut Output) -> Result<PlanOutcome, MessageError> {
        self.outside_transaction("VERIFY")?;
        admin::check_right("VERIFY", &self.identity)?;
        // On a replica, files that the primary deletes during the check would be reported
        // as damage.
        self.context.engine.check_primary()?;
        let damage = self.link.verify().await?.damage;
        let count = damage.len() as u64;
        self.record_verification(&damage);
        let catalog = self.context.catalog.clone();
        let row = |damage: Damage| {
            let byte = damage.offset.map_or(Value::Null, |at| Value::Integer(at as i64));
            let databases: Vec<String> = damage
                .partitions
                .iter()
                .filter_map(|id| catalog.tenant_of(*id).map(|tenant| tenant.name.clone()))
                .collect();
            let databases = Value::Text(databases.join(", "));
            vec![Value::Text(damage.file), byte, Value::Text(damage.problem), databases]
        };
        let rows = damage.into_iter().map(row).collect();
        self.write_rows(rows, CommandTag::Select(count), layout, output)
    }

    fn record_verification(&self, damage: &[Damage]) {
        const MAX_NAMED_FILES: usize = 10;
        let event = if damage.is_empty() { Event::new(Kind::Verified) } else { Event::new(Kind::Damage) };
        let files: Vec<&str> =
            damage.iter().take(MAX_NAMED_FILES).map(|damage| damage.file.as_str()).collect();
        let event = event.detail("damaged", damage.len()).detail("files", files);
        self.context.event_log.record(event.by(self.identity.actor()));
    }

    /// Writes rows that the gateway has produced.
    fn write_rows(
        &self,
        rows: Vec<Vec<Value>>,
        tag: CommandTag,
        layout: Layout<'_>,
        output: &mut Output,
    ) -> Result<PlanOutcome, MessageError> {
        let spills = self.statements.spills(&self.context.temporary_directory, &self.temporary);
        let mut writer = RowWriter::new(output, layout, spills);
        for row in &rows {
            if let Err(error) = writer.row(&ValueRow(row)) {
                writer.reset();
                return Err(error.into());
            }
        }
        let (rows, spill) = writer.finish();
        Ok(PlanOutcome::Done { tag, rows, spill })
    }

    pub(super) async fn set(
        &mut self,
        name: &str,
        value: Option<&str>,
        local: bool,
        output: &mut Output,
    ) -> Result<()> {
        let in_transaction = self.link.status() != TransactionStatus::Idle;
        if local && !in_transaction {
            backend::notice(
                output,
                sqlstate::NO_ACTIVE_TRANSACTION,
                "SET LOCAL can only be used in transaction blocks",
            );
            return Ok(());
        }
        if name.eq_ignore_ascii_case(AS_OF) {
            self.set_as_of(value, output).await?;
        }
        let bytes = self.settings.bytes_with(name, value);
        self.settings_reservation.grow_to(self.statements.memory(), bytes as u64)?;
        if in_transaction {
            self.settings.set_in_transaction(name, value, local)?;
        } else {
            self.settings.set(name, value)?;
        }
        self.apply_settings();
        Ok(())
    }

    fn set_transaction(&mut self, read_only: Option<bool>, session: bool) -> Result<()> {
        if session {
            let Some(read_only) = read_only else { return Ok(()) };
            self.settings.set("default_transaction_read_only", Some(if read_only { "on" } else { "off" }))?;
            self.apply_settings();
            return Ok(());
        }
        if read_only == Some(false) {
            return self.settings.check_may_write();
        }
        if read_only == Some(true) {
            return Err(Error::new(
                sqlstate::FEATURE_NOT_SUPPORTED,
                "a transaction cannot be made read-only after it has begun",
            )
            .hint("Begin the transaction with BEGIN READ ONLY."));
        }
        Ok(())
    }

    fn deallocate(&mut self, name: Option<&str>) -> Result<&'static str> {
        match name {
            None => {
                self.statements.close_statements();
                Ok("DEALLOCATE ALL")
            }
            Some(name) if self.statements.close_statement(name) => Ok("DEALLOCATE"),
            Some(name) => {
                let message = format!("prepared statement \"{name}\" does not exist");
                Err(Error::new(sqlstate::INVALID_STATEMENT_NAME, message))
            }
        }
    }

    async fn discard_all(&mut self) -> Result<()> {
        self.outside_transaction("DISCARD ALL")?;
        self.settings.reset_all();
        self.apply_settings();
        self.link.partition.session_mut().drop_temporary_tables();
        self.statements.close_statements();
        self.context.advisory.unlock_all(self.link.handle.pid);
        Ok(())
    }

    /// Runs the statements of a batch in one transaction. A single one (possibly a VACUUM, which
    /// cannot run in a transaction) runs like any other statement.
    async fn batch(&mut self, statements: &[String], scope: Scope, output: &mut Output) -> Result<()> {
        let scope = if statements.len() == 1 { scope } else { Scope::Implicit };
        for sql in statements {
            let (statement, _) = self.link.prepare(sql).await?;
            let mut discarded = Collector::default();
            let completion = self.link.execute(&statement, &[], scope, &mut discarded).await?;
            self.completed(&completion, output);
        }
        Ok(())
    }

    /// Creates or drops a procedure in the client's transaction.
    async fn procedure(&mut self, procedure: &Procedure, output: &mut Output) -> Result<()> {
        let mut name = match procedure {
            Procedure::Create { definition, .. } => definition.name.clone(),
            Procedure::Drop { name, .. } => name.clone(),
        };
        if let Procedure::Create { definition, .. } = procedure {
            definition.check()?;
            self.link.collect(CREATE_PROCEDURES, &[]).await?;
        }
        let find_table = "SELECT 1 FROM main.sqlite_schema WHERE name = $1 AND type = 'table'";
        let mut exists =
            !self.link.collect(find_table, &[Value::Text(PROCEDURES.to_owned())]).await?.is_empty();
        if exists {
            exists = self.has_procedure(&name).await?;
            let lower = name.to_lowercase();
            // CALL falls back to the lower-case name too: earlier versions stored every name in
            // lower case, quoted or not.
            if !exists && matches!(procedure, Procedure::Drop { .. }) && self.has_procedure(&lower).await? {
                (name, exists) = (lower, true);
            }
        }
        match procedure {
            Procedure::Create { replace: false, .. } if exists => {
                const DUPLICATE_FUNCTION: &str = "42723";
                let message = format!("procedure \"{name}\" already exists");
                Err(Error::new(DUPLICATE_FUNCTION, message)
                    .hint("Use CREATE OR REPLACE PROCEDURE to replace it."))
            }
            Procedure::Create { definition, .. } => {
                let sql = format!("INSERT OR REPLACE INTO main.{PROCEDURES} VALUES ($1, $2, $3, $4)");
                self.link.collect(&sql, &definition.values()).await.map(drop)
            }
            Procedure::Drop { .. } if exists => {
                let sql = format!("DELETE FROM main.{PROCEDURES} WHERE name = $1");
                self.link.collect(&sql, &[Value::Text(name.clone())]).await.map(drop)
            }
            Procedure::Drop { if_exists: true, .. } => {
                let message = format!("procedure \"{name}\" does not exist, skipping");
                backend::notice(output, sqlstate::SUCCESSFUL_COMPLETION, &message);
                Ok(())
            }
            Procedure::Drop { .. } => {
                let message = format!("procedure \"{name}\" does not exist");
                Err(Error::new(sqlstate::UNDEFINED_FUNCTION, message))
            }
        }
    }

    async fn has_procedure(&mut self, name: &str) -> Result<bool> {
        let sql = format!("SELECT 1 FROM main.{PROCEDURES} WHERE name = $1");
        Ok(!self.link.collect(&sql, &[Value::Text(name.to_owned())]).await?.is_empty())
    }

    pub(super) fn outside_transaction(&self, tag: &str) -> Result<()> {
        if self.link.status() == TransactionStatus::Idle && !self.link.implicit {
            return Ok(());
        }
        Err(Error::new(sqlstate::ACTIVE_TRANSACTION, format!("{tag} cannot run inside a transaction block")))
    }
}
