//! `beyond-memory`: YCSB with four times as much data as memory, against PostgreSQL with the same
//! memory.
//!
//! - Each server runs in a control group that bounds its memory, including the kernel's page cache
//!   of its files, to 1.25 times the budget. Otherwise the kernel would cache the data that does
//!   not fit the server's memory.
//! - Fulmar gets the budget as its `--memory`. PostgreSQL gets half of it as `shared_buffers`,
//!   which is 40 % of the group and the maximum that its manual recommends. The rest is left to its
//!   processes and to the kernel's cache. With the whole budget as `shared_buffers`, the kernel
//!   kills PostgreSQL while it builds an index.
//! - The rounds of the two servers alternate, because the throughput of a virtual disk varies from
//!   minute to minute. The other server is stopped meanwhile, and its dirty pages in the kernel are
//!   written before a measurement.

use std::path::Path;
use std::time::Duration;

use super::super::cases::Case;
use super::super::result::{CaseResult, Peer};
use super::super::rounds::{Pair, Progress, Side};
use super::StoreArgs;
use crate::keys::Distribution;
use crate::run::{RunOptions, run};
use crate::server::{ControlGroup, Fulmar, Postgres, Product, Server};
use crate::tenants;
use crate::ycsb::Ycsb;

const DATABASE: &str = "beyond";
const CONNECTIONS: usize = 8;
const WARM_UP: Duration = Duration::from_secs(10);
const MEASURE: Duration = Duration::from_secs(20);

/// A row of 1 KB takes a third of a page, and a key has a row in each of three tables.
const BYTES_PER_KEY: u64 = 4096;

pub(super) async fn measure(
    arguments: &StoreArgs,
    binary: &Path,
    case: &'static Case,
) -> anyhow::Result<CaseResult> {
    let data_bytes = arguments.memory_mib << 20;
    let workload = Ycsb {
        records: u32::try_from(data_bytes / BYTES_PER_KEY)?,
        distribution: Distribution::Uniform,
        ..Ycsb::default()
    };
    let progress = Progress::new();
    let budget_bytes = data_bytes / 4;
    let group_bytes = budget_bytes + budget_bytes / 4;
    let mut notes = Vec::new();
    let fulmar = Box::new(Fulmar::at(binary.to_owned()));
    // Dropped in reverse order: a group must be dropped after its server, so it is bound first.
    let (of_fulmar, fulmar) = start(fulmar, budget_bytes, group_bytes, &mut notes).await?;
    let postgres = Box::new(Postgres::installed()?);
    let (of_postgres, postgres) = start(postgres, budget_bytes / 2, group_bytes, &mut notes).await?;
    let (_groups, mut pair) = ([of_fulmar, of_postgres], Pair::of(fulmar, postgres));
    let options = |server: &Server, seed, measure| RunOptions {
        connections: CONNECTIONS,
        seed,
        warm_up: WARM_UP,
        measure,
        ..RunOptions::new(server.target().with_database(DATABASE))
    };
    pair.each(async |server| {
        progress.step(&format!("{}: loading {}", case.name, server.name()));
        tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await?;
        run(workload.clone(), options(server, 0, Duration::from_secs(1))).await?;
        server.settle(DATABASE).await
    })
    .await?;
    let mut rounds = [Vec::new(), Vec::new()];
    for round in 1..=arguments.rounds {
        for (side, measured) in [Side::Fulmar, Side::Peer].into_iter().zip(&mut rounds) {
            let (case, name, of) = (case.name, pair.name(side), arguments.rounds);
            progress.step(&format!("{case}: round {round} of {of}, {name}"));
            let mut measurement = async |server: &Server| {
                tokio::task::spawn_blocking(rustix::fs::sync).await?;
                let report =
                    run(workload.clone(), options(server, round.into(), MEASURE)).await?.complete()?;
                anyhow::Ok(report.throughput_tps)
            };
            measured.push(pair.alone(side, &mut measurement).await?);
        }
    }
    let [fulmar, postgres] = rounds;
    let result = CaseResult::ratio(case, fulmar, Peer::Postgres, postgres);
    Ok(notes.into_iter().fold(result, CaseResult::with_note))
}

/// Starts a server and bounds its memory.
async fn start(
    product: Box<dyn Product>,
    memory_bytes: u64,
    group_bytes: u64,
    notes: &mut Vec<String>,
) -> anyhow::Result<(Option<ControlGroup>, Server)> {
    let server = Server::start(product, memory_bytes, CONNECTIONS as u32).await?;
    let group = ControlGroup::with_memory(server.name(), group_bytes)
        .and_then(|group| group.add_server(&server).map(|()| group));
    let group = group.inspect_err(|error| {
        notes.push(format!("{}: kernel page cache is not bounded: {error:#}", server.name()))
    });
    Ok((group.ok(), server))
}
