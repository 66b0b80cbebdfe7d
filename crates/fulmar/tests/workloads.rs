//! The workloads against a Fulmar node and a PostgreSQL server, through the library and the
//! command.

mod common;

use std::path::PathBuf;
use std::time::Duration;

use common::{run as command, stdout, wait_until};
use fulmar_workload::Target;
use fulmar_workload::client::Client;
use fulmar_workload::keys::Distribution;
use fulmar_workload::run::{Record, Report, RunOptions, run};
use fulmar_workload::server::{Fulmar, Postgres, Product, Server};
use fulmar_workload::tatp::Tatp;
use fulmar_workload::tenants;
use fulmar_workload::tpcw::Tpcw;
use fulmar_workload::voter::Voter;
use fulmar_workload::workload::{Dialect, Workload};
use fulmar_workload::ycsb::Ycsb;

const DATABASE: &str = "bench";

/// Starts Fulmar and PostgreSQL, each with an empty database.
async fn servers() -> [Server; 2] {
    let fulmar = Fulmar::at(PathBuf::from(env!("CARGO_BIN_EXE_fulmar")));
    [start(Box::new(fulmar)).await, start(Box::new(Postgres::installed().unwrap())).await]
}

async fn start(product: Box<dyn Product>) -> Server {
    let server = Server::start(product, 256 << 20, 20).await.unwrap();
    tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await.unwrap();
    server
}

fn target(server: &Server) -> Target {
    server.target().with_database(DATABASE)
}

async fn client(server: &Server) -> Client {
    Client::connect(&target(server)).await.unwrap()
}

/// Runs a workload on four connections until every kind of transaction has occurred.
async fn run_workload(server: &Server, workload: impl Workload) -> Report {
    // 500 transactions are enough for each kind to occur.
    run_until(server, workload, |report| report.transactions >= 500).await
}

/// Runs a workload on four connections with increasing duration until `enough` returns true.
async fn run_until(server: &Server, workload: impl Workload, enough: impl Fn(&Report) -> bool) -> Report {
    let mut measure = Duration::from_secs(1);
    loop {
        let options = RunOptions {
            connections: 4,
            warm_up: Duration::from_millis(100),
            measure,
            tick: Duration::from_millis(100),
            ..RunOptions::new(target(server))
        };
        let report = run(workload.clone(), options).await.unwrap();
        assert_eq!((report.failed, report.lost_connections), (0, 0), "{report}");
        if enough(&report) {
            return report;
        }
        measure *= 2;
        assert!(measure < Duration::from_secs(120), "too few transactions: {report}");
    }
}

/// Returns the number of independent events for which five standard deviations of the share of
/// events with this probability are equal to `slack`.
fn events_for(probability: f64, slack: f64) -> u64 {
    (probability * (1.0 - probability) * (5.0 / slack).powi(2)).ceil() as u64
}

async fn number(client: &mut Client, sql: &str) -> u64 {
    client.query(sql).await.unwrap()[0][0].as_ref().unwrap().parse().unwrap()
}

/// Returns the number of committed transactions of a kind, and that of all completed ones:
/// committed or rolled back as the workload intends.
fn committed_of(report: &Report, kind: &str) -> (u64, u64) {
    let kind = report.kinds.iter().find(|report| report.kind == kind).unwrap();
    (kind.committed, kind.committed + kind.rolled_back)
}

/// Returns the share of committed transactions among the completed ones of a kind.
fn committed_share(report: &Report, kind: &str) -> f64 {
    let (committed, completed) = committed_of(report, kind);
    committed as f64 / completed as f64
}

#[tokio::test]
async fn voter_stores_every_acknowledged_vote() {
    for server in servers().await {
        for procedure in [false, true] {
            check_votes(&server, procedure).await;
        }
    }
}

