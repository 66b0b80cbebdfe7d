//! A metadata store that was restored from a backup of the same incarnations.

use std::path::Path;

use fulmar_workload::server::{Cluster, ClusterSetup};

use super::{execute, values};
use crate::common::refusal;

/// Replaces the embedded metadata store in a directory by that of another one.
fn replace_metadata(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    let files = |directory: &Path| {
        let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
        let names = names.map(|name| name.into_string().unwrap());
        names.filter(|name| name.starts_with("cluster.db") || name == "cluster.head").collect::<Vec<_>>()
    };
    for name in files(to) {
        std::fs::remove_file(to.join(name)).unwrap();
    }
    for name in files(from) {
        std::fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}

/// Creates a database with one row.
async fn create(cluster: &Cluster, database: &str) {
    execute(cluster, 0, "fulmar", &format!("CREATE DATABASE {database}")).await;
    let sql = "CREATE TABLE t(v INTEGER PRIMARY KEY); INSERT INTO t VALUES (1)";
    execute(cluster, 0, database, sql).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_metadata_store_is_refused_and_no_commit_is_lost() {
    let setup = ClusterSetup { nodes: 1, embedded_metadata: true, ..ClusterSetup::default() };
    let mut cluster = Cluster::start(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup).await.unwrap();
    create(&cluster, "before").await;
    let data = cluster.data(0).to_owned();
    let (backup, newest) = (cluster.path("backup"), cluster.path("newest"));
    replace_metadata(&data, &backup);
    create(&cluster, "shop").await;
    cluster.kill(0).unwrap();
    replace_metadata(&data, &newest);

    replace_metadata(&backup, &data);
    let error = refusal(cluster.command(0)).await;
    assert!(error.contains("restore a newer backup of the metadata store"), "{error}");
    assert!(error.contains("start this node once with --accept-catalog "), "{error}");

    replace_metadata(&newest, &data);
    cluster.start_node(0).await.unwrap();
    for database in ["before", "shop"] {
        assert_eq!(values(&cluster, 0, database).await, [1]);
    }
}
