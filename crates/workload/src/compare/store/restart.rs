//! `restart-after-kills-ms` and `restart-after-stop-ms`: the time from exec to a node's first
//! response, for a tenant whose log is in an S3 server on loopback.
//!
//! In each round the node runs under load for 15 s, is killed (or stopped by a signal) under that
//! load, and is started again on the same data. Round n therefore measures a start after n kills.

use std::path::Path;
use std::time::Duration;

use super::super::cases::Case;
use super::super::result::CaseResult;
use super::super::rounds::Progress;
use super::{StoreArgs, s3_server};
use crate::client::Client;
use crate::run::{RunOptions, run};
use crate::server::{Fulmar, Server};
use crate::ycsb::Ycsb;

const DATABASE: &str = "shared";
const CONNECTIONS: u32 = 32;
const WARM_UP: Duration = Duration::from_secs(1);
/// How long a node runs under load in each round.
const UPTIME: Duration = Duration::from_secs(15);

/// How a node is ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Kill,
    Stop,
}

pub(super) async fn measure(
    arguments: &StoreArgs,
    binary: &Path,
    case: &'static Case,
    end: End,
) -> anyhow::Result<CaseResult> {
    let progress = Progress::new();
    let s3 = s3_server(arguments)?;
    let fulmar = Fulmar::at(binary.to_owned()).with_store(s3.url("bench"), s3.environment());
    let mut server = Server::start(Box::new(fulmar), arguments.memory_mib << 20, CONNECTIONS).await?;
    progress.step(&format!("{}: loading", case.name));
    let mut system = Client::connect(&server.target()).await?;
    system.query(&format!("CREATE DATABASE {DATABASE} DURABILITY shared")).await?;
    system.close().await?;
    let target = server.target().with_database(DATABASE);
    let options = |measure| RunOptions {
        connections: CONNECTIONS as usize,
        warm_up: WARM_UP,
        measure,
        ..RunOptions::new(target.clone())
    };
    run(Ycsb::default(), options(WARM_UP)).await?.complete()?;
    let (mut times, mut objects) = (Vec::new(), Vec::new());
    for round in 1..=arguments.rounds {
        progress.step(&format!("{}: round {round} of {}", case.name, arguments.rounds));
        // The run returns an error when the node ends.
        let load = run(Ycsb::default(), RunOptions { seed: round.into(), ..options(4 * UPTIME) });
        let ending = async {
            tokio::time::sleep(UPTIME).await;
            match end {
                End::Kill => server.kill().await,
                End::Stop => server.stop().await,
            }
        };
        let (load, ended) = tokio::join!(load, ending);
        ended?;
        anyhow::ensure!(load.is_err(), "the load ended before the node was stopped");
        objects.push(files(&s3.objects().join("bench/logs"))?);
        times.push(server.restart().await?.as_secs_f64() * 1e3);
    }
    server.stop().await?;
    let note = format!("{}: log objects in the store at each start: {objects:?}", case.name);
    Ok(CaseResult::value(case, times).with_note(note))
}

/// Counts the files below a directory.
fn files(directory: &Path) -> anyhow::Result<u64> {
    let mut count = 0;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        count += if entry.file_type()?.is_dir() { files(&entry.path())? } else { 1 };
    }
    Ok(count)
}
