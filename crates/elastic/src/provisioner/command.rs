//! Nodes by an operator's program.
//!
//! call | standard input | standard output
//! --- | --- | ---
//! `PROGRAM add NAME` | `{"node": NAME, "cluster": ID, "arguments": [...]}` | ignored
//! `PROGRAM remove NAME` | the same | ignored
//! `PROGRAM list` | `{"cluster": ID, "arguments": [...]}` | `{"nodes": [NAME, ...]}`
//!
//! `arguments` are those of `fulmar start` that all nodes of the cluster have in common: without name,
//! addresses, directory, certificate, site and rack. Exit code 0 is success; `add` may return before the
//! node serves. Standard error goes to the node's log, and its last line into the error of a call that
//! fails. A call that takes too long is killed together with the processes that it has started.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use async_trait::async_trait;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::time::timeout;

use super::{Provisioner, ProvisionerError};

/// Maximum size of an answer.
const MAX_ANSWER_BYTES: u64 = 1 << 20;
/// Maximum number of lines of one call that are logged, and of characters of each.
const MAX_LOGGED_LINES: usize = 100;
const MAX_LINE_CHARS: usize = 1000;
/// Maximum size of the standard error that is read.
const MAX_ERROR_BYTES: u64 = 1 << 20;

/// How long the pipes of a program that has ended are read.
const PIPE_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs a program for each call.
#[derive(Clone, Debug)]
pub struct Command {
    program: PathBuf,
    cluster: String,
    arguments: Vec<String>,
}

/// What the program reads.
#[derive(Serialize)]
struct Input<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<&'a str>,
    cluster: &'a str,
    arguments: &'a [String],
}

/// What `list` writes.
#[derive(Deserialize)]
struct Listed {
    nodes: Vec<String>,
}

/// Kills a call's processes when it is dropped.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // Fails if all of them have ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Command {
    /// Runs `program` for the cluster with this id, whose nodes have these arguments in common.
    pub fn new(program: PathBuf, cluster: String, arguments: Vec<String>) -> Command {
        Command { program, cluster, arguments }
    }

    /// Runs a call. Returns its standard output.
    async fn call(&self, action: &str, node: Option<&str>) -> Result<Vec<u8>, ProvisionerError> {
        let doing = format!("{} {action}", self.program.display());
        let failed = |cause: &dyn std::fmt::Display| ProvisionerError(format!("{doing}: {cause}"));
        let mut command = tokio::process::Command::new(&self.program);
        command.arg(action).args(node).kill_on_drop(true).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| failed(&error))?;
        let mut group = Group(child.id().and_then(|id| Pid::from_raw(id as i32)));
        let input = Input { node, cluster: &self.cluster, arguments: &self.arguments };
        let input = serde_json::to_vec(&input).map_err(|error| failed(&error))?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (mut output, mut last_line) = (Vec::new(), None);
        let status = {
            let write = async {
                let Some(mut stdin) = stdin else { return };
                // A program that ignores its input may have closed it.
                let _ = stdin.write_all(&input).await;
            };
            let pipes = async {
                tokio::join!(write, read(stdout, &mut output), log(stderr, &doing, &mut last_line));
            };
            tokio::pin!(pipes);
            let mut is_read = false;
            let status = loop {
                tokio::select! {
                    status = child.wait() => break status,
                    () = &mut pipes, if !is_read => is_read = true,
                }
            };
            if !is_read {
                // What the program has started in the background may have inherited its pipes.
                let _ = timeout(PIPE_TIMEOUT, pipes).await;
            }
            status.map_err(|error| failed(&error))?
        };
        if status.success() {
            // What it has started may go on.
            group.0 = None;
            return Ok(output);
        }
        Err(match last_line {
            Some(line) => failed(&format!("{status}: {line}")),
            None => failed(&status),
        })
    }
}

/// Reads what a call writes to its standard output.
async fn read(stdout: Option<impl AsyncRead + Unpin>, output: &mut Vec<u8>) {
    if let Some(stdout) = stdout {
        // The caller finds an answer that is cut off invalid.
        let _ = stdout.take(MAX_ANSWER_BYTES).read_to_end(output).await;
    }
}

