//! `single-node-cpu`: what the code for clusters costs a single node: CPU time per transaction of
//! `ycsb-8`, over another build.

use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use rustix::process::Pid;

use super::{Bench, SINGLE, case};
use crate::compare::result::CaseResult;
use crate::compare::rounds::{Pair, Side};
use crate::measure::Spread;
use crate::run::{RunOptions, run};
use crate::server::{Fulmar, Server};
use crate::tenants;
use crate::ycsb::Ycsb;

const DATABASE: &str = "ycsb";
const CONNECTIONS: usize = 8;
const RECORDS: u32 = 30_000;
const MEMORY_BYTES: u64 = 1 << 30;
const WARM_UP: Duration = Duration::from_secs(2);

pub(super) async fn measure(bench: &Bench<'_>, before: &Path) -> anyhow::Result<CaseResult> {
    let start = async |binary: &Path, name| {
        bench.progress.step(&format!("{SINGLE}: starting and loading {name}"));
        let product = Box::new(Fulmar::at(binary.to_owned()).named(name));
        let server = Server::start(product, MEMORY_BYTES, CONNECTIONS as u32).await?;
        tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await?;
        cpu_us(&server, WARM_UP, 0).await?;
        anyhow::Ok(server)
    };
    let mut pair = Pair::of(start(bench.binary, "fulmar").await?, start(before, "before").await?);
    let (mut ratios, mut now, mut then) = (Vec::new(), Vec::new(), Vec::new());
    let time = Duration::from_secs(bench.arguments.seconds);
    for round in 1..=bench.arguments.rounds {
        bench.progress.step(&format!("{SINGLE}: round {round} of {}", bench.arguments.rounds));
        let mut work = async |server: &Server| cpu_us(server, time, u64::from(round)).await;
        now.push(pair.alone(Side::Fulmar, &mut work).await?);
        then.push(pair.alone(Side::Peer, &mut work).await?);
        ratios.extend(now.last().zip(then.last()).map(|(now, then)| now / then));
    }
    let text = |name: &str, rounds| match Spread::of(rounds) {
        Some(Spread { median, min, max, .. }) => format!("{name}: {median:.0} us ({min:.0} to {max:.0})"),
        None => String::new(),
    };
    let result = CaseResult::value(case(SINGLE)?, ratios);
    Ok(result.with_note(text("this build", now)).with_note(text("before", then)))
}

/// The server's CPU time per transaction in microseconds.
async fn cpu_us(server: &Server, time: Duration, seed: u64) -> anyhow::Result<f64> {
    let pids = server.processes()?.pids()?;
    let options = RunOptions {
        connections: CONNECTIONS,
        warm_up: WARM_UP,
        measure: time,
        seed,
        server_processes: pids.into_iter().filter_map(Pid::from_raw).take(1).collect(),
        ..RunOptions::new(server.target().with_database(DATABASE))
    };
    let report = run(Ycsb { records: RECORDS, ..Ycsb::default() }, options).await?.complete()?;
    ensure!(report.transactions > 0, "no transaction committed");
    let usage = report.server.ok_or_else(|| anyhow::anyhow!("the CPU time of the server is unknown"))?;
    Ok(usage.cpu_us_per_transaction)
}
