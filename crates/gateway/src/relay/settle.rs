//! Finds out which units of a lost session were committed.

use std::sync::Arc;

use fulmar_engine::{Error, TransactionStatus, sqlstate};
use fulmar_meta::SYSTEM_PARTITION;
use fulmar_pages::PartitionId;
use futures::{StreamExt, TryStreamExt, stream};
use tokio::time::Instant;

use super::front::{Front, Stop};
use super::journal::{Journal, Mismatch};
use super::resume::{Pause, unknown_outcome};
use super::unit::Unit;
use crate::Result;
use crate::cluster::{Cluster, TransactionOutcome};

/// How often a unit is repeated after its node has failed while executing it.
const MAX_REPEATS: u32 = 1;
/// How many outcomes are asked for concurrently.
const MAX_QUESTIONS: usize = 16;

/// Asks for the outcomes of transactions. 0 is one without a known id.
async fn outcomes(
    cluster: Arc<dyn Cluster>,
    partition: PartitionId,
    ids: Vec<u64>,
) -> Result<Vec<TransactionOutcome>> {
    let ask = async |id| match id {
        // Statements about databases and users are no transactions of the engine.
        _ if partition == SYSTEM_PARTITION => Ok(TransactionOutcome::Forgotten),
        0 => Ok(TransactionOutcome::Forgotten),
        id => cluster.outcome(partition, id).await,
    };
    stream::iter(ids).map(ask).buffered(MAX_QUESTIONS).try_collect().await
}

impl Front {
    /// Finds out what became of the units without an answer, whose session is lost. Answers those
    /// that were committed; the others are repeated.
    pub(super) async fn settle(&mut self, deadline: Instant) -> Result<(), Pause> {
        let ids = self.journal.transactions_in_doubt();
        let asking = outcomes(self.cluster.clone(), self.identity.tenant.partition, ids.clone());
        let outcomes = self.attend(deadline, asking).await?.map_err(|_| Pause::Retry)?;
        self.apply(&ids, &outcomes)?;
        Ok(())
    }

    /// Answers the units that were committed, or that precede one.
    fn apply(&mut self, ids: &[u64], outcomes: &[TransactionOutcome]) -> Result<(), Stop> {
        let errors = lost_answers(&self.journal, ids, outcomes);
        if errors.len() == 1 && outcomes[0] == TransactionOutcome::Committed {
            if self.journal.units.front().is_some_and(Unit::is_answerable_commit) {
                self.journal.answer_commit();
                return Ok(());
            }
            match self.journal.answer_committed() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                // The client has got the beginning of another answer from an earlier session.
                Err(Mismatch) => return Err(Stop::End),
            }
        }
        if outcomes.first() == Some(&TransactionOutcome::Committed) {
            self.journal.keep_pending_values();
        }
        for error in &errors {
            self.answer_with(error, TransactionStatus::Idle)?;
        }
        let is_repeated_again = self.journal.units.front_mut().is_some_and(|unit| {
            unit.repeats += u32::from(!unit.is_discarded);
            unit.repeats > MAX_REPEATS
        });
        if is_repeated_again {
            self.fail_transaction(&crashed_again())?;
        }
        Ok(())
    }
}

/// The errors that answer the units up to the last one that may have been committed, whose answers are
/// lost: all of them were executed.
pub(super) fn lost_answers(journal: &Journal, ids: &[u64], outcomes: &[TransactionOutcome]) -> Vec<Error> {
    let mut errors = Vec::new();
    let last = outcomes.iter().rposition(|outcome| *outcome != TransactionOutcome::Aborted);
    while errors.len() <= last.unwrap_or_default() && last.is_some() {
        let index = errors.len();
        let error = match outcomes[index] {
            TransactionOutcome::Committed => unknown_outcome(ids[index]),
            TransactionOutcome::Forgotten => unknown_outcome(0),
            TransactionOutcome::Aborted => {
                errors.push(lost_answer());
                continue;
            }
        };
        // The units that follow may belong to the transaction. Their own ids were not used.
        errors.resize(journal.end_of_transaction(index) + 1, error);
    }
    errors
}

fn crashed_again() -> Error {
    const CRASH_SHUTDOWN: &str = "57P02";
    Error::new(CRASH_SHUTDOWN, "the database's node failed twice while it executed the statement")
        .detail("The statement had no effect.")
        .hint("Do not retry it before you know that it is not the cause.")
}

/// The session has executed a statement without effect before one that was committed.
fn lost_answer() -> Error {
    let message = "the connection to the database's node was lost before its answer arrived";
    Error::new(sqlstate::SERIALIZATION_FAILURE, message)
        .detail("The statement had no effect. A later statement was committed.")
        .hint("Retry the statement if its result is needed.")
}
