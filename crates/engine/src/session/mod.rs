//! A client's side of the engine: prepare, execute, transactions.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`call`] | preparing a CALL |
//! | [`auto`] | a statement that is a transaction of its own |
//! | [`open`] | statements inside BEGIN ... COMMIT, or inside a pipeline |
//! | [`control`] | BEGIN, COMMIT, ROLLBACK, savepoints |
//! | [`journal`] | what an open transaction has answered, and its replay |
//! | [`let_go`] | snapshots that have been held for too long |
//! | [`look_back`] | transactions on a version of the past, or on what another node owns |
//! | [`held_turn`] | a turn held across client round trips, and its bounds |
//!
//! # Answers wait for durability
//! A commit is visible to other writers at once; its answer waits until the log is durable. Statements that only read
//! begin at the newest durable version: it shows everything that was ever acknowledged, and their answers wait for
//! nothing. A transaction that has written (or holds a turn or a row) sees the current version and answers its
//! intermediate statements at once: they are provisional until its COMMIT, which waits. So nobody acts on a commit that
//! a crash could take back. No thread is held while an answer waits.

mod auto;
mod call;
mod control;
mod held_turn;
mod journal;
mod let_go;
mod look_back;
mod open;
mod prepare;

pub(crate) use let_go::snapshot_too_old;
pub use prepare::statement_too_long;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fulmar_pages::PartitionId;
use fulmar_store::{CommitLog, LogError, Lsn};

use crate::cancel::CancelFlag;
use crate::connection::Connection;
use crate::partition::{Partition, log_error, past_is_read_only};
use crate::variables::Variables;
use crate::{
    Canceller, CommandTag, Completion, Engine, Error, Known, Result, RowSink, Scope, Statement,
    StatementKind, System, TemporarySpace, TransactionLimits, TransactionStatus, Value, sqlstate,
};

/// Attempts of one transaction before it gives up; each one after the first is made in a turn, so more than a few mean
/// that the partition is being discarded under it again and again.
const MOST_ATTEMPTS: u32 = 20;

/// The remedy of who may not write.
const READS_ONLY: &str = "the user may only read this database; GRANT CONNECT ON DATABASE lets it write";

/// What SQL functions remember of a session between transactions.
#[derive(Clone, Copy, Debug, Default)]
struct Remembered {
    last_insert_rowid: i64,
    changes: i64,
    total_changes: i64,
}

/// One client's session on one partition. Its futures are run to their end (cancel with a [`Canceller`]); one that is
/// dropped midway rolls its transaction back. Dropping one whose statement is in a call that cannot
/// be interrupted ([`Canceller::is_offloaded`]) blocks the thread until the call returns: such a
/// future must not be dropped on a thread that serves others. Before that call, and at its next
/// large allocation, the statement ends at once.
pub struct Session {
    engine: Arc<Engine>,
    id: PartitionId,
    /// The tenant's name, for reports.
    tenant: Arc<str>,
    partition: Option<Arc<Partition>>,
    open: Option<open::Open>,
    /// A connection that the session must keep: it holds its temporary tables.
    own: Option<Box<Connection>>,
    /// What answers for system tables, once a statement has wanted them.
    system: Option<Arc<dyn System>>,
    flag: Arc<CancelFlag>,
    running: Arc<AtomicBool>,
    default_read_only: bool,
    /// The version of the past that its transactions see, if they do.
    past: Option<look_back::LookBack>,
    /// How old what its transactions see may be, where another node owns the partition; `None`: as old as it likes.
    staleness: Option<Duration>,
    /// All that was acknowledged before is in what its last transaction there has seen (milliseconds since 1970).
    seen_unix_ms: Option<u64>,
    /// Whether its user may write at all.
    may_write: bool,
    limits: TransactionLimits,
    /// The last transaction got 40001: the next one takes its turn first.
    turn_first: bool,
    remembered: Remembered,
    /// A statement has begun and not ended.
    unsettled: bool,
}

impl Session {
    pub(crate) fn new(engine: Arc<Engine>, id: PartitionId) -> Self {
        Session {
            engine,
            id,
            tenant: Arc::from(""),
            partition: None,
            open: None,
            own: None,
            system: None,
            flag: Arc::default(),
            running: Arc::default(),
            default_read_only: false,
            past: None,
            staleness: None,
            seen_unix_ms: None,
            may_write: true,
            limits: TransactionLimits::default(),
            turn_first: false,
            remembered: Remembered::default(),
            unsettled: false,
        }
    }

