//! What the data must satisfy after a run: a server that loses an update, or half of a transaction, is fast, and is found
//! here.

use crate::client::Client;

/// A condition on all of the data.
pub(crate) struct Condition {
    /// In messages: its number, and what it says.
    pub(crate) what: &'static str,
    /// A query that answers a row for each place where it does not hold, a few of them.
    pub(crate) violations: &'static str,
}

/// Checks the conditions of a workload.
pub(crate) async fn check(
    client: &mut Client,
    workload: &str,
    conditions: &[Condition],
) -> anyhow::Result<()> {
    for Condition { what, violations } in conditions {
        let rows = client.query(violations).await?;
        let shown = |row: &Vec<Option<String>>| {
            let values = row.iter().map(|value| value.as_deref().unwrap_or("NULL"));
            format!("({})", values.collect::<Vec<_>>().join(", "))
        };
        let shown: Vec<String> = rows.iter().map(shown).collect();
        anyhow::ensure!(
            rows.is_empty(),
            "{workload}'s consistency condition {what} does not hold: {}",
            shown.join(", ")
        );
    }
    Ok(())
}
