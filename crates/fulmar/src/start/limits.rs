//! Raises the limit on open files. Every session needs one, and shells set a soft limit of 1,024.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Below this limit the node logs a warning. Each session and each file of the log and of the store
/// needs one descriptor.
const MIN_OPEN_FILES: u64 = 8192;

/// Raises the soft limit on open files to the hard limit, which requires no privileges.
pub fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    let hard = limit.maximum;
    limit.current = hard;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the limit on open files");
    }
    // `None` means unlimited.
    let open_files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if open_files < MIN_OPEN_FILES {
        tracing::warn!(
            open_files,
            "the limit on open files is low and limits the number of sessions; raise it (ulimit -n)"
        );
    }
}
