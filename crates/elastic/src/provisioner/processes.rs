//! Nodes as processes on this machine: `fulmar start` with the arguments that all nodes share.
//!
//! ```text
//!   DIR/NAME/data    data directory
//!   DIR/NAME/log     what the node writes
//!   DIR/NAME/added   the cluster's id: the node was added by its provisioner, and not by hand
//!   DIR/NAME.removed the directory of a node that was removed, until the next one with the name is
//! ```
//!
//! Nothing is recorded about a process: it is found by its command line, which contains the path of
//! its data directory. So a controller that has died between the start of a process and a record of
//! it leaves nothing unknown, and a process id that was reused is not mistaken for a node.
//!
//! Nodes outlive the process that has started them. They are stopped by SIGTERM, and killed after
//! [`STOP_TIMEOUT`].

use std::collections::HashSet;
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};

use async_trait::async_trait;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{Provisioner, ProvisionerError};

/// How long a node may take to stop before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How nodes are started.
#[derive(Clone, Debug)]
pub struct Options {
    /// The executable.
    pub program: PathBuf,
    /// The cluster's id: other clusters may use the same directory.
    pub cluster: String,
    /// The directory of the nodes' directories.
    pub directory: PathBuf,
    /// Where nodes listen.
    pub host: IpAddr,
    /// The ports that they use: three for each.
    pub ports: RangeInclusive<u16>,
    /// The arguments that all nodes share.
    pub arguments: Vec<String>,
    /// The directory with `NAME.crt` and `NAME.key` for each node, with TLS between nodes.
    pub certificates: Option<PathBuf>,
}

/// Starts and stops processes on this machine.
#[derive(Debug)]
pub struct Processes {
    options: Options,
    /// One process is started at a time, so that each finds the ports of the others.
    starting: Mutex<()>,
}

impl Processes {
    /// Starts nodes with these options.
    pub fn new(mut options: Options) -> Result<Processes, ProvisionerError> {
        let directory = &options.directory;
        let doing = format!("cannot use the directory {} for nodes", directory.display());
        fs::create_dir_all(directory).map_err(|error| ProvisionerError::new(&doing, &error))?;
        // Command lines are compared with it.
        options.directory =
            directory.canonicalize().map_err(|error| ProvisionerError::new(&doing, &error))?;
        Ok(Processes { options, starting: Mutex::new(()) })
    }

    fn home(&self, node: &str) -> PathBuf {
        self.options.directory.join(node)
    }

    fn data(&self, node: &str) -> PathBuf {
        self.home(node).join("data")
    }

    /// The file that tells directories of added nodes from others.
    fn mark(&self, node: &str) -> PathBuf {
        self.home(node).join("added")
    }

    /// Returns true if a directory is that of a node that was added to this cluster.
    fn is_added(&self, node: &str) -> bool {
        fs::read_to_string(self.mark(node)).is_ok_and(|cluster| cluster == self.options.cluster)
    }

    /// Writes the mark, atomically and durably.
    fn write_mark(&self, node: &str) -> io::Result<()> {
        let new = self.options.directory.join(format!("{node}.added"));
        let mut file = fs::File::create(&new)?;
        file.write_all(self.options.cluster.as_bytes())?;
        file.sync_all()?;
        fs::rename(new, self.mark(node))?;
        fs::File::open(self.home(node))?.sync_all()
    }

    fn find(&self, node: &str) -> Option<Pid> {
        find_process(&self.data(node))
    }

    /// Three free ports that no other node uses.
    fn free_ports(&self) -> io::Result<[u16; 3]> {
        let used = self.used_ports();
        let is_free =
            |port: &u16| !used.contains(port) && TcpListener::bind((self.options.host, *port)).is_ok();
        let mut free = self.options.ports.clone().filter(is_free);
        let mut next = || {
            let none =
                || io::Error::new(io::ErrorKind::AddrInUse, "fewer than three free ports in the range");
            free.next().ok_or_else(none)
        };
        Ok([next()?, next()?, next()?])
    }

