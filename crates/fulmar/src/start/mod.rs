//! `fulmar start`: runs a node in the foreground.
//!
//! Startup sequence:
//!
//! 1. Flags: reject unsafe combinations. Start logging to stderr.
//! 2. Data directory: create it and lock it. A second process gets an error with the process id of
//!    the first one ([`data`]).
//! 3. HTTP: listen, and answer 503 with the progress of the startup.
//! 4. Catalog: open the metadata store, checked against `meta.head`. It lists the existing
//!    partitions.
//! 5. Store: open the one that the data directory is bound to, or refuse the start ([`store`]).
//! 6. Engine: recover from the log. Refuse the start if the log or the store has data of a
//!    partition that the catalog does not know ([`catalog_check`]). Drop tenants whose creation or
//!    drop a crash has interrupted.
//! 7. Superuser: at the first start without `--insecure`, generate a password and write it to a
//!    file ([`superuser`]).
//! 8. Gateway: listen, and print one line on stdout: `fulmar ready: ...`.
//!
//! SIGINT and SIGTERM shut the node down in reverse order, with exit code 0. During startup, and
//! between fencing and a restart, they stop the process immediately.
//!
//! With `--read-only` there is no data directory and no recovery. The catalog is the copy that the
//! primary publishes in the store ([`replica`]).
//!
//! From the lock on, a crash is equivalent to a clean shutdown, except that the next start replays
//! more of the log.

mod catalog_check;
mod cluster;
mod conversion;
mod data;
mod disk_cache;
mod limits;
mod logs;
mod memory;
mod metadata_move;
mod node;
mod provisioner;
mod ready;
mod replica;
mod security;
mod store;
mod superuser;
mod tls;

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::ensure;
use rustix::fs::Mode;

use crate::cli::StartArgs;
use crate::interrupt::EndSignals;
use crate::output;
pub use data::DataDirectory;
pub use limits::raise_open_files;
pub use metadata_move::convert_cluster;
pub use node::METADATA_FILE;
use node::Node;
pub use replica::open_read_only as open_store_read_only;
pub use store::{ExpectedBinding, StoreToRead, open_for_reading as open_store_for_reading};
use tls::Tls;

/// Runs a node until a signal shuts it down.
pub async fn run(arguments: StartArgs) -> anyhow::Result<()> {
    let started = Instant::now();
    // For crash tests. Without failpoints in the environment this has no effect.
    fulmar_store::failpoint::arm_from_environment()?;
    check_insecure(&arguments)?;
    let tls = Tls::load(arguments.tls_cert.as_deref(), arguments.tls_key.as_deref())?;
    let memory = memory::budget(arguments.memory)?;
    disk_cache::bytes(arguments.disk_cache, arguments.store.as_ref())?;
    logs::init(arguments.log_format, &arguments.log_level)?;
    raise_open_files();
    let mut signals = EndSignals::listen()?;
    // All files that this process creates are accessible only to its user, in any directory.
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let data = arguments.data.as_deref().map(DataDirectory::lock).transpose()?;
    if let Some(data) = &data {
        cluster::check_directory(&arguments, data.path())?;
    }

    let start = async {
        match &data {
            Some(data) => match cluster::start(&arguments, data, memory, tls.clone()).await? {
                Some(node) => Ok(node),
                None => Node::start(&arguments, data, memory, tls).await,
            },
            None => replica::start(&arguments, memory, tls).await,
        }
    };
    let node = tokio::select! {
        node = start => node?,
        signal = signals.next() => {
            tracing::info!(signal, "shutdown requested during startup");
            return Ok(());
        }
    };
    let source = match (&data, &arguments.store) {
        (Some(data), _) => format!("data {}", data.path().display()),
        (None, store) => format!("reads {}", store.as_ref().map(ToString::to_string).unwrap_or_default()),
    };
    let password_file = data.as_ref().and_then(|data| ready::password_file(data.path(), arguments.insecure));
    output::line(&ready::line(node.sql_addr(), node.http_addr(), &source, password_file.as_deref()))?;
    let signal = tokio::select! {
        signal = signals.next() => Ok(signal),
        reason = node.fenced() => Err(reason),
    };
    let signal = match signal {
        Ok(signal) => signal,
        Err(reason) => tokio::select! {
            biased;
            signal = signals.next() => {
                tracing::info!(signal, "shutdown requested before a restart");
                node.record_shutdown(signal);
                return Ok(());
            }
            error = cluster::rejoin(&reason, started) => return Err(error),
        },
    };
    tracing::info!(signal, "shutting down; a second signal stops the node immediately");
    node.record_shutdown(signal);
    tokio::select! {
        result = node.shutdown() => result?,
        signal = signals.next() => {
            tracing::warn!(signal, "immediate shutdown; the next start recovers from the log");
        }
    }
    // Keep the data directory locked until here.
    drop(data);
    Ok(())
}

/// Rejects `--insecure` on addresses other than loopback. Without passwords every client is a
/// superuser, so clients on other machines must not be able to connect.
fn check_insecure(arguments: &StartArgs) -> anyhow::Result<()> {
    if !arguments.insecure {
        return Ok(());
    }
    let loopback = |flag: &str, address: SocketAddr| {
        ensure!(
            address.ip().is_loopback(),
            "--insecure disables authentication and requires a loopback address, but {flag} is \
             {address}; listen on 127.0.0.1 or [::1], or remove --insecure"
        );
        Ok(())
    };
    loopback("--sql", arguments.sql)?;
    loopback("--http", arguments.http)?;
    // With certificates only the other nodes can connect.
    match arguments.cluster.rpc.filter(|_| arguments.cluster.rpc_tls.rpc_ca.is_none()) {
        Some(rpc) => loopback("--rpc", rpc),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn check(flags: &str) -> anyhow::Result<()> {
        let line = format!("fulmar start --data d {flags}");
        let Command::Start(arguments) = Cli::parse_from(line.split(' ')).command else {
            panic!("parsed as another subcommand than start");
        };
        check_insecure(&arguments)
    }

    #[test]
    fn insecure_requires_loopback_addresses() {
        check("--sql 127.0.0.1:1 --http [::1]:2 --insecure").unwrap();
        check("--sql 0.0.0.0:1 --http 10.0.0.1:2").unwrap();
        let rpc = "--sql 127.0.0.1:1 --http 127.0.0.1:2 --node n1 --rpc 10.0.0.1:3 --meta etcd://a:1 \
                   --store file:///s";
        for flags in ["--sql 0.0.0.0:1 --http 127.0.0.1:2", "--sql 127.0.0.1:1 --http [::]:2", rpc] {
            let error = check(&format!("{flags} --insecure")).unwrap_err().to_string();
            assert!(error.contains("remove --insecure"), "{error}");
        }
    }
}
