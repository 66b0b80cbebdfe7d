//! `fulmar`: the command-line program. Runs nodes, administers tenants and runs benchmarks.
//!
//! ```text
//!   main ─ cli (subcommands, flags and help texts)
//!     ├── start    runs a node in the foreground: lock, engine, catalog, gateway, signals
//!     ├── tenant   administration, data loads and schema migrations over the PostgreSQL protocol
//!     ├── cluster  moves a cluster's metadata from the first node to etcd
//!     ├── plan     planners of the crate `fulmar-control`, on a picture of a cluster
//!     ├── simulate policies of the crate `fulmar-control`, on virtual time
//!     ├── token    tokens for HTTP, over the PostgreSQL protocol
//!     ├── cert     certificates for TLS between nodes
//!     ├── events   the event log of a node
//!     ├── verify   checksum verification of all stored data
//!     ├── status   /healthz and /metrics of a node, as a table
//!     ├── top      the busiest tenants of a node, refreshed periodically
//!     ├── bench    the workloads of the crate `fulmar-workload`
//!     └── demo     a cluster: 100 tenants, a crash and more load, in two minutes
//! ```
//!
//! The crate has no server logic: it assembles a node from the other crates, and formats results.
//!
//! - Results go to stdout, as JSON with `--json`. Everything else goes to stderr.
//! - Exit codes: 0 success; 1 error, with its cause and remedy on stderr; 2 invalid command line;
//!   130 interrupted.

#![forbid(unsafe_code)]

mod bench;
mod cert;
mod cli;
mod client;
mod control;
mod demo;
mod events;
mod forecast;
mod interrupt;
mod moves;
mod node;
mod output;
mod plan;
mod simulate;
mod size;
mod start;
mod status;
mod tenant;
mod token;
mod top;
mod verify;

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use cli::{Cli, Command};
use interrupt::Interrupted;

/// Allocates for Rust and for SQLite: see docs/decisions/0016.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<Interrupted>() => {
            eprintln!("fulmar: interrupted");
            ExitCode::from(130)
        }
        Err(error) => {
            eprintln!("fulmar: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    // rustls needs one crypto provider per process. A second call fails, which is harmless.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("fulmar")
        .enable_all()
        .build()
        .context("cannot start the runtime; raise the limit on threads (ulimit -u)")?;
    runtime.block_on(async {
        match command {
            Command::Start(arguments) => start::run(*arguments).await,
            Command::Tenant(arguments) => interrupt::or_interrupted(tenant::run(arguments)).await,
            Command::Node(arguments) => interrupt::or_interrupted(node::run(arguments)).await,
            Command::Move(arguments) => interrupt::or_interrupted(moves::run(arguments)).await,
            Command::Moves(arguments) => interrupt::or_interrupted(moves::list(arguments)).await,
            Command::Control(arguments) => interrupt::or_interrupted(control::run(arguments)).await,
            Command::Decisions(arguments) => interrupt::or_interrupted(control::decisions(arguments)).await,
            Command::Forecast(arguments) => interrupt::or_interrupted(forecast::run(arguments)).await,
            Command::Plan(arguments) => plan::run(arguments),
            Command::Simulate(arguments) => simulate::run(arguments),
            Command::Cluster(arguments) => interrupt::or_interrupted(start::convert_cluster(arguments)).await,
            Command::Token(arguments) => interrupt::or_interrupted(token::run(arguments)).await,
            Command::Cert(arguments) => cert::run(arguments),
            Command::Events(arguments) => events::run(arguments).await,
            Command::Verify(arguments) => interrupt::or_interrupted(verify::run(arguments)).await,
            Command::Status(arguments) => status::run(arguments).await,
            Command::Top(arguments) => top::run(arguments).await,
            Command::Bench(arguments) => interrupt::or_interrupted(bench::run(arguments)).await,
            Command::Demo(arguments) => interrupt::or_interrupted(demo::run(arguments)).await,
        }
    })
}
