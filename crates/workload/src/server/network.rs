//! A network of namespaces on one machine, whose links can be cut.
//!
//! ```text
//!   this process, etcd, S3 server          10.99.0.1 on a bridge
//!      |            |            |
//!    node 1       node 2       node 3      10.99.1.N, each in its own namespace
//! ```
//!
//! Addresses are resolved by static entries. With ARP, the kernel repeats a request that was lost in a
//! cut only after 1 s, so a cut would last up to 1 s longer. Routers and virtual networks hide that.
//!
//! The bridge is in the namespace of this process, which must be a private one: [`run_in_private`]
//! starts the process again in such a namespace. All namespaces vanish with their processes. This
//! needs the rights of root, and the commands `ip` (package iproute2), `unshare` and `nsenter`
//! (package util-linux).

use std::net::Ipv4Addr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

/// Marks the process that was started in a private namespace.
const MARK: &str = "FULMAR_PRIVATE_NETWORK";
/// The bridge and its address.
const BRIDGE: &str = "hub";
const START_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The address of this process and of the servers that are not nodes.
pub const HUB: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);

/// The network of the second addresses of nodes.
const SECOND_NETWORK: &str = "10.99.2.0/24";

/// The second address of a node, if it has one.
pub(super) fn second_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 99, 2, number as u8 + 1)
}

/// Runs this program again, with these arguments, in its own namespaces for the network and for
/// mounts, and returns how it ended. Returns None if it already runs in such.
pub fn run_in_private(arguments: &[String]) -> anyhow::Result<Option<ExitStatus>> {
    if std::env::var_os(MARK).is_some() {
        run("ip", &["link", "set", "lo", "up"])?;
        return Ok(None);
    }
    let program = std::env::current_exe().context("cannot determine the path of this program")?;
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--"]).arg(program).args(arguments).env(MARK, "1");
    command.status().map(Some).context("could not run unshare; install Debian's package util-linux")
}

/// A network. Dropping it ends its namespaces.
pub struct Network {
    nodes: Vec<Namespace>,
}

/// The namespace of a node. It lives as long as the process that holds it.
struct Namespace {
    holder: Child,
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.nodes.clear();
        // The bridge vanishes with the namespace, if it cannot be removed here.
        let _ = run("ip", &["link", "delete", BRIDGE]);
    }
}

impl Network {
    /// Creates the bridge. Fails if this process is not in a private namespace.
    pub fn create() -> anyhow::Result<Network> {
        ensure!(std::env::var_os(MARK).is_some(), "a network needs a private namespace (run_in_private)");
        run("ip", &["link", "add", BRIDGE, "address", &hardware_address(HUB), "type", "bridge"])?;
        run("ip", &["address", "add", &format!("{HUB}/16"), "dev", BRIDGE])?;
        run("ip", &["link", "set", BRIDGE, "up"])?;
        Ok(Network { nodes: Vec::new() })
    }

    /// Adds the namespace of the next node, and connects it.
    pub fn add(&mut self) -> anyhow::Result<()> {
        let number = self.nodes.len();
        let mut command = Command::new("unshare");
        command.args(["--net", "--", "sleep", "infinity"]).stdin(Stdio::null());
        let holder = command.spawn().context("could not run unshare")?;
        let namespace = Namespace { holder };
        let process = namespace.holder.id().to_string();
        wait_until_unshared(&process)?;
        let link = link(number);
        let hardware = hardware_address(self.address(number));
        let peer = ["peer", "name", "eth0", "address", &hardware, "netns", &process];
        run("ip", &[&["link", "add", &link, "type", "veth"][..], &peer].concat())?;
        run("ip", &["link", "set", &link, "master", BRIDGE, "up"])?;
        self.nodes.push(namespace);
        let address = format!("{}/16", self.address(number));
        self.run_in(number, &["ip", "address", "add", &address, "dev", "eth0"])?;
        self.run_in(number, &["ip", "link", "set", "eth0", "up"])?;
        self.run_in(number, &["ip", "link", "set", "lo", "up"])?;
        self.resolve(number)
    }

