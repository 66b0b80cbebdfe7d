//! A client session: prepare, execute, transactions.
//!
//! | module | contents |
//! | --- | --- |
//! | [`prepare`] | preparing statements |
//! | [`call`] | preparing a CALL |
//! | [`auto`] | autocommitted statements |
//! | [`open`] | statements in a transaction block or a pipeline |
//! | [`control`] | BEGIN, COMMIT, ROLLBACK, savepoints |
//! | [`journal`] | the journal of an open transaction, and its replay |
//! | [`snapshot_expiry`] | expiry of old snapshots |
//! | [`time_travel`] | transactions on historical versions, and on replicas |
//! | [`temporary_tables`] | temporary tables when the partition moves |
//! | [`verify`] | verification of stored data |
//! | [`state`], [`errors`] | the state of an open transaction; errors of transactions |
//! | [`held_turn`] | a turn held across client round trips, and its bounds |
//!
//! # Answers wait for durability
//! A commit is visible to other writers immediately; its answer waits until the log is durable.
//! Read-only statements begin at the newest durable version, which contains every acknowledged
//! commit, and their answers wait for nothing. A transaction that has written (or holds a turn or a
//! row lock) sees the current version, and its intermediate statements are answered immediately:
//! they are provisional until its COMMIT, which waits. So no client acts on a commit that a crash
//! could undo. No thread is held while an answer waits.

mod auto;
mod call;
mod control;
mod errors;
mod held_turn;
mod journal;
mod open;
mod prepare;
mod snapshot_expiry;
mod state;
mod temporary_tables;
mod time_travel;
mod verify;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fulmar_mvcc::{HoldReason, MoveHold, Partition, historical_session_is_read_only, moved_error};
use fulmar_pages::PartitionId;
use fulmar_sqlite::{
    CancelFlag, Canceller, CommandTag, Completion, Error, Result, RowSink, Scope, Statement, StatementKind,
    System, TransactionLimits, TransactionStatus, Value, Variables, sqlstate,
};
use fulmar_store::Lsn;
use futures::future::{Either, select};
use tokio::time::timeout;

use self::errors::lost;
use self::state::{HistoricalView, Open, Remembered, TransactionIds};
pub use self::temporary_tables::TemporaryTables;
use crate::connection::Connection;
use crate::engine::Engine;
use crate::idle::Idle;
use crate::temporary::TemporarySpace;

/// Maximum number of attempts of one transaction. Each attempt after the first is made in a turn,
/// so reaching the limit means that the partition's versions are discarded repeatedly.
const MAX_ATTEMPTS: u32 = 20;

/// How long a transaction waits before it begins, because its partition moves. Longer than any move
/// waits for others and copies, unless the metadata store does not answer.
const MAX_MOVE_WAIT: Duration = Duration::from_secs(40);

/// Whether a session may write, and if not, why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteAccess {
    /// It may.
    #[default]
    Allowed,
    /// The user has read-only access to the database.
    ReadOnlyUser,
    /// The database would lose what is written when its node fails.
    Volatile,
}

impl WriteAccess {
    fn is_allowed(self) -> bool {
        self == WriteAccess::Allowed
    }

    /// A hint for sessions that may not write.
    fn hint(self) -> &'static str {
        match self {
            WriteAccess::Allowed => {
                "Begin a transaction with READ WRITE, or run SET default_transaction_read_only = off."
            }
            WriteAccess::ReadOnlyUser => {
                "The user has read-only access to this database. GRANT CONNECT ON DATABASE allows it to write."
            }
            WriteAccess::Volatile => {
                "Without a common store this database cannot hold data. CREATE DATABASE creates one that can."
            }
        }
    }
}

/// One client's session on one partition. Its futures should be run to completion (cancel with a
/// [`Canceller`]). Dropping one early rolls its transaction back. If its statement is in a call
/// that cannot be interrupted ([`Canceller::is_offloaded`]), the drop blocks the thread until the
/// call returns, so such a future must not be dropped on a worker thread. Otherwise the statement
/// ends immediately, at the latest at its next large allocation.
pub struct Session {
    engine: Arc<Engine>,
    id: PartitionId,
    /// The tenant's name, for reports.
    tenant: Arc<str>,
    partition: Option<Arc<Partition>>,
    open: Option<Open>,
    /// A connection with the session's temporary tables, which the session must keep.
    own: Option<Box<Connection>>,
    /// Its temporary tables are too large for a move.
    large_tables: Option<MoveHold>,
    /// The provider of system tables, set when a statement first uses them.
    system: Option<Arc<dyn System>>,
    flag: Arc<CancelFlag>,
    running: Arc<AtomicBool>,
    default_read_only: bool,
    /// The historical version that transactions read, if `fulmar.as_of` is set.
    historical_view: Option<HistoricalView>,
    /// On a replica, the maximum age of a transaction's snapshot; None for any age.
    staleness: Option<Duration>,
    /// On a replica, the last transaction's snapshot contains every commit acknowledged before this
    /// time (milliseconds since 1970).
    seen_unix_ms: Option<u64>,
    /// Whether the session's user may write.
    writes: WriteAccess,
    limits: TransactionLimits,
    /// The last transaction failed with 40001, so the next one acquires the turn first.
    turn_first: bool,
    remembered: Remembered,
    /// A statement has begun and not ended.
    unsettled: bool,
    /// The ids of the next transaction.
    next_ids: TransactionIds,
}