async fn check_votes(server: &Server, procedure: bool) {
    let client = &mut client(server).await;
    client.query("DROP TABLE IF EXISTS votes").await.unwrap();
    let distribution = Distribution::HighSkew { operations_percent: 80.0, hot_keys: 3 };
    // Run until a phone number has reached its limit of votes.
    let mut acknowledged = 0;
    loop {
        let report = run_workload(server, Voter { distribution, procedure, ..Voter::default() }).await;
        acknowledged += report.transactions - report.rolled_back;
        // The table also has votes from outside the measured window.
        let votes = number(client, "SELECT count(*) FROM votes").await;
        assert!(votes >= acknowledged, "acknowledged votes are lost: {votes} {report}");
        if report.rolled_back > 0 {
            break;
        }
        assert!(votes < 1_000, "three hot phone numbers with 10 votes each cannot have 800 votes: {report}");
    }
    let max_per_number = "SELECT max(n) FROM (SELECT count(*) AS n FROM votes GROUP BY phone_number) AS each";
    let max = number(client, max_per_number).await;
    match Dialect::of(client).await.unwrap() {
        Dialect::Fulmar => assert_eq!(max, 10),
        // Concurrent votes can exceed the limit: each sees room for one more.
        Dialect::Postgres => assert!((10..20).contains(&max), "{max}"),
    }
    let wrong_state = "SELECT count(*) FROM votes AS v JOIN area_code_state AS a \
                     ON a.area_code = substr(v.phone_number, 1, 3) WHERE v.state <> a.state";
    assert_eq!(number(client, wrong_state).await, 0, "votes with a state that is not their area code's");
}

#[tokio::test]
async fn tatp_transactions_succeed_with_their_specified_probabilities() {
    let of = |subscribers| Tatp { subscribers, ..Tatp::default() };
    // get-new-destination succeeds if the facility exists (0.625) and is active (0.85), and one of
    // up to three forwarding times matches (0.27).
    let shares = [("get-access-data", 0.625, 0.06), ("get-new-destination", 0.145, 0.05)];
    let enough = |report: &Report| {
        shares
            .iter()
            .all(|(kind, expected, slack)| committed_of(report, kind).1 >= events_for(*expected, *slack))
    };
    for server in servers().await {
        let report = run_until(&server, of(2_000), enough).await;
        assert_eq!(committed_share(&report, "get-subscriber-data"), 1.0);
        assert_eq!(committed_share(&report, "update-location"), 1.0);
        for (kind, expected, slack) in shares {
            let share = committed_share(&report, kind);
            assert!((share - expected).abs() < slack, "{kind}: {share} {report}");
        }
        let expected = ["23503", "23505"];
        assert!(report.errors.keys().all(|sqlstate| expected.contains(&sqlstate.as_str())), "{report}");

        // A second run reuses the data. A run of another size is rejected.
        run_workload(&server, of(2_000)).await;
        let error = run(of(1_000), RunOptions::new(target(&server))).await.unwrap_err();
        assert!(format!("{error:#}").contains("--subscribers 2000"), "{error:#}");
    }
}

#[tokio::test]
async fn tpcw_purchases_match_the_carts() {
    let of = |items| Tpcw { items, customers: 200, ..Tpcw::default() };
    for server in servers().await {
        // The run's own consistency check compares orders, payments and stock. A cart has 1 to 10
        // items: 5.5 on average, with a standard deviation of 2.9. With 130 purchases, the
        // tolerance of 2 covers five standard deviations of the mean plus 80 items at the ends of
        // the window.
        let report = run_until(&server, of(300), |report| report.kinds[2].committed >= 130).await;
        let committed = |kind: usize| report.kinds[kind].committed as f64;
        // At either end of the window, up to four browsers are between their steps.
        assert!((committed(0) - committed(2)).abs() <= 8.0 && committed(2) > 0.0, "{report}");
        assert!((committed(1) / committed(2) - 5.5).abs() < 2.0, "{report}");
        assert_eq!(report.rolled_back, 0, "{report}");
        assert!(
            report.errors.keys().all(|sqlstate| ["40001", "40P01"].contains(&sqlstate.as_str())),
            "{report}"
        );
        let client = &mut client(&server).await;
        let pending = number(client, "SELECT count(*) FROM orders WHERE o_status = 'PENDING'").await;
        assert!(pending >= report.kinds[2].committed, "{pending} {report}");
        let empty = "SELECT count(*) FROM orders WHERE o_id NOT IN (SELECT ol_o_id FROM order_line)";
        assert_eq!(number(client, empty).await, 0);

        // A second run reuses the data. A run of another size is rejected. A wrong stock is
        // detected.
        run_workload(&server, of(300)).await;
        let error = run(of(200), RunOptions::new(target(&server))).await.unwrap_err();
        assert!(format!("{error:#}").contains("--items 300"), "{error:#}");
        client.query("UPDATE item SET i_stock = i_stock + 1 WHERE i_id = 7").await.unwrap();
        let error = of(300).check(client).await.unwrap_err().to_string();
        assert!(error.contains("condition 3") && error.contains("(7, "), "{error}");
    }
}

