//! A node, a tenant that attacks it, a neighbour that measures, and the judgement of each attack.

use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use crate::client::{self, Answer, PASSWORD, Raw};
use crate::common::{Node, run, stdout};
use crate::neighbour::{self, Neighbour};
use crate::process::Monitor;

/// The tenant that attacks. Its user `OWNER` has all rights in it, its user `READER` only SELECT.
pub const TENANT: &str = "attacked";
pub const OWNER: &str = "boss";
pub const READER: &str = "ro";

/// The requirement is 1 s on idle cores. Other programs may run during the tests, and machines may be slower.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// Of a node with `--memory 256MiB`.
const RESIDENT_BYTES: u64 = 512 << 20;
/// The tenant's limit is four times its `max_size` of 64 MB; the rest is the node's own.
const TEMPORARY_BYTES: u64 = 300 << 20;
/// Requests of each kind that the neighbour makes after an attack has been answered.
const REQUESTS_AFTERWARDS: u64 = 5;

/// Starts a node whose statements have the smallest stack that can be set.
pub fn with_smallest_stack(command: &mut Command) {
    command.args(["--statement-stack", "4MiB"]);
}

/// One node at a time: what is measured is the attack, not the test next to it.
static MACHINE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// What is started, prepared and judged.
pub struct Arena {
    family: &'static str,
    directory: tempfile::TempDir,
    configure: fn(&mut Command),
    /// `--memory` of the nodes, and the most that one may take.
    memory: (&'static str, u64),
    stage: Option<Stage>,
    report: String,
    failures: usize,
    _machine: tokio::sync::MutexGuard<'static, ()>,
}

/// A node that runs, with its watchers. Dropped in this order.
struct Stage {
    neighbour: Neighbour,
    monitor: Monitor,
    node: Node,
}

impl Stage {
    /// How the node has ended, if it has. One that dumps its core closes its connections before it ends.
    async fn end(&mut self, is_closing: bool) -> Option<ExitStatus> {
        let deadline = Instant::now() + if is_closing { Duration::from_secs(2) } else { Duration::ZERO };
        loop {
            let ended = self.node.process.try_wait().unwrap();
            if ended.is_some() || Instant::now() >= deadline {
                return ended;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let resident = self.monitor.peak_resident_bytes().unwrap_or(0);
        let (temporary, (waited, _)) = (self.monitor.peak_temporary_bytes(), self.neighbour.longest());
        write!(
            f,
            "the neighbour waited {waited:.1?}, memory {} MiB, temporary files {} MiB",
            resident >> 20,
            temporary >> 20
        )
    }
}

impl Arena {
    /// A data directory with the tenants. `schema` is run by the owner of the tenant that attacks.
    pub async fn new(family: &'static str, schema: &[&str]) -> Arena {
        let arena = Arena {
            family,
            directory: tempfile::Builder::new().prefix("fulmar-attacks-").tempdir().unwrap(),
            configure: |_| (),
            memory: ("256MiB", RESIDENT_BYTES),
            stage: None,
            report: String::new(),
            failures: 0,
            _machine: MACHINE.lock().await,
        };
        arena.prepare(schema).await;
        arena
    }

    /// Nodes are started with more flags or variables.
    pub fn configured(mut self, configure: fn(&mut Command)) -> Arena {
        self.configure = configure;
        self.stage = None;
        self
    }

    /// From now on nodes are started with another `--memory`, and may take `resident_bytes`.
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
        assert_eq!(node.end(rustix::process::Signal::TERM), Some(0));
    }

    /// Ends the node, so that the next attack begins with a fresh one.
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

    /// The node's address; starts one if none runs.
    pub async fn target(&mut self) -> Target {
        let node = &self.stage().await.node;
        Target { sql: node.sql.clone(), http: node.http.clone() }
    }

    /// Runs an attack and judges it. It must be answered with one of the SQLSTATEs `expected`; `00000` is success.
    pub async fn attack(
        &mut self,
        name: &str,
        expected: &[&str],
        attack: impl AsyncFnOnce(&Target) -> Answer,
    ) {
        let target = self.target().await;
        let stage = self.stage().await;
        stage.neighbour.make_requests(1, LONGEST_WAIT).await;
        stage.neighbour.reset();
        stage.monitor.reset();
        let began = Instant::now();
        let answer = attack(&target).await;
        let took = began.elapsed();
        stage.neighbour.make_requests(REQUESTS_AFTERWARDS, LONGEST_WAIT).await;

        let measures = format!("{answer} after {took:.1?}; {stage}");
        let mut complaints = self.complaints().await;
        if !expected.contains(&answer.state()) {
            complaints.push(format!("expected {}", expected.join(", ")));
        }
        let verdict = if complaints.is_empty() {
            "held".to_owned()
        } else {
            format!("FAILED: {}", complaints.join("; "))
        };
        let line = format!("{} {name}: {measures}: {verdict}", self.family);
        println!("{line}");
        if !complaints.is_empty() {
            self.failures += 1;
            self.report += &format!("\n  {line}");
            // What the attack left running must not be measured with the next one.
            self.end_node();
        }
    }

    /// What is wrong with the node since the last attack began: it has ended, holds too much, or let the neighbour wait.
    pub async fn complaints(&mut self) -> Vec<String> {
        let Some(stage) = &mut self.stage else { return Vec::new() };
        let mut complaints = Vec::new();
        let failures = stage.neighbour.failures();
        match (stage.monitor.excess(), stage.end(!failures.is_empty()).await) {
            (Some(excess), _) => complaints.push(excess),
            (None, Some(status)) => complaints.push(format!("the node ended: {status}")),
            (None, None) => complaints.extend(failures),
        }
        let (waited, request) = stage.neighbour.longest();
        if waited > LONGEST_WAIT {
            complaints.push(format!(
                "the neighbour waited {waited:.1?} for {request}, longer than {LONGEST_WAIT:?}"
            ));
        }
        let resident_bytes = self.memory.1;
        if stage.monitor.peak_resident_bytes() > Some(resident_bytes) {
            complaints.push(format!("memory above {} MiB: {stage}", resident_bytes >> 20));
        }
        if stage.monitor.peak_temporary_bytes() > TEMPORARY_BYTES {
            complaints.push(format!("temporary files above {} MiB: {stage}", TEMPORARY_BYTES >> 20));
        }
        complaints
    }

    /// A statement of a new session.
    pub async fn statement(&mut self, name: &str, expected: &[&str], user: &str, sql: &str) {
        self.attack(name, expected, async |target| target.run(user, &[sql]).await).await;
    }

    /// Fails if an attack has succeeded.
    pub fn judge(self) {
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

/// The node under attack, as its clients see it.
pub struct Target {
    sql: String,
    http: String,
}

impl Target {
    /// Host and port for SQL.
    pub fn address(&self) -> &str {
        &self.sql
    }

    /// A metric of the node, which must run with `--public-metrics`.
    pub fn metric(&self, name: &str) -> u64 {
        let status = stdout(&run(&["status", "--json", "--http", &self.http]));
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        let found = status["metrics"].as_array().unwrap().iter().find(|metric| metric["name"] == name);
        found.and_then(|metric| metric["value"].as_f64()).unwrap_or_else(|| panic!("{name} in {status}"))
            as u64
    }

    /// A session in the tenant that attacks.
    pub async fn log_in(&self, user: &str) -> Result<tokio_postgres::Client, tokio_postgres::Error> {
        client::log_in(&self.sql, TENANT, user).await
    }

    pub async fn log_in_raw(&self, user: &str) -> std::io::Result<Raw> {
        Raw::log_in(&self.sql, TENANT, user).await
    }

    /// Runs statements in a new session until one fails.
    pub async fn run(&self, user: &str, statements: &[&str]) -> Answer {
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
