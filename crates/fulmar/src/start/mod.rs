//! `fulmar start`: a node in the foreground.
//!
//! ```text
//!   flags ─ refuse what is unsafe          logs to stderr
//!   data directory ─ made, locked          a second process is told who has it
//!   catalog ─ metadata store               checked against meta.head; has the partitions that exist
//!   store ─ the one that it had before     or the start is refused
//!   HTTP ─ listens                         answers 503 and the progress of the start
//!   engine ─ recovers from its log         refused if log or store hold what the catalog does not know ([`census`]);
//!                                          what a crash left half made is dropped
//!   superuser ─ password file              only the first start without --insecure
//!   gateway ─ listens                      one line on stdout: "fulmar ready: ..."
//!   SIGINT, SIGTERM                        the same in reverse; exit code 0
//! ```
//!
//! With `--read-only` there is no data directory, and nothing is recovered: the catalog is the one that the owner of the
//! store has put there ([`reader`]).
//!
//! Whatever happens after the lock, a crash is no different from a clean end, except that the next start reads
//! more of the log. A signal during the start ends it where it is.

mod census;
mod data;
mod disk_cache;
mod limits;
mod logs;
mod memory;
mod node;
mod reader;
mod store;
mod superuser;
mod tls;

use std::net::SocketAddr;

use anyhow::ensure;
use rustix::fs::Mode;

use crate::cli::StartArgs;
use crate::interrupt::EndSignals;
use crate::output;
pub use data::DataDirectory;
pub use limits::raise_open_files;
pub use node::METADATA_FILE;
use node::Node;
pub use reader::open as open_anothers_store;
pub use store::{Marks, StoreToRead, open_to_read as open_store_to_read};
use tls::Tls;

/// Runs a node until it is asked to end.
pub async fn run(arguments: StartArgs) -> anyhow::Result<()> {
    // For crash tests: nothing happens unless the environment names failpoints.
    fulmar_store::failpoint::arm_from_environment()?;
    check_insecure(&arguments)?;
    let tls = Tls::load(arguments.tls_cert.as_deref(), arguments.tls_key.as_deref())?;
    let memory = memory::budget(arguments.memory)?;
    disk_cache::bytes(arguments.disk_cache, arguments.store.as_ref())?;
    logs::begin(arguments.log_format, &arguments.log_level)?;
    raise_open_files();
    fulmar_engine::huge_pages::follow();
    let mut signals = EndSignals::listen()?;
    // Whatever this process writes is its owner's only, even in a directory that others can read.
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let data = arguments.data.as_deref().map(DataDirectory::lock).transpose()?;

    let start = async {
        match &data {
            Some(data) => Node::start(&arguments, data, memory, tls).await,
            None => reader::start(&arguments, memory, tls).await,
        }
    };
    let node = tokio::select! {
        node = start => node?,
        signal = signals.next() => {
            tracing::info!(signal, "asked to end before the node was ready");
            return Ok(());
        }
    };
    let what = match (&data, &arguments.store) {
        (Some(data), _) => format!("data {}", data.path().display()),
        (None, store) => format!("reads {}", store.as_ref().map(ToString::to_string).unwrap_or_default()),
    };
    output::line(&format!("fulmar ready: sql {}, http {}, {what}", node.sql_addr(), node.http_addr()))?;
    let signal = signals.next().await;
    tracing::info!(signal, "asked to end; a second signal ends at once");
    node.stopping(signal);
    tokio::select! {
        ended = node.shutdown() => ended?,
        signal = signals.next() => {
            tracing::warn!(signal, "ended at once; the next start reads the rest from the log");
        }
    }
    // The lock is held until here.
    drop(data);
    Ok(())
}

/// Without passwords everybody who can connect can do everything, so nobody elsewhere may be able to.
fn check_insecure(arguments: &StartArgs) -> anyhow::Result<()> {
    if !arguments.insecure {
        return Ok(());
    }
    let loopback = |flag: &str, address: SocketAddr| {
        ensure!(
            address.ip().is_loopback(),
            "--insecure asks for no passwords, so {flag} {address} would let everybody in; listen on 127.0.0.1 or \
             [::1], or leave --insecure out"
        );
        Ok(())
    };
    loopback("--sql", arguments.sql)?;
    loopback("--http", arguments.http)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn check(flags: &str) -> anyhow::Result<()> {
        let line = format!("fulmar start --data d {flags}");
        let Command::Start(arguments) = Cli::parse_from(line.split(' ')).command else { panic!("not start") };
        check_insecure(&arguments)
    }

    #[test]
    fn insecure_listens_on_loopback_only() {
        check("--sql 127.0.0.1:1 --http [::1]:2 --insecure").unwrap();
        check("--sql 0.0.0.0:1 --http 10.0.0.1:2").unwrap();
        for flags in ["--sql 0.0.0.0:1 --http 127.0.0.1:2", "--sql 127.0.0.1:1 --http [::]:2"] {
            let error = check(&format!("{flags} --insecure")).unwrap_err().to_string();
            assert!(error.contains("leave --insecure out"), "{error}");
        }
    }
}
