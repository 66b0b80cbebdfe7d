//! An etcd that is out of space, or only readable: the nodes keep their leases and databases, and
//! changes fail with a remedy.

use std::path::Path;
use std::time::{Duration, Instant};

use fulmar_workload::server::{Cluster, ClusterSetup};

use super::{connect, create, execute, move_to, owner, state, try_connect, values, wait_until_alive};
use crate::common::{refusal, wait_until, with_timeout};

/// Several leases.
const LEASES: Duration = Duration::from_secs(4);

/// Fills etcd until it rejects changes.
fn fill(cluster: &mut Cluster) {
    let value = "x".repeat(100_000);
    for number in 0..1000 {
        if let Err(error) = cluster.etcd().etcdctl(&["put", &format!("large/{number}"), &value]) {
            assert!(error.to_string().contains("database space exceeded"), "{error}");
            return;
        }
    }
    panic!("etcd accepts more than its quota");
}

/// The documented remedy.
fn free(cluster: &mut Cluster) {
    let etcd = cluster.etcd();
    etcd.etcdctl(&["del", "--prefix", "large/"]).unwrap();
    let read = etcdctl_revision(&etcd.etcdctl(&["get", "x", "-w", "json"]).unwrap());
    etcd.etcdctl(&["compact", "--physical", &read]).unwrap();
    etcd.etcdctl(&["defrag"]).unwrap();
    etcd.etcdctl(&["alarm", "disarm"]).unwrap();
}

/// The revision in the header of an answer.
fn etcdctl_revision(answer: &str) -> String {
    let answer: serde_json::Value = serde_json::from_str(answer).unwrap();
    answer["header"]["revision"].to_string()
}

/// The SQLSTATE and the text of a statement's error.
async fn error(cluster: &Cluster, sql: &str) -> (String, String) {
    let client = connect(cluster, 0, "fulmar").await;
    let error = with_timeout(sql, client.batch_execute(sql)).await.unwrap_err();
    let error = error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error:?}"));
    (error.code().code().to_owned(), format!("{} {}", error.message(), error.hint().unwrap_or_default()))
}

#[tokio::test(flavor = "multi_thread")]
async fn full_etcd_stops_neither_reads_nor_commits() {
    let setup = ClusterSetup {
        nodes: 2,
        etcd_arguments: vec!["--quota-backend-bytes=8388608".to_owned()],
        ..ClusterSetup::default()
    };
    let mut cluster = Cluster::start(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup).await.unwrap();
    create(&cluster, "shop").await;
    move_to(&cluster, 0, "shop", 1).await;
    move_to(&cluster, 0, "fulmar", 0).await;
    fill(&mut cluster);

    // Leases are renewed, and both nodes go on.
    let begun = Instant::now();
    let mut count = 0;
    while begun.elapsed() < LEASES {
        execute(&cluster, 0, "shop", &format!("INSERT INTO t VALUES ({count})")).await;
        count += 1;
        assert_eq!(values(&cluster, 1, "shop").await.len() as i64, count);
    }
    // The leases of before the loop have expired.
    assert_eq!(values(&cluster, 1, "shop").await.len() as i64, count);

    // Changes fail, and say why.
    for sql in ["CREATE DATABASE more", "CREATE USER ada PASSWORD 'x'", "ALTER DATABASE shop MOVE TO 'n1'"] {
        let (state, text) = error(&cluster, sql).await;
        assert_eq!(state, "53100", "{sql}: {text}");
        assert!(text.contains("etcdctl alarm disarm"), "{sql}: {text}");
    }
    assert_eq!(owner(&cluster, 0, "shop").await, 1);

    // A death is failed over once there is space again.
    let (_, before) = state(&cluster, 0, 1).await;
    cluster.kill(1).unwrap();
    execute(&cluster, 0, "fulmar", "SELECT 1").await;
    free(&mut cluster);
    assert_eq!(values(&cluster, 0, "shop").await, Vec::from_iter(0..count));
    execute(&cluster, 0, "fulmar", "CREATE DATABASE more").await;
    cluster.start_node(1).await.unwrap();
    wait_until_alive(&cluster, 0, 1, before + 1).await;
    execute(&cluster, 1, "shop", &format!("INSERT INTO t VALUES ({count})")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_starts_while_etcd_is_full_is_refused_with_a_remedy() {
    let setup = ClusterSetup {
        nodes: 1,
        etcd_arguments: vec!["--quota-backend-bytes=8388608".to_owned()],
        ..ClusterSetup::default()
    };
    let mut cluster = Cluster::start(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup).await.unwrap();
    execute(&cluster, 0, "fulmar", "CREATE DATABASE shop").await;
    cluster.kill(0).unwrap();
    fill(&mut cluster);
    let error = refusal(cluster.command(0)).await;
    assert!(error.contains("etcdctl alarm disarm"), "{error}");
    free(&mut cluster);
    cluster.start_node(0).await.unwrap();
    execute(&cluster, 0, "shop", "CREATE TABLE t(v)").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_user_without_the_right_to_write_is_refused() {
    let binary = Path::new(env!("CARGO_BIN_EXE_fulmar"));
    let mut cluster = Cluster::prepare(binary, ClusterSetup { nodes: 1, ..ClusterSetup::default() }).unwrap();
    let (name, password) = ("fulmar", "secret");
    for arguments in [
        &["user", "add", "root:root"][..],
        &["user", "grant-role", "root", "root"],
        &["role", "add", name],
        &["role", "grant-permission", name, "read", "/fulmar/fulmar/", "--prefix=true"],
        &["user", "add", &format!("{name}:{password}")],
        &["user", "grant-role", name, name],
        &["auth", "enable"],
    ] {
        cluster.etcd().etcdctl(arguments).unwrap();
    }
    let file = cluster.path("password");
    std::fs::write(&file, password).unwrap();
    cluster.set_arguments(0, &["--meta-user", name, "--meta-password-file", file.to_str().unwrap()]);
    let error = refusal(cluster.command(0)).await;
    assert!(error.contains("permission denied") && error.contains("readwrite"), "{error}");
    // With the right to write.
    let root = ["--user", "root:root"];
    let mut grant = root.to_vec();
    grant.extend(["role", "grant-permission", name, "readwrite", "/fulmar/fulmar/", "--prefix=true"]);
    cluster.etcd().etcdctl(&grant).unwrap();
    cluster.start_node(0).await.unwrap();
    wait_until("a session", async || try_connect(&cluster.url(0, "fulmar")).await.is_ok()).await;
}