    /// Prepares the first statement of `sql`; answers it and the rest of the text (empty if there is none).
    /// Runs nothing. In a failed transaction only transaction control is accepted (25P02).
    pub async fn prepare<'a>(&mut self, sql: &'a str) -> Result<(Arc<Statement>, &'a str)> {
        let _running = self.start();
        let prepared = prepare::prepare(self, sql, Known::default()).await;
        if prepared.is_err() {
            self.fail();
        }
        prepared
    }

    /// From now on system tables and functions answer from `system`.
    pub fn set_system(&mut self, system: Arc<dyn System>) {
        if let Some(connection) = self.open.as_ref().and_then(|open| open.connection.as_ref()) {
            connection.link.system.borrow_mut().system = Some(system.clone());
        }
        self.system = Some(system);
    }

    /// Like [`Session::prepare`], for a text of which more is known. The same text must not come with something else.
    pub async fn prepare_as<'a>(
        &mut self,
        sql: &'a str,
        known: Known<'_>,
    ) -> Result<(Arc<Statement>, &'a str)> {
        let _running = self.start();
        let prepared = prepare::prepare(self, sql, known).await;
        if prepared.is_err() {
            self.fail();
        }
        prepared
    }

    /// An error outside of the engine (a parameter that cannot be decoded, say) has reached the client: the open
    /// transaction, if there is one, has failed.
    pub fn fail(&mut self) {
        if let Some(open) = &mut self.open {
            open.failed = true;
        }
    }

    /// Runs a statement to its end and waits until what the answer shows is durable. All rows have gone to `sink`
    /// when it returns. Transaction control (BEGIN, COMMIT, SAVEPOINT ...) goes through here too.
    /// A COMMIT of a failed transaction answers the tag ROLLBACK, as PostgreSQL does.
    pub async fn execute(
        &mut self,
        statement: &Arc<Statement>,
        parameters: &[Value],
        scope: Scope,
        sink: &mut dyn RowSink,
    ) -> Result<Completion> {
        let _running = self.start();
        self.settle().await;
        self.unsettled = true;
        let result = self.execute_settled(statement, parameters, scope, sink).await;
        self.unsettled = false;
        result
    }

    async fn execute_settled(
        &mut self,
        statement: &Arc<Statement>,
        parameters: &[Value],
        scope: Scope,
        sink: &mut dyn RowSink,
    ) -> Result<Completion> {
        match statement.kind {
            StatementKind::Empty => Ok(Completion { tag: CommandTag::Empty, notices: Vec::new() }),
            StatementKind::Begin => self.begin(statement.plan.begin),
            StatementKind::Commit => self.commit().await,
            StatementKind::Rollback => self.rollback().await,
            _ if self.open.is_some() => self.run_open(statement, parameters, sink).await,
            StatementKind::Savepoint | StatementKind::Release | StatementKind::RollbackTo => {
                self.savepoint_outside(statement, scope, sink).await
            }
            _ if scope == Scope::Implicit => {
                self.open = Some(open::Open::implicit(&self.engine, self.begins_read_only()));
                self.run_open(statement, parameters, sink).await
            }
            _ => self.run_auto(statement, parameters, sink).await,
        }
    }

    /// Commits the implicit transaction, if there is one (or rolls it back if it has failed); waits until it is
    /// durable.
    pub async fn finish_implicit(&mut self) -> Result<()> {
        if !self.open.as_ref().is_some_and(|open| open.is_implicit()) {
            return Ok(());
        }
        let _running = self.start();
        self.commit().await.map(|_| ())
    }

    /// For ReadyForQuery. An implicit transaction counts as idle.
    pub fn status(&self) -> TransactionStatus {
        match &self.open {
            Some(open) if open.is_implicit() => TransactionStatus::Idle,
            Some(open) if open.has_failed() => TransactionStatus::Failed,
            Some(_) => TransactionStatus::InTransaction,
            None => TransactionStatus::Idle,
        }
    }

    /// To cancel this session from elsewhere.
    pub fn canceller(&self) -> Canceller {
        Canceller { flag: self.flag.clone(), running: self.running.clone() }
    }

    /// A session on another partition. What cancels this one cancels it too.
    pub fn beside(&self, partition: PartitionId) -> Session {
        let mut beside = Session::new(self.engine.clone(), partition);
        (beside.flag, beside.running) = (self.flag.clone(), self.running.clone());
        beside
    }

    /// Names the tenant in reports about what the session runs.
    pub fn set_tenant(&mut self, name: &str) {
        self.tenant = name.into();
    }

    /// Whether transactions are read-only unless they say otherwise (`default_transaction_read_only`).
    pub fn set_default_read_only(&mut self, on: bool) {
        self.default_read_only = on;
    }

    /// Whether its user may write at all, from its next statement on. If not, all its transactions are read-only, whatever
    /// they ask for, and so is the rest of the open one.
    pub fn set_may_write(&mut self, may_write: bool) {
        self.may_write = may_write;
        if let Some(open) = self.open.as_mut().filter(|_| !may_write) {
            open.forbid_writes();
        }
    }

    fn begins_read_only(&self) -> bool {
        self.default_read_only || !self.may_write || self.past.is_some() || self.engine.reads_beside()
    }

    /// The error of who writes in a read-only transaction, `of_past` if that sees the past.
    fn read_only_error(&self, of_past: bool) -> Error {
        if of_past {
            return past_is_read_only();
        }
        if let Err(error) = self.engine.check_owner() {
            return error;
        }
        let error = Error::new(sqlstate::READ_ONLY_TRANSACTION, "cannot write in a read-only transaction");
        error.hint(match self.may_write {
            true => "begin a transaction with READ WRITE, or SET default_transaction_read_only = off",
            false => READS_ONLY,
        })
    }

    /// What its transactions may take, the open one included, from its next statement on.
    pub fn set_limits(&mut self, limits: TransactionLimits) {
        self.limits = limits;
        if let Some(connection) = self.open.as_mut().and_then(|open| open.connection.as_mut()) {
            connection.set_limits(limits);
        }
    }

    /// Charges temporary files outside of the engine to the session's tenant.
    pub fn temporary_space(&self) -> TemporarySpace {
        TemporarySpace::new(self.engine.clone(), self.id)
    }

    /// Between two statements that came together, each of which may be too short to do so: lets others on this thread work.
    /// What is cancelled meanwhile is the second one.
    pub async fn give_way(&mut self) -> Result<()> {
        let _running = self.start();
        tokio::task::yield_now().await;
        self.check_cancelled()
    }

    /// What others leave its partition of the memory for pages, for as long as the node runs.
    pub fn set_cache_floor(&self, bytes: u64) {
        self.engine.set_cache_floor(self.id, bytes);
    }

    /// Rolls back what is open and gives back what the session held.
    pub async fn close(&mut self) {
        let _ = self.rollback().await;
        self.own = None;
        self.partition = None;
        self.past = None;
    }

    /// If the last statement's future was dropped, it may have committed without anybody having waited for it. Whether it
    /// did must not change between this session's next statements, so they begin when it is durable or lost.
    async fn settle(&mut self) {
        if std::mem::take(&mut self.unsettled) {
            let appended = self.partition.as_ref().map(|partition| partition.log.appended());
            let _ = self.wait_durable(appended.unwrap_or_default()).await;
        }
    }

    /// Runs all statements of a text, whose rows do not matter.
    #[cfg(test)]
    pub(crate) async fn run(&mut self, mut sql: &str) {
        while !sql.is_empty() {
            let (statement, rest) = self.prepare(sql).await.unwrap();
            self.execute(&statement, &[], Scope::Auto, &mut crate::statement::Nowhere).await.unwrap();
            sql = rest;
        }
    }

    pub(crate) fn start(&self) -> Running {
        self.flag.clear();
        self.running.store(true, Ordering::Release);
        Running(self.running.clone())
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// For what is long and no statement of SQLite's.
    pub(crate) fn check_cancelled(&self) -> Result<()> {
        if self.flag.is_set() { Err(self.flag.error()) } else { Ok(()) }
    }

    /// The partition that the session's transaction sees, opened on first use. From a store that does not answer that takes
    /// a minute to fail. Refused once another process is known to own it: what is read here would be outdated, without end.
    async fn partition(&mut self) -> Result<Arc<Partition>> {
        let partition = self.find_partition().await?;
        partition.check_not_taken_over()?;
        Ok(partition)
    }

    async fn find_partition(&mut self) -> Result<Arc<Partition>> {
        if let Some(seen) = self.seen_partition().filter(|partition| !partition.is_closed()) {
            return Ok(seen.clone());
        }
        if let Some(at_unix_ms) = self.as_of() {
            return self.partition_at(at_unix_ms).await;
        }
        if let Some(beside) = &self.engine.beside {
            let beside = beside.clone();
            return self.partition_beside(beside).await;
        }
        if let Some(partition) = self.partition.as_ref().filter(|partition| !partition.is_closed()) {
            return Ok(partition.clone());
        }
        let (engine, id) = (self.engine.clone(), self.id);
        let partition = self.cancellable(async move { engine.partition(id).await }).await??;
        self.partition = Some(partition.clone());
        Ok(partition)
    }

    /// A connection for one transaction, with the session's context in it.
    async fn checkout(&mut self, variables: Variables) -> Result<Box<Connection>> {
        let partition = self.partition().await?;
        // Not one of before a restore. Temporary tables stand beside the newest version only.
        let own = if partition.is_past() { None } else { self.own.take() };
        let own = own.filter(|own| !own.link.partition.is_closed());
        let mut connection = match own.or_else(|| partition.pool.take()) {
            Some(connection) => connection,
            None => Box::pin(Connection::open(partition)).await?,
        };
        if *connection.link.tenant.borrow() != self.tenant {
            *connection.link.tenant.borrow_mut() = self.tenant.clone();
        }
        connection.set_last_insert_rowid(self.remembered.last_insert_rowid);
        let (_, total) = connection.changes();
        let link = &connection.link;
        *link.variables.borrow_mut() = Variables {
            changes: self.remembered.changes,
            total_changes_base: self.remembered.total_changes - total,
            changed: false,
            ..variables
        };
        *link.cancel.borrow_mut() = self.flag.clone();
        link.bump_schema.set(false);
        link.system.borrow_mut().system = self.system.clone();
        let mut transaction = link.transaction.borrow_mut();
        transaction.id = 0;
        transaction.turn = 0;
        transaction.seen = None;
        transaction.committed = None;
        transaction.conflict = None;
        transaction.failure = None;
        transaction.track_reads = true;
        transaction.lone = false;
        transaction.current = true;
        drop(transaction);
        connection.set_limits(self.limits);
        Ok(connection)
    }

    /// Gives a connection back after its transaction.
    fn give_back(&mut self, mut connection: Box<Connection>) {
        self.remember(&connection);
        // Closing the connection clears the flag that it has. That of this session is for its next
        // statement, which may run by then.
        *connection.link.cancel.borrow_mut() = Arc::default();
        if !connection.is_autocommit() {
            // Its ROLLBACK failed, for lack of memory for example. Closing it rolls back; whoever got it from the pool would write into
            // the open transaction.
            return;
        }
        connection.trim();
        let partition = connection.link.partition.clone();
        if connection.tainted && !partition.is_past() {
            self.own = Some(connection);
        } else {
            partition.pool.give(connection);
            // Nobody would take it from there any more, and the two hold each other.
            if partition.is_closed() {
                partition.pool.clear();
            }
        }
    }

    fn remember(&mut self, connection: &Connection) {
        let (changes, total) = connection.changes();
        let variables = connection.link.variables.borrow();
        if variables.changed {
            self.remembered.changes = changes;
        }
        self.remembered.total_changes = variables.total_changes_base + total;
        self.remembered.last_insert_rowid = connection.last_insert_rowid();
    }

    /// Fresh variables for a transaction that begins now.
    fn variables(&self) -> Variables {
        let node = self.engine.node();
        Variables {
            clock_ms: node.clock.unix_ms(),
            random: self.engine.seed(),
            may_write: self.may_write,
            ..Variables::default()
        }
    }

    // `&mut self` here and below although nothing changes: a session is not shared between threads, so that only an
    // exclusive borrow of it may cross an await.

    /// Waits for `future`; a cancel ends the wait with its error.
    async fn cancellable<F: Future>(&mut self, future: F) -> Result<F::Output> {
        let mut future = std::pin::pin!(future);
        let flag = &self.flag;
        std::future::poll_fn(|cx| {
            flag.register(cx.waker());
            if flag.is_set() {
                return std::task::Poll::Ready(Err(flag.error()));
            }
            future.as_mut().poll(cx).map(Ok)
        })
        .await
    }

    /// Waits until the partition's log is durable up to `lsn`. Not cancellable: until then nobody knows the answer.
    async fn wait_durable(&mut self, lsn: Lsn) -> Result<()> {
        let Some(partition) = &self.partition else { return Ok(()) };
        let log = &partition.log;
        if log.is_durable(lsn) {
            return Ok(());
        }
        log.wait_durable(lsn).await.map_err(|error| lost(error, log))
    }
}