    /// The ports in the command lines of nodes, which may not listen on them yet.
    fn used_ports(&self) -> HashSet<u16> {
        let is_own = |arguments: &Vec<String>| {
            arguments
                .windows(2)
                .any(|pair| pair[0] == "--data" && Path::new(&pair[1]).starts_with(&self.options.directory))
        };
        let own = process_ids().into_iter().map(arguments).filter(is_own).flatten();
        own.filter_map(|argument| Some(argument.parse::<SocketAddr>().ok()?.port())).collect()
    }

    fn start(&self, node: &str) -> io::Result<()> {
        let _starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        let home = self.home(node);
        fs::create_dir_all(&home)?;
        if !self.is_added(node) {
            if fs::read_dir(&home)?.next().is_some() {
                let text =
                    format!("{} exists, and was not created for a node of this cluster", home.display());
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
            }
            self.write_mark(node)?;
        }
        if self.find(node).is_some() {
            return Ok(());
        }
        let log = fs::File::options().create(true).append(true).open(home.join("log"))?;
        let address = |port| SocketAddr::new(self.options.host, port).to_string();
        let [sql, http, rpc] = self.free_ports()?.map(address);
        let mut command = tokio::process::Command::new(&self.options.program);
        command.arg("start").arg("--data").arg(self.data(node)).args(["--node", node]);
        command.args(["--sql", &sql, "--http", &http, "--rpc", &rpc]).args(&self.options.arguments);
        if let Some(certificates) = &self.options.certificates {
            command.arg("--rpc-cert").arg(certificates.join(format!("{node}.crt")));
            command.arg("--rpc-key").arg(certificates.join(format!("{node}.key")));
        }
        // Signals to this process's group, such as Ctrl-C, are not for the node.
        command.process_group(0).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // The runtime waits for a child whose handle was dropped.
        command.spawn().map(drop)
    }

    async fn stop(&self, node: &str) -> io::Result<()> {
        // A directory without the mark is not one of a node that was started here.
        if !self.is_added(node) {
            return Ok(());
        }
        let begun = Instant::now();
        let mut signalled = None;
        while let Some(pid) = self.find(node) {
            let signal = if begun.elapsed() > STOP_TIMEOUT { Signal::KILL } else { Signal::TERM };
            if signalled != Some((pid, signal)) {
                send(pid, &self.data(node), signal)?;
                signalled = Some((pid, signal));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        let (home, removed) = (self.home(node), self.options.directory.join(format!("{node}.removed")));
        if removed.exists() {
            fs::remove_dir_all(&removed)?;
        }
        fs::rename(home, removed)
    }
}

/// Sends a signal to a process, if it is still that of a node.
fn send(pid: Pid, data: &Path, signal: Signal) -> io::Result<()> {
    // The descriptor refers to one process, whatever becomes of its id.
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(()) };
    if is_node(pid.as_raw_nonzero().get(), data) {
        pidfd_send_signal(&process, signal)?;
    }
    Ok(())
}

/// The process of the node with this data directory.
fn find_process(data: &Path) -> Option<Pid> {
    process_ids().into_iter().find(|id| is_node(*id, data)).and_then(Pid::from_raw)
}

fn process_ids() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The command line of a process. One that has ended has none.
fn arguments(id: i32) -> Vec<String> {
    let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).map(|argument| String::from_utf8_lossy(argument).into_owned()).collect()
}

/// Returns true if a process is `... start ... --data DATA`.
fn is_node(id: i32, data: &Path) -> bool {
    let arguments = arguments(id);
    let starts = arguments.iter().any(|argument| argument == "start");
    starts && arguments.windows(2).any(|pair| pair[0] == "--data" && Path::new(&pair[1]) == data)
}

#[async_trait]
impl Provisioner for Processes {
    async fn add(&self, node: &str) -> Result<(), ProvisionerError> {
        self.start(node)
            .map_err(|error| ProvisionerError::new(&format!("cannot start node \"{node}\""), &error))
    }

