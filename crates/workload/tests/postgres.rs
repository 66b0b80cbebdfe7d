//! The client and the YCSB workload against a real PostgreSQL, which each test starts for itself.

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
async fn statements_transactions_and_errors() {
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
    assert!(client.in_transaction(), "a failed transaction is still one");
    client.query("ROLLBACK").await.unwrap();
    assert!(!client.in_transaction());

    let missing = client.prepare("SELECT * FROM nowhere", &[]).await.unwrap_err();
    assert_eq!(missing.sqlstate(), Some("42P01"));
    assert_eq!(client.query("SELECT count(*) FROM t").await.unwrap(), [[text("2")]]);
}

#[tokio::test]
async fn answers_longer_than_the_buffer() {
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
async fn every_authentication() {
    for method in ["scram-sha-256", "md5", "password"] {
        let product = Postgres::installed().unwrap().with_password(method, "s3cret words");
        let server = Server::start(Box::new(product), MEMORY_BYTES, 10).await.unwrap();
        let mut target = server.target();
        Client::connect(&target).await.unwrap().query("SELECT 1").await.unwrap();

        target.password = Some("wrong".to_owned());
        let error = Client::connect(&target).await.err().expect("a wrong password");
        assert_eq!(error.sqlstate(), Some("28P01"), "{method}");
        target.password = None;
        let error = Client::connect(&target).await.err().expect("no password");
        assert!(error.to_string().contains("password"), "{method}: {error}");
    }
}

#[tokio::test]
async fn a_server_that_goes_is_noticed_and_comes_back_with_its_data() {
    let mut server = postgres().await;
    let mut client = Client::connect(&server.target()).await.unwrap();
    client.query("CREATE TABLE kept AS SELECT 7 AS n").await.unwrap();
    server.kill().await.unwrap();
    assert!(client.query("SELECT 1").await.unwrap_err().ends_session());
    let target = server.target();
    server.start_until(&target, "SELECT n FROM kept").await.unwrap();
    server.stop().await.unwrap();
    server.start_again().await.unwrap();
    let mut client = Client::connect(&target).await.unwrap();
    assert_eq!(client.query("SELECT n FROM kept").await.unwrap(), [[Some("7".to_owned())]]);
    assert!(server.processes().unwrap().cpu().unwrap() > Duration::ZERO);
}

/// The state of a process as `/proc` has it; `None` when it is gone.
fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

#[tokio::test]
async fn a_frozen_server_is_thawed_and_a_dropped_one_leaves_nothing() {
    let mut server = postgres().await;
    let tree = server.processes().unwrap();
    server.freeze().unwrap();
    let pids = tree.pids().unwrap();
    assert!(pids.len() > 3, "the postmaster and its workers: {pids:?}");
    // The signal is delivered when a process next runs. (One that ended in between stays a zombie: its parent, frozen,
    // cannot take note.)
    let is_frozen = async {
        while !pids.iter().all(|pid| matches!(state(*pid), None | Some('T' | 'Z'))) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), is_frozen).await.expect("timed out: every process stops");
    server.thaw().unwrap();
    Client::connect(&server.target()).await.unwrap().query("SELECT 1").await.unwrap();
    server.freeze().unwrap();
    drop(server);
    assert!(pids.iter().all(|pid| !matches!(state(*pid), Some('T' | 'R' | 'S' | 'D'))), "all are gone");
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

/// Rows of the three tables that differ from what they were, and rows in all.
async fn count(client: &mut Client, sql: &str) -> u64 {
    let rows = client.query(sql).await.unwrap();
    rows[0][0].as_ref().unwrap().parse().unwrap()
}

#[tokio::test]
async fn ycsb_loads_runs_and_changes_what_it_says() {
    let server = postgres().await;
    let mut client = Client::connect(&server.target()).await.unwrap();
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = events.clone();
    let mut options = options(&server);
    options.watcher = Some(Arc::new(move |event| told.lock().unwrap().push(event.clone())));

    // Twice: the second run finds the data and must not write what the first has written.
    for round in 0..2 {
        client.query("DROP TABLE IF EXISTS before").await.unwrap();
        if round == 1 {
            client.query("CREATE TABLE before AS SELECT * FROM ycsb_primary").await.unwrap();
        }
        let report = run(workload(300), options.clone()).await.unwrap();
        assert!(report.transactions > 0 && report.failed == 0 && report.lost_connections == 0, "{report}");
        assert_eq!(report.statements, report.transactions * 12, "ten operations, BEGIN, COMMIT");
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
    let place = |wanted: fn(&RunEvent) -> bool| events.iter().position(wanted).expect("the event came");
    let loaded = place(|event| matches!(event, RunEvent::Loading { rows: 900, of: 900 }));
    let opens = place(|event| matches!(event, RunEvent::Opens));
    let ticks = place(|event| matches!(event, RunEvent::Tick(tick) if tick.throughput_tps > 0.0));
    let closes = place(|event| matches!(event, RunEvent::Closes));
    assert!(loaded < opens && opens < closes && loaded < ticks);
}

#[tokio::test]
async fn conflicts_are_run_again_and_counted() {
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
        .expect("timed out: transactions conflict");
    assert!(report.errors.keys().eq(["40001"]), "{report}");
}

#[tokio::test]
async fn an_open_loop_over_tenants_keeps_its_rate() {
    let server = postgres().await;
    let databases = tenants::names("t_", 4);
    tenants::create(&server.target(), &databases, |_| ()).await.unwrap();
    tenants::create(&server.target(), &databases, |_| ()).await.expect("existing databases are fine");
    let mut options = options(&server);
    options.databases = databases;
    options.arrival = Arrival::poisson(200.0);
    options.measure = Duration::from_secs(2);
    let report = run(Ycsb { operations: 1, ..workload(20) }, options).await.unwrap();
    assert_eq!(report.tenants, 4);
    assert_eq!(report.statements, report.transactions, "one statement each, without BEGIN and COMMIT");
    // 400 are expected with a standard deviation of 20 (Poisson).
    let due = report.transactions + report.unsent;
    assert!((280..=520).contains(&due), "{report}");
}

/// Starts a run and comes back when its measured window is open, and so many ticks have gone by in it.
async fn start(mut options: RunOptions, ticks: usize) -> JoinHandle<anyhow::Result<Report>> {
    let (told, mut events) = tokio::sync::mpsc::unbounded_channel();
    options.watcher = Some(Arc::new(move |event| {
        // Nobody listens any more when the run has begun.
        let _ = told.send(event.clone());
    }));
    let run = tokio::spawn(run(workload(300), options));
    while !matches!(events.recv().await.expect("the window opens"), RunEvent::Opens) {}
    for _ in 0..ticks {
        while !matches!(events.recv().await.expect("the window goes on"), RunEvent::Tick(_)) {}
    }
    run
}

#[tokio::test]
async fn losing_the_server_ends_a_run_without_patience() {
    let mut server = postgres().await;
    let mut options = options(&server);
    options.measure = Duration::from_secs(600);
    let run = start(options, 0).await;
    server.kill().await.unwrap();
    let error = run.await.unwrap().unwrap_err();
    assert!(
        error.to_string().contains("lost postgres://") || error.to_string().contains("cannot use"),
        "{error:#}"
    );
}

#[tokio::test]
async fn a_patient_run_outlives_the_server() {
    let mut server = postgres().await;
    let mut options = options(&server);
    options.measure = Duration::from_secs(5);
    options.patience = Duration::from_secs(60);
    let run = start(options, 0).await;
    server.kill().await.unwrap();
    server.start_again().await.unwrap();
    let report = run.await.unwrap().unwrap();
    assert!(report.lost_connections >= 3, "{report}");
    assert_eq!(report.failed, report.lost_connections, "each took a transaction of unknown outcome with it");
}

#[tokio::test]
async fn tables_of_another_size_are_not_measured() {
    let server = postgres().await;
    run(workload(300), options(&server)).await.unwrap();
    let error = run(workload(100), options(&server)).await.unwrap_err();
    assert!(format!("{error:#}").contains("--records 300"), "{error:#}");
}

/// The thesis's schedule against a server that stands still for a while: everything that it must show. What it must not show
/// more of is the matter of the meter's own tests, which have no machine that may stand still too.
#[tokio::test]
async fn a_server_that_stops_for_ten_seconds_is_seen_to() {
    const STOPPED: Duration = Duration::from_secs(10);
    // What was sent before the stop is answered a little later.
    const LEAST_S: f64 = 8.5;
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
    tokio::time::sleep(STOPPED).await;
    server.thaw().unwrap();
    let report = run.await.unwrap().unwrap();

    assert!(report.availability.outages >= 1, "{report}");
    assert!(report.availability.longest_outage_s >= LEAST_S, "{report}");
    assert!(report.availability.unavailable_s >= report.availability.longest_outage_s, "{report}");
    assert!(
        report.latency.p999_ms / 1e3 >= LEAST_S,
        "what was due at the stop waited for all of it: {report}"
    );
    // Of 1,600 that fell due 1,000 did so in the stop, evenly: the 5 % that waited longest did so for 9.2 s or more.
    assert!(report.latency.p95_ms / 1e3 >= LEAST_S - 1.0, "{report}");
    assert!(report.availability.down_intervals >= 8, "{report}");
    assert_eq!(report.availability.worst_tenant_tps.len(), 1, "one whole slot of ten seconds");
    assert_eq!((report.failed, report.lost_connections, report.cancelled), (0, 0, 0), "{report}");

    let text = std::fs::read_to_string(lines).unwrap();
    let records: Vec<Record> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let Some(Record::Report(last)) = records.last() else { panic!("the report is last: {text}") };
    assert_eq!((last.transactions, &last.kinds[0].kind), (report.transactions, &"transaction".to_owned()));
    let intervals: Vec<_> = records
        .iter()
        .filter_map(|record| match record {
            Record::Interval(interval) => Some(interval),
            _ => None,
        })
        .collect();
    assert_eq!(intervals.len(), 17, "a cut one of the warm-up, and the window's");
    let silent =
        intervals.iter().filter(|interval| interval.kinds[0].report.committed == 0 && interval.ends_s > 0.0);
    assert!(silent.count() >= 8);
    let samples = intervals
        .iter()
        .filter(|interval| interval.ends_s > 0.0)
        .flat_map(|interval| &interval.kinds[0].samples_us);
    let counted: u64 = samples.map(|(_, count)| count).sum();
    assert!(counted >= report.transactions, "all samples are there");
    assert!(intervals.iter().any(|interval| interval.usage.is_some_and(|usage| usage.cpu_s > 0.0)));
    assert!(report.server.is_some_and(|server| server.usage.pss_bytes > 1 << 20));
}

#[tokio::test]
async fn a_schedule_cancels_what_is_too_late_and_counts_the_lost_work() {
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
    // Of five seconds' work, that of the last one was still in time.
    let lost_s = report.lost_work_s.expect("an open loop");
    assert!(lost_s >= 3.0, "{report}");
    assert!((report.cancelled as f64 / 100.0 - lost_s).abs() < 1e-9);
    assert!(report.latency.max_ms >= 4_500.0, "one for each connection was under way: {report}");
}

#[tokio::test]
async fn threads_share_the_terminals_and_add_up() {
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
    // 1,200 fall due, with a standard deviation of 35. Those that a busy machine does not get done are not sent.
    let due = report.transactions + report.unsent;
    assert!((1_000..=1_400).contains(&due), "{report}");
    // The ticks have those of the warm-up too.
    let ticked = *ticked.lock().unwrap();
    assert!(report.transactions > 0 && ticked >= report.transactions as f64 - 1.0, "{ticked} {report}");
    assert_eq!((report.tenants, report.driver.threads), (3, 2));
    for (tenant, rows) in [("t_0000", 49), ("t_0001", 25), ("t_0002", 16)] {
        let mut client = Client::connect(&server.target().with_database(tenant)).await.unwrap();
        assert_eq!(count(&mut client, "SELECT count(*) FROM ycsb_primary").await, rows, "{tenant}");
    }
}
