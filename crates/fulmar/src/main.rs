//! `fulmar`: the one command. It starts a node, looks after tenants, measures, and shows itself.
//!
//! ```text
//!   main ─ cli (what can be asked, and the help that teaches it)
//!     ├── start    a node in the foreground: lock, engine, catalog, gateway, signals
//!     ├── tenant   administration, loads and migrations over the Postgres protocol, as any client could
//!     ├── token    tokens for HTTP, in the same way
//!     ├── events   the journal of a node
//!     ├── verify   everything that is kept, compared with its checksums
//!     ├── status   /healthz and /metrics of a node, as a table
//!     ├── top      the busiest tenants of a node, again and again
//!     ├── bench    the workloads of the crate `fulmar-workload`
//!     └── demo     a node, a hundred tenants, a crash: one minute
//! ```
//!
//! No logic of a server lives here: what the command knows is how to put the rooms together, and how to talk
//! to people. Results go to stdout (`--json` where a script would read them), everything else to stderr. Exit
//! codes: 0 done, 1 an error (its cause and its remedy are on stderr), 2 a command line that makes no sense,
//! 130 interrupted.

#![forbid(unsafe_code)]

mod bench;
mod cli;
mod client;
mod demo;
mod events;
mod interrupt;
mod output;
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

/// For SQLite too: see docs/decisions/0006 and 0013.
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
    // rustls asks the process which cryptography it uses; ring it is (a second call would be refused).
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("fulmar")
        .enable_all()
        .build()
        .context("cannot start the runtime; raise the limit of threads (ulimit -u)")?;
    runtime.block_on(async {
        match command {
            Command::Start(arguments) => start::run(arguments).await,
            Command::Tenant(arguments) => interrupt::or_interrupted(tenant::run(arguments)).await,
            Command::Token(arguments) => interrupt::or_interrupted(token::run(arguments)).await,
            Command::Events(arguments) => events::run(arguments).await,
            Command::Verify(arguments) => interrupt::or_interrupted(verify::run(arguments)).await,
            Command::Status(arguments) => status::run(arguments).await,
            Command::Top(arguments) => top::run(arguments).await,
            Command::Bench(arguments) => interrupt::or_interrupted(bench::run(arguments)).await,
            Command::Demo(arguments) => interrupt::or_interrupted(demo::run(arguments)).await,
        }
    })
}
