//! Runs a shortened demo, which verifies its own results, to completion and with an interruption,
//! and checks that it removes its files. Requires PostgreSQL's pgbench.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Only one demo runs at a time: two would compete for the CPUs with six nodes.
static ONE: Mutex<()> = Mutex::new(());

fn demo(temporary: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fulmar"));
    command.args(["demo", "--seconds", "6", "--tenants", "12"]).env("TMPDIR", temporary);
    command
}

fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).unwrap().next().is_none()
}

#[test]
fn demo_completes_and_removes_its_files() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let temporary = tempfile::tempdir().unwrap();
    let output = demo(temporary.path()).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.contains("nothing lost") && stdout.contains("psql postgres://"), "{stdout}");
    assert!(stdout.contains("/console with the token fulmar_"), "{stdout}");
    assert_eq!(stdout.matches("Moved bank_").count(), 3, "{stdout}");
    assert!(stdout.contains("The controller added auto-1"), "{stdout}");
    assert!(stdout.contains("auto-1 was emptied and stopped"), "{stdout}");
    assert!(is_empty(temporary.path()), "the demo must remove its files");
}

#[test]
fn interrupted_demo_removes_its_files() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    use std::io::{BufRead, BufReader};
    let temporary = tempfile::tempdir().unwrap();
    let mut demo = demo(temporary.path()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(demo.stdout.take().unwrap()).lines().map(Result::unwrap);
    let loaded = lines.find(|line| line.starts_with("Data loaded."));
    assert!(loaded.is_some() && !is_empty(temporary.path()), "the demo ended before it was interrupted");
    let process = rustix::process::Pid::from_child(&demo);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    assert_eq!(demo.wait().unwrap().code(), Some(130));
    assert!(is_empty(temporary.path()), "an interrupted demo must remove its files");
}
