//! `COPY DATABASE ... (FORMAT sqlite)`: exports and imports a whole database as a plain SQLite
//! file.
//!
//! ```text
//! shop=>    COPY DATABASE TO STDOUT (FORMAT sqlite)          sends the pages in order
//! fulmar=>  COPY DATABASE shop FROM STDIN (FORMAT sqlite)    creates the tenant
//!
//! catalog: creating --> CopyData: pages are written to a segment
//!                   --> CopyDone: manifest, quick_check --> catalog: ready
//! ```
//!
//! In a cluster the partition gets this node as its owner between manifest and quick_check.
//!
//! Neither runs inside a transaction.
//!
//! - An export contains the data committed when it began, or the version that `fulmar.as_of`
//!   selects. Backpressure from the client limits its speed.
//! - An import creates a tenant ([`crate::admin`]). The tenant is not visible until all pages have
//!   arrived and `PRAGMA quick_check` has passed. Any failure rolls the creation back.

use fulmar_engine::{CommandTag, Error, Import, Value, sqlstate};
use fulmar_pgwire::protocol::backend;
use fulmar_service::{ExportStream, PartitionService};

use super::copy_in::{CopyIn, Importing, Target};
use super::outcome::{MessageError, PlanOutcome};
use super::rows::Output;
use super::state::Session;
use crate::Result;
use crate::admin;
use crate::events::{Event, Kind};

/// The command's name in error messages.
const TAG: &str = "COPY DATABASE";
/// Maximum number of `quick_check` findings in the error's detail.
const MAX_FINDINGS: usize = 5;

impl Session {
    /// Sends all pages of the session's database.
    pub(super) async fn export(&mut self, output: &mut Output) -> Result<PlanOutcome, MessageError> {
        self.outside_transaction(TAG)?;
        let mut export = self.link.partition.export(self.settings.as_of()).await?;
        let exported = Event::new(Kind::DatabaseExported).database(&self.identity.tenant);
        self.context.event_log.record_aggregated(exported.by(self.identity.actor()));
        backend::copy_out_bytes(output);
        let (mut pages, mut piece) = (0, Vec::new());
        while export.next_pages(&mut piece).await? {
            pages += (piece.len() / fulmar_pages::PAGE_SIZE) as u64;
            // In addition to `piece` itself.
            output.must_grow(2 * piece.len(), self.statements.memory())?;
            backend::copy_data(output, |out| out.extend_from_slice(&piece));
            piece.clear();
            self.metrics.sent(output.len());
            self.link.send(output).await?;
            output.clear();
        }
        backend::copy_done(output);
        Ok(PlanOutcome::Done { tag: CommandTag::Copy(pages), rows: 0, spill: None })
    }

    /// Begins the creation of a tenant and requests its pages from the client.
    pub(super) async fn begin_import(
        &mut self,
        name: &str,
        owner: Option<&str>,
        output: &mut Output,
    ) -> Result<()> {
        self.outside_transaction(TAG)?;
        admin::check_right(TAG, &self.identity)?;
        let tenant = admin::begin_create(name, owner, &self.context.administration, &self.identity).await?;
        let import = match self.context.engine.import(tenant.partition).await {
            Ok(import) => import,
            Err(error) => {
                admin::undo(&tenant, &self.context.administration).await;
                return Err(error);
            }
        };
        backend::copy_in_bytes(output);
        let importing = Importing { tenant, import: Some(import) };
        self.begin_copy_in(Target::Database(importing), output).await
    }
}

impl Importing {
    pub(super) async fn take(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.import {
            Some(import) => import.write(bytes).await,
            None => Ok(()),
        }
    }

    /// Checks the complete file and makes the tenant available. Returns its number of pages.
    pub(super) async fn finish(&mut self, session: &mut Session) -> Result<u64> {
        let Some(import) = self.import.take() else { return Ok(0) };
        let finished = self.check(import, session).await;
        let event = match &finished {
            Ok(pages) => Event::new(Kind::DatabaseImported).database(&self.tenant).detail("pages", *pages),
            Err(error) => {
                let event = Event::new(Kind::ImportFailed).database_name(&self.tenant.name);
                event.detail("sqlstate", error.state()).detail("problem", error.message())
            }
        };
        session.context.event_log.record(event.by(session.identity.actor()));
        finished
    }

    async fn check(&self, import: Import, session: &mut Session) -> Result<u64> {
        let pages = import.finish().await?;
        admin::own_created(&self.tenant, &session.context.administration).await?;
        let mut temporary = session.link.partition.session_on(self.tenant.partition);
        std::mem::swap(&mut session.link.partition, &mut temporary);
        let checked = quick_check(session).await;
        std::mem::swap(&mut session.link.partition, &mut temporary);
        temporary.close().await;
        checked?;
        admin::finish_create(&self.tenant, &session.context.administration).await?;
        Ok(pages.into())
    }

    /// Aborts the import and rolls back the creation of the tenant.
    pub(super) async fn abort(&mut self, session: &Session) {
        self.import = None;
        admin::undo(&self.tenant, &session.context.administration).await;
    }
}

/// Runs `PRAGMA quick_check`, which reads every page, on the database of the session's engine
/// session.
async fn quick_check(session: &mut Session) -> Result<()> {
    let findings = session.link.run_alone("PRAGMA quick_check(5)").await.map_err(|error| {
        let is_corrupt = [sqlstate::DATA_CORRUPTED, sqlstate::BAD_COPY_FILE].contains(&error.state());
        if is_corrupt { corrupt(error.message().to_owned()) } else { error }
    })?;
    let findings = findings.into_iter().flatten().filter_map(|value| match value {
        Value::Text(finding) if finding != "ok" => Some(finding),
        _ => None,
    });
    let findings: Vec<String> = findings.take(MAX_FINDINGS).collect();
    if findings.is_empty() { Ok(()) } else { Err(corrupt(findings.join("\n"))) }
}

fn corrupt(findings: String) -> Error {
    Error::new(sqlstate::BAD_COPY_FILE, "database file is damaged, or was copied while it was in use")
        .detail(findings)
        .hint("Nothing was imported. Repair the file: sqlite3 OLD.db .recover | sqlite3 NEW.db")
}

impl CopyIn {
    /// Cleans up after a COPY that did not complete.
    pub(super) async fn abort(&mut self, session: &Session) {
        // Inserted rows are rolled back with their transaction.
        if let Target::Database(importing) = &mut self.target {
            importing.abort(session).await;
        }
    }
}
