//! The network of namespaces: links work, can be cut in one or both directions, and work again.
//! Needs the rights of root.

use std::net::{Ipv4Addr, TcpListener};
use std::process::Stdio;
use std::time::{Duration, Instant};

use fulmar_workload::server::{HUB, Network, run_in_private};

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
    assert!(can_connect(&network, 1, HUB, port));
    network.heal(0).unwrap();
    wait_until("a node reaches the hub again", || can_connect(&network, 0, HUB, port));

    let mut server = network.command(1);
    let program =
        "import socket; s = socket.create_server(('0.0.0.0', 7777)); [s.accept() for _ in iter(int, 1)]";
    let mut server = server.args(["python3", "-c", program]).spawn().unwrap();
    wait_until("nodes reach each other", || can_connect(&network, 0, network.address(1), 7777));
    network.cut_between(0, 1).unwrap();
    assert!(!can_connect(&network, 0, network.address(1), 7777));
    assert!(can_connect(&network, 0, HUB, port));
    network.heal_between(0, 1).unwrap();
    wait_until("nodes reach each other again", || can_connect(&network, 0, network.address(1), 7777));
    server.kill().unwrap();
    server.wait().unwrap();
}