/// Logs what a call writes to its standard error, and keeps the last line.
async fn log(stderr: Option<impl AsyncRead + Unpin>, doing: &str, last: &mut Option<String>) {
    let Some(stderr) = stderr else { return };
    let mut lines = BufReader::new(stderr.take(MAX_ERROR_BYTES)).lines();
    let mut count = 0;
    while let Ok(Some(line)) = lines.next_line().await {
        let line: String = line.chars().take(MAX_LINE_CHARS).collect();
        count += 1;
        if count <= MAX_LOGGED_LINES {
            tracing::info!(call = doing, "{line}");
        }
        if !line.trim().is_empty() {
            *last = Some(line);
        }
    }
}

#[async_trait]
impl Provisioner for Command {
    async fn add(&self, node: &str) -> Result<(), ProvisionerError> {
        self.call("add", Some(node)).await.map(drop)
    }

    async fn remove(&self, node: &str) -> Result<(), ProvisionerError> {
        self.call("remove", Some(node)).await.map(drop)
    }

    async fn list(&self) -> Result<Vec<String>, ProvisionerError> {
        let output = self.call("list", None).await?;
        let listed: Listed = serde_json::from_slice(&output).map_err(|error| {
            let doing = format!("the answer of {} list is not {{\"nodes\": [...]}}", self.program.display());
            ProvisionerError::new(&doing, &error)
        })?;
        Ok(listed.nodes)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::tests::write_program;
    use super::*;

    /// Longer than any call that does not hang.
    const DEADLINE: Duration = Duration::from_secs(60);

    fn command(directory: &Path, script: &str) -> Command {
        let program = directory.join("provision");
        write_program(&program, script);
        Command::new(program, "c1".to_owned(), vec!["--insecure".to_owned()])
    }

    #[tokio::test]
    async fn program_gets_arguments_and_json() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("calls");
        let script =
            format!("echo \"$@\" >> {0}; cat >> {0}; echo '{{\"nodes\":[\"a1\",\"a2\"]}}'", file.display());
        let command = command(directory.path(), &script);
        timeout(DEADLINE, command.add("a1")).await.unwrap().unwrap();
        timeout(DEADLINE, command.remove("a1")).await.unwrap().unwrap();
        assert_eq!(timeout(DEADLINE, command.list()).await.unwrap().unwrap(), ["a1", "a2"]);
        let calls = std::fs::read_to_string(file).unwrap();
        let common = r#""cluster":"c1","arguments":["--insecure"]}"#;
        let expected = format!(
            "add a1\n{{\"node\":\"a1\",{common}remove a1\n{{\"node\":\"a1\",{common}list\n{{{common}"
        );
        assert_eq!(calls, expected);
    }

    #[tokio::test]
    async fn failure_has_the_last_line_of_standard_error() {
        let directory = tempfile::tempdir().unwrap();
        let command = command(directory.path(), "echo first >&2; echo 'quota exceeded' >&2; exit 3");
        let error = timeout(DEADLINE, command.add("a1")).await.unwrap().unwrap_err().to_string();
        assert!(error.ends_with("exit status: 3: quota exceeded"), "{error}");
        let missing = Command::new(directory.path().join("none"), String::new(), Vec::new());
        assert!(missing.add("a1").await.unwrap_err().to_string().contains("No such file"));
    }

    #[tokio::test]
    async fn answer_that_is_no_list_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let command = command(directory.path(), "echo a1 a2");
        let error = timeout(DEADLINE, command.list()).await.unwrap().unwrap_err().to_string();
        assert!(error.contains("list is not {\"nodes\": [...]}"), "{error}");
    }

    #[tokio::test]
    async fn call_that_is_dropped_is_killed_with_its_children() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("child");
        let script = format!("sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; wait", file.display());
        let command = command(directory.path(), &script);
        let hangs = async {
            tokio::select! {
                ended = command.add("a1") => panic!("{ended:?}"),
                child = async {
                    loop {
                        match std::fs::read_to_string(&file) {
                            Ok(child) => break child,
                            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                        }
                    }
                } => child,
            }
        };
        let child: i32 = timeout(DEADLINE, hangs).await.unwrap().trim().parse().unwrap();
        let ended = async {
            // A process that has ended and was not waited for has no memory map.
            while std::fs::read(format!("/proc/{child}/cmdline")).is_ok_and(|line| !line.is_empty()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(DEADLINE, ended).await.unwrap();
    }
}
