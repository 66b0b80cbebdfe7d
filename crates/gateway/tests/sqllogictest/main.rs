//! Runs sqllogictest scripts against a node over TCP and against stock SQLite. Both must return the
//! same results.
//!
//! ```text
//!   script --+-- simple query, over TCP --> a node, a tenant for each script --+
//!            |                                                                +--> same outcome,
//!            +-- rusqlite, in memory -----> stock SQLite of the same version --+    same rows in order
//! ```
//!
//! `scripts/` contains Fulmar's own scripts. The scripts published by SQLite's authors (about 600,
//! 1 GB) are run by `make sqllogictest SCRIPTS=directory`; see CONTRIBUTING.md for where to get
//! them. Statements are pipelined, one script per CPU runs at a time, and a failure reports script,
//! line and statement.

#[path = "../common/mod.rs"]
mod common;
mod script;
mod stock;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use common::Node;
use futures::{StreamExt, stream};
use script::{Expected, Record};
use stock::{Cell, Stock};
use tokio_postgres::{Client, SimpleQueryMessage};

/// Maximum number of statements in flight.
const PIPELINE: usize = 64;
/// Maximum number of differences reported per script. After the first, the two databases may
/// contain different rows.
const MAX_REPORTED_DIFFERENCES: usize = 5;

/// The result of a script.
#[derive(Default)]
struct Report {
    statements: usize,
    differences: Vec<String>,
    /// Statements whose outcome in stock SQLite differs from the script's expectation.
    unexpected: Vec<String>,
}

/// Fulmar's result: rows as text, or the error.
type NodeResult = Result<Vec<Vec<Option<String>>>, String>;

#[tokio::test(flavor = "multi_thread")]
async fn bundled_scripts() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sqllogictest/scripts");
    let total = run_all(&scripts_in(&directory)).await;
    assert!(total.statements > 300, "only {} statements were executed", total.statements);
    assert!(
        total.unexpected.is_empty(),
        "stock SQLite does not do what the script expects:\n{}",
        total.unexpected.join("\n")
    );
    assert!(total.differences.is_empty(), "differs from stock SQLite:\n{}", total.differences.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs scripts: make sqllogictest SCRIPTS=directory"]
async fn scripts_in_a_directory() {
    let directory = std::env::var("SCRIPTS").expect("SCRIPTS must name a directory");
    let total = run_all(&scripts_in(Path::new(&directory))).await;
    println!("{} statements whose expectation stock SQLite does not meet", total.unexpected.len());
    assert!(total.differences.is_empty(), "differs from stock SQLite:\n{}", total.differences.join("\n"));
}

/// The scripts below a directory, sorted.
fn scripts_in(directory: &Path) -> Vec<PathBuf> {
    let mut scripts = Vec::new();
    let mut open = vec![directory.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "test") {
                scripts.push(path);
            }
        }
    }
    scripts.sort();
    assert!(!scripts.is_empty(), "no *.test in {}", directory.display());
    scripts
}

async fn run_all(scripts: &[PathBuf]) -> Report {
    let node = Arc::new(Node::insecure().await);
    let (start, done) = (Instant::now(), AtomicUsize::new(0));
    let jobs = std::thread::available_parallelism().unwrap().get();
    let reports = stream::iter(scripts.iter().enumerate()).map(|(number, path)| {
        let (node, path) = (node.clone(), path.clone());
        tokio::spawn(async move { run_script(&node, &format!("script{number}"), &path).await })
    });
    let total = reports
        .buffer_unordered(jobs)
        .fold(Report::default(), async |mut total, report| {
            let report = report.unwrap();
            total.statements += report.statements;
            total.differences.extend(report.differences);
            total.unexpected.extend(report.unexpected);
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            if done.is_multiple_of(10) || done == scripts.len() {
                let (statements, seconds) = (total.statements, start.elapsed().as_secs());
                let (all, differences) = (scripts.len(), total.differences.len());
                println!(
                    "{done} of {all} scripts, {statements} statements, {differences} differences, {seconds} s"
                );
            }
            total
        })
        .await;
    Arc::into_inner(node).unwrap().stop().await;
    total
}

