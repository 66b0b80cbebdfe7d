//! The test bench: a node, an attacking tenant, a neighbour tenant that measures latency, and the
//! check of each attack.

use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use crate::client::{self, PASSWORD, Raw, Response};
use crate::common::{Node, status, stdout};
use crate::neighbour::{self, Neighbour};
use crate::process::{self, Monitor};

/// The attacking tenant. Its user `OWNER` has all privileges in it, its user `READER` only SELECT.
pub const TENANT: &str = "attacked";
pub const OWNER: &str = "boss";
pub const READER: &str = "ro";

/// Limit on the latency of the neighbour's requests. The requirement is 1 s on idle cores, but
/// other programs may run during the tests, and machines may be slower.
const MAX_NEIGHBOUR_LATENCY: Duration = Duration::from_secs(5);
/// Limit on the resident memory of a node with `--memory 256MiB`.
const MAX_RESIDENT_BYTES: u64 = 512 << 20;
/// Limit on temporary files: four times the tenant's `max_size` of 64 MB, plus those of the node.
const MAX_TEMPORARY_BYTES: u64 = 300 << 20;
/// Number of requests of each kind that the neighbour makes after the response to an attack.
const REQUESTS_AFTER_ATTACK: u64 = 5;

/// Configures the smallest possible statement stack.
pub fn with_smallest_stack(command: &mut Command) {
    command.args(["--statement-stack", "4MiB"]);
}

