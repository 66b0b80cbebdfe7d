//! PostgreSQL as Debian ships it, with its default durability.
//!
//! Only what a comparison must fix is set: shared buffers (the memory that the other side gets too), the number of
//! connections, and where it listens. `fsync`, `synchronous_commit`, `full_page_writes`, autovacuum and the rest stay
//! as they are. The C locale spares it the cost of collation.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;
use futures::future::{BoxFuture, FutureExt};
use rustix::process::Signal;

use super::{Place, Product};
use crate::Target;
use crate::client::Client;

/// Where Debian puts the server's programs.
const PROGRAMS: &str = "/usr/lib/postgresql/15/bin";

/// The account that runs it if the bench runs as root, as which PostgreSQL refuses to run.
const ACCOUNT: &str = "postgres";

/// Its superuser, in databases made here.
const SUPERUSER: &str = "postgres";

/// PostgreSQL 15.
pub struct Postgres {
    programs: PathBuf,
    authentication: Authentication,
    account: Option<Account>,
}

/// How clients prove who they are.
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
    /// The installed PostgreSQL, trusting its clients.
    pub fn installed() -> anyhow::Result<Postgres> {
        let programs = PathBuf::from(PROGRAMS);
        anyhow::ensure!(
            programs.join("postgres").exists(),
            "there is no PostgreSQL in {PROGRAMS}; install Debian's postgresql-15"
        );
        let account = if rustix::process::geteuid().is_root() { Some(account_of(ACCOUNT)?) } else { None };
        Ok(Postgres { programs, authentication: Authentication::Trust, account })
    }

    /// Asks clients for this password, by `scram-sha-256`, `md5` or `password`.
    pub fn with_password(self, method: &'static str, password: &str) -> Postgres {
        let password = password.to_owned();
        Postgres { authentication: Authentication::Password { method, password }, ..self }
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.join(name));
        if let Some(Account { uid, gid }) = self.account {
            // Supplementary groups are dropped along with root.
            command.uid(uid).gid(gid);
        }
        // The account may not enter the directory that the bench was started in.
        command.current_dir("/");
        command
    }

    fn initdb(&self, place: &Place) -> anyhow::Result<()> {
        let directory = place.data.parent().context("a data directory has a parent")?;
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
        let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
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

    fn initialise<'a>(&'a self, place: &'a Place) -> BoxFuture<'a, anyhow::Result<()>> {
        // A couple of seconds, in which this task has nothing else to do.
        async move { self.initdb(place) }.boxed()
    }

    fn command(&self, place: &Place) -> Command {
        let mut command = self.program("postgres");
        command.arg("-D").arg(&place.data);
        let settings = [
            ("port", place.sql_port.to_string()),
            ("listen_addresses", "127.0.0.1".to_owned()),
            ("unix_socket_directories", String::new()),
            ("shared_buffers", format!("{}kB", place.memory_bytes / 1024)),
            // Beyond the clients: the bench's own connections, and the superuser's reserve.
            ("max_connections", (place.connections + 20).to_string()),
        ];
        for (name, value) in settings {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        command
    }

    fn target(&self, place: &Place) -> Target {
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
        // "Fast": disconnects clients, writes a checkpoint.
        Signal::INT
    }

    fn abandon_signal(&self) -> Signal {
        // "Immediate": the postmaster ends its children, then itself.
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
    let missing = || format!("PostgreSQL does not run as root, and there is no account {name} to run it as");
    match fields.with_context(missing)?[..] {
        [_, _, uid, gid, ..] => Ok(Account { uid: uid.parse()?, gid: gid.parse()? }),
        _ => anyhow::bail!("an odd line for {name} in /etc/passwd"),
    }
}
