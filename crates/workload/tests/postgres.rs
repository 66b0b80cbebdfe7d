//! Tests of the client and of runs of YCSB against PostgreSQL. Each test starts its own server.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fulmar_workload::arrival::{Arrival, Shape};
use fulmar_workload::client::{Client, Parameter, Type};
use fulmar_workload::keys::Distribution;
use fulmar_workload::run::{Record, Report, RunEvent, RunOptions, run};
use fulmar_workload::server::{Postgres, Server};
use fulmar_workload::tenants;
use fulmar_workload::ycsb::Ycsb;
use tokio::task::JoinHandle;

const MEMORY_BYTES: u64 = 64 << 20;

async fn postgres() -> Server {
    Server::start(Box::new(Postgres::installed().unwrap()), MEMORY_BYTES, 50).await.unwrap()
}

#[tokio::test]
async fn client_runs_statements_and_reports_errors() {
    let server = postgres().await;
    let mut client = Client::connect(&server.target()).await.unwrap();
    client.query("CREATE TABLE t (id INTEGER PRIMARY KEY, name VARCHAR(20))").await.unwrap();

    let insert = client.prepare("INSERT INTO t VALUES ($1, $2)", &[Type::Int4, Type::Varchar]).await.unwrap();
    for (id, name) in [(1, "one"), (-2, "minus two")] {
        let row = [Parameter::Int4(id), Parameter::Text(name.as_bytes())];
        assert_eq!(client.execute(&insert, &row).await.unwrap(), 1);
    }
    let rows = client.query("SELECT id, name, NULL FROM t ORDER BY id").await.unwrap();
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(rows, [[text("-2"), text("minus two"), None], [text("1"), text("one"), None]]);

    let error = client.execute(&insert, &[Parameter::Int4(1), Parameter::Text(b"again")]).await.unwrap_err();
    assert_eq!(error.sqlstate(), Some("23505"));
    assert!(!error.is_retryable() && !error.ends_session());

    assert!(!client.in_transaction());
    client.query("BEGIN").await.unwrap();
    assert!(client.in_transaction());
    client.query("SELECT 1 / 0").await.unwrap_err();
    assert!(client.in_transaction(), "a failed transaction is still open");
    client.query("ROLLBACK").await.unwrap();
    assert!(!client.in_transaction());

    let missing = client.prepare("SELECT * FROM nowhere", &[]).await.unwrap_err();
    assert_eq!(missing.sqlstate(), Some("42P01"));
    assert_eq!(client.query("SELECT count(*) FROM t").await.unwrap(), [[text("2")]]);
}

#[tokio::test]
async fn client_reads_responses_larger_than_its_buffer() {
    let server = postgres().await;
    let mut client = Client::connect(&server.target()).await.unwrap();
    let rows = client.query("SELECT n, repeat('x', n) FROM generate_series(1, 3000) AS n").await.unwrap();
    assert_eq!(rows.len(), 3000);
    assert!(rows.iter().zip(1..).all(|(row, n)| row[1].as_ref().unwrap().len() == n));
    let all = client.prepare("SELECT repeat('x', n) FROM generate_series(1, 3000) AS n", &[]).await.unwrap();
    assert_eq!(client.execute(&all, &[]).await.unwrap(), 3000);
    let copy = client.query("COPY pg_type FROM STDIN").await.unwrap_err();
    assert!(copy.ends_session(), "{copy}");
}

#[tokio::test]
async fn client_supports_all_password_authentication_methods() {
    for method in ["scram-sha-256", "md5", "password"] {
        let product = Postgres::installed().unwrap().with_password(method, "s3cret words");
        let server = Server::start(Box::new(product), MEMORY_BYTES, 10).await.unwrap();
        let mut target = server.target();
        Client::connect(&target).await.unwrap().query("SELECT 1").await.unwrap();

        target.password = Some("wrong".to_owned());
        let error = Client::connect(&target).await.err();
        let error = error.expect("a wrong password must be rejected");
        assert_eq!(error.sqlstate(), Some("28P01"), "{method}");
        target.password = None;
        let error = Client::connect(&target).await.err();
        let error = error.expect("a missing password must be an error");
        assert!(error.to_string().contains("password"), "{method}: {error}");
    }
}

#[tokio::test]
async fn killed_server_is_detected_and_restarts_with_its_data() {
    let mut server = postgres().await;
    let mut client = Client::connect(&server.target()).await.unwrap();
    client.query("CREATE TABLE kept AS SELECT 7 AS n").await.unwrap();
    server.kill().await.unwrap();
    assert!(client.query("SELECT 1").await.unwrap_err().ends_session());
    let target = server.target();
    server.start_until(&target, "SELECT n FROM kept").await.unwrap();
    server.stop().await.unwrap();
    server.restart().await.unwrap();
    let mut client = Client::connect(&target).await.unwrap();
    assert_eq!(client.query("SELECT n FROM kept").await.unwrap(), [[Some("7".to_owned())]]);
    assert!(server.processes().unwrap().cpu().unwrap() > Duration::ZERO);
}

