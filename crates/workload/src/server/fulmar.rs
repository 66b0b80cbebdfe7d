//! Fulmar: the binary that is asked to compare itself, run as a user would run it.

use std::path::PathBuf;
use std::process::Command;

use futures::future::{BoxFuture, FutureExt};
use rustix::process::Signal;

use super::{Place, Product};
use crate::Target;

/// The database in which tenants are made.
const SYSTEM_DATABASE: &str = "fulmar";

/// A Fulmar node.
pub struct Fulmar {
    name: &'static str,
    binary: PathBuf,
    /// A URL, and what the environment must hold for it.
    store: Option<(String, Vec<(String, String)>)>,
}

impl Fulmar {
    /// The `fulmar` command at this path.
    pub fn at(binary: PathBuf) -> Fulmar {
        Fulmar { name: "fulmar", binary, store: None }
    }

    /// The same, by another name in tables and messages.
    pub fn named(self, name: &'static str) -> Fulmar {
        Fulmar { name, ..self }
    }

    /// Keeps its data in the store of this URL, with these variables in its environment.
    pub fn with_store(self, url: String, environment: Vec<(String, String)>) -> Fulmar {
        Fulmar { store: Some((url, environment)), ..self }
    }
}

impl Product for Fulmar {
    fn name(&self) -> &'static str {
        self.name
    }

    fn initialise<'a>(&'a self, _place: &'a Place) -> BoxFuture<'a, anyhow::Result<()>> {
        // It makes its data directory when it starts.
        async { Ok(()) }.boxed()
    }

    fn command(&self, place: &Place) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg("start").arg("--data").arg(&place.data);
        command.arg("--sql").arg(format!("127.0.0.1:{}", place.sql_port));
        command.arg("--http").arg(format!("127.0.0.1:{}", place.http_port));
        command.arg("--memory").arg(place.memory_bytes.to_string()).arg("--insecure");
        if let Some((url, environment)) = &self.store {
            command.arg("--store").arg(url).envs(environment.iter().cloned());
        }
        command
    }

    fn target(&self, place: &Place) -> Target {
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
        // It keeps its own house.
        async { Ok(()) }.boxed()
    }
}
