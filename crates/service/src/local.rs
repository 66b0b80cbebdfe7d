//! A partition of this node.

use std::sync::Arc;

use fulmar_engine::{
    CancelReason, Canceller, Completion, Engine, Error, Export, RowSink, Scope, Session, Statement,
    StatementContext, TransactionStatus, Value,
};
use fulmar_pages::PartitionId;

use crate::{Cancel, ExportStream, PartitionService};

/// A session's partition on this node.
pub struct LocalPartition {
    engine: Arc<Engine>,
    partition: PartitionId,
    session: Session,
}

impl LocalPartition {
    /// Creates a session on a partition. The partition is opened by the first statement.
    pub fn new(engine: Arc<Engine>, partition: PartitionId) -> LocalPartition {
        let session = engine.session(partition);
        LocalPartition { engine, partition, session }
    }

    /// Creates a session on another partition that shares this session's canceller.
    pub fn session_on(&self, partition: PartitionId) -> LocalPartition {
        LocalPartition { engine: self.engine.clone(), partition, session: self.session.session_on(partition) }
    }

    /// The engine's session, for what is outside of the service.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The engine's session, for what is outside of the service.
    pub fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }
}

// Each method returns the engine's future: a wrapper would copy its state, which has kilobytes.
impl PartitionService for LocalPartition {
    type Canceller = Canceller;
    type Export = Export;

    fn prepare<'a>(
        &mut self,
        sql: &'a str,
        known: StatementContext<'_>,
    ) -> impl Future<Output = Result<(Arc<Statement>, &'a str), Error>> {
        self.session.prepare_as(sql, known)
    }

    fn execute(
        &mut self,
        statement: &Arc<Statement>,
        parameters: &[Value],
        scope: Scope,
        sink: &mut dyn RowSink,
    ) -> impl Future<Output = Result<Completion, Error>> {
        self.session.execute(statement, parameters, scope, sink)
    }

    fn commit_implicit(&mut self) -> impl Future<Output = Result<(), Error>> {
        self.session.finish_implicit()
    }

    fn fail(&mut self) {
        self.session.fail();
    }

    fn status(&self) -> TransactionStatus {
        self.session.status()
    }

    fn canceller(&self) -> Canceller {
        self.session.canceller()
    }

    fn export(&self, at_unix_ms: Option<u64>) -> impl Future<Output = Result<Export, Error>> {
        self.engine.export(self.partition, at_unix_ms)
    }

    fn close(&mut self) -> impl Future<Output = ()> {
        self.session.close()
    }
}

impl Cancel for Canceller {
    fn cancel(&self, reason: CancelReason) {
        Canceller::cancel(self, reason);
    }
}

impl ExportStream for Export {
    fn next_pages(&mut self, out: &mut Vec<u8>) -> impl Future<Output = Result<bool, Error>> {
        self.next(out)
    }
}