    /// Adds static entries for the addresses of a new node and of all others.
    fn resolve(&self, number: usize) -> anyhow::Result<()> {
        let entry = |address: Ipv4Addr, device: &str| {
            let hardware = hardware_address(address);
            format!("ip neighbour add {address} lladdr {hardware} nud permanent dev {device}")
        };
        let run_in =
            |number: usize, command: String| self.run_in(number, &command.split(' ').collect::<Vec<_>>());
        let command = entry(self.address(number), BRIDGE);
        run("ip", &command.split(' ').skip(1).collect::<Vec<_>>())?;
        run_in(number, entry(HUB, "eth0"))?;
        for other in 0..number {
            run_in(number, entry(self.address(other), "eth0"))?;
            run_in(other, entry(self.address(number), "eth0"))?;
        }
        Ok(())
    }

    /// The address of a node.
    pub fn address(&self, number: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 99, 1, number as u8 + 1)
    }

    /// Adds a second address of a node, which it also connects from to second addresses of others.
    pub(super) fn add_second_address(&self, number: usize) -> anyhow::Result<()> {
        let address = second_address(number);
        let host = format!("{address}/32");
        self.run_in(number, &["ip", "address", "add", &host, "dev", "eth0"])?;
        let source = address.to_string();
        self.run_in(number, &["ip", "route", "add", SECOND_NETWORK, "dev", "eth0", "src", &source])
    }

    /// Makes an address of another node a local one in the namespace of a node.
    pub(super) fn add_loopback_address(&self, number: usize, address: Ipv4Addr) -> anyhow::Result<()> {
        self.run_in(number, &["ip", "address", "add", &format!("{address}/32"), "dev", "lo"])
    }

    /// A command that runs in the namespace of a node. The process keeps its id.
    pub fn command(&self, number: usize) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.nodes[number].holder.id())).arg("--");
        command
    }

    /// Cuts a node off from everything. Its packets are lost, in both directions.
    pub fn cut(&self, number: usize) -> anyhow::Result<()> {
        run("ip", &["link", "set", &link(number), "down"])
    }

    /// Ends a cut.
    pub fn heal(&self, number: usize) -> anyhow::Result<()> {
        run("ip", &["link", "set", &link(number), "up"])
    }

    /// Cuts the way from one node to another. Packets in the other direction still arrive.
    pub fn cut_between(&self, from: usize, to: usize) -> anyhow::Result<()> {
        self.run_in(from, &["ip", "route", "add", "blackhole", &self.address(to).to_string()])
    }

    /// Ends a cut between two nodes.
    pub fn heal_between(&self, from: usize, to: usize) -> anyhow::Result<()> {
        self.run_in(from, &["ip", "route", "delete", "blackhole", &self.address(to).to_string()])
    }

    fn run_in(&self, number: usize, words: &[&str]) -> anyhow::Result<()> {
        let mut command = self.command(number);
        command.args(words);
        check(command)
    }
}

/// The hardware address of the interface with this address. It is a locally administered one.
fn hardware_address(address: Ipv4Addr) -> String {
    let [a, b, c, d] = address.octets();
    format!("02:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

/// The bridge's end of a node's link.
fn link(number: usize) -> String {
    format!("node{}", number + 1)
}

/// Waits until a process is in another network namespace than this one.
fn wait_until_unshared(process: &str) -> anyhow::Result<()> {
    let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net"));
    let (own, begun) = (namespace("self")?, Instant::now());
    while namespace(process)? == own {
        ensure!(begun.elapsed() < START_TIMEOUT, "unshare did not create a network namespace");
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

fn run(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let mut command = Command::new(program);
    command.args(arguments);
    check(command)
}

fn check(mut command: Command) -> anyhow::Result<()> {
    let output = command.output().with_context(|| {
        format!("could not run {command:?}; install Debian's packages iproute2 and util-linux")
    })?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {errors}");
    Ok(())
}