/// Limits the tests to one node at a time, so that concurrent tests do not distort the
/// measurements.
static MACHINE_LOCK: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// The test bench of a family of attacks.
pub struct TestBench {
    family: &'static str,
    directory: tempfile::TempDir,
    configure: fn(&mut Command),
    /// `--memory` of the nodes, and the limit on their resident bytes.
    memory: (&'static str, u64),
    stage: Option<Stage>,
    report: String,
    failures: usize,
    _lock: tokio::sync::MutexGuard<'static, ()>,
}

/// A running node and its observers. The fields are dropped in this order.
struct Stage {
    neighbour: Neighbour,
    monitor: Monitor,
    node: Node,
}

impl Stage {
    /// Returns the exit status if the node has exited. With `is_closing`, waits up to 2 s: a node
    /// that dumps core closes its connections before it exits.
    async fn exit_status(&mut self, is_closing: bool) -> Option<ExitStatus> {
        let deadline = Instant::now() + if is_closing { Duration::from_secs(2) } else { Duration::ZERO };
        loop {
            let status = self.node.process.try_wait().unwrap();
            if status.is_some() || Instant::now() >= deadline {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let resident = self.monitor.peak_resident_bytes().unwrap_or(0);
        let (temporary, (latency, _)) = (self.monitor.peak_temporary_bytes(), self.neighbour.longest());
        write!(
            f,
            "neighbour latency {latency:.1?}, memory {} MiB, temporary files {} MiB",
            resident >> 20,
            temporary >> 20
        )
    }
}

impl TestBench {
    /// Creates a data directory with the tenants. The owner of the attacking tenant runs `schema`.
    pub async fn new(family: &'static str, schema: &[&str]) -> TestBench {
        let arena = TestBench {
            family,
            directory: tempfile::Builder::new().prefix("fulmar-attacks-").tempdir().unwrap(),
            configure: |_| (),
            memory: ("256MiB", MAX_RESIDENT_BYTES),
            stage: None,
            report: String::new(),
            failures: 0,
            _lock: MACHINE_LOCK.lock().await,
        };
        arena.prepare(schema).await;
        arena
    }

    /// Sets a function that adds flags or environment variables to the node's command.
    pub fn configured(mut self, configure: fn(&mut Command)) -> TestBench {
        self.configure = configure;
        self.stage = None;
        self
    }

    /// Changes `--memory` and the limit on resident bytes for later nodes.
    pub fn set_memory(&mut self, memory: &'static str, resident_bytes: u64) {
        self.memory = (memory, resident_bytes);
        self.stage = None;
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join(name)
    }

    fn run_node(&self) -> Node {
        let (data, tmpdir, log) = (self.path("data"), self.path("tmp"), self.path("log"));
        std::fs::create_dir_all(&tmpdir).unwrap();
        let mut command = Node::command(&data, &["--memory", self.memory.0, "--disk-reserve", "0"]);
        let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        command.env("TMPDIR", tmpdir).stderr(log);
        (self.configure)(&mut command);
        Node::run(command)
    }

    async fn prepare(&self, schema: &[&str]) {
        let node = self.run_node();
        let password = std::fs::read_to_string(self.path("data").join("superuser-password")).unwrap();
        let mut superuser = client::config(&node.sql, "fulmar", "fulmar");
        let (admin, connection) =
            superuser.password(password.trim()).connect(tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        for user in [OWNER, READER, neighbour::TENANT] {
            admin.batch_execute(&format!("CREATE USER {user} PASSWORD '{PASSWORD}'")).await.unwrap();
        }
        for (tenant, owner) in [(TENANT, OWNER), (neighbour::TENANT, neighbour::TENANT)] {
            admin.batch_execute(&format!("CREATE DATABASE {tenant} OWNER {owner}")).await.unwrap();
        }
        admin.batch_execute(&format!("ALTER DATABASE {TENANT} SET max_size = '64MB'")).await.unwrap();
        admin.batch_execute(&format!("GRANT SELECT ON DATABASE {TENANT} TO {READER}")).await.unwrap();
        let neighbour = client::log_in(&node.sql, neighbour::TENANT, neighbour::TENANT).await.unwrap();
        neighbour.batch_execute("CREATE TABLE probe(id INTEGER PRIMARY KEY)").await.unwrap();
        let owner = client::log_in(&node.sql, TENANT, OWNER).await.unwrap();
        for statement in schema {
            owner.batch_execute(statement).await.unwrap();
        }
        drop((admin, neighbour, owner));
        assert_eq!(node.stop_with(rustix::process::Signal::TERM), Some(0));
    }

    /// Ends the node, so that the next attack gets a new one.
    pub fn end_node(&mut self) {
        self.stage = None;
    }

    async fn stage(&mut self) -> &mut Stage {
        let is_alive =
            self.stage.as_mut().is_some_and(|stage| stage.node.process.try_wait().unwrap().is_none());
        if !is_alive {
            self.stage = None;
            let node = self.run_node();
            let monitor = Monitor::start(node.process.id(), &self.path("data"), &self.path("tmp"));
            let neighbour = Neighbour::start(&node).await.unwrap();
            self.stage = Some(Stage { neighbour, monitor, node });
        }
        self.stage.as_mut().unwrap()
    }

    /// Returns the address of the node. Starts one if none is running.
    pub async fn target(&mut self) -> Target {
        let node = &self.stage().await.node;
        Target { sql: node.sql.clone(), http: node.http.clone(), process: node.process.id() }
    }

    /// Runs an attack and checks its effects. The response must have one of the SQLSTATEs
    /// `expected`; `00000` is success.
    pub async fn attack(
        &mut self,
        name: &str,
        expected: &[&str],
        attack: impl AsyncFnOnce(&Target) -> Response,
    ) {
        let target = self.target().await;
        let stage = self.stage().await;
        stage.neighbour.make_requests(1, MAX_NEIGHBOUR_LATENCY).await;
        stage.neighbour.reset();
        stage.monitor.reset();
        let began = Instant::now();
        let answer = attack(&target).await;
        let took = began.elapsed();
        stage.neighbour.make_requests(REQUESTS_AFTER_ATTACK, MAX_NEIGHBOUR_LATENCY).await;

        let measures = format!("{answer} after {took:.1?}; {stage}");
        let mut violations = self.violations().await;
        if !expected.contains(&answer.state()) {
            violations.push(format!("expected {}", expected.join(", ")));
        }
        let verdict = if violations.is_empty() {
            "passed".to_owned()
        } else {
            format!("FAILED: {}", violations.join("; "))
        };
        let line = format!("{} {name}: {measures}: {verdict}", self.family);
        println!("{line}");
        if !violations.is_empty() {
            self.failures += 1;
            self.report += &format!("\n  {line}");
            // Do not measure the remains of this attack with the next one.
            self.end_node();
        }
    }

    /// Returns the violations since the last attack began: the node has exited, exceeds a limit, or
    /// has delayed or failed the neighbour's requests.
    pub async fn violations(&mut self) -> Vec<String> {
        let Some(stage) = &mut self.stage else { return Vec::new() };
        let mut violations = Vec::new();
        let failures = stage.neighbour.failures();
        match (stage.monitor.excess(), stage.exit_status(!failures.is_empty()).await) {
            (Some(excess), _) => violations.push(excess),
            (None, Some(status)) => violations.push(format!("the node exited: {status}")),
            (None, None) => violations.extend(failures),
        }
        let (latency, request) = stage.neighbour.longest();
        if latency > MAX_NEIGHBOUR_LATENCY {
            violations.push(format!(
                "the neighbour waited {latency:.1?} for {request}, longer than \
                 {MAX_NEIGHBOUR_LATENCY:?}"
            ));
        }
        let resident_bytes = self.memory.1;
        if stage.monitor.peak_resident_bytes() > Some(resident_bytes) {
            violations.push(format!("memory above {} MiB: {stage}", resident_bytes >> 20));
        }
        if stage.monitor.peak_temporary_bytes() > MAX_TEMPORARY_BYTES {
            violations.push(format!("temporary files above {} MiB: {stage}", MAX_TEMPORARY_BYTES >> 20));
        }
        violations
    }

    /// Runs a statement in a new session as an attack.
    pub async fn statement(&mut self, name: &str, expected: &[&str], user: &str, sql: &str) {
        self.attack(name, expected, async |target| target.run(user, &[sql]).await).await;
    }

    /// Panics if an attack has succeeded.
    pub fn assert_no_failures(self) {
        let log = std::fs::read_to_string(self.path("log")).unwrap_or_default();
        let log: Vec<&str> = log.lines().rev().take(10).collect();
        let log: String = log.into_iter().rev().map(|line| format!("\n  {line}")).collect();
        assert!(
            self.failures == 0,
            "{} attacks succeeded:{}\nthe node's log ends with:{log}",
            self.failures,
            self.report
        );
    }
}

/// The addresses of the node under attack.
pub struct Target {
    sql: String,
    http: String,
    process: u32,
}

impl Target {
    /// Returns the host and port for SQL.
    pub fn address(&self) -> &str {
        &self.sql
    }

    /// Returns the CPU time that the threads of the offload pool have used.
    pub fn offload_cpu(&self) -> Duration {
        process::cpu_of_threads(self.process, "fulmar-offload")
    }

    /// Returns the value of a metric. The node must run with `--public-metrics`.
    pub fn metric(&self, name: &str) -> u64 {
        let status = stdout(&status(&["--json", "--http", &self.http]));
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        let found = status["metrics"].as_array().unwrap().iter().find(|metric| metric["name"] == name);
        found.and_then(|metric| metric["value"].as_f64()).unwrap_or_else(|| panic!("{name} in {status}"))
            as u64
    }

    /// Opens a session in the attacking tenant.
    pub async fn log_in(&self, user: &str) -> Result<tokio_postgres::Client, tokio_postgres::Error> {
        client::log_in(&self.sql, TENANT, user).await
    }

    pub async fn log_in_raw(&self, user: &str) -> std::io::Result<Raw> {
        Raw::log_in(&self.sql, TENANT, user).await
    }

    /// Runs statements in a new session until one fails.
    pub async fn run(&self, user: &str, statements: &[&str]) -> Response {
        client::answer(async {
            let session = self.log_in(user).await?;
            for statement in statements {
                session.batch_execute(statement).await?;
            }
            Ok(())
        })
        .await
    }
}
