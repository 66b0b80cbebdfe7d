//! `beyond-memory`: YCSB over data that are four times as large as the memory, beside PostgreSQL with as much.
//!
//! Both servers run in a control group that bounds them, and the kernel's page cache of their files, to a quarter more than
//! the budget: else the kernel would hold for them what their memory does not. Fulmar is given the budget as its `--memory`;
//! PostgreSQL half of it as `shared_buffers` (two fifths of the group, the most that its manual recommends): the rest is its
//! processes' own, and the kernel's for it. Given all of it, it is ended by its group while it builds an index.

use std::path::Path;
use std::time::Duration;

use super::super::cases::Case;
use super::super::result::{CaseResult, Peer};
use super::super::turns::Progress;
use super::StoreArgs;
use crate::keys::Distribution;
use crate::run::{RunOptions, run};
use crate::server::{Fulmar, MemoryGroup, Postgres, Product, Server};
use crate::tenants;
use crate::ycsb::Ycsb;

const DATABASE: &str = "beyond";
const CONNECTIONS: usize = 8;
const WARM_UP: Duration = Duration::from_secs(10);
const MEASURE: Duration = Duration::from_secs(20);

/// A row of a kilobyte takes a third of a page, and a key has one in each of three tables.
const BYTES_PER_KEY: u64 = 4096;

/// One of the two, and what bounds it. The group goes after its processes.
struct Bounded {
    server: Server,
    _group: Option<MemoryGroup>,
}

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
    let mut notes = Vec::new();
    let mut rounds = [Vec::new(), Vec::new()];
    let budget_bytes = data_bytes / 4;
    let fulmar: Box<dyn Product> = Box::new(Fulmar::at(binary.to_owned()));
    let postgres: Box<dyn Product> = Box::new(Postgres::installed()?);
    let products = [(fulmar, budget_bytes), (postgres, budget_bytes / 2)];
    // One after the other: two loaded servers would share what the machine's disk cache has beyond the groups.
    for ((product, memory_bytes), measured) in products.into_iter().zip(&mut rounds) {
        progress.step(&format!("{}: loading {}", case.name, product.name()));
        let bounded = start(product, memory_bytes, budget_bytes + budget_bytes / 4, &mut notes).await?;
        let server = &bounded.server;
        tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await?;
        let options = |measure| RunOptions {
            connections: CONNECTIONS,
            warm_up: WARM_UP,
            measure,
            ..RunOptions::new(server.target().with_database(DATABASE))
        };
        run(workload.clone(), options(Duration::from_secs(1))).await?;
        server.settle(DATABASE).await?;
        for round in 1..=arguments.rounds {
            progress.step(&format!(
                "{}: round {round} of {}, {}",
                case.name,
                arguments.rounds,
                server.name()
            ));
            let report = run(workload.clone(), options(MEASURE)).await?.complete()?;
            measured.push(report.throughput_tps);
        }
    }
    let [fulmar, postgres] = rounds;
    let result = CaseResult::ratio(case, fulmar, Peer::Postgres, postgres);
    Ok(notes.into_iter().fold(result, CaseResult::with_note))
}

async fn start(
    product: Box<dyn Product>,
    memory_bytes: u64,
    group_bytes: u64,
    notes: &mut Vec<String>,
) -> anyhow::Result<Bounded> {
    let server = Server::start(product, memory_bytes, CONNECTIONS as u32).await?;
    let group =
        MemoryGroup::new(server.name(), group_bytes).and_then(|group| group.hold(&server).map(|()| group));
    let group = group.inspect_err(|error| {
        notes.push(format!("{}: the kernel's page cache is not bounded: {error:#}", server.name()))
    });
    Ok(Bounded { server, _group: group.ok() })
}