    async fn remove(&self, node: &str) -> Result<(), ProvisionerError> {
        let doing = format!("cannot stop node \"{node}\"");
        self.stop(node).await.map_err(|error| ProvisionerError::new(&doing, &error))
    }

    async fn list(&self) -> Result<Vec<String>, ProvisionerError> {
        let doing = format!("cannot list {}", self.options.directory.display());
        let entries =
            fs::read_dir(&self.options.directory).map_err(|error| ProvisionerError::new(&doing, &error))?;
        let name = |entry: fs::DirEntry| entry.file_name().into_string().ok();
        let names = entries.flatten().filter(|entry| entry.path().is_dir()).filter_map(name);
        Ok(names.filter(|name| !name.ends_with(".removed") && self.is_added(name)).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::super::tests::write_program;
    use super::*;

    /// A program that behaves as a node for the provisioner: it runs until SIGTERM.
    fn processes(directory: &Path, first_port: u16) -> Processes {
        processes_of("c1", directory, first_port)
    }

    fn processes_of(cluster: &str, directory: &Path, first_port: u16) -> Processes {
        let program = directory.join("program");
        write_program(&program, "trap 'exit 0' TERM\nwhile :; do sleep 0.05; done");
        Processes::new(Options {
            program,
            cluster: cluster.to_owned(),
            directory: directory.join("nodes"),
            host: Ipv4Addr::LOCALHOST.into(),
            ports: first_port..=first_port + 5,
            arguments: vec!["--insecure".to_owned()],
            certificates: None,
        })
        .unwrap()
    }

    #[tokio::test]
    async fn processes_are_started_once_found_by_any_provisioner_and_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let first = processes(directory.path(), 19_310);
        first.add("a1").await.unwrap();
        let running = async {
            while first.find("a1").is_none() {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), running).await.unwrap();
        let pid = first.find("a1");
        first.add("a1").await.unwrap();
        assert_eq!(first.find("a1"), pid, "a node that runs is not started again");
        assert_eq!(first.find("a"), None, "another node's data directory begins with the same letters");

        let of_another_cluster = processes_of("c2", directory.path(), 19_310);
        assert_eq!(of_another_cluster.list().await.unwrap(), Vec::<String>::new());
        of_another_cluster.remove("a1").await.unwrap();
        let refused = of_another_cluster.add("a1").await.unwrap_err().to_string();
        assert!(refused.contains("was not created for a node of this cluster"), "{refused}");
        assert_eq!(first.find("a1"), pid);

        let other = processes(directory.path(), 19_310);
        assert_eq!(other.list().await.unwrap(), ["a1"]);
        other.remove("a1").await.unwrap();
        assert_eq!((other.find("a1"), other.list().await.unwrap()), (None, Vec::new()));
        assert!(other.home("a1.removed").exists());
        other.remove("a1").await.unwrap();
    }

    #[tokio::test]
    async fn other_directories_are_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let processes = processes(directory.path(), 19_330);
        let data = processes.home("n1").join("data");
        fs::create_dir_all(&data).unwrap();
        assert_eq!(processes.list().await.unwrap(), Vec::<String>::new());
        processes.remove("n1").await.unwrap();
        let refused = processes.add("n1").await.unwrap_err().to_string();
        assert!(refused.contains("was not created for a node of this cluster"), "{refused}");
        assert!(data.exists() && processes.find("n1").is_none());
    }

    #[tokio::test]
    async fn nodes_need_free_ports() {
        let directory = tempfile::tempdir().unwrap();
        let processes = processes(directory.path(), 19_320);
        let taken: Vec<TcpListener> =
            (19_320..19_324).map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap()).collect();
        let error = processes.add("a1").await.unwrap_err().to_string();
        assert!(error.contains("fewer than three free ports"), "{error}");
        drop(taken);
        // A process that another test starts has the sockets too, until it executes its program.
        let free = async {
            while !processes.free_ports().is_ok_and(|ports| ports == [19_320, 19_321, 19_322]) {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), free).await.unwrap();
    }
}
