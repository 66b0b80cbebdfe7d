//! The workloads against a real node and a real PostgreSQL, by the library and by the command.

mod common;

use std::path::PathBuf;
use std::time::Duration;

use common::{run as command, stdout, until};
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

/// A server of each kind, with an empty database.
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

/// Runs a workload on four connections.
async fn go(server: &Server, workload: impl Workload) -> Report {
    // Enough for each kind of a workload to occur.
    go_until(server, workload, |report| report.transactions >= 500).await
}

/// Runs a workload on four connections for as long as this machine needs for `enough`.
async fn go_until(server: &Server, workload: impl Workload, enough: impl Fn(&Report) -> bool) -> Report {
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

/// How many independent events of this probability have a share that is five standard deviations
/// within `slack` of it.
fn events_for(probability: f64, slack: f64) -> u64 {
    (probability * (1.0 - probability) * (5.0 / slack).powi(2)).ceil() as u64
}

async fn number(client: &mut Client, sql: &str) -> u64 {
    client.query(sql).await.unwrap()[0][0].as_ref().unwrap().parse().unwrap()
}

/// How many transactions of a kind committed, and how many ended as they should.
fn committed_of(report: &Report, kind: &str) -> (u64, u64) {
    let kind = report.kinds.iter().find(|report| report.kind == kind).unwrap();
    (kind.committed, kind.committed + kind.rolled_back)
}

/// A share of a kind of transaction that committed.
fn committed_share(report: &Report, kind: &str) -> f64 {
    let (committed, ended) = committed_of(report, kind);
    committed as f64 / ended as f64
}

#[tokio::test]
async fn voter_counts_every_vote_that_it_says_it_counted() {
    for server in servers().await {
        for procedure in [false, true] {
            votes_are_counted(&server, procedure).await;
        }
    }
}

async fn votes_are_counted(server: &Server, procedure: bool) {
    let client = &mut client(server).await;
    client.query("DROP TABLE IF EXISTS votes").await.unwrap();
    let distribution = Distribution::HighSkew { operations_percent: 80.0, hot_keys: 3 };
    // Until a telephone has no votes left.
    let mut counted = 0;
    loop {
        let report = go(server, Voter { distribution, procedure, ..Voter::default() }).await;
        counted += report.transactions - report.rolled_back;
        // The window is a part of the run: the table has those of the warm-up and of the last moment too.
        let votes = number(client, "SELECT count(*) FROM votes").await;
        assert!(votes >= counted, "{votes} {report}");
        if report.rolled_back > 0 {
            break;
        }
        assert!(votes < 1_000, "800 of them were to be of three telephones, which have 30: {report}");
    }
    let of_most = "SELECT max(n) FROM (SELECT count(*) AS n FROM votes GROUP BY phone_number) AS each";
    let most = number(client, of_most).await;
    match Dialect::of(client).await.unwrap() {
        Dialect::Fulmar => assert_eq!(most, 10),
        // Two votes at once both see room for one.
        Dialect::Postgres => assert!((10..20).contains(&most), "{most}"),
    }
    let elsewhere = "SELECT count(*) FROM votes AS v JOIN area_code_state AS a \
                     ON a.area_code = substr(v.phone_number, 1, 3) WHERE v.state <> a.state";
    assert_eq!(number(client, elsewhere).await, 0);
}

#[tokio::test]
async fn tatp_finds_what_was_loaded() {
    let of = |subscribers| Tatp { subscribers, ..Tatp::default() };
    // A destination: the facility is there (0.625) and active (0.85), and one of up to three times fits (0.27).
    let shares = [("get-access-data", 0.625, 0.06), ("get-new-destination", 0.145, 0.05)];
    let enough = |report: &Report| {
        shares
            .iter()
            .all(|(kind, expected, slack)| committed_of(report, kind).1 >= events_for(*expected, *slack))
    };
    for server in servers().await {
        let report = go_until(&server, of(2_000), enough).await;
        assert_eq!(committed_share(&report, "get-subscriber-data"), 1.0);
        assert_eq!(committed_share(&report, "update-location"), 1.0);
        for (kind, expected, slack) in shares {
            let share = committed_share(&report, kind);
            assert!((share - expected).abs() < slack, "{kind}: {share} {report}");
        }
        let foreseen = ["23503", "23505"];
        assert!(report.errors.keys().all(|sqlstate| foreseen.contains(&sqlstate.as_str())), "{report}");

        // A second run finds its data; one of another size does not.
        go(&server, of(2_000)).await;
        let error = run(of(1_000), RunOptions::new(target(&server))).await.unwrap_err();
        assert!(format!("{error:#}").contains("--subscribers 2000"), "{error:#}");
    }
}

#[tokio::test]
async fn tpcws_browsers_buy_what_they_put_into_their_carts() {
    let of = |items| Tpcw { items, customers: 200, ..Tpcw::default() };
    for server in servers().await {
        // The check of the run compares orders, payments and stocks.
        // A cart has one to ten items: 5.5, with a standard deviation of 2.9. Of 130 purchases five
        // deviations of the mean and the 80 items at the ends of the window are within two.
        let report = go_until(&server, of(300), |report| report.kinds[2].committed >= 130).await;
        let committed = |kind: usize| report.kinds[kind].committed as f64;
        // Four browsers may be on their way at either end of the window.
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

        // A second run finds its data; one of another size does not; a lost update is found.
        go(&server, of(300)).await;
        let error = run(of(200), RunOptions::new(target(&server))).await.unwrap_err();
        assert!(format!("{error:#}").contains("--items 300"), "{error:#}");
        client.query("UPDATE item SET i_stock = i_stock + 1 WHERE i_id = 7").await.unwrap();
        let error = of(300).check(client).await.unwrap_err().to_string();
        assert!(error.contains("condition 3") && error.contains("(7, "), "{error}");
    }
}

#[tokio::test]
async fn shuttledbs_transactions_sort_and_join() {
    let workload = |operations| Ycsb {
        records: 500,
        reads: 40.0,
        sorts: 20.0,
        joins: 20.0,
        operations,
        ..Ycsb::default()
    };
    for server in servers().await {
        let report = go(&server, workload(10)).await;
        assert_eq!(report.statements, report.transactions * 12, "{report}");
        let report = go(&server, workload(1)).await;
        let names: Vec<_> = report.kinds.iter().map(|kind| kind.kind.as_str()).collect();
        assert_eq!(names, ["read", "update", "sort", "join"]);
        assert!(report.kinds.iter().all(|kind| kind.committed > 0), "{report}");
    }
}

#[tokio::test]
async fn e_stores_ycsb_is_of_one_table_and_two_kinds() {
    let distribution = Distribution::HighSkew { operations_percent: 60.0, hot_keys: 40 };
    for server in servers().await {
        let ycsb =
            Ycsb { records: 500, tables: 1, operations: 1, reads: 85.0, distribution, ..Ycsb::default() };
        let enough = |report: &Report| report.transactions >= events_for(0.85, 0.05);
        let report = go_until(&server, ycsb, enough).await;
        let share = report.kinds[0].committed as f64 / report.transactions as f64;
        assert!((share - 0.85).abs() < 0.05 && report.rolled_back == 0, "{report}");
        let mut client = client(&server).await;
        assert_eq!(number(&mut client, "SELECT count(*) FROM ycsb_primary").await, 500);
        client.query("SELECT count(*) FROM ycsb_secondary_1").await.unwrap_err();
    }
}

/// The command, from a run over tenants to the page.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_written_down_and_drawn() {
    let server = start(Box::new(Fulmar::at(PathBuf::from(env!("CARGO_BIN_EXE_fulmar"))))).await;
    // Tenants are made in the system database.
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
    let measures = ["--warm-up", "1", "--seconds", "3", "--output", &lines, "--json"];
    let measures = [&measures[..], &["--server-process", &pid, "--prices", &prices]].concat();
    let report = stdout(&command(&[&arguments[..], &load, &measures].concat()));
    let report: Report = serde_json::from_str(&report).unwrap();
    // About 900 fall due. Those that a busy machine cannot start in time are cancelled.
    let due = report.transactions + report.cancelled;
    assert!(report.transactions > 0 && due > 500 && report.tenants == 5, "{report}");
    let server = report.server.as_ref().expect("a process was given");
    let per_hour = server.usage.cpu_s / report.seconds * 3.6;
    assert!(server.usage.cpu_s > 0.0 && (server.dollars_per_hour - per_hour).abs() < 1e-9, "{report}");

    stdout(&command(&["bench", "report", &lines, "--output", &page]));
    let page = std::fs::read_to_string(page).unwrap();
    for told in [
        "ycsb_0004",
        "Fulmar",
        "schedule, 200 transactions/s, steps:1,2",
        "Memory of the server",
        "dollars per hour",
        "<svg",
    ] {
        assert!(page.contains(told), "{told}");
    }
}

