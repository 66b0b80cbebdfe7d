//! The thread that keeps a node alive in its cluster: it renews the lease, sends and answers
//! heartbeats, and reads and writes the connections between nodes.
//!
//! Other work of the process, such as the creation of many databases, may occupy the threads of the
//! process's runtime for longer than a lease lasts. The other nodes would then declare the node
//! dead. This thread does nothing that takes long, and has a higher priority than the others.

use tokio::runtime::{Builder, Handle};

use crate::Error;

/// Nice value of the thread. The default of other threads is 0.
const NICENESS: i32 = -10;

/// Starts the thread. It runs until the process ends, like the node.
pub(crate) fn start() -> Result<Handle, Error> {
    let failed = |error: std::io::Error| Error::Thread { cause: error.to_string() };
    let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let handle = runtime.handle().clone();
    let run = move || {
        // Needs the right to do so: CAP_SYS_NICE or RLIMIT_NICE. Without it the thread is one of
        // many with the same priority, which suffices unless the machine is overloaded.
        if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
            tracing::debug!(%error, "cannot raise the priority of the thread for heartbeats");
        }
        runtime.block_on(std::future::pending::<()>());
    };
    std::thread::Builder::new().name("fulmar-pulse".to_owned()).spawn(run).map_err(failed)?;
    Ok(handle)
}
