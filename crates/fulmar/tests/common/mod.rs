//! Test helpers that run the command, start nodes and connect clients.
//!
//! Nodes run in temporary directories, on ports chosen by the kernel (`127.0.0.1:0`). They are
//! killed when their guard is dropped.

#![allow(dead_code, reason = "each test file uses some of the helpers")]

pub mod gate;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use fulmar_workload::server::metadata_did_not_answer;
use tokio_postgres::NoTls;

/// Deadline of every wait in a test. A wait that takes longer is a hang, not a slow machine.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// The text of `/healthz` if a worker does not respond to a probe within 2 s, which a busy machine
/// can exceed.
pub const SLOW_WORKER: &str = "a worker thread does not respond";

/// Polls until `condition` returns true. Panics after [`WAIT_TIMEOUT`].
pub async fn wait_until(description: &str, condition: impl AsyncFnMut() -> bool) {
    wait_up_to(WAIT_TIMEOUT, description, condition).await;
}

/// Polls until `condition` returns true. Panics after `timeout`.
pub async fn wait_up_to(timeout: Duration, description: &str, mut condition: impl AsyncFnMut() -> bool) {
    let poll = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(timeout, poll).await.is_ok(), "timed out: {description}");
}

/// Awaits `future` and returns its result. Panics after [`WAIT_TIMEOUT`].
pub async fn with_timeout<T>(description: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(WAIT_TIMEOUT, future).await {
        Ok(value) => value,
        Err(_) => panic!("timed out: {description}"),
    }
}

/// Waits until a process exits. Panics after [`WAIT_TIMEOUT`].
pub fn wait(process: &mut Child) -> ExitStatus {
    let began = Instant::now();
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return status;
        }
        assert!(began.elapsed() < WAIT_TIMEOUT, "timed out: process exit");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Wraps a command so that it starts with SIGHUP ignored, or with its default action. A process
/// inherits this from its parent, and tests run under nohup ignore SIGHUP.
pub fn with_sighup_disposition(ignored: bool, command: Command) -> Command {
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

/// Runs a command to completion.
pub fn run(arguments: &[&str]) -> Output {
    fulmar(arguments).output().unwrap()
}

/// Runs a command to completion. Repeats it while it fails because the metadata store did not
/// answer in time, which also happens on a busy machine. Panics after [`WAIT_TIMEOUT`].
pub fn run_until_answered(mut command: Command) -> Output {
    let began = Instant::now();
    loop {
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        if output.status.success() || !metadata_did_not_answer(&error) {
            return output;
        }
        assert!(began.elapsed() < WAIT_TIMEOUT, "timed out: {command:?}: {error}");
    }
}

/// Runs a command that must fail, and not because the metadata store did not answer in time.
/// Returns its stderr.
pub async fn refusal(command: Command) -> String {
    let text = format!("{command:?}");
    let run = tokio::task::spawn_blocking(move || run_until_answered(command));
    let output = with_timeout(&text, run).await.unwrap();
    assert!(!output.status.success(), "{text}");
    String::from_utf8(output.stderr).unwrap()
}

/// Runs `fulmar status`. Repeats it while a worker of the node is slow. Panics after
/// [`WAIT_TIMEOUT`].
pub fn status(arguments: &[&str]) -> Output {
    let began = Instant::now();
    loop {
        let output = run(&[&["status"], arguments].concat());
        if !String::from_utf8_lossy(&output.stderr).contains(SLOW_WORKER) {
            return output;
        }
        assert!(began.elapsed() < WAIT_TIMEOUT, "timed out: {output:?}");
    }
}

pub fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Returns stderr of a command. Panics unless it failed with this exit code.
pub fn stderr_of_failure(output: &Output, code: i32) -> String {
    assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The first line that a process writes to stdout, empty if it ends before. Kills the process and
/// panics after [`WAIT_TIMEOUT`].
pub fn first_line(process: &mut Child) -> String {
    let mut stdout = process.stdout.take().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(&mut stdout).read_line(&mut line).map(|_| line);
        // Fails if the test has given up.
        let _ = sender.send((read, stdout));
    });
    let Ok((line, stdout)) = receiver.recv_timeout(WAIT_TIMEOUT) else {
        let _ = process.kill();
        panic!("the process has written nothing within {WAIT_TIMEOUT:?}");
    };
    // Open as long as the process runs, so that it can write.
    process.stdout = Some(stdout);
    line.unwrap()
}

/// A running node. Killed on drop.
pub struct Node {
    pub process: Child,
    pub sql: String,
    pub http: String,
    /// The command that the ready line suggests.
    pub command: String,
}

impl Node {
    pub fn start(data: &Path, flags: &[&str]) -> Self {
        Self::start_with(data, flags, Stdio::inherit())
    }

    /// Starts a node that writes its log to `log`.
    pub fn start_with(data: &Path, flags: &[&str], log: Stdio) -> Self {
        let mut command = Self::command(data, flags);
        command.stderr(log);
        Self::run(command)
    }

    /// Returns the command that starts a node.
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
        let line = first_line(&mut process);
        Self::ready(process, &line)
    }

    /// Runs a command that starts a node, with its log in a file, and waits until it is ready.
    /// Repeats it while the metadata store does not answer in time. Panics after [`WAIT_TIMEOUT`].
    pub fn run_until_answered(mut command: Command, log: &Path) -> Self {
        let began = Instant::now();
        loop {
            command.stdout(Stdio::piped()).stderr(std::fs::File::create(log).unwrap());
            let mut process = command.spawn().unwrap();
            let line = first_line(&mut process);
            if !line.is_empty() {
                return Self::ready(process, &line);
            }
            let status = wait(&mut process);
            let log = std::fs::read_to_string(log).unwrap();
            let is_late = metadata_did_not_answer(&log);
            assert!(is_late && began.elapsed() < WAIT_TIMEOUT, "not ready: {status}: {log}");
        }
    }

    /// A node that has printed its ready line.
    pub fn ready(process: Child, line: &str) -> Self {
        // fulmar ready: sql 127.0.0.1:1, http 127.0.0.1:2, data DIR; try: COMMAND
        let words: Vec<&str> = line.trim_end().splitn(8, ' ').collect();
        assert_eq!((words[0], words[1], words[2], words[4]), ("fulmar", "ready:", "sql", "http"), "{line}");
        assert!(["data", "reads"].contains(&words[6]), "{line}");
        let address = |word: &str| word.trim_end_matches(',').to_owned();
        let command = line.trim_end().rsplit_once("; try: ").map(|(_, command)| command.to_owned());
        Self { process, sql: address(words[3]), http: address(words[5]), command: command.unwrap() }
    }

    pub fn url(&self) -> String {
        format!("postgres://fulmar@{}", self.sql)
    }

    /// Sends a signal, waits for the exit, and returns the exit code.
    pub fn stop_with(mut self, signal: rustix::process::Signal) -> Option<i32> {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.process), signal).unwrap();
        wait(&mut self.process).code()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Fails if the process has already exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Connects a client to a database of the node.
pub async fn client(node: &Node, database: &str) -> tokio_postgres::Client {
    let (client, connection) =
        tokio_postgres::connect(&format!("{}/{database}", node.url()), NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

pub async fn query_i64(client: &tokio_postgres::Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}