/// The state of a process in `/proc`, or `None` if it does not exist.
fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

#[tokio::test]
async fn server_can_be_thawed_and_dropping_it_ends_all_processes() {
    let mut server = postgres().await;
    let tree = server.processes().unwrap();
    server.freeze().unwrap();
    let pids = tree.pids().unwrap();
    assert!(pids.len() > 3, "the postmaster must have workers: {pids:?}");
    // A process stops when it next runs. One that ended meanwhile stays a zombie, because its
    // frozen parent cannot reap it.
    let is_frozen = async {
        while !pids.iter().all(|pid| matches!(state(*pid), None | Some('T' | 'Z'))) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let frozen = tokio::time::timeout(Duration::from_secs(120), is_frozen).await;
    frozen.expect("every process must stop within 120 s");
    server.thaw().unwrap();
    Client::connect(&server.target()).await.unwrap().query("SELECT 1").await.unwrap();
    server.freeze().unwrap();
    drop(server);
    let runs = |pid: &i32| matches!(state(*pid), Some('T' | 'R' | 'S' | 'D'));
    assert!(!pids.iter().any(runs), "dropping a server must end all its processes");
}

fn workload(records: u32) -> Ycsb {
    Ycsb { records, ..Ycsb::default() }
}

fn options(server: &Server) -> RunOptions {
    RunOptions {
        connections: 3,
        warm_up: Duration::from_millis(100),
        measure: Duration::from_millis(700),
        tick: Duration::from_millis(100),
        ..RunOptions::new(server.target())
    }
}

/// Runs a query that returns a number.
async fn count(client: &mut Client, sql: &str) -> u64 {
    let rows = client.query(sql).await.unwrap();
    rows[0][0].as_ref().unwrap().parse().unwrap()
}

#[tokio::test]
async fn ycsb_run_loads_updates_and_reports() {
    let server = postgres().await;
    let mut client = Client::connect(&server.target()).await.unwrap();
    let events = Arc::new(Mutex::new(Vec::new()));
    let pushed = events.clone();
    let mut options = options(&server);
    options.watcher = Some(Arc::new(move |event| pushed.lock().unwrap().push(event.clone())));

    // The second run finds the loaded data and must write other values than the first.
    for round in 0..2 {
        client.query("DROP TABLE IF EXISTS before").await.unwrap();
        if round == 1 {
            client.query("CREATE TABLE before AS SELECT * FROM ycsb_primary").await.unwrap();
        }
        let report = run(workload(300), options.clone()).await.unwrap();
        assert!(report.transactions > 0 && report.failed == 0 && report.lost_connections == 0, "{report}");
        assert_eq!(
            report.statements,
            report.transactions * 12,
            "a transaction has ten operations, BEGIN and COMMIT"
        );
        assert!(report.latency.p50_ms > 0.0 && report.latency.p50_ms <= report.latency.max_ms);
    }
    for table in ["ycsb_primary", "ycsb_secondary_1", "ycsb_secondary_2"] {
        let whole = "count(*) FILTER (WHERE length(field0) = 100 AND length(field9) = 100)";
        assert_eq!(count(&mut client, &format!("SELECT {whole} FROM {table}")).await, 300);
    }
    let changed =
        "SELECT count(*) FROM ycsb_primary a JOIN before b USING (id) WHERE a.* IS DISTINCT FROM b.*";
    assert!(count(&mut client, changed).await > 0);

    let events = events.lock().unwrap();
    let place = |wanted: fn(&RunEvent) -> bool| {
        events.iter().position(wanted).expect("the event must have been reported")
    };
    let loaded = place(|event| matches!(event, RunEvent::Loading { rows: 900, of: 900 }));
    let opens = place(|event| matches!(event, RunEvent::Opens));
    let ticks = place(|event| matches!(event, RunEvent::Tick(tick) if tick.throughput_tps > 0.0));
    let closes = place(|event| matches!(event, RunEvent::Closes));
    assert!(loaded < opens && opens < closes && loaded < ticks);
}

#[tokio::test]
async fn conflicts_are_retried_and_counted() {
    let server = postgres().await;
    let mut client = Client::connect(&server.target()).await.unwrap();
    client.query("ALTER SYSTEM SET default_transaction_isolation = 'serializable'").await.unwrap();
    client.query("SELECT pg_reload_conf()").await.unwrap();
    let mut options = options(&server);
    options.connections = 8;
    let workload = Ycsb { distribution: Distribution::Uniform, ..workload(2) };
    let conflict = async {
        loop {
            let report = run(workload.clone(), options.clone()).await.unwrap();
            if report.retries() > 0 && report.transactions > 0 {
                break report;
            }
        }
    };
    let report = tokio::time::timeout(Duration::from_secs(120), conflict)
        .await
        .expect("concurrent updates of two rows must conflict");
    assert!(report.errors.keys().eq(["40001"]), "{report}");
}

#[tokio::test]
async fn open_loop_over_tenants_has_the_requested_rate() {
    let server = postgres().await;
    let databases = tenants::names("t_", 4);
    tenants::create(&server.target(), &databases, |_| ()).await.unwrap();
    let again = tenants::create(&server.target(), &databases, |_| ()).await;
    again.expect("existing databases must not be an error");
    let mut options = options(&server);
    options.databases = databases;
    options.arrival = Arrival::poisson(200.0);
    options.measure = Duration::from_secs(2);
    let report = run(Ycsb { operations: 1, ..workload(20) }, options).await.unwrap();
    assert_eq!(report.tenants, 4);
    assert_eq!(
        report.statements, report.transactions,
        "a single operation must run without BEGIN and COMMIT"
    );
    // 400 are expected with a standard deviation of 20 (Poisson).
    let due = report.transactions + report.unsent;
    assert!((280..=520).contains(&due), "{report}");
}

/// Starts a run and returns after `ticks` ticks in its measured window.
async fn start(mut options: RunOptions, ticks: usize) -> JoinHandle<anyhow::Result<Report>> {
    let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
    options.watcher = Some(Arc::new(move |event| {
        // The receiver is dropped when this function returns.
        let _ = sender.send(event.clone());
    }));
    let run = tokio::spawn(run(workload(300), options));
    while !matches!(events.recv().await.expect("the window must open"), RunEvent::Opens) {}
    for _ in 0..ticks {
        while !matches!(events.recv().await.expect("a tick must come"), RunEvent::Tick(_)) {}
    }
    run
}

#[tokio::test]
async fn lost_server_ends_a_run_without_patience() {
    let mut server = postgres().await;
    let mut options = options(&server);
    options.measure = Duration::from_secs(600);
    let run = start(options, 0).await;
    server.kill().await.unwrap();
    let error = run.await.unwrap().unwrap_err();
    let text = error.to_string();
    let expected = ["lost connection to postgres://", "could not connect to postgres://"];
    assert!(expected.iter().any(|expected| text.contains(expected)), "{error:#}");
}

#[tokio::test]
async fn run_with_patience_survives_a_server_restart() {
    let mut server = postgres().await;
    let mut options = options(&server);
    options.measure = Duration::from_secs(5);
    options.reconnect_timeout = Duration::from_secs(60);
    let run = start(options, 0).await;
    server.kill().await.unwrap();
    server.restart().await.unwrap();
    let report = run.await.unwrap().unwrap();
    assert!(report.lost_connections >= 3, "{report}");
    assert_eq!(report.failed, report.lost_connections, "each lost connection must fail one transaction");
}

#[tokio::test]
async fn tables_of_another_size_are_rejected() {
    let server = postgres().await;
    run(workload(300), options(&server)).await.unwrap();
    let error = run(workload(100), options(&server)).await.unwrap_err();
    assert!(format!("{error:#}").contains("--records 300"), "{error:#}");
}

/// A server that stops for 10 s must show in all measures of an open loop. The tests of the meter
/// check that nothing more shows: here the machine itself may stop for a moment.
#[tokio::test]
async fn frozen_server_shows_in_all_measures() {
    const FREEZE: Duration = Duration::from_secs(10);
    // Less than the freeze, because what was sent just before it may be answered a little later.
    const MIN_OUTAGE_S: f64 = 8.5;
    let mut server = postgres().await;
    let mut options = options(&server);
    options.arrival = Arrival::poisson(100.0);
    options.measure = Duration::from_secs(16);
    options.tick = Duration::from_secs(1);
    options.server_processes = vec![server.processes().unwrap().root()];
    let directory = tempfile::tempdir().unwrap();
    let lines = directory.path().join("run.jsonl");
    options.output = Some(lines.clone());
    let run = start(options, 2).await;
    server.freeze().unwrap();
    tokio::time::sleep(FREEZE).await;
    server.thaw().unwrap();
    let report = run.await.unwrap().unwrap();

    assert!(report.availability.outages >= 1, "{report}");
    assert!(report.availability.longest_outage_s >= MIN_OUTAGE_S, "{report}");
    assert!(report.availability.unavailable_s >= report.availability.longest_outage_s, "{report}");
    assert!(
        report.latency.p999_ms / 1e3 >= MIN_OUTAGE_S,
        "transactions due at the start of the freeze must have waited for its end: {report}"
    );
    // Of 1,600 due transactions, 1,000 were due during the freeze, evenly distributed. The 5 % with
    // the longest wait waited at least 9.2 s.
    assert!(report.latency.p95_ms / 1e3 >= MIN_OUTAGE_S - 1.0, "{report}");
    assert!(report.availability.down_intervals >= 8, "{report}");
    let slots = report.availability.worst_tenant_tps.len();
    assert_eq!(slots, 1, "the window has one complete slot of 10 s");
    assert_eq!((report.failed, report.lost_connections, report.cancelled), (0, 0, 0), "{report}");

    let text = std::fs::read_to_string(lines).unwrap();
    let records: Vec<Record> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let Some(Record::Report(last)) = records.last() else {
        panic!("the last line must be the report: {text}")
    };
    assert_eq!((last.transactions, &last.kinds[0].kind), (report.transactions, &"transaction".to_owned()));
    let intervals: Vec<_> = records
        .iter()
        .filter_map(|record| match record {
            Record::Interval(interval) => Some(interval),
            _ => None,
        })
        .collect();
    assert_eq!(intervals.len(), 17, "one interval of the warm-up and 16 of the window");
    let silent =
        intervals.iter().filter(|interval| interval.kinds[0].report.committed == 0 && interval.ends_s > 0.0);
    assert!(silent.count() >= 8);
    let samples = intervals
        .iter()
        .filter(|interval| interval.ends_s > 0.0)
        .flat_map(|interval| &interval.kinds[0].samples_us);
    let counted: u64 = samples.map(|(_, count)| count).sum();
    assert!(counted >= report.transactions, "the intervals must have all samples");
    assert!(intervals.iter().any(|interval| interval.usage.is_some_and(|usage| usage.cpu_s > 0.0)));
    assert!(report.server.is_some_and(|server| server.usage.pss_bytes > 1 << 20));
}

#[tokio::test]
async fn schedule_cancels_late_transactions_and_counts_lost_work() {
    let mut server = postgres().await;
    let mut options = options(&server);
    let tolerance = Some(Duration::from_secs(1));
    options.arrival = Arrival::Open { rate_tps: 100.0, shape: Shape::constant(), tolerance };
    options.measure = Duration::from_secs(8);
    options.tick = Duration::from_secs(1);
    let run = start(options, 0).await;
    server.freeze().unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    server.thaw().unwrap();
    let report = run.await.unwrap().unwrap();
    // Of the 5 s of load during the freeze, the last second was within the tolerance.
    let lost_s = report.lost_work_s.expect("an open loop must report lost work");
    assert!(lost_s >= 3.0, "{report}");
    assert!((report.cancelled as f64 / 100.0 - lost_s).abs() < 1e-9);
    assert!(report.latency.max_ms >= 4_500.0, "one transaction per connection was in progress: {report}");
}

#[tokio::test]
async fn driver_threads_share_the_terminals_and_their_counts_are_added() {
    let server = postgres().await;
    let databases = tenants::names("t_", 3);
    tenants::create(&server.target(), &databases, |_| ()).await.unwrap();
    let mut options = options(&server);
    options.databases = databases;
    options.threads = 2;
    options.tenant_rates = Distribution::Zipfian { exponent: 1.0 };
    options.tenant_sizes = Distribution::Zipfian { exponent: 1.0 };
    options.arrival = Arrival::poisson(300.0);
    options.measure = Duration::from_secs(4);
    let ticked = Arc::new(Mutex::new(0.0));
    let sum = ticked.clone();
    options.watcher = Some(Arc::new(move |event| {
        if let RunEvent::Tick(tick) = event {
            *sum.lock().unwrap() += tick.throughput_tps * 0.1;
        }
    }));
    let report = run(workload(30), options).await.unwrap();
    // 1,200 transactions are due, with a standard deviation of 35. On a busy machine some of them
    // are not sent.
    let due = report.transactions + report.unsent;
    assert!((1_000..=1_400).contains(&due), "{report}");
    // The ticks include the warm-up.
    let ticked = *ticked.lock().unwrap();
    assert!(report.transactions > 0 && ticked >= report.transactions as f64 - 1.0, "{ticked} {report}");
    assert_eq!((report.tenants, report.driver.threads), (3, 2));
    for (tenant, rows) in [("t_0000", 49), ("t_0001", 25), ("t_0002", 16)] {
        let mut client = Client::connect(&server.target().with_database(tenant)).await.unwrap();
        assert_eq!(count(&mut client, "SELECT count(*) FROM ycsb_primary").await, rows, "{tenant}");
    }
}
