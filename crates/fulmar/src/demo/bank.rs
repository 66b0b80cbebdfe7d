//! A tenant under load by pgbench, and the check that its books balance.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use fulmar_workload::Target;
use fulmar_workload::client::Client;

use super::live::DemoStatistics;
use super::pgbench::{self, PgbenchRun, Report};

/// The four sums that every pgbench transaction changes equally, and the number of history rows.
const BOOKS: &str = "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers), \
                     (SELECT sum(bbalance) FROM pgbench_branches), \
                     (SELECT coalesce(sum(delta), 0) FROM pgbench_history), (SELECT count(*) FROM pgbench_history)";

/// A tenant that runs pgbench.
pub struct Bank {
    target: Target,
    live: Arc<DemoStatistics>,
    acknowledged: u64,
    failed: u64,
    latency_ms: Option<f64>,
}

impl Bank {
    /// Creates and fills pgbench's tables.
    pub async fn open(target: Target, live: Arc<DemoStatistics>) -> anyhow::Result<Self> {
        fulmar_workload::pgbench::initialise(&target, 1).await?;
        Ok(Self { target, live, acknowledged: 0, failed: 0, latency_ms: None })
    }

    /// Runs pgbench for `duration`.
    pub async fn run_for(&mut self, duration: Duration) -> anyhow::Result<()> {
        let PgbenchRun { report, status, stderr } = self.run(duration).await?;
        ensure!(status.success(), "pgbench in {} ended with {status}:\n{stderr}", self.target.database);
        self.count(&report);
        Ok(())
    }

    async fn run(&self, duration: Duration) -> anyhow::Result<PgbenchRun> {
        let bank = self.target.database.as_str();
        let ended = pgbench::run(&self.target, duration, |progress| self.live.bank(bank, progress)).await;
        self.live.bank_finished(bank);
        ended
    }

    fn count(&mut self, report: &Report) {
        self.acknowledged += report.transactions;
        self.failed += report.failed;
        self.latency_ms = report.latency_ms.or(self.latency_ms);
    }

    /// Number of acknowledged transactions.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Number of transactions that failed with a serialization failure or a deadlock.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    /// Average latency of the last run with a latency.
    pub fn latency_ms(&self) -> Option<f64> {
        self.latency_ms
    }

    /// Checks that the books balance and contain every acknowledged transaction.
    pub async fn check(&self) -> anyhow::Result<()> {
        let name = &self.target.database;
        let mut client =
            Client::connect(&self.target).await.with_context(|| format!("cannot check {name}"))?;
        let rows = client.query(BOOKS).await.with_context(|| format!("cannot check {name}"))?;
        client.close().await?;
        let sums = rows
            .first()
            .and_then(|row| integers(row))
            .with_context(|| format!("cannot read the books of {name}"))?;
        let [accounts, tellers, branches, history, transactions] = sums;
        ensure!(
            accounts == tellers && tellers == branches && branches == history,
            "the books of {name} do not balance: accounts {accounts}, tellers {tellers}, branches {branches}, \
             history {history}"
        );
        let acknowledged = i64::try_from(self.acknowledged)?;
        ensure!(
            transactions == acknowledged,
            "{name} has {transactions} transactions, but {acknowledged} were acknowledged"
        );
        Ok(())
    }
}

fn integers(row: &[Option<String>]) -> Option<[i64; 5]> {
    let numbers: Option<Vec<i64>> = row.iter().map(|value| value.as_deref()?.parse().ok()).collect();
    numbers?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::integers;

    #[test]
    fn books_are_five_non_null_integers() {
        let row = |text: &str| text.split(' ').map(|word| Some(word.to_owned())).collect::<Vec<_>>();
        assert_eq!(integers(&row("1 -2 3 4 5")), Some([1, -2, 3, 4, 5]));
        assert_eq!(integers(&row("1 2 3 4")), None);
        assert_eq!(integers(&[None, None, None, None, None]), None);
    }
}
