//! A process that works on the catalog is killed at a random moment, again and again: what it was told is
//! there, nothing is half there, and no partition id comes twice.
//!
//! The work is done by this test binary itself, started once more with only [`work_until_killed`] to run. It
//! writes a line to stdout for everything that the catalog acknowledged.

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
#[ignore = "the crash test runs it in a process of its own"]
fn work_until_killed() {
    let directory = std::env::var(DIRECTORY).expect("started by the crash test");
    let round = std::env::var(ROUND).expect("started by the crash test");
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

/// Creates tenants; drops every third of them, renames every fifth.
async fn work(catalog: Arc<Catalog>, prefix: String) {
    for n in 0_u64.. {
        let name = format!("{prefix}-{n}");
        let creating = catalog.create_tenant(&name, SYSTEM_USER).await.unwrap();
        say(&format!("id {}", creating.partition.0));
        catalog.finish_create(&creating).await.unwrap();
        say(&format!("ready {name}"));
        if n % 3 == 0 {
            say(&format!("try {name}"));
            let dropping = catalog.begin_drop(&name).await.unwrap();
            say(&format!("dropping {name}"));
            catalog.finish_drop(&dropping).await.unwrap();
        } else if n % 5 == 0 {
            say(&format!("try {name}"));
            catalog.rename_tenant(&name, &format!("{name}'")).await.unwrap();
            say(&format!("dropping {name}"));
            say(&format!("ready {name}'"));
        }
    }
}

fn say(line: &str) {
    // One write, so that lines of several workers do not mix, and nothing is kept in a buffer.
    std::io::stdout().lock().write_all(format!("\n> {line}\n").as_bytes()).unwrap();
}

/// What the worker said that it knows.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Known {
    Ready,
    Gone,
    /// It was about to change it.
    Either,
}

#[test]
fn what_was_acknowledged_survives_a_kill() {
    let directory = tempfile::tempdir().unwrap();
    let mut ids = HashSet::new();
    let mut known = BTreeMap::new();
    for round in 0..ROUNDS {
        // From "just started" to "well under way": each round reads more lines before the kill.
        let lines = run_and_kill(directory.path(), round, round * round * 5);
        for line in lines {
            let (verb, what) = line.split_once(' ').unwrap();
            match verb {
                "id" => assert!(ids.insert(what.to_owned()), "partition id {what} was given out twice"),
                "ready" => drop(known.insert(what.to_owned(), Known::Ready)),
                "try" => drop(known.insert(what.to_owned(), Known::Either)),
                "dropping" => drop(known.insert(what.to_owned(), Known::Gone)),
                other => panic!("unknown line {other}"),
            }
        }
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(check(directory.path(), &known));
    }
    assert!(known.len() > ROUNDS && ids.len() > ROUNDS, "the workers got nothing done");
}

/// Lets the worker run until it has said `lines` lines, kills it with SIGKILL, answers all it said.
fn run_and_kill(directory: &Path, round: usize, lines: usize) -> Vec<String> {
    let mut worker = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "work_until_killed", "--nocapture", "--test-threads=1"])
        .env(DIRECTORY, directory)
        .env(ROUND, round.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut said = Vec::new();
    for line in BufReader::new(worker.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        if let Some(line) = line.strip_prefix("> ") {
            said.push(line.to_owned());
            if said.len() == lines + 1 {
                worker.kill().unwrap();
            }
        }
    }
    let status = worker.wait().unwrap();
    assert!(status.code().is_none(), "the worker ended by itself: {status}");
    said
}

async fn check(directory: &Path, known: &BTreeMap<String, Known>) {
    let catalog = open(directory).await;
    for (name, known) in known {
        let is_there = catalog.tenant(name).is_some();
        match known {
            Known::Ready => assert!(is_there, "{name} was acknowledged and is lost"),
            Known::Gone => assert!(!is_there, "{name} was dropped or renamed and is back"),
            Known::Either => {}
        }
    }
    for tenant in catalog.unfinished() {
        catalog.finish_drop(&tenant).await.unwrap();
    }
    // Every partition has its tenant and the other way round: nothing is half there.
    let mut tenants: Vec<_> = catalog.tenants().iter().map(|tenant| tenant.partition).collect();
    tenants.sort_unstable();
    let partitions: Vec<_> = catalog.partitions().iter().map(|partition| partition.id).collect();
    assert_eq!(tenants, partitions);
}
