//! Runs Fulmar: the executable under test, started as a user would start it.

use std::path::PathBuf;
use std::process::Command;

use futures::future::{BoxFuture, FutureExt};
use rustix::process::Signal;

use super::{Product, ServerConfig};
use crate::Target;

/// The database through which tenants are created.
const SYSTEM_DATABASE: &str = "fulmar";

/// A Fulmar node.
pub struct Fulmar {
    name: &'static str,
    binary: PathBuf,
    /// The URL of the store, and the environment variables that it requires.
    store: Option<(String, Vec<(String, String)>)>,
    /// Further flags of `fulmar start`.
    flags: Vec<String>,
}

impl Fulmar {
    /// Runs the `fulmar` executable at this path.
    pub fn at(binary: PathBuf) -> Fulmar {
        Fulmar { name: "fulmar", binary, store: None, flags: Vec::new() }
    }

    /// Sets the name in tables and messages.
    pub fn named(self, name: &'static str) -> Fulmar {
        Fulmar { name, ..self }
    }

    /// Starts the node with further flags.
    pub fn with_flags(self, flags: &[&str]) -> Fulmar {
        Fulmar { flags: flags.iter().map(|flag| (*flag).to_owned()).collect(), ..self }
    }

    /// Stores the data in the store at `url`, with `environment` as additional environment
    /// variables.
    pub fn with_store(self, url: String, environment: Vec<(String, String)>) -> Fulmar {
        Fulmar { store: Some((url, environment)), ..self }
    }
}

impl Product for Fulmar {
    fn name(&self) -> &'static str {
        self.name
    }

    fn initialise<'a>(&'a self, _place: &'a ServerConfig) -> BoxFuture<'a, anyhow::Result<()>> {
        // The node creates its data directory when it starts.
        async { Ok(()) }.boxed()
    }

    fn command(&self, place: &ServerConfig) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg("start").arg("--data").arg(&place.data);
        command.arg("--sql").arg(format!("127.0.0.1:{}", place.sql_port));
        command.arg("--http").arg(format!("127.0.0.1:{}", place.http_port));
        command.arg("--memory").arg(place.memory_bytes.to_string()).arg("--insecure");
        command.args(&self.flags);
        if let Some((url, environment)) = &self.store {
            command.arg("--store").arg(url).envs(environment.iter().cloned());
        }
        command
    }

    fn target(&self, place: &ServerConfig) -> Target {
        Target {
            host: "127.0.0.1".to_owned(),
            port: place.sql_port,
            user: "fulmar".to_owned(),
            password: None,
            database: SYSTEM_DATABASE.to_owned(),
        }
    }

    fn stop_signal(&self) -> Signal {
        Signal::TERM
    }

    fn abandon_signal(&self) -> Signal {
        Signal::KILL
    }

    fn settle<'a>(&'a self, _target: &'a Target) -> BoxFuture<'a, anyhow::Result<()>> {
        // A node needs no maintenance.
        async { Ok(()) }.boxed()
    }
}
