//! Crash test: a process that changes the catalog is killed at random moments. Acknowledged changes
//! survive, no change is applied partially, and no partition id is assigned twice.
//!
//! The process is this test binary, started again to run only [`work_until_killed`]. It writes a
//! line to stdout for everything that the catalog acknowledged.

use std::collections::{BTreeMap, HashSet};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use fulmar_meta::{Catalog, Embedded, SYSTEM_USER};

const DIRECTORY: &str = "FULMAR_META_CRASH_DIRECTORY";
const ROUND: &str = "FULMAR_META_CRASH_ROUND";
const ROUNDS: usize = 12;

async fn open(directory: &Path) -> Arc<Catalog> {
    let store = Embedded::open(&directory.join("meta.db")).unwrap();
    Catalog::open(Arc::new(store)).await.unwrap()
}

#[test]
#[ignore = "started by the crash test in a separate process"]
fn work_until_killed() {
    let directory = std::env::var(DIRECTORY).expect("must be started by the crash test");
    let round = std::env::var(ROUND).expect("must be started by the crash test");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let catalog = open(Path::new(&directory)).await;
        let workers: Vec<_> =
            (0..4).map(|worker| tokio::spawn(work(catalog.clone(), format!("{round}-{worker}")))).collect();
        for worker in workers {
            worker.await.unwrap();
        }
    });
}

/// Creates tenants. Drops every third one, and renames every fifth of the others.
async fn work(catalog: Arc<Catalog>, prefix: String) {
    for n in 0_u64.. {
        let name = format!("{prefix}-{n}");
        let creating = catalog.create_tenant(&name, SYSTEM_USER).await.unwrap();
        report(&format!("id {}", creating.partition.0));
        catalog.finish_create(&creating).await.unwrap();
        report(&format!("ready {name}"));
        if n % 3 == 0 {
            report(&format!("try {name}"));
            let dropping = catalog.begin_drop(&name).await.unwrap();
            report(&format!("dropping {name}"));
            catalog.finish_drop(&dropping).await.unwrap();
        } else if n % 5 == 0 {
            report(&format!("try {name}"));
            catalog.rename_tenant(&name, &format!("{name}'")).await.unwrap();
            report(&format!("dropping {name}"));
            report(&format!("ready {name}'"));
        }
    }
}

fn report(line: &str) {
    // A single unbuffered write, so that lines of several workers do not mix.
    std::io::stdout().lock().write_all(format!("\n> {line}\n").as_bytes()).unwrap();
}

/// The acknowledged state of a tenant.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Known {
    Ready,
    Gone,
    /// A change of it was in progress.
    Either,
}

#[test]
fn acknowledged_changes_survive_a_kill() {
    let directory = tempfile::tempdir().unwrap();
    let mut ids = HashSet::new();
    let mut known = BTreeMap::new();
    for round in 0..ROUNDS {
        // Each round reads more lines before the kill, so kills range from the start of the process
        // to its steady state.
        let lines = run_and_kill(directory.path(), round, round * round * 5);
        for line in lines {
            let (verb, value) = line.split_once(' ').unwrap();
            match verb {
                "id" => assert!(ids.insert(value.to_owned()), "partition id {value} was assigned twice"),
                "ready" => drop(known.insert(value.to_owned(), Known::Ready)),
                "try" => drop(known.insert(value.to_owned(), Known::Either)),
                "dropping" => drop(known.insert(value.to_owned(), Known::Gone)),
                other => panic!("unknown line {other}"),
            }
        }
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(check(directory.path(), &known));
    }
    assert!(known.len() > ROUNDS && ids.len() > ROUNDS, "the workers must make progress");
}

/// Runs the worker until it has written `lines` lines, then kills it with SIGKILL. Returns all
/// lines.
fn run_and_kill(directory: &Path, round: usize, lines: usize) -> Vec<String> {
    let mut worker = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "work_until_killed", "--nocapture", "--test-threads=1"])
        .env(DIRECTORY, directory)
        .env(ROUND, round.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut lines_read = Vec::new();
    for line in BufReader::new(worker.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        if let Some(line) = line.strip_prefix("> ") {
            lines_read.push(line.to_owned());
            if lines_read.len() == lines + 1 {
                worker.kill().unwrap();
            }
        }
    }
    let status = worker.wait().unwrap();
    assert!(status.code().is_none(), "the worker must run until it is killed: {status}");
    lines_read
}

async fn check(directory: &Path, known: &BTreeMap<String, Known>) {
    let catalog = open(directory).await;
    for (name, known) in known {
        let is_there = catalog.tenant(name).is_some();
        match known {
            Known::Ready => assert!(is_there, "acknowledged tenant {name} is lost"),
            Known::Gone => assert!(!is_there, "dropped or renamed tenant {name} is back"),
            Known::Either => {}
        }
    }
    for tenant in catalog.unfinished() {
        catalog.finish_drop(&tenant).await.unwrap();
    }
    // Every partition has a tenant and vice versa: no change was applied partially.
    let mut tenants: Vec<_> = catalog.tenants().iter().map(|tenant| tenant.partition).collect();
    tenants.sort_unstable();
    let partitions: Vec<_> = catalog.partitions().iter().map(|partition| partition.id).collect();
    assert_eq!(tenants, partitions);
}
