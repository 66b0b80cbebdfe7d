//! Provisioners add nodes to a cluster and remove them.
//!
//! name | how
//! --- | ---
//! [`processes`] | starts and stops `fulmar start` on this machine: for demos and tests
//! [`command`] | runs an operator's program with documented arguments and JSON
//!
//! A provisioner is not trusted: calls may fail or hang, and may claim what is not so. The caller
//! limits their time, repeats them, and compares the outcome with the cluster's own records. Dropping
//! the future of a call cancels it as far as possible; what has happened until then is found out by
//! the next call. Every call may therefore be repeated: adding a node that is there, and removing one
//! that is not, succeed.
//!
//! The provisioner is chosen by a flag of `fulmar start` and not in SQL: a superuser of the database
//! must not be able to run programs on its machine.

pub mod command;
pub mod processes;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use async_trait::async_trait;

/// Why a call failed: the cause, and the remedy if there is one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ProvisionerError(pub String);

impl ProvisionerError {
    fn new(doing: &str, cause: &impl fmt::Display) -> ProvisionerError {
        ProvisionerError(format!("{doing}: {cause}"))
    }
}

/// Adds nodes to a cluster, and removes them.
#[async_trait]
pub trait Provisioner: Send + Sync + fmt::Debug {
    /// Starts a node with this name, which joins the cluster by itself. Returns when it was started,
    /// or before. Succeeds if it runs already.
    async fn add(&self, node: &str) -> Result<(), ProvisionerError>;

    /// Stops a node that serves nothing any more, and frees what it uses. Succeeds if there is none
    /// with this name.
    async fn remove(&self, node: &str) -> Result<(), ProvisionerError>;

    /// The names of all nodes that were added and not removed, whether they run or not.
    async fn list(&self) -> Result<Vec<String>, ProvisionerError>;
}

/// The value of `--provisioner`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProvisionerUrl {
    /// `processes:DIR:FROM-TO`.
    Processes {
        /// The directory of the nodes' data directories.
        directory: PathBuf,
        /// The first port.
        first_port: u16,
        /// The last port.
        last_port: u16,
    },
    /// `command:PROGRAM`.
    Command {
        /// The program.
        program: PathBuf,
    },
}

impl ProvisionerUrl {
    /// The same with an absolute path, for a process with another working directory.
    pub fn absolute(self) -> ProvisionerUrl {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        match self {
            ProvisionerUrl::Processes { directory, first_port, last_port } => {
                ProvisionerUrl::Processes { directory: absolute(directory), first_port, last_port }
            }
            ProvisionerUrl::Command { program } => ProvisionerUrl::Command { program: absolute(program) },
        }
    }
}

impl FromStr for ProvisionerUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const USE: &str =
            "use processes:DIR:FROM-TO, with a range of at least three ports, or command:PROGRAM";
        if let Some(program) = text.strip_prefix("command:").filter(|program| !program.is_empty()) {
            return Ok(ProvisionerUrl::Command { program: program.into() });
        }
        let rest = text.strip_prefix("processes:").ok_or(USE)?;
        let (directory, ports) = rest.rsplit_once(':').ok_or(USE)?;
        let (first, last) = ports.split_once('-').ok_or(USE)?;
        let (first_port, last_port): (u16, u16) =
            (first.parse().map_err(|_| USE)?, last.parse().map_err(|_| USE)?);
        let is_range = first_port > 0 && u32::from(last_port) >= u32::from(first_port) + 2;
        if directory.is_empty() || !is_range {
            return Err(USE.to_owned());
        }
        Ok(ProvisionerUrl::Processes { directory: directory.into(), first_port, last_port })
    }
}

impl fmt::Display for ProvisionerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProvisionerUrl::Processes { directory, first_port, last_port } => {
                write!(f, "processes:{}:{first_port}-{last_port}", directory.display())
            }
            ProvisionerUrl::Command { program } => write!(f, "command:{}", program.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::Path;
    use std::process::{Command, Stdio};

    use super::*;

    /// Writes a shell script that can be executed.
    ///
    /// Another process writes the file. If this one opened it for writing, a process that another
    /// test starts at that moment could inherit the descriptor for a while, and the kernel does not
    /// execute a file that is open for writing (ETXTBSY).
    pub(super) fn write_program(path: &Path, script: &str) {
        let mut install = Command::new("install");
        install.args(["-m", "755", "/dev/stdin"]).arg(path).stdin(Stdio::piped());
        let mut child = install.spawn().unwrap();
        child.stdin.take().unwrap().write_all(format!("#!/bin/sh\n{script}\n").as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn urls_are_parsed_and_shown() {
        for text in ["processes:/srv/nodes:7100-7199", "processes:a:b:1-3", "command:/etc/fulmar/provision"] {
            let url: ProvisionerUrl = text.parse().unwrap();
            assert_eq!(url.to_string(), text);
        }
        for text in [
            "",
            "none",
            "command:",
            "processes:/srv",
            "processes:/srv:1-2",
            "processes::1-9",
            "processes:/srv:9-1",
        ] {
            assert!(text.parse::<ProvisionerUrl>().is_err(), "{text}");
        }
    }
}