/// The error for an answer whose version was discarded, or will never be known.
fn lost(error: LogError, log: &CommitLog) -> Error {
    match (error, log.fenced()) {
        (LogError::Discarded { .. }, _) => discarded(log),
        (_, Some(fenced)) => log_error(fenced)
            .detail("It is unknown whether the other process has taken over what this transaction wrote."),
        (other, None) => {
            Error::new(sqlstate::IO_ERROR, format!("the answer is not known to be durable: {other}"))
                .hint("ask for the outcome with pg_xact_status when the node is back")
        }
    }
}

/// The error for an answer whose version was discarded meanwhile.
fn discarded(log: &CommitLog) -> Error {
    let error = match log.works() {
        Err(fenced @ LogError::Fenced { .. }) => log_error(fenced),
        _ => Error::new(sqlstate::IO_ERROR, "the commit log could not be written")
            .hint("run the transaction again; check the disk that holds the data directory"),
    };
    error.detail("what this transaction saw or wrote was discarded; nothing of it remains")
}

/// The error of a transaction that cannot be replayed with the same answers.
fn serialization_failure(detail: &str) -> Error {
    Error::new(sqlstate::SERIALIZATION_FAILURE, "could not serialize access due to concurrent update")
        .detail(detail)
        .hint("run the transaction again: it will then take its turn first")
}

/// Marks the session as running while it lives.
pub(crate) struct Running(Arc<AtomicBool>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
