//! Consistency conditions of the data, checked after a run: a server that loses updates, or half of
//! a transaction, is fast and must not pass.

use crate::client::Client;

/// A condition that must hold for all data of a database.
pub(crate) struct Condition {
    /// Its number and statement, for messages.
    pub(crate) what: &'static str,
    /// A query that returns a few rows, one for each violation, or none if the condition holds.
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
