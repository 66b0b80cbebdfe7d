//! `monitor-cost-percent`: CPU time per transaction of YCSB with the load monitor, above that
//! without; for comparison, the cost of counting every access, as E-Store does.

use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::Pid;

use super::Bench;
use crate::compare::cases::Case;
use crate::compare::result::CaseResult;
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

/// The servers: name and flags. The first one is the reference.
const SERVERS: [(&str, &[&str]); 4] = [
    ("off", &["--load-monitor", "off", "--key-monitoring", "off"]),
    ("level 1", &["--key-monitoring", "off"]),
    ("both levels", &["--key-monitoring", "on"]),
    ("full counting", &["--key-monitoring", "full"]),
];
/// The index of the server that the case is about.
const BOTH: usize = 2;

pub(super) async fn measure(bench: &Bench<'_>, case: &Case) -> anyhow::Result<CaseResult> {
    let mut servers = Vec::new();
    for (name, flags) in SERVERS {
        bench.progress.step(&format!("{}: starting and loading {name}", case.name));
        let product = Fulmar::at(bench.binary.to_owned()).named(name).with_flags(flags);
        let mut server = Server::start(Box::new(product), MEMORY_BYTES, CONNECTIONS as u32).await?;
        tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await?;
        cpu_us(&server, WARM_UP, 0).await?;
        server.freeze()?;
        servers.push(server);
    }
    let mut rounds: [Vec<f64>; SERVERS.len()] = Default::default();
    let time = Duration::from_secs(bench.arguments.seconds);
    for round in 1..=bench.arguments.rounds {
        for (server, measured) in servers.iter_mut().zip(&mut rounds) {
            let name = server.name();
            bench
                .progress
                .step(&format!("{}: round {round} of {}, {name}", case.name, bench.arguments.rounds));
            // The others are stopped, and pay for nothing meanwhile.
            server.thaw()?;
            let cpu = cpu_us(server, time, u64::from(round)).await;
            server.freeze()?;
            measured.push(cpu.with_context(|| format!("on {name}"))?);
        }
    }
    for server in &mut servers {
        server.thaw()?;
    }
    let percent = |of: usize| -> Vec<f64> {
        rounds[of].iter().zip(&rounds[0]).map(|(with, without)| (with / without - 1.0) * 100.0).collect()
    };
    let mut result = CaseResult::value(case, percent(BOTH));
    for (of, (name, _)) in SERVERS.iter().enumerate() {
        if let (Some(cpu), Some(above)) = (Spread::of(rounds[of].clone()), Spread::of(percent(of))) {
            let cpu = format!("{name}: {:.0} us ({:.0} to {:.0})", cpu.median, cpu.min, cpu.max);
            let above = format!("{:+.1} % ({:+.1} to {:+.1})", above.median, above.min, above.max);
            result = result.with_note(if of == 0 { cpu } else { format!("{cpu}, {above}") });
        }
    }
    Ok(result)
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
    let usage = report.server.context("the CPU time of the server is unknown")?;
    Ok(usage.cpu_us_per_transaction)
}
