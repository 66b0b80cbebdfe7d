//! Sets `FULMAR_COMMIT` to the version and commit of the build. `fulmar bench` records it.

use std::process::Command;

fn main() {
    // A source archive has no repository, and so no commit.
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
