//! Verifies the data of a running node.

use anyhow::Context;
use futures::{StreamExt, stream};
use tokio_postgres::SimpleQueryMessage;

use super::{Damage, Report};
use crate::cli::{ServerArgs, VerifyArgs};
use crate::client::{connect, server_error};
use crate::output;
use crate::tenant::{SYSTEM_DATABASE, texts};

/// Maximum number of concurrent `PRAGMA quick_check`.
const MAX_CONCURRENT_CHECKS: usize = 4;

/// Runs `VERIFY` on the node, and `PRAGMA quick_check` in its tenants with `--deep`.
pub(super) async fn verify(arguments: &VerifyArgs) -> anyhow::Result<Report> {
    let client = connect(&arguments.server, SYSTEM_DATABASE).await?;
    let mut report = Report::default();
    let bar = output::byte_progress("verifying checksums", None);
    bar.enable_steady_tick(std::time::Duration::from_millis(200));
    let rows = client.simple_query("VERIFY").await.map_err(|error| server_error(&error))?;
    bar.finish_and_clear();
    for message in rows {
        if let SimpleQueryMessage::Row(row) = message {
            let column = |index| row.try_get(index).ok().flatten();
            let (place, problem) =
                column(0).zip(column(2)).context("the node returned damage without place or problem")?;
            let byte = column(1).and_then(|byte| byte.parse().ok());
            let tenants = column(3).unwrap_or_default().to_owned();
            report.damage.push(Damage {
                place: place.to_owned(),
                byte,
                problem: problem.to_owned(),
                tenants,
            });
        }
    }
    report.checked.insert("nodes", 1);
    if arguments.deep {
        let names = texts(&client, "SELECT datname FROM pg_catalog.pg_database ORDER BY 1").await?;
        report.checked.insert("tenants", names.len() as u64);
        let bar = output::progress("running quick_check", names.len() as u64);
        let checks = stream::iter(names).map(|[name]| {
            let bar = &bar;
            async move {
                let problem = quick_check(&arguments.server, &name).await;
                bar.inc(1);
                let damage = |problem| Damage {
                    place: format!("tenant {name}"),
                    byte: None,
                    problem,
                    tenants: name.clone(),
                };
                problem.map(damage)
            }
        });
        let found: Vec<Option<Damage>> = checks.buffered(MAX_CONCURRENT_CHECKS).collect().await;
        bar.finish_and_clear();
        report.damage.extend(found.into_iter().flatten());
    }
    Ok(report)
}

/// Runs `PRAGMA quick_check` in a tenant. Returns its findings, or the error if it cannot run.
async fn quick_check(server: &ServerArgs, tenant: &str) -> Option<String> {
    let findings = async {
        let client = connect(server, tenant).await?;
        texts::<1>(&client, "PRAGMA quick_check(5)").await
    };
    match findings.await {
        Ok(findings) => {
            let findings: Vec<String> =
                findings.into_iter().map(|[finding]| finding).filter(|finding| finding != "ok").collect();
            (!findings.is_empty()).then(|| findings.join("; "))
        }
        Err(error) => Some(format!("{error:#}")),
    }
}
