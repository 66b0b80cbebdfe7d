//! pgbench's TPC-B-like script at scale 1: every transaction updates the only branch and one of its
//! ten tellers.

use std::time::Duration;

use super::cases::{Case, case};
use super::result::CaseResult;
use super::rounds::Bench;
use crate::client::Client;
use crate::pgbench::{self, Script};
use crate::server::Server;
use crate::tenants;

const DATABASE: &str = "tpcb";
const SCALE: u32 = 1;
const MAX_CLIENTS: u32 = 32;

/// Before each round, because the server has just resumed after SIGSTOP.
const WARM_UP: Duration = Duration::from_secs(1);

pub(super) async fn measure(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let mut pair = bench.pair(MAX_CLIENTS).await?;
    pair.each(async |server| {
        bench.step(&format!("loading {} with pgbench -i", server.name()));
        tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await?;
        pgbench::initialise(&server.target().with_database(DATABASE), SCALE).await
    })
    .await?;
    let mut results = Vec::new();
    for (clients, name) in [(8, "tpcb-8"), (MAX_CLIENTS, "tpcb-32")] {
        if wanted.iter().any(|case| case.name == name) {
            let rounds = bench.alternate(&mut pair, [case(name)], async |server| {
                let target = server.target().with_database(DATABASE);
                server.settle(DATABASE).await?;
                pgbench::run(&target, Script::TpcbLike, clients, WARM_UP).await?;
                let outcome = pgbench::run(&target, Script::TpcbLike, clients, bench.time).await?;
                check_balances(server).await?;
                Ok([outcome.throughput_tps])
            });
            results.extend(rounds.await);
        }
    }
    Ok(results)
}

/// Fails if the sums of the balances of branches, tellers, accounts and the history differ: a
/// server that loses updates is fast and must not pass.
async fn check_balances(server: &Server) -> anyhow::Result<()> {
    let mut client = Client::connect(&server.target().with_database(DATABASE)).await?;
    let mut sums = Vec::new();
    for (column, table) in [
        ("bbalance", "pgbench_branches"),
        ("tbalance", "pgbench_tellers"),
        ("abalance", "pgbench_accounts"),
        ("delta", "pgbench_history"),
    ] {
        let rows = client.query(&format!("SELECT coalesce(sum({column}), 0) FROM {table}")).await?;
        sums.push(rows.into_iter().flatten().next().flatten());
    }
    client.close().await?;
    let equal = sums.iter().all(|sum| sum.is_some() && *sum == sums[0]);
    anyhow::ensure!(equal, "updates were lost: {sums:?}");
    Ok(())
}