#[tokio::test]
async fn ycsb_supports_the_sorts_and_joins_of_shuttledb() {
    let workload = |operations| Ycsb {
        records: 500,
        reads: 40.0,
        sorts: 20.0,
        joins: 20.0,
        operations,
        ..Ycsb::default()
    };
    for server in servers().await {
        let report = run_workload(&server, workload(10)).await;
        assert_eq!(report.statements, report.transactions * 12, "{report}");
        let report = run_workload(&server, workload(1)).await;
        let names: Vec<_> = report.kinds.iter().map(|kind| kind.kind.as_str()).collect();
        assert_eq!(names, ["read", "update", "sort", "join"]);
        assert!(report.kinds.iter().all(|kind| kind.committed > 0), "{report}");
    }
}

#[tokio::test]
async fn ycsb_supports_the_single_table_form_of_e_store() {
    let distribution = Distribution::HighSkew { operations_percent: 60.0, hot_keys: 40 };
    for server in servers().await {
        let ycsb =
            Ycsb { records: 500, tables: 1, operations: 1, reads: 85.0, distribution, ..Ycsb::default() };
        let enough = |report: &Report| report.transactions >= events_for(0.85, 0.05);
        let report = run_until(&server, ycsb, enough).await;
        let share = report.kinds[0].committed as f64 / report.transactions as f64;
        assert!((share - 0.85).abs() < 0.05 && report.rolled_back == 0, "{report}");
        let mut client = client(&server).await;
        assert_eq!(number(&mut client, "SELECT count(*) FROM ycsb_primary").await, 500);
        client.query("SELECT count(*) FROM ycsb_secondary_1").await.unwrap_err();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bench_run_writes_json_lines_and_bench_report_renders_them() {
    let server = start(Box::new(Fulmar::at(PathBuf::from(env!("CARGO_BIN_EXE_fulmar"))))).await;
    // Tenants are created in the system database.
    let (url, pid) = (server.target().to_string(), server.processes().unwrap().root());
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (lines, page) = (path("run.jsonl"), path("run.html"));
    let pid = pid.as_raw_nonzero().to_string();
    let arguments =
        ["bench", "run", "ycsb", "--target", &url, "--records", "50", "--tenants", "5", "--connections", "2"];
    let load =
        ["--rate", "200", "--arrival", "schedule", "--trace", "steps:1,2", "--tenant-rates", "zipfian"];
    let prices = path("prices.csv");
    std::fs::write(&prices, "resource,dollars\ncpu,3.6\n").unwrap();
    let output = ["--warm-up", "1", "--seconds", "3", "--output", &lines, "--json"];
    let output = [&output[..], &["--server-process", &pid, "--prices", &prices]].concat();
    let report = stdout(&command(&[&arguments[..], &load, &output].concat()));
    let report: Report = serde_json::from_str(&report).unwrap();
    // About 900 transactions are due. On a busy machine, those that cannot start in time are
    // cancelled.
    let due = report.transactions + report.cancelled + report.unsent;
    assert!(report.transactions > 0 && due > 500 && report.tenants == 5, "{report}");
    let server = report.server.as_ref().expect("a process was given");
    let per_hour = server.usage.cpu_s / report.seconds * 3.6;
    assert!(server.usage.cpu_s > 0.0 && (server.dollars_per_hour - per_hour).abs() < 1e-9, "{report}");

    stdout(&command(&["bench", "report", &lines, "--output", &page]));
    let page = std::fs::read_to_string(page).unwrap();
    for expected in [
        "ycsb_0004",
        "Fulmar",
        "schedule, 200 transactions/s, steps:1,2",
        "Memory of the server",
        "dollars per hour",
        "<svg",
    ] {
        assert!(page.contains(expected), "the report does not contain {expected}");
    }
}

/// A parent process measures the load of two driver processes.
#[tokio::test(flavor = "multi_thread")]
async fn driver_processes_share_the_load_and_their_results_add_up() {
    let server = start(Box::new(Fulmar::at(PathBuf::from(env!("CARGO_BIN_EXE_fulmar"))))).await;
    let directory = tempfile::tempdir().unwrap();
    let lines = directory.path().join("run.jsonl");
    let url = server.target().to_string();
    let arguments = ["bench", "run", "ycsb", "--target", &url, "--records", "50", "--tenants", "3"];
    let load =
        ["--connections", "2", "--processes", "2", "--rate", "200", "--warm-up", "1", "--seconds", "4"];
    let output = ["--output", lines.to_str().unwrap(), "--json"];
    let report = stdout(&command(&[&arguments[..], &load, &output].concat()));
    let report: Report = serde_json::from_str(&report).unwrap();
    // 800 transactions are due on average, with a standard deviation of 28. On a busy machine, some
    // of them are not sent.
    let due = report.transactions + report.unsent;
    assert!(report.transactions > 0 && (660..940).contains(&due), "{report}");
    assert_eq!((report.driver.threads, report.tenants, report.failed), (2, 3, 0), "{report}");
    assert!(report.latency.count >= report.transactions && report.statements > 0, "{report}");

    let text = std::fs::read_to_string(lines).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Record>(line).unwrap());
    let (mut committed, mut intervals) = (0, 0);
    for record in records {
        let Record::Interval(interval) = record else { continue };
        assert_eq!(interval.driver_cpu.len(), 2, "each driver process must have one thread");
        if interval.ends_s > 0.0 {
            intervals += 1;
            committed += interval.kinds[0].report.committed;
        }
    }
    assert_eq!(intervals, 4);
    // A transaction that ends as the window closes may be missing from the last interval or from
    // the report.
    assert!(committed.abs_diff(report.transactions) <= 6, "{committed} {report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn driver_processes_exit_when_their_parent_is_killed() {
    let server = start(Box::new(Fulmar::at(PathBuf::from(env!("CARGO_BIN_EXE_fulmar"))))).await;
    let mut client = client(&server).await;
    let url = target(&server).to_string();
    let mut parent = std::process::Command::new(env!("CARGO_BIN_EXE_fulmar"))
        .args(["bench", "run", "ycsb", "--target", &url, "--records", "50", "--connections", "4"])
        .args(["--processes", "2", "--seconds", "3600"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // Four sessions of the drivers and that of the test.
    let sessions = format!("SELECT count(*) FROM pg_stat_activity WHERE datname = '{DATABASE}'");
    wait_until("the drivers have connected", async || number(&mut client, &sessions).await >= 5).await;
    parent.kill().unwrap();
    parent.wait().unwrap();
    wait_until("the drivers have exited", async || number(&mut client, &sessions).await == 1).await;
}

#[test]
fn bench_figure_prints_csv_and_renders_charts() {
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("figure.html");
    let small = ["--scale", "0.0001", "--memory-mib", "64", "--line", "hotspot:90:20", "--seconds", "1"];
    let arguments = ["bench", "figure", "elastras/6", "--output", page.to_str().unwrap()];
    let rows = stdout(&command(&[&arguments[..], &small].concat()));
    let rows: Vec<Vec<&str>> = rows.lines().skip(1).map(|row| row.split(',').collect()).collect();
    let reads: Vec<&str> = rows.iter().map(|row| row[2]).collect();
    assert_eq!(reads, ["50", "60", "70", "80", "90"]);
    for row in &rows {
        assert_eq!((row.len(), row[0], row[1]), (7, "elastras/6", "hotspot:90:20"), "{row:?}");
        // The last column is the reason why a point could not be measured.
        assert_eq!(row[6], "", "{row:?}");
        assert!(row[3].parse::<f64>().unwrap() > 0.0, "{row:?}");
    }
    assert!(std::fs::read_to_string(page).unwrap().matches("<svg").count() == 3);

    let unknown = common::stderr_of_failure(&command(&["bench", "figure", "elastras/99"]), 1);
    assert!(unknown.contains("elastras/4"), "{unknown}");
    let unknown = common::stderr_of_failure(&command(&["bench", "figure", "elastras/6", "--line", "no"]), 1);
    assert!(unknown.contains("hotspot:90:20"), "{unknown}");
}

#[test]
fn bench_figure_supports_tenants_skew_and_memory() {
    let small = ["--scale", "0.0001", "--memory-mib", "64", "--seconds", "1"];
    for (name, points) in [("elastras/12", 3), ("estore/3", 3), ("cloudtps/13", 2)] {
        let rows = stdout(&command(&[&["bench", "figure", name][..], &small].concat()));
        // Notes follow the rows.
        let rows: Vec<&str> = rows.lines().skip(1).filter(|row| !row.starts_with('#')).collect();
        assert_eq!(rows.len(), points, "{name}: {rows:?}");
        // No point failed.
        assert!(rows.iter().all(|row| row.starts_with(name) && row.ends_with(',')), "{name}: {rows:?}");
    }
}
