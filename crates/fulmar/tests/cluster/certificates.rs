//! TLS between nodes, with metadata in etcd and embedded; nodes with wrong certificates.

use std::path::{Path, PathBuf};

use fulmar_workload::server::{Cluster, ClusterSetup};

use super::{create, execute, move_to, owner, state, values, wait_until_alive};
use crate::common::{refusal, run, stdout};

/// Creates an authority below the cluster's directory.
fn authority(cluster: &Cluster, name: &str) -> PathBuf {
    let directory = cluster.path(name);
    stdout(&run(&["cert", "authority", "--out", directory.to_str().unwrap()]));
    directory
}

/// The arguments of a node with a certificate that an authority has issued for `name`.
fn certificate(authority: &Path, name: &str) -> Vec<String> {
    let path = authority.to_str().unwrap();
    if !authority.join(format!("{name}.crt")).exists() {
        stdout(&run(&["cert", "node", name, "--ca", path, "--out", path]));
    }
    let file = |name: &str| authority.join(name).display().to_string();
    let (crt, key) = (file(&format!("{name}.crt")), file(&format!("{name}.key")));
    ["--rpc-ca", &file("ca.crt"), "--rpc-cert", &crt, "--rpc-key", &key].map(str::to_owned).into()
}

fn set(cluster: &mut Cluster, node: usize, arguments: &[String]) {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    cluster.set_arguments(node, &arguments);
}

async fn check(embedded_metadata: bool) {
    let binary = Path::new(env!("CARGO_BIN_EXE_fulmar"));
    let setup = ClusterSetup { nodes: 2, embedded_metadata, ..ClusterSetup::default() };
    let mut cluster = Cluster::prepare(binary, setup).unwrap();
    let (own, other) = (authority(&cluster, "ca"), authority(&cluster, "other"));
    let first = certificate(&own, "n1");
    set(&mut cluster, 0, &first);
    cluster.start_node(0).await.unwrap();
    create_alone(&cluster).await;

    // Of another authority, of another name, and none.
    set(&mut cluster, 1, &certificate(&other, "n2"));
    let error = refusal(cluster.command(1)).await;
    assert!(error.contains("by another authority") && error.contains("fulmar cert node"), "{error}");
    set(&mut cluster, 1, &certificate(&own, "n3"));
    let error = refusal(cluster.command(1)).await;
    assert!(error.contains("is valid for \"n3\", not for \"n2\""), "{error}");
    cluster.set_arguments(1, &[]);
    let error = refusal(cluster.command(1)).await;
    assert!(error.contains("the node uses TLS") && error.contains("--rpc-ca"), "{error}");

    // The first node was not disturbed. With the right certificate, all works.
    assert_eq!(state(&cluster, 0, 0).await, ("alive".to_owned(), 1));
    assert_eq!(values(&cluster, 0, "shop").await, [1]);
    set(&mut cluster, 1, &certificate(&own, "n2"));
    cluster.start_node(1).await.unwrap();
    wait_until_alive(&cluster, 0, 1, state(&cluster, 0, 1).await.1).await;
    create(&cluster, "more").await;
    move_to(&cluster, 0, "shop", 1).await;
    execute(&cluster, 0, "shop", "INSERT INTO t VALUES (2)").await;
    assert_eq!(values(&cluster, 1, "shop").await, [1, 2]);
    cluster.kill(1).unwrap();
    assert_eq!(values(&cluster, 0, "shop").await, [1, 2]);
    assert_eq!(owner(&cluster, 0, "shop").await, 0);
    cluster.start_node(1).await.unwrap();
    assert_eq!(values(&cluster, 1, "shop").await, [1, 2]);
}

/// Creates a database while there is one node.
async fn create_alone(cluster: &Cluster) {
    execute(cluster, 0, "fulmar", "CREATE DATABASE shop").await;
    execute(cluster, 0, "shop", "CREATE TABLE t(v INTEGER PRIMARY KEY); INSERT INTO t VALUES (1)").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_use_tls_and_refuse_wrong_certificates() {
    check(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_with_embedded_metadata_use_tls_and_refuse_wrong_certificates() {
    check(true).await;
}
