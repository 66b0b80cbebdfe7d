//! Runs PostgreSQL as Debian packages it, with its default durability.
//!
//! Only what a comparison must fix is configured: `shared_buffers` (the memory that the other
//! server gets too), the number of connections, and the listen address. `fsync`,
//! `synchronous_commit`, `full_page_writes`, autovacuum and all other settings keep their defaults.
//! The C locale avoids the cost of collation.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;
use futures::future::{BoxFuture, FutureExt};
use rustix::process::Signal;

use super::{Product, ServerConfig};
use crate::Target;
use crate::client::Client;

/// The directory of Debian's server programs.
const PROGRAMS: &str = "/usr/lib/postgresql/15/bin";

/// The account that runs the server if the benchmark runs as root, since PostgreSQL refuses to run
/// as root.
const ACCOUNT: &str = "postgres";

/// The superuser of the databases that are created here.
const SUPERUSER: &str = "postgres";

/// PostgreSQL 15.
pub struct Postgres {
    programs: PathBuf,
    authentication: Authentication,
    account: Option<Account>,
}

/// How clients authenticate.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Authentication {
    Trust,
    Password { method: &'static str, password: String },
}

#[derive(Clone, Copy, Debug)]
struct Account {
    uid: u32,
    gid: u32,
}

impl Postgres {
    /// The installed PostgreSQL with trust authentication.
    pub fn installed() -> anyhow::Result<Postgres> {
        let programs = PathBuf::from(PROGRAMS);
        anyhow::ensure!(
            programs.join("postgres").exists(),
            "PostgreSQL was not found in {PROGRAMS}; install Debian's package postgresql-15"
        );
        let account = if rustix::process::geteuid().is_root() { Some(account_of(ACCOUNT)?) } else { None };
        Ok(Postgres { programs, authentication: Authentication::Trust, account })
    }

    /// Requires this password from clients, with `scram-sha-256`, `md5` or `password`
    /// authentication.
    pub fn with_password(self, method: &'static str, password: &str) -> Postgres {
        let password = password.to_owned();
        Postgres { authentication: Authentication::Password { method, password }, ..self }
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.join(name));
        if let Some(Account { uid, gid }) = self.account {
            // Command::uid also drops the supplementary groups of root.
            command.uid(uid).gid(gid);
        }
        // The account may have no access to the current directory.
        command.current_dir("/");
        command
    }

    fn initdb(&self, place: &ServerConfig) -> anyhow::Result<()> {
        let directory = place.data.parent().context("data directory has no parent")?;
        if let Some(Account { uid, gid }) = self.account {
            std::os::unix::fs::chown(directory, Some(uid), Some(gid))?;
        }
        let mut command = self.program("initdb");
        command
            .args(["--username", SUPERUSER, "--encoding", "UTF8", "--locale", "C"])
            .arg("-D")
            .arg(&place.data);
        match &self.authentication {
            Authentication::Trust => command.args(["--auth", "trust"]),
            Authentication::Password { method, password } => {
                let file = directory.join("password");
                std::fs::write(&file, password)?;
                command.args(["--auth-local", method, "--auth-host", method, "--pwfile"]).arg(file)
            }
        };
        let output = command.output().with_context(|| format!("could not run {command:?}"))?;
        anyhow::ensure!(
            output.status.success(),
            "initdb failed: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }
}

impl Product for Postgres {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn initialise<'a>(&'a self, place: &'a ServerConfig) -> BoxFuture<'a, anyhow::Result<()>> {
        // This blocks for a few seconds, in which the calling task has nothing else to do.
        async move { self.initdb(place) }.boxed()
    }

    fn command(&self, place: &ServerConfig) -> Command {
        let mut command = self.program("postgres");
        command.arg("-D").arg(&place.data);
        let settings = [
            ("port", place.sql_port.to_string()),
            ("listen_addresses", "127.0.0.1".to_owned()),
            ("unix_socket_directories", String::new()),
            ("shared_buffers", format!("{}kB", place.memory_bytes / 1024)),
            // In addition to the clients: the benchmark's own connections and the superuser's
            // reserve.
            ("max_connections", (place.connections + 20).to_string()),
        ];
        for (name, value) in settings {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        command
    }

    fn target(&self, place: &ServerConfig) -> Target {
        let password = match &self.authentication {
            Authentication::Trust => None,
            Authentication::Password { password, .. } => Some(password.clone()),
        };
        Target {
            host: "127.0.0.1".to_owned(),
            port: place.sql_port,
            user: SUPERUSER.to_owned(),
            password,
            database: "postgres".to_owned(),
        }
    }

    fn stop_signal(&self) -> Signal {
        // Fast shutdown: disconnects clients and writes a checkpoint.
        Signal::INT
    }

    fn abandon_signal(&self) -> Signal {
        // Immediate shutdown: the postmaster ends its children and then itself.
        Signal::QUIT
    }

    fn settle<'a>(&'a self, target: &'a Target) -> BoxFuture<'a, anyhow::Result<()>> {
        async move {
            let mut client = Client::connect(target).await?;
            client.query("VACUUM ANALYZE").await?;
            client.query("CHECKPOINT").await?;
            Ok(client.close().await?)
        }
        .boxed()
    }
}

fn account_of(name: &str) -> anyhow::Result<Account> {
    let accounts = std::fs::read_to_string("/etc/passwd")?;
    let fields =
        accounts.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| fields[0] == name);
    let missing = || format!("account {name} does not exist, and PostgreSQL does not run as root");
    match fields.with_context(missing)?[..] {
        [_, _, uid, gid, ..] => Ok(Account { uid: uid.parse()?, gid: gid.parse()? }),
        _ => anyhow::bail!("invalid line for {name} in /etc/passwd"),
    }
}
