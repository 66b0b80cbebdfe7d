//! The demo, shortened: it checks itself; here it is made to run twice, and to be interrupted, and must leave
//! nothing behind. Needs PostgreSQL's pgbench.

use std::path::Path;
use std::process::{Command, Stdio};

fn demo(temporary: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fulmar"));
    command.args(["demo", "--seconds", "6", "--tenants", "12"]).env("TMPDIR", temporary);
    command
}

fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).unwrap().next().is_none()
}

#[test]
fn it_runs_twice_and_cleans_up() {
    let temporary = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let output = demo(temporary.path()).output().unwrap();
        let (said, errors) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{said}\n{errors}");
        assert!(said.contains("nothing lost") && said.contains("psql postgres://"), "{said}");
        assert!(is_empty(temporary.path()));
    }
}

#[test]
fn an_interruption_cleans_up() {
    use std::io::{BufRead, BufReader};
    let temporary = tempfile::tempdir().unwrap();
    let mut demo = demo(temporary.path()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(demo.stdout.take().unwrap()).lines().map(Result::unwrap);
    let loaded = lines.find(|line| line.starts_with("Loaded."));
    assert!(loaded.is_some() && !is_empty(temporary.path()), "the demo ended before it was interrupted");
    let process = rustix::process::Pid::from_child(&demo);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    assert_eq!(demo.wait().unwrap().code(), Some(130));
    assert!(is_empty(temporary.path()));
}
