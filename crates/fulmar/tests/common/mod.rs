//! The command, nodes that it runs, and clients of them.
//!
//! Nodes run in temporary directories on ports that the kernel chooses (`127.0.0.1:0`), and end with their guard.

#![allow(dead_code, reason = "every test file takes what it needs")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use tokio_postgres::NoTls;

/// Deadline of every wait in a test. A wait that takes longer is a hang, not a slow machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Polls until `holds` returns true. Panics after [`PATIENCE`].
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let poll = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(what, poll).await;
}

/// The result of `future`. Panics after [`PATIENCE`].
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("timed out: {what}"),
    }
}

/// Waits for the end of a process. Panics after [`PATIENCE`].
pub fn wait(process: &mut Child) -> ExitStatus {
    let began = Instant::now();
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return status;
        }
        assert!(began.elapsed() < PATIENCE, "timed out: the process ends");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The same command, started with SIGHUP ignored or not. A process inherits that: under nohup the tests ignore it, and else a node that
/// they start would, too.
pub fn with_hangups(ignored: bool, command: Command) -> Command {
    let mut env = Command::new("env");
    env.arg(if ignored { "--ignore-signal=HUP" } else { "--default-signal=HUP" });
    env.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => env.env(name, value),
            None => env.env_remove(name),
        };
    }
    env
}

pub fn fulmar(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fulmar"));
    command.args(arguments).env_remove("FULMAR_SERVER").env_remove("PGPASSWORD").env_remove("RUST_LOG");
    command
}

/// Runs a command that ends by itself.
pub fn run(arguments: &[&str]) -> Output {
    fulmar(arguments).output().unwrap()
}

pub fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The error text of a command that must fail with this exit code.
pub fn refusal(output: &Output, code: i32) -> String {
    assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A node that runs; killed when dropped.
pub struct Node {
    pub process: Child,
    pub sql: String,
    pub http: String,
}

impl Node {
    pub fn start(data: &Path, flags: &[&str]) -> Self {
        Self::start_with(data, flags, Stdio::inherit())
    }

    /// The same, with its log going elsewhere.
    pub fn start_with(data: &Path, flags: &[&str], log: Stdio) -> Self {
        let mut command = Self::command(data, flags);
        command.stderr(log);
        Self::run(command)
    }

    /// What starts a node.
    pub fn command(data: &Path, flags: &[&str]) -> Command {
        let data = data.to_str().unwrap();
        let mut command = fulmar(&["start", "--data", data, "--sql", "127.0.0.1:0", "--http", "127.0.0.1:0"]);
        command.args(flags);
        for (flag, value) in [("--memory", "64MB"), ("--log-level", "warn")] {
            if !flags.contains(&flag) {
                command.args([flag, value]);
            }
        }
        command
    }

    /// Runs a command that starts a node, and waits until it is ready.
    pub fn run(mut command: Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        // fulmar ready: sql 127.0.0.1:1, http 127.0.0.1:2, data DIR
        let words: Vec<&str> = line.trim_end().splitn(8, ' ').collect();
        assert_eq!((words[0], words[1], words[2], words[4]), ("fulmar", "ready:", "sql", "http"), "{line}");
        assert!(["data", "reads"].contains(&words[6]), "{line}");
        let address = |word: &str| word.trim_end_matches(',').to_owned();
        Self { process, sql: address(words[3]), http: address(words[5]) }
    }

    pub fn url(&self) -> String {
        format!("postgres://fulmar@{}", self.sql)
    }

    /// Ends it with a signal; answers its exit code.
    pub fn end(mut self, signal: rustix::process::Signal) -> Option<i32> {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.process), signal).unwrap();
        wait(&mut self.process).code()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A client's connection to a database of a node.
pub async fn client(node: &Node, database: &str) -> tokio_postgres::Client {
    let (client, connection) =
        tokio_postgres::connect(&format!("{}/{database}", node.url()), NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

pub async fn number(client: &tokio_postgres::Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}
