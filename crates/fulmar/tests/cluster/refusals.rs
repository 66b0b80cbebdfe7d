//! Nodes that must not start.

use std::path::Path;
use std::process::Command;

use fulmar_workload::server::{Cluster, ClusterSetup};

use crate::common::{fulmar, with_timeout};

/// Runs a node that must refuse to start. Returns its error.
async fn refusal(mut command: Command) -> String {
    let command_text = format!("{command:?}");
    let run = tokio::task::spawn_blocking(move || command.output().unwrap());
    let output = with_timeout("a refused start", run).await.unwrap();
    assert!(!output.status.success(), "{command_text}");
    String::from_utf8(output.stderr).unwrap()
}

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

    // Another process with the name of a living node, and another directory.
    let error = refusal(replaced(&cluster, 1, &[("--node", "n1".to_owned())])).await;
    assert!(error.contains("does not belong to this node") && error.contains("another name"), "{error}");

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

    // Invalid flags.
    for (flag, value, part) in [
        ("--meta", "embedded", "--meta contains no cluster"),
        ("--rpc", "0.0.0.0:7000", "--insecure disables authentication"),
        ("--rpc", "127.0.0.1:0", "not an address that other nodes can reach"),
        ("--node", "N 1", "invalid node name"),
        ("--store", "memory:", "cannot be shared"),
        ("--meta", "etcd://127.0.0.1:1", "metadata store"),
    ] {
        let error = refusal(replaced(&cluster, 1, &[(flag, value.to_owned())])).await;
        assert!(error.contains(part), "{flag} {value}: {error}");
    }

    // The node itself was not disturbed by any of them, and a right one joins.
    cluster.start_node(1).await.unwrap();
    assert!(cluster.is_running(0));
}
