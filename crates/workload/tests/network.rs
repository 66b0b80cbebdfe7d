//! The network of namespaces: links work, can be cut in one or both directions, and work again;
//! connections between two sites are delayed. Needs the rights of root, and `make tools`.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fulmar_workload::server::{HUB, Network, Wan, WanProxies, run_in_private};

/// Deadline of every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Whether a node can open a connection within a second.
fn can_connect(network: &Network, node: usize, to: Ipv4Addr, port: u16) -> bool {
    let mut command = network.command(node);
    command.args(["timeout", "1", "bash", "-c", &format!("exec 3<>/dev/tcp/{to}/{port}")]);
    command.stderr(Stdio::null()).status().unwrap().success()
}

fn wait_until(description: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < TIMEOUT, "timed out: {description}");
    }
}

/// A server that ends with the test.
struct Server(Child);

impl Server {
    fn start(mut command: Command, program: &str) -> Server {
        Server(command.args(["python3", "-c", program]).stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn links_can_be_cut_and_healed() {
    let arguments = ["--exact", "links_can_be_cut_and_healed", "--nocapture"].map(str::to_owned);
    if let Some(status) = run_in_private(&arguments).unwrap() {
        assert!(status.success(), "the test in the private namespace failed");
        return;
    }
    let mut network = Network::create().unwrap();
    network.add().unwrap();
    network.add().unwrap();
    let listener = TcpListener::bind((HUB, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    for node in 0..2 {
        wait_until("a node reaches the hub", || can_connect(&network, node, HUB, port));
    }
    network.cut(0).unwrap();
    assert!(!can_connect(&network, 0, HUB, port));
    wait_until("the other node reaches the hub", || can_connect(&network, 1, HUB, port));
    network.heal(0).unwrap();
    wait_until("a node reaches the hub again", || can_connect(&network, 0, HUB, port));

    let program =
        "import socket; s = socket.create_server(('0.0.0.0', 7777)); [s.accept() for _ in iter(int, 1)]";
    let _server = Server::start(network.command(1), program);
    wait_until("nodes reach each other", || can_connect(&network, 0, network.address(1), 7777));
    network.cut_between(0, 1).unwrap();
    assert!(!can_connect(&network, 0, network.address(1), 7777));
    wait_until("the node reaches the hub", || can_connect(&network, 0, HUB, port));
    network.heal_between(0, 1).unwrap();
    wait_until("nodes reach each other again", || can_connect(&network, 0, network.address(1), 7777));
}

/// Whether a node gets an answer from another one, and the shortest time that it may take.
fn answers_within(network: &Network, node: usize, to: Ipv4Addr, least: Duration) -> bool {
    let program = format!(
        "import socket, time; t = time.time(); c = socket.create_connection(('{to}', 7777)); \
         c.sendall(b'?'); c.recv(1) == b'!' and time.time() - t >= {} or exit(1)",
        least.as_secs_f64()
    );
    let mut command = network.command(node);
    command.args(["python3", "-c", &program]).stderr(Stdio::null()).status().unwrap().success()
}

#[test]
fn connections_to_another_site_are_delayed() {
    let arguments = ["--exact", "connections_to_another_site_are_delayed", "--nocapture"].map(str::to_owned);
    if let Some(status) = run_in_private(&arguments).unwrap() {
        assert!(status.success(), "the test in the private namespace failed");
        return;
    }
    let mut network = Network::create().unwrap();
    let mut servers = Vec::new();
    for node in 0..3 {
        network.add().unwrap();
        let program = format!(
            "import socket; s = socket.create_server(('{}', 7777))\nwhile True:\n c, _ = s.accept(); c.recv(1); \
             c.sendall(b'!')",
            network.address(node)
        );
        servers.push(Server::start(network.command(node), &program));
    }
    let wan = Wan { first_remote: 2, delay: Duration::from_millis(200), bytes_per_s: 1_000_000 };
    let proxies = WanProxies::start(&network, &[7777; 3], wan).unwrap();
    let round_trip = wan.delay * 2;
    for (node, to) in [(0, 2), (1, 2), (2, 0)] {
        let to = network.address(to);
        wait_until("the other site answers", || answers_within(&network, node, to, Duration::ZERO));
        assert!(answers_within(&network, node, to, round_trip), "{node} to {to}");
    }
    wait_until("a node of the same site answers", || {
        answers_within(&network, 0, network.address(1), Duration::ZERO)
    });
    drop(proxies);
    assert!(!answers_within(&network, 0, network.address(2), Duration::ZERO), "the proxies have ended");
    assert!(answers_within(&network, 0, network.address(1), Duration::ZERO), "no proxy is in between");
}
