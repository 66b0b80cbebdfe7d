//! A tenant that runs pgbench, and the books that must balance.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use fulmar_workload::Target;
use fulmar_workload::client::Client;

use super::live::Live;
use super::pgbench::{self, CONNECTIONS, Ended, Report};

/// Longer than any demo: that run ends when the server is gone.
const UNTIL_CUT_OFF: Duration = Duration::from_secs(86_400);

/// The four sums that pgbench's transaction changes alike, and its history's rows.
const BOOKS: &str = "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers), \
                     (SELECT sum(bbalance) FROM pgbench_branches), \
                     (SELECT coalesce(sum(delta), 0) FROM pgbench_history), (SELECT count(*) FROM pgbench_history)";

/// A tenant that runs pgbench.
pub struct Bank {
    target: Target,
    live: Arc<Live>,
    acknowledged: u64,
    /// Transactions that were under way when a server went away: they may have happened.
    in_doubt: u64,
    failed: u64,
    latency_ms: Option<f64>,
}

impl Bank {
    /// Makes pgbench's tables.
    pub async fn open(target: Target, live: Arc<Live>) -> anyhow::Result<Self> {
        fulmar_workload::pgbench::initialise(&target, 1).await?;
        Ok(Self { target, live, acknowledged: 0, in_doubt: 0, failed: 0, latency_ms: None })
    }

    /// Runs pgbench until the server goes away under it.
    pub async fn work_until_cut_off(&mut self) -> anyhow::Result<()> {
        let Ended { report, status, said } = self.run(UNTIL_CUT_OFF).await?;
        ensure!(
            status.code() == Some(2),
            "pgbench ended with {status} instead of losing its server:\n{said}"
        );
        self.in_doubt += CONNECTIONS;
        self.count(&report);
        Ok(())
    }

    /// Runs pgbench for that long.
    pub async fn work_for(&mut self, duration: Duration) -> anyhow::Result<()> {
        let Ended { report, status, said } = self.run(duration).await?;
        ensure!(status.success(), "pgbench in {} ended with {status}:\n{said}", self.target.database);
        self.count(&report);
        Ok(())
    }

    async fn run(&self, duration: Duration) -> anyhow::Result<Ended> {
        let bank = self.target.database.as_str();
        let ended = pgbench::run(&self.target, duration, |progress| self.live.bank(bank, progress)).await;
        self.live.bank_rests(bank);
        ended
    }

    fn count(&mut self, report: &Report) {
        self.acknowledged += report.transactions;
        self.failed += report.failed;
        self.latency_ms = report.latency_ms.or(self.latency_ms);
    }

    /// Transactions whose COMMIT was answered.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Transactions that ended with an error of serialization.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    /// Average latency of the last run that had one.
    pub fn latency_ms(&self) -> Option<f64> {
        self.latency_ms
    }

    /// The books balance, and every acknowledged transaction is in them.
    pub async fn check(&self) -> anyhow::Result<()> {
        let name = &self.target.database;
        let mut client =
            Client::connect(&self.target).await.with_context(|| format!("cannot check {name}"))?;
        let rows = client.query(BOOKS).await.with_context(|| format!("cannot check {name}"))?;
        client.close().await?;
        let figures =
            rows.first().and_then(|row| figures(row)).with_context(|| format!("{name} has no books"))?;
        let [accounts, tellers, branches, history, transactions] = figures;
        ensure!(
            accounts == tellers && tellers == branches && branches == history,
            "the books of {name} do not balance: accounts {accounts}, tellers {tellers}, branches {branches}, \
             history {history}"
        );
        let acknowledged = i64::try_from(self.acknowledged)?;
        let possible = acknowledged + i64::try_from(self.in_doubt)?;
        ensure!(
            (acknowledged..=possible).contains(&transactions),
            "{name} has {transactions} transactions; {acknowledged} were acknowledged, {possible} begun"
        );
        Ok(())
    }
}

fn figures(row: &[Option<String>]) -> Option<[i64; 5]> {
    let numbers: Option<Vec<i64>> = row.iter().map(|value| value.as_deref()?.parse().ok()).collect();
    numbers?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::figures;

    #[test]
    fn figures_are_five_numbers() {
        let row = |text: &str| text.split(' ').map(|word| Some(word.to_owned())).collect::<Vec<_>>();
        assert_eq!(figures(&row("1 -2 3 4 5")), Some([1, -2, 3, 4, 5]));
        assert_eq!(figures(&row("1 2 3 4")), None);
        assert_eq!(figures(&[None, None, None, None, None]), None);
    }
}