/// Two processes drive, a third one measures.
#[tokio::test(flavor = "multi_thread")]
async fn driver_processes_share_the_terminals_and_add_up() {
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
    // 800 fall due, with a standard deviation of 28. Those that a busy machine does not get done are not sent.
    let due = report.transactions + report.unsent;
    assert!(report.transactions > 0 && (660..940).contains(&due), "{report}");
    assert_eq!((report.driver.threads, report.tenants, report.failed), (2, 3, 0), "{report}");
    assert!(report.latency.count >= report.transactions && report.statements > 0, "{report}");

    let text = std::fs::read_to_string(lines).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Record>(line).unwrap());
    let (mut committed, mut intervals) = (0, 0);
    for record in records {
        let Record::Interval(interval) = record else { continue };
        assert_eq!(interval.driver_cpu.len(), 2, "each process has a thread");
        if interval.ends_s > 0.0 {
            intervals += 1;
            committed += interval.kinds[0].report.committed;
        }
    }
    assert_eq!(intervals, 4);
    // The last interval is handed over as the window closes: what ends in that moment may be in either.
    assert!(committed.abs_diff(report.transactions) <= 6, "{committed} {report}");
}

/// A driver whose parent was killed does not go on alone.
#[tokio::test(flavor = "multi_thread")]
async fn driver_processes_end_with_the_one_that_measures() {
    let server = start(Box::new(Fulmar::at(PathBuf::from(env!("CARGO_BIN_EXE_fulmar"))))).await;
    let mut client = client(&server).await;
    let url = target(&server).to_string();
    let mut parent = std::process::Command::new(env!("CARGO_BIN_EXE_fulmar"))
        .args(["bench", "run", "ycsb", "--target", &url, "--records", "50", "--connections", "4"])
        .args(["--processes", "2", "--seconds", "3600"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // One of the sessions is the test's.
    let sessions = format!("SELECT count(*) FROM pg_stat_activity WHERE datname = '{DATABASE}'");
    until("the drivers have connected", async || number(&mut client, &sessions).await >= 5).await;
    parent.kill().unwrap();
    parent.wait().unwrap();
    until("the drivers have ended", async || number(&mut client, &sessions).await == 1).await;
}

#[test]
fn a_papers_figure_is_run_and_drawn() {
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("figure.html");
    let small = ["--scale", "0.0001", "--memory-mib", "64", "--line", "hotspot:90:20", "--seconds", "1"];
    let arguments = ["bench", "figure", "elastras/6", "--output", page.to_str().unwrap()];
    let rows = stdout(&command(&[&arguments[..], &small].concat()));
    let rows: Vec<Vec<&str>> = rows.lines().skip(1).map(|row| row.split(',').collect()).collect();
    let reads: Vec<&str> = rows.iter().map(|row| row[2]).collect();
    assert_eq!(reads, ["50", "60", "70", "80", "90"]);
    for row in &rows {
        assert_eq!((row[0], row[1], row[8]), ("elastras/6", "hotspot:90:20", ""), "{row:?}");
        assert!(row[3].parse::<f64>().unwrap() > 0.0, "{row:?}");
    }
    assert!(std::fs::read_to_string(page).unwrap().matches("<svg").count() == 3);

    let unknown = common::refusal(&command(&["bench", "figure", "elastras/99"]), 1);
    assert!(unknown.contains("elastras/4"), "{unknown}");
    let unknown = common::refusal(&command(&["bench", "figure", "elastras/6", "--line", "no"]), 1);
    assert!(unknown.contains("hotspot:90:20"), "{unknown}");
}

#[test]
fn figures_of_many_tenants_of_skew_and_of_memory() {
    let small = ["--scale", "0.0001", "--memory-mib", "64", "--seconds", "1"];
    for (name, points) in [("elastras/12", 3), ("estore/3", 3), ("cloudtps/13", 2)] {
        let rows = stdout(&command(&[&["bench", "figure", name][..], &small].concat()));
        let rows: Vec<&str> = rows.lines().skip(1).collect();
        assert_eq!(rows.len(), points, "{name}: {rows:?}");
        // The last column says why a point could not be measured.
        assert!(rows.iter().all(|row| row.starts_with(name) && row.ends_with(',')), "{name}: {rows:?}");
    }
}
