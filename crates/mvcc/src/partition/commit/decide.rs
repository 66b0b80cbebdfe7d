//! Transaction outcomes that are recorded without a commit: asking for an undecided outcome decides
//! it.

use fulmar_pages::record::{RecordBuilder, RecordHeader, RecordKind};
use fulmar_pages::{Outcome, Version};
use fulmar_sqlite::{Error, Result, TransactionOutcome, sqlstate};
use fulmar_store::{LogError, Lsn, Urgency};

use crate::clock::MAX_ID_LEAD;
use crate::error::log_error;
use crate::partition::commits::UncollectedCommit;
use crate::partition::{Partition, Snapshot, Status};

impl Partition {
    /// Assigns a number to a version that no commit makes.
    pub fn take_number(&self) -> u64 {
        self.commits.lock().take_number()
    }

    /// The outcome of a transaction. **Asking decides** if `decides`: an undecided transaction
    /// becomes aborted. The outcome is durable when this returns.
    pub async fn resolve_outcome(&self, id: u64, decides: bool) -> Result<TransactionOutcome> {
        if id > self.node.clock.newest_id().saturating_add(MAX_ID_LEAD) {
            return Err(Error::new(
                sqlstate::INVALID_PARAMETER_VALUE,
                format!("transaction id {id} is in the future"),
            ));
        }
        if !decides && self.outcomes.status(id) == Status::Open {
            return Ok(TransactionOutcome::Open);
        }
        self.decide_outcome(id).await
    }

    /// The outcome of a transaction. An undecided transaction becomes aborted. The outcome is
    /// durable when this returns.
    pub async fn decide_outcome(&self, id: u64) -> Result<TransactionOutcome> {
        loop {
            let (committed, lsn) = match self.outcomes.status(id) {
                Status::Forgotten => return Ok(TransactionOutcome::Forgotten),
                Status::Decided(committed, lsn) => (committed, lsn),
                Status::Open => self.decide_in_log(id, false)?,
            };
            match self.log.wait_durable(lsn).await {
                Ok(()) => return Ok(TransactionOutcome::Ended(committed)),
                // The decision was lost with the end of the log; decide again.
                Err(LogError::Discarded { .. }) => {}
                Err(error) => return Err(log_error(error)),
            }
        }
    }

    /// Records durably the outcome of a transaction that changed nothing.
    pub async fn decide(&self, id: u64, committed: bool) -> Result<()> {
        let (_, lsn) = self.decide_in_log(id, committed)?;
        self.log.wait_durable(lsn).await.map_err(log_error)
    }

    /// Writes an outcome into the log, unless there is one already, and returns the outcome that
    /// counts. It makes a version without pages, so that the next manifest covers it like any
    /// other.
    fn decide_in_log(&self, id: u64, committed: bool) -> Result<(bool, Lsn)> {
        let mut commits = self.commits.lock();
        if let Status::Decided(committed, lsn) = self.outcomes.status(id) {
            return Ok((committed, lsn));
        }
        if let Some(error) = self.commit_error() {
            return Err(error);
        }
        let current = self.current();
        let number = commits.last_number + 1;
        let mut record = RecordBuilder::new(self.node.buffers.take());
        record.begin(&RecordHeader {
            kind: RecordKind::Decide,
            partition: self.id,
            version: Version { lineage: self.lineage, epoch: self.epoch, number },
            transaction: id,
            timestamp: self.node.clock.tick(),
            page_count: current.page_count,
            previous: Some(current.number),
        });
        record.push_outcome(Outcome { transaction: id, committed });
        let start = self.log.appended();
        let lsn = self.log.append(record.finish(), Urgency::Immediate);
        let lsn = lsn.map_err(|error| self.write_error().unwrap_or_else(|| log_error(error)))?;
        self.node.buffers.give(record.into_buffer());
        let snapshot = Snapshot { number, lsn, page_count: current.page_count };
        commits.dirty_since.get_or_insert_with(|| (start, self.node.clock.monotonic_ms()));
        commits.last_number = number;
        commits.push_recent(UncollectedCommit {
            snapshot,
            pages: Box::default(),
            page_count_before: current.page_count,
            replaced_bytes: 0,
        });
        self.outcomes.decided(id, committed, lsn);
        self.snapshots.lock().push(snapshot);
        Ok((committed, lsn))
    }
}
