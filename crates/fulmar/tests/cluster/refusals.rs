//! Nodes that must not start.

use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Command;

use fulmar_transport::hello::{METADATA_CLIENT, VERSIONS};
use fulmar_transport::{Identity, connect};
use fulmar_workload::server::{Cluster, ClusterSetup};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::common::{Node, fulmar, refusal, stderr_of_failure, with_timeout};
use crate::{execute, wait_until_alive};

/// The command of a node with some of its arguments replaced.
fn replaced(cluster: &Cluster, node: usize, flags: &[(&str, String)]) -> Command {
    let original = cluster.command(node);
    let mut command = Command::new(original.get_program());
    let mut arguments = original.get_args();
    while let Some(argument) = arguments.next() {
        command.arg(argument);
        if let Some((_, value)) = flags.iter().find(|(flag, _)| argument == *flag) {
            arguments.next();
            command.arg(value);
        }
    }
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_directories_and_stores_are_refused_with_a_remedy() {
    let binary = Path::new(env!("CARGO_BIN_EXE_fulmar"));
    let setup = ClusterSetup { nodes: 2, ..ClusterSetup::default() };
    let mut cluster = Cluster::prepare(binary, setup).unwrap();
    cluster.start_node(0).await.unwrap();
    let path = |name: &str| cluster.path(name).display().to_string();

    // Another store than the cluster's, which is empty.
    let other_store = format!("file://{}", path("other"));
    let error = refusal(replaced(&cluster, 1, &[("--store", other_store)])).await;
    assert!(error.contains("give all nodes the same --store"), "{error}");

    // Another process with the name of a living node: with an empty directory, and with a copy of that
    // node's.
    std::fs::create_dir(cluster.path("same")).unwrap();
    for data in ["empty", "same"] {
        for file in ["cluster.json", "stamp.json"].iter().filter(|_| data == "same") {
            std::fs::copy(cluster.data(0).join(file), cluster.path("same").join(file)).unwrap();
        }
        let flags = [("--node", "n1".to_owned()), ("--data", path(data))];
        let error = refusal(replaced(&cluster, 1, &flags)).await;
        assert!(error.contains("another process runs as node \"n1\" at 127.0.0.1:"), "{error}");
        assert!(error.contains("with another --node and an empty --data"), "{error}");
    }

    // The directory of another node. (A copy: the lock protects the original.)
    std::fs::create_dir(cluster.path("copy")).unwrap();
    for file in ["cluster.json", "stamp.json"] {
        std::fs::copy(cluster.data(0).join(file), cluster.path("copy").join(file)).unwrap();
    }
    let error = refusal(replaced(&cluster, 1, &[("--data", path("copy"))])).await;
    assert!(error.contains("is the data directory of node \"n1\"; start with --node n1"), "{error}");

    // Without the flags of a cluster.
    let single = ["start", "--sql", "127.0.0.1:0", "--http", "127.0.0.1:0", "--insecure", "--data"];
    let mut command = fulmar(&single);
    command.arg(path("copy"));
    let error = refusal(command).await;
    assert!(error.contains("of a cluster; start it with --node n1"), "{error}");

    // The store, for a single node.
    let mut command = fulmar(&single);
    command.arg(path("single")).args(["--store", &format!("file://{}", path("store"))]);
    let error = refusal(command).await;
    assert!(error.contains("belongs to another data directory"), "{error}");

    // The store of a single node, and another cluster.
    drop(Node::start(&cluster.path("alone"), &["--insecure"]));
    let other_store = format!("file://{}/store", path("alone"));
    let error = refusal(replaced(&cluster, 1, &[("--store", other_store)])).await;
    assert!(error.contains("belongs to another cluster") && error.contains("of one cluster"), "{error}");
    let other_cluster = format!("etcd://{}/other", cluster.etcd().endpoints().join(","));
    let error = refusal(replaced(&cluster, 1, &[("--meta", other_cluster)])).await;
    assert!(error.contains("--meta contains no cluster; use the --meta of that cluster"), "{error}");

    // Invalid flags.
    for (flag, value, part) in [
        ("--meta", "embedded", "--meta contains no cluster"),
        ("--rpc", "0.0.0.0:7000", "--insecure disables authentication"),
        ("--rpc", "127.0.0.1:0", "not an address that other nodes can reach"),
        ("--node", "N 1", "invalid node name"),
        ("--store", "memory:", "cannot be shared"),
    ] {
        let error = refusal(replaced(&cluster, 1, &[(flag, value.to_owned())])).await;
        assert!(error.contains(part), "{flag} {value}: {error}");
    }
    // No etcd. It is the absence of an answer that is expected here: the start is not repeated.
    // A node that has joined would wait for it.
    let flags =
        [("--meta", "etcd://127.0.0.1:1".to_owned()), ("--data", cluster.path("new").display().to_string())];
    let mut command = replaced(&cluster, 1, &flags);
    let run = tokio::task::spawn_blocking(move || command.output().unwrap());
    let error = stderr_of_failure(&with_timeout("a start without etcd", run).await.unwrap(), 1);
    assert!(error.contains("metadata store"), "{error}");

    // The node itself was not disturbed by any of them, and a right one joins.
    execute(&cluster, 0, "fulmar", "SELECT 1").await;
    cluster.start_node(1).await.unwrap();
    wait_until_alive(&cluster, 1, 0, 1).await;
}

/// Introduces a process with these protocol versions to a node. Returns the version to be used.
async fn introduce(cluster: &Cluster, versions: RangeInclusive<u16>) -> Result<u16, String> {
    let tcp = tokio::net::TcpStream::connect(("127.0.0.1", cluster.rpc_port(0))).await.unwrap();
    let (reader, writer) = tokio::io::split(tcp);
    let identity = Identity { cluster: 0, node: METADATA_CLIENT, incarnation: 0, versions };
    let connected = with_timeout("a handshake", connect(reader, writer, &identity, None)).await;
    connected.map(|(connection, _)| connection.version()).map_err(|error| error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn neighbouring_protocol_versions_work_together_and_others_are_refused() {
    let binary = Path::new(env!("CARGO_BIN_EXE_fulmar"));
    let cluster = Cluster::start(binary, ClusterSetup { nodes: 1, ..ClusterSetup::default() }).await.unwrap();
    let (oldest, newest) = (*VERSIONS.start(), *VERSIONS.end());
    assert_eq!(introduce(&cluster, newest..=newest + 1).await, Ok(newest), "the next version of Fulmar");
    assert_eq!(introduce(&cluster, oldest - 1..=oldest).await, Ok(oldest), "the previous version");
    let error = introduce(&cluster, newest + 1..=newest + 2).await.unwrap_err();
    assert!(error.contains("upgrade the older one to a neighbouring version first"), "{error}");
    // Something else than a node.
    let mut tcp = tokio::net::TcpStream::connect(("127.0.0.1", cluster.rpc_port(0))).await.unwrap();
    tcp.write_all(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n").await.unwrap();
    let closed = with_timeout("the node closes the connection", tcp.read_to_end(&mut Vec::new())).await;
    // Reset, because the node has not read all of it, or closed.
    drop(closed);
    crate::execute(&cluster, 0, "fulmar", "SELECT 1").await;
}
