//! TPC-C with 10 warehouses and 16 terminals without think time, statement by statement and as
//! procedures.
//!
//! Every run checks the consistency conditions at its end. A violation fails the case.

use super::cases::{Case, case};
use super::result::CaseResult;
use super::rounds::Bench;
use crate::client::Client;
use crate::run::{Report, RunOptions, run};
use crate::server::Server;
use crate::tenants;
use crate::tpcc::Tpcc;

const DATABASE: &str = "tpcc";
const TERMINALS: u32 = 16;

pub(super) async fn measure(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let mut pair = bench.pair(TERMINALS).await?;
    pair.each(async |server| load(bench, server).await).await?;
    let mut results = Vec::new();
    for (procedure, name) in [(false, "tpcc-16"), (true, "tpcc-proc-16")] {
        if wanted.iter().any(|case| case.name == name) {
            let mut notes = Vec::new();
            let rounds = bench.alternate(&mut pair, [case(name)], async |server| {
                server.settle(DATABASE).await?;
                let report = transactions(bench, server, procedure).await?;
                notes.push(note(server, &report));
                Ok([report.throughput_tps])
            });
            let [result] = rounds.await;
            results.push(notes.into_iter().fold(result, CaseResult::with_note));
        }
    }
    Ok(results)
}

fn workload(bench: &Bench, procedure: bool) -> Tpcc {
    let (warehouses, items, customers) = bench.sizes.tpcc;
    Tpcc { warehouses, items, customers, procedure, ..Tpcc::default() }
}

fn options(bench: &Bench, server: &Server) -> RunOptions {
    RunOptions {
        connections: TERMINALS as usize,
        warm_up: bench.sizes.warm_up,
        measure: bench.time,
        seed: bench.seed(),
        ..RunOptions::new(server.target().with_database(DATABASE))
    }
}

async fn load(bench: &Bench, server: &Server) -> anyhow::Result<()> {
    bench.step(&format!("loading {} for TPC-C", server.name()));
    tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await?;
    let brief = RunOptions { measure: bench.sizes.warm_up, ..options(bench, server) };
    run(workload(bench, false), brief).await?;
    read_all(server).await
}

/// Reads every row and every index entry once, so that all data is in memory at both servers. The
/// transactions alone would take minutes to touch all of it.
async fn read_all(server: &Server) -> anyhow::Result<()> {
    let mut client = Client::connect(&server.target().with_database(DATABASE)).await?;
    for (table, columns) in [
        ("item", "sum(i_price), max(length(i_data))"),
        ("customer", "sum(c_balance), max(length(c_data))"),
        ("history", "sum(h_amount)"),
        ("new_order", "sum(no_o_id)"),
        ("orders", "sum(o_ol_cnt)"),
        ("order_line", "sum(ol_amount)"),
        ("stock", "sum(s_quantity), max(length(s_data))"),
        // These queries can be answered from an index.
        ("customer", "sum(c_id)"),
        ("customer", "max(length(c_last))"),
        ("orders", "sum(o_c_id)"),
        ("stock", "sum(s_i_id)"),
    ] {
        client.query(&format!("SELECT {columns} FROM {table}")).await?;
    }
    Ok(client.close().await?)
}

async fn transactions(bench: &Bench, server: &Server, procedure: bool) -> anyhow::Result<Report> {
    let report = run(workload(bench, procedure), options(bench, server)).await?.complete()?;
    anyhow::ensure!(report.transactions > 0, "no transaction committed");
    Ok(report)
}

fn note(server: &Server, report: &Report) -> String {
    format!(
        "{}: {:.0} transactions/s, {} retries, {} transactions retried more than once",
        server.name(),
        report.throughput_tps,
        report.retries(),
        report.retried_again,
    )
}