impl Engine {
    /// Creates a session on a partition, which is opened when the first statement needs it.
    pub fn session(self: &Arc<Self>, partition: PartitionId) -> Session {
        Session::new(self.clone(), partition)
    }
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
            large_tables: None,
            system: None,
            flag: Arc::default(),
            running: Arc::default(),
            default_read_only: false,
            historical_view: None,
            staleness: None,
            seen_unix_ms: None,
            writes: WriteAccess::default(),
            limits: TransactionLimits::default(),
            turn_first: false,
            remembered: Remembered::default(),
            unsettled: false,
            next_ids: TransactionIds::default(),
        }
    }

    /// Sets the provider of system tables and functions.
    pub fn set_system(&mut self, system: Arc<dyn System>) {
        if let Some(connection) = self.open.as_ref().and_then(|open| open.connection.as_ref()) {
            connection.link.set_system(Some(system.clone()));
        }
        self.system = Some(system);
    }

    /// Sets the id of the session's next transaction, which may be a single statement. Its commit
    /// records the outcome under this id ([`Engine::outcome`]). The id is unique in the cluster
    /// ([`Engine::new_transaction_id`]) and used for one transaction.
    pub fn set_transaction_id(&mut self, id: u64) {
        self.next_ids = TransactionIds { assigned: id, origin: id, abandoned: 0 };
    }

    /// The next transaction repeats one that has begun under the id `origin`, possibly at another node:
    /// if the partition has its snapshot, it reads at that, until [`Session::end_repetition`]. Called
    /// after [`Session::set_transaction_id`].
    pub fn repeat_transaction(&mut self, origin: u64) {
        self.next_ids.origin = origin;
    }

    /// The next transaction was sent before under the id `abandoned`, possibly to another node, and
    /// its client has no answer: it begins at a new snapshot.
    pub fn abandon_transaction(&mut self, abandoned: u64) {
        self.next_ids.abandoned = abandoned;
    }

    /// All statements that the open transaction repeats have been executed.
    pub fn end_repetition(&mut self) {
        if let Some(open) = &self.open {
            open.end_repetition();
        }
    }

    /// Marks the open transaction as failed, after an error outside of the engine (a malformed
    /// parameter, for example) was sent to the client.
    pub fn fail(&mut self) {
        if let Some(open) = &mut self.open {
            open.failed = true;
        }
    }

    /// Runs a statement to completion, and waits until the answer is durable. On return all rows
    /// have been passed to `sink`. Also runs transaction control (BEGIN, COMMIT, SAVEPOINT ...). A
    /// COMMIT of a failed transaction returns the tag ROLLBACK, as in PostgreSQL.
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
                let ids = std::mem::take(&mut self.next_ids);
                self.open = Some(Open::implicit(&self.engine, self.begins_read_only(), ids));
                self.run_open(statement, parameters, sink).await
            }
            _ => self.run_auto(statement, parameters, sink).await,
        }
    }

    /// Commits the implicit transaction, if there is one (or rolls it back if it has failed), and
    /// waits until it is durable.
    pub async fn finish_implicit(&mut self) -> Result<()> {
        if !self.open.as_ref().is_some_and(|open| open.is_implicit()) {
            return Ok(());
        }
        let _running = self.start();
        self.commit().await.map(|_| ())
    }

    /// The status for ReadyForQuery. An implicit transaction counts as idle.
    pub fn status(&self) -> TransactionStatus {
        match &self.open {
            Some(open) if open.is_implicit() => TransactionStatus::Idle,
            Some(open) if open.has_failed() => TransactionStatus::Failed,
            Some(_) => TransactionStatus::InTransaction,
            None => TransactionStatus::Idle,
        }
    }

    /// Returns a handle to cancel this session's statements.
    pub fn canceller(&self) -> Canceller {
        Canceller::new(self.flag.clone(), self.running.clone())
    }

    /// Creates a session on another partition that shares this session's canceller.
    pub fn session_on(&self, partition: PartitionId) -> Session {
        let mut other = Session::new(self.engine.clone(), partition);
        (other.flag, other.running) = (self.flag.clone(), self.running.clone());
        other
    }

    /// Sets the tenant's name for reports.
    pub fn set_tenant(&mut self, name: &str) {
        self.tenant = name.into();
    }

    /// Sets whether transactions are read-only by default (`default_transaction_read_only`).
    pub fn set_default_read_only(&mut self, on: bool) {
        self.default_read_only = on;
    }

    /// Sets whether the session may write, from the next statement on. If not, all its transactions
    /// are read-only whatever they request, including the rest of the open one.
    pub fn set_writes(&mut self, writes: WriteAccess) {
        self.writes = writes;
        if let Some(open) = self.open.as_mut().filter(|_| !writes.is_allowed()) {
            open.forbid_writes();
        }
    }

    fn begins_read_only(&self) -> bool {
        self.default_read_only
            || !self.writes.is_allowed()
            || self.historical_view.is_some()
            || self.engine.is_replica()
    }

    /// The error of a write in a read-only transaction. `of_past`: the transaction reads a
    /// historical version.
    fn read_only_error(&self, of_past: bool) -> Error {
        if of_past {
            return historical_session_is_read_only();
        }
        if let Err(error) = self.engine.check_primary() {
            return error;
        }
        let error = Error::new(sqlstate::READ_ONLY_TRANSACTION, "cannot write in a read-only transaction");
        error.hint(self.writes.hint())
    }

    /// Sets the limits of the session's transactions, including the open one, from the next
    /// statement on.
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

    /// Keeps the partition from moving to another node until the result is dropped. Waits while it
    /// is about to move.
    pub fn hold_for_copy(&self) -> impl Future<Output = MoveHold> + use<> {
        MoveHold::admitted(self.engine.partitions().counted(self.id), HoldReason::Copy)
    }

    /// Holds the partition for a transaction that begins. Waits while an exclusive move is about to
    /// begin, for at most [`MAX_MOVE_WAIT`]: then the move waits for it.
    async fn hold_for_transaction(&mut self) -> Result<MoveHold> {
        let stats = self.partition().await?.stats.clone();
        if let Some(hold) = MoveHold::try_new(&stats, HoldReason::Transaction) {
            return Ok(hold);
        }
        let admitted = MoveHold::admitted(stats.clone(), HoldReason::Transaction);
        let admitted = Box::pin(self.cancellable(timeout(MAX_MOVE_WAIT, admitted))).await?;
        Ok(admitted.unwrap_or_else(|_| MoveHold::new(stats, HoldReason::Transaction)))
    }

    /// Yields the thread to other sessions. Called between statements of one message, each of which
    /// may be too short to yield. A cancel during the call fails it.
    pub async fn yield_now(&mut self) -> Result<()> {
        let _running = self.start();
        tokio::task::yield_now().await;
        self.check_cancelled()
    }

    /// Sets how much page memory the partition keeps under pressure, until the node stops.
    pub fn set_cache_floor(&self, bytes: u64) {
        self.engine.set_cache_floor(self.id, bytes);
    }

    /// Rolls back the open transaction and releases all resources.
    pub async fn close(&mut self) {
        if let Some(open) = self.open.take() {
            let _ = self.roll_back(open).await;
        }
        self.drop_temporary_tables();
        self.partition = None;
        self.historical_view = None;
    }

    /// If the last statement's future was dropped, it may have committed without waiting for
    /// durability. Its outcome must not change between this session's next statements, so they wait
    /// until the outcome is final.
    async fn settle(&mut self) {
        if std::mem::take(&mut self.unsettled) {
            let appended = self.partition.as_ref().map(|partition| partition.log.appended());
            let _ = self.wait_durable(appended.unwrap_or_default()).await;
        }
    }

    /// The flag that cancels its statements.
    #[cfg(test)]
    pub(crate) fn flag(&self) -> &CancelFlag {
        &self.flag
    }

    /// Runs all statements of a text, and discards their rows.
    #[cfg(test)]
    pub(crate) async fn run(&mut self, mut sql: &str) {
        while !sql.is_empty() {
            let (statement, rest) = self.prepare(sql).await.unwrap();
            self.execute(&statement, &[], Scope::Auto, &mut fulmar_sqlite::DiscardRows).await.unwrap();
            sql = rest;
        }
    }

    fn start(&self) -> Running {
        self.flag.clear();
        self.running.store(true, Ordering::Release);
        Running(self.running.clone())
    }

    /// Fails if the session is cancelled. For long operations outside of SQLite.
    fn check_cancelled(&self) -> Result<()> {
        if self.flag.is_set() { Err(self.flag.error()) } else { Ok(()) }
    }

    /// The partition that the session's transaction reads, opened on first use. If the store does
    /// not respond, opening fails after a minute. Fails if another process has taken over the
    /// store, since all reads would be outdated.
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
        if let Some(replica) = self.engine.replica() {
            let replica = replica.clone();
            return self.replica_partition(replica).await;
        }
        if let Some(partition) = self.partition.as_ref().filter(|partition| !partition.is_closed()) {
            return Ok(partition.clone());
        }
        let (engine, id) = (self.engine.clone(), self.id);
        let partition = self.cancellable(async move { engine.partitions().partition(id).await }).await??;
        self.partition = Some(partition.clone());
        Ok(partition)
    }

    /// Takes a connection for one transaction, and initializes it with the session's context.
    async fn checkout(&mut self, variables: Variables) -> Result<Box<Connection>> {
        let partition = self.partition().await?;
        // Temporary tables are available with the newest version only.
        let own = match self.own.is_some() && !partition.is_historical() {
            true => Box::pin(self.take_own(&partition)).await?,
            false => None,
        };
        let mut connection = match own.or_else(|| partition.attachment::<Idle>().take()) {
            Some(connection) => connection,
            None => {
                let settings = self.engine.connection_settings();
                Box::pin(Connection::open(partition, settings)).await?
            }
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
        link.reset();
        link.set_system(self.system.clone());
        connection.pages.transaction().borrow_mut().reset();
        connection.set_limits(self.limits);
        Ok(connection)
    }

    /// Runs `body` on the transaction's connection, or on a temporarily checked-out one.
    async fn with_connection<T>(&mut self, body: impl FnOnce(&mut Connection) -> Result<T>) -> Result<T> {
        if let Some(connection) = self.open.as_mut().and_then(|open| open.connection.as_mut()) {
            return connection.run(body)?.await;
        }
        let variables = self.variables();
        let mut connection = self.checkout(variables).await?;
        {
            let mut transaction = connection.pages.transaction().borrow_mut();
            transaction.track_reads = false;
            transaction.single_statement = true;
        }
        let answer = connection.run(body)?.await;
        self.give_back(connection);
        answer
    }

    /// Returns a connection after its transaction.
    fn give_back(&mut self, mut connection: Box<Connection>) {
        self.remember(&connection);
        // Closing the connection clears its cancel flag. The session's flag may belong to its next
        // statement by then.
        *connection.link.cancel.borrow_mut() = Arc::default();
        if !connection.is_autocommit() {
            // Its ROLLBACK failed, for lack of memory for example. Closing it rolls back; in the
            // pool it would carry the open transaction to the next session.
            return;
        }
        connection.trim();
        let partition = connection.partition().clone();
        if connection.tainted && !partition.is_historical() {
            self.hold_large_tables(&connection);
            self.own = Some(connection);
        } else {
            partition.attachment::<Idle>().give(connection);
            // No session takes connections from a closed partition, and pool and partition
            // reference each other.
            if partition.is_closed() {
                partition.close_idle();
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

    /// Variables for a transaction that begins now.
    fn variables(&self) -> Variables {
        let node = self.engine.node();
        Variables {
            clock_ms: node.clock.unix_ms(),
            random: self.engine.seed(),
            may_write: self.writes.is_allowed(),
            ..Variables::default()
        }
    }

    // The following methods take `&mut self` although they change nothing: a session is not Sync,
    // so only an exclusive borrow may be held across an await.

    /// Waits for `future`. A cancel ends the wait with an error.
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

    /// Waits for a resource of a partition. Fails if the partition moves to another node.
    async fn wait_on<F: Future>(&mut self, partition: &Partition, future: F) -> Result<F::Output> {
        let (future, moved) = (std::pin::pin!(future), std::pin::pin!(partition.wait_moved()));
        match self.cancellable(select(future, moved)).await? {
            Either::Left((output, _)) => Ok(output),
            Either::Right(_) => Err(moved_error()),
        }
    }

    /// Waits until the partition's log is durable up to `lsn`. Cannot be cancelled: until then the
    /// outcome is unknown.
    async fn wait_durable(&mut self, lsn: Lsn) -> Result<()> {
        let Some(partition) = &self.partition else { return Ok(()) };
        let log = &partition.log;
        if log.is_durable(lsn) {
            return Ok(());
        }
        log.wait_durable(lsn).await.map_err(|error| lost(error, log))
    }
}

/// Marks the session as running until it is dropped.
struct Running(Arc<AtomicBool>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