async fn run_script(node: &Node, tenant: &str, path: &Path) -> Report {
    let text = std::fs::read_to_string(path).unwrap();
    let records = script::read(&text).unwrap_or_else(|line| panic!("{}: {line}", path.display()));
    let client = node.database(tenant).await;
    let report = compare(&client, &records, path).await;
    drop(client);
    let admin = node.client("fulmar").await;
    admin.batch_execute(&format!("DROP DATABASE {tenant} WITH (FORCE)")).await.unwrap();
    report
}

async fn compare(client: &Client, records: &[Record], path: &Path) -> Report {
    let stock = Stock::open();
    let mut report = Report::default();
    for portion in records.chunks(PIPELINE) {
        let sent = futures::future::join_all(portion.iter().map(|record| send(client, &record.sql))).await;
        for (record, sent) in portion.iter().zip(sent) {
            let answer = stock.run(&record.sql);
            let location = || format!("{}:{}: {}", path.display(), record.line, record.sql);
            if !is_expected(record.expected, &answer) {
                let outcome = answer.as_ref().map(Vec::len);
                report.unexpected.push(format!("{}\n  {outcome:?} rows", location()));
            }
            if let Some(difference) = difference(&answer, &sent)
                && report.differences.len() < MAX_REPORTED_DIFFERENCES
            {
                report.differences.push(format!("{}\n  {difference}", location()));
            }
            report.statements += 1;
        }
    }
    report
}

async fn send(client: &Client, sql: &str) -> NodeResult {
    let messages = client.simple_query(sql).await.map_err(|error| match error.as_db_error() {
        Some(cause) => format!("{}: {}", cause.code().code(), cause.message()),
        None => error.to_string(),
    })?;
    let row = |message| match message {
        SimpleQueryMessage::Row(row) => {
            Some((0..row.len()).map(|at| row.get(at).map(str::to_owned)).collect())
        }
        _ => None,
    };
    Ok(messages.into_iter().filter_map(row).collect())
}

fn is_expected(expected: Expected, answer: &stock::Outcome) -> bool {
    match (expected, answer) {
        (Expected::Ok, Ok(_)) | (Expected::Error, Err(_)) => true,
        (Expected::Rows { columns }, Ok(rows)) => rows.iter().all(|row| row.len() == columns),
        _ => false,
    }
}

fn difference(stock: &stock::Outcome, sent: &NodeResult) -> Option<String> {
    match (stock, sent) {
        (Err(_), Err(_)) => None,
        (Err(error), Ok(rows)) => Some(format!("SQLite: {error}; Fulmar: {} rows", rows.len())),
        (Ok(rows), Err(error)) => Some(format!("SQLite: {} rows; Fulmar: {error}", rows.len())),
        (Ok(rows), Ok(sent)) if rows.len() != sent.len() => {
            Some(format!("SQLite: {} rows; Fulmar: {}", rows.len(), sent.len()))
        }
        (Ok(rows), Ok(sent)) => rows
            .iter()
            .zip(sent)
            .find(|(row, sent)| !is_same(row, sent))
            .map(|(row, sent)| format!("SQLite: {row:?}; Fulmar: {sent:?}")),
    }
}

fn is_same(row: &[Cell], sent: &[Option<String>]) -> bool {
    row.len() == sent.len() && row.iter().zip(sent).all(|(cell, sent)| cell.is_sent_as(sent.as_deref()))
}

#[test]
fn differences_are_detected() {
    let stock = Stock::open();
    let values = ["1", "0.1", "'x'", "x'00ff'", "NULL"];
    let sent = [Some("1"), Some("0.1"), Some("x"), Some("\\x00ff"), None];
    for (value, right) in values.iter().zip(sent) {
        let answer = stock.run(&format!("SELECT {value}"));
        for sent in sent {
            let found = difference(&answer, &Ok(vec![vec![sent.map(str::to_owned)]]));
            assert_eq!(found.is_none(), sent == right, "{value} as {sent:?}");
        }
        assert!(difference(&answer, &Ok(Vec::new())).is_some());
        assert!(difference(&answer, &Err(String::new())).is_some());
    }
    assert!(difference(&stock.run("no"), &Ok(Vec::new())).is_some());
    assert!(difference(&stock.run("no"), &Err(String::new())).is_none());
}
