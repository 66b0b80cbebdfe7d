//! A wide-area network between two sites: proxies (toxiproxy, which `make tools` builds) that delay
//! the connections between nodes, and limit their rate.
//!
//! ```text
//!   namespace of node 1                         namespace of node 3
//!   node 1 --> 10.99.1.3 (a loopback address)   10.99.2.3 --> 10.99.1.3: node 3
//!              toxiproxy ----------------------> toxiproxy
//! ```
//!
//! A node connects to the address at which another one is registered. In the namespace of a node,
//! the addresses of the nodes of the other site are on the loopback interface, where a proxy
//! listens. It connects to the second address of the other node, where a proxy without delay
//! forwards to the node.
//!
//! Only connections between nodes are delayed: each site is taken to have the metadata store, the
//! common store and clients nearby.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::network::{Network, second_address};
use super::{POLL_INTERVAL, START_TIMEOUT};

/// Where `make tools` installs toxiproxy.
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/tools/toxiproxy");

/// The port of each proxy process for its configuration.
const CONTROL_PORT: u16 = 8474;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The properties of the network between the sites.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wan {
    /// Nodes from this number on are at the second site.
    pub first_remote: usize,
    /// The delay in each direction.
    pub delay: Duration,
    /// The rate of each connection in each direction.
    pub bytes_per_s: u64,
}

impl Wan {
    /// Two coasts of the United States (ShuttleDB 6.3), which the paper does not measure: 80 ms for
    /// a round trip, 6 MB/s.
    pub fn coasts(first_remote: usize) -> Wan {
        Wan { first_remote, delay: Duration::from_millis(40), bytes_per_s: 6_000_000 }
    }

    fn is_remote(self, node: usize) -> bool {
        node >= self.first_remote
    }
}

/// The running proxies, one process per node. Dropping it ends them.
pub struct WanProxies(Vec<Child>);

impl Drop for WanProxies {
    fn drop(&mut self) {
        for proxy in &mut self.0 {
            let _ = proxy.kill();
            let _ = proxy.wait();
        }
    }
}

impl WanProxies {
    /// Starts the proxies for nodes that listen on these ports, before the nodes are started.
    pub fn start(network: &Network, ports: &[u16], wan: Wan) -> anyhow::Result<WanProxies> {
        ensure!(Path::new(PROGRAM).exists(), "there is no proxy at {PROGRAM}; run `make tools`");
        let mut proxies = WanProxies(Vec::new());
        for node in 0..ports.len() {
            network.add_second_address(node)?;
            let mut command = network.command(node);
            let (host, port) = (network.address(node).to_string(), CONTROL_PORT.to_string());
            command.arg(PROGRAM).args(["-host", &host, "-port", &port]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            proxies.0.push(command.spawn().context("could not run toxiproxy")?);
        }
        for (node, port) in ports.iter().enumerate() {
            let control = SocketAddr::from((network.address(node), CONTROL_PORT));
            wait_until_it_listens(control)?;
            let own = network.address(node);
            create(control, "arrival", (second_address(node), *port), (own, *port))?;
            for (other, port) in
                ports.iter().enumerate().filter(|(other, _)| wan.is_remote(*other) != wan.is_remote(node))
            {
                network.add_loopback_address(node, network.address(other))?;
                let name = format!("to{other}");
                create(control, &name, (network.address(other), *port), (second_address(other), *port))?;
                for stream in ["upstream", "downstream"] {
                    slow_down(control, &name, stream, wan)?;
                }
            }
        }
        Ok(proxies)
    }
}

fn wait_until_it_listens(control: SocketAddr) -> anyhow::Result<()> {
    let begun = Instant::now();
    while TcpStream::connect(control).is_err() {
        ensure!(begun.elapsed() < START_TIMEOUT, "toxiproxy did not listen on {control}");
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

fn create(
    control: SocketAddr,
    name: &str,
    (listen, port): (Ipv4Addr, u16),
    (upstream, to): (Ipv4Addr, u16),
) -> anyhow::Result<()> {
    let proxy = serde_json::json!({
        "name": name, "listen": format!("{listen}:{port}"), "upstream": format!("{upstream}:{to}"), "enabled": true,
    });
    post(control, "/proxies", &proxy)
}

/// Delays a direction of a proxy, and limits its rate.
fn slow_down(control: SocketAddr, name: &str, stream: &str, wan: Wan) -> anyhow::Result<()> {
    let path = format!("/proxies/{name}/toxics");
    let rate = serde_json::json!({ "rate": wan.bytes_per_s / 1000 });
    let delay = serde_json::json!({ "latency": wan.delay.as_millis() as u64 });
    for (kind, attributes) in [("bandwidth", rate), ("latency", delay)] {
        let toxic = serde_json::json!({
            "name": format!("{kind}-{stream}"), "type": kind, "stream": stream, "attributes": attributes,
        });
        post(control, &path, &toxic)?;
    }
    Ok(())
}

fn post(control: SocketAddr, path: &str, body: &serde_json::Value) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect_timeout(&control, REQUEST_TIMEOUT)?;
    stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    let body = body.to_string();
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.0\r\nHost: {control}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let is_created = answer.split(' ').nth(1).is_some_and(|status| status.starts_with('2'));
    ensure!(is_created, "toxiproxy rejected {body}: {answer}");
    Ok(())
}
