//! Open files: a session is one, and shells give a process 1024 unless it asks for more.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Below this many the node says so: each session and each file of the log and the store is one.
const FEW: u64 = 8192;

/// Raises the limit of open files as far as it may be raised without rights.
pub fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    let hard = limit.maximum;
    limit.current = hard;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    // No limit at all is not few.
    let now = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if now < FEW {
        tracing::warn!(
            open_files = now,
            "few open files are allowed, so few sessions are; raise it (ulimit -n)"
        );
    }
}
