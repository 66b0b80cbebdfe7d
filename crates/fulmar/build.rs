//! Tells the command which commit it was built from, for what `fulmar bench` writes down.

use std::process::Command;

fn main() {
    // Without a repository (a source archive) there is no commit to tell.
    let Some(commit) = git(&["describe", "--always", "--dirty", "--abbrev=12"]) else { return };
    let version = env!("CARGO_PKG_VERSION");
    println!("cargo::rustc-env=FULMAR_COMMIT={version} {commit}");
    if let Some(head) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={head}");
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
