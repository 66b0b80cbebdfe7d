//! Point reads with pgbench's select-only script, prepared, at 1, 8 and 32 connections, and the
//! server's CPU time per read.

use super::cases::{Case, case};
use super::result::CaseResult;
use super::rounds::Bench;
use crate::Target;
use crate::pgbench::{self, Script};
use crate::server::Server;
use crate::tenants;

const DATABASE: &str = "reads";
const MAX_CLIENTS: u32 = 32;

pub(super) async fn measure(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let mut pair = bench.pair(MAX_CLIENTS).await?;
    pair.each(async |server| {
        bench.step(&format!("loading {} with pgbench -i", server.name()));
        let target = database(server).await?;
        pgbench::initialise(&target, bench.sizes.read_scale).await?;
        server.settle(DATABASE).await?;
        // Reads the data into memory.
        pgbench::run(&target, Script::SelectOnly, 8, bench.sizes.warm_up).await.map(drop)
    })
    .await?;
    let mut results = Vec::new();
    for (clients, cases) in
        [(1, &["read-1"][..]), (8, &["read-8", "cpu-read-8"]), (MAX_CLIENTS, &["read-32"])]
    {
        if wanted.iter().any(|case| cases.contains(&case.name)) {
            // Every run yields both numbers. cpu-read-8 comes from the same runs as read-8.
            let speed_and_cost = [case(cases[0]), case("cpu-read-8")];
            let measured =
                bench.alternate(&mut pair, speed_and_cost, async |server| read(bench, server, clients).await);
            results.extend(measured.await.into_iter().filter(|result| cases.contains(&result.name)));
        }
    }
    results.retain(|result| wanted.iter().any(|case| case.name == result.name));
    Ok(results)
}

async fn database(server: &Server) -> anyhow::Result<Target> {
    tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await?;
    Ok(server.target().with_database(DATABASE))
}

/// Reads per second, and microseconds of server CPU time per read. The CPU time includes
/// connecting, which is negligible.
async fn read(bench: &Bench, server: &Server, clients: u32) -> anyhow::Result<[f64; 2]> {
    let target = server.target().with_database(DATABASE);
    let processes = server.processes()?;
    let before = processes.cpu()?;
    let outcome = pgbench::run(&target, Script::SelectOnly, clients, bench.time).await?;
    let cpu = processes.cpu()?.saturating_sub(before);
    Ok([outcome.throughput_tps, cpu.as_secs_f64() * 1e6 / outcome.transactions.max(1) as f64])
}
