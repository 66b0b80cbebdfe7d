//! Clusters whose nodes have stores of their own: databases are copied when they move.

use fulmar_workload::server::ClusterStore;

use super::migrations::{
    ROWS, fill, final_report, message, move_with_open_transactions, rows, start_slow_move, wait_for_step,
};
use super::*;
use crate::common::refusal;

pub(super) async fn start_private() -> Cluster {
    let setup = ClusterSetup { store: ClusterStore::Private, ..ClusterSetup::default() };
    Cluster::start(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup).await.unwrap()
}

async fn start_with_archives() -> Cluster {
    let arguments = vec!["--archives".to_owned(), "64MiB".to_owned()];
    let setup = ClusterSetup { store: ClusterStore::Private, arguments, ..ClusterSetup::default() };
    Cluster::start(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup).await.unwrap()
}

async fn move_using(cluster: &Cluster, mechanism: &str, to: usize) {
    let sql = format!("ALTER DATABASE shop MOVE TO '{}' USING '{mechanism}'", cluster.name(to));
    execute(cluster, (to + 1) % 3, "fulmar", &sql).await;
}

/// The number of the database's manifests in the store of a node.
async fn manifests(cluster: &Cluster, node: usize, database: &str) -> usize {
    let client = connect(cluster, node, "fulmar").await;
    let sql = "SELECT partition FROM fulmar.partitions WHERE tenant = $1";
    let row = with_timeout("the partition", client.query_one(sql, &[&database])).await.unwrap();
    // Those of the first timeline. An empty directory may be left.
    let name = format!("{:016x}/00000001", row.get::<_, i64>(0));
    let directory = cluster.data(node).join("store/manifests").join(name);
    std::fs::read_dir(directory).map_or(0, Iterator::count)
}

/// The only value of a query's result.
pub(super) async fn text(cluster: &Cluster, through: usize, sql: &str) -> String {
    let client = connect(cluster, through, "shop").await;
    let answers = with_timeout(sql, client.simple_query(sql)).await.unwrap();
    let row = answers.iter().find_map(|answer| match answer {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    row.unwrap_or_else(|| panic!("{sql}: {answers:?}")).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn databases_move_between_stores_and_no_transaction_fails() {
    let mut cluster = start_private().await;
    // The system database would be empty after a failover.
    let system = connect(&cluster, 1, "fulmar").await;
    let created = with_timeout("a table", system.batch_execute("CREATE TABLE kept (n INTEGER)")).await;
    assert_eq!(message(&created.unwrap_err()), "cannot write in a read-only transaction");
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = write(cluster.url(source, "shop"), stop.clone());
    let others = [(source + 1) % 3, (source + 2) % 3];
    let moves = [("on-demand", others[1]), ("live", others[0]), ("bulk", source), ("live", others[1])];
    for (mechanism, to) in moves {
        let sql = format!("ALTER DATABASE shop MOVE TO '{}' USING '{mechanism}'", cluster.name(to));
        let client = connect(&cluster, source, "fulmar").await;
        // The pages of the move before may still be being copied.
        wait_until("the move", async || match with_timeout(&sql, client.batch_execute(&sql)).await {
            Ok(()) => true,
            Err(error) => {
                assert!(message(&error).contains("are still being copied"), "{sql}: {error:?}");
                false
            }
        })
        .await;
        assert_eq!(owner(&cluster, 0, "shop").await, to);
        assert_eq!(rows(&cluster, to, "shop").await, ROWS);
    }
    stop.store(true, Ordering::Relaxed);
    let expected = with_timeout("the writer", writer).await.unwrap();
    assert_eq!(values(&cluster, 0, "shop").await, expected);
    let report = final_report(&cluster, 0, "shop", 4).await;
    assert_eq!((&report["mechanism"], &report["failed"]), (&"live".into(), &0.into()), "{report}");
    assert!(report["bytes"].as_u64().unwrap() > ROWS as u64 * 500, "{report}");

    // The destination has everything, also after its process was killed.
    cluster.kill(others[1]).unwrap();
    cluster.start_node(others[1]).await.unwrap();
    for node in [source, 0] {
        wait_until_reachable(&cluster, node, "shop").await;
    }
    assert_eq!(values(&cluster, source, "shop").await, expected);
    assert_eq!(rows(&cluster, 0, "shop").await, ROWS);

    // A drain moves all databases, although they are local: that is the default here.
    let default = "SELECT \"default\" FROM fulmar.limits WHERE tenant = 'shop' AND name = 'durability'";
    assert_eq!(text(&cluster, source, default).await, "local");
    let server = cluster.url(source, "fulmar");
    let drained = stdout(&run(&["node", "drain", cluster.name(others[1]), "--server", &server]));
    assert_eq!(drained, format!("moved 1 databases from {}\n", cluster.name(others[1])));
    assert_ne!(owner(&cluster, source, "shop").await, others[1]);
    assert_eq!(rows(&cluster, source, "shop").await, ROWS);
}

#[tokio::test(flavor = "multi_thread")]
async fn open_transactions_continue_at_their_snapshots() {
    let cluster = start_with_archives().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let others = [(source + 1) % 3, (source + 2) % 3];
    for (mechanism, to) in [("live", others[0]), ("delta", source), ("on-demand", others[1])] {
        move_with_open_transactions(&cluster, mechanism, to).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn database_is_at_its_node_after_either_end_of_a_copy_has_died() {
    let mut cluster = start_private().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let (to, other) = ((source + 1) % 3, (source + 2) % 3);
    for victim in [to, source] {
        let moving = start_slow_move(&cluster, other, to, "live");
        wait_for_step(&cluster, other, "shop", "copying").await;
        cluster.kill(victim).unwrap();
        if victim == source {
            let client = try_connect(&cluster.url(other, "shop")).await;
            // The catalog may not have noticed yet.
            if let Err(error) = client {
                assert!(message(&error).contains("is not available while node"), "{error:?}");
            }
        } else {
            with_timeout("the move", moving).await.unwrap().unwrap_err();
        }
        cluster.start_node(victim).await.unwrap();
        if victim == source {
            execute(&cluster, other, "fulmar", "ALTER DATABASE shop CANCEL MOVE").await;
        }
        wait_for_step(&cluster, other, "shop", "undone").await;
        assert_eq!(owner(&cluster, other, "shop").await, source);
        wait_until_reachable(&cluster, other, "shop").await;
        assert_eq!(rows(&cluster, other, "shop").await, ROWS);
    }
    move_using(&cluster, "live", to).await;
    assert_eq!(rows(&cluster, other, "shop").await, ROWS);
    // The source does not keep what it has given away.
    wait_until("the source has deleted its data", async || manifests(&cluster, source, "shop").await == 0)
        .await;
    assert!(manifests(&cluster, to, "shop").await > 0);
    assert_eq!(rows(&cluster, source, "shop").await, ROWS);
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_that_were_not_copied_are_read_after_either_end_has_died() {
    let mut cluster = start_private().await;
    fill(&cluster, "shop").await;
    let mut at = owner(&cluster, 0, "shop").await;
    for kill_source in [true, false] {
        let to = (at + 1) % 3;
        move_using(&cluster, "on-demand", to).await;
        let victim = if kill_source { at } else { to };
        cluster.kill(victim).unwrap();
        cluster.start_node(victim).await.unwrap();
        assert_eq!(owner(&cluster, to, "shop").await, to);
        for node in [at, to] {
            wait_until_reachable(&cluster, node, "shop").await;
        }
        execute(&cluster, at, "shop", "UPDATE big SET text = hex(randomblob(500)) WHERE id % 10 = 0").await;
        assert_eq!(rows(&cluster, to, "shop").await, ROWS);
        wait_until("the source has no pages", async || manifests(&cluster, at, "shop").await == 0).await;
        at = to;
    }
    assert_eq!(text(&cluster, at, "PRAGMA integrity_check").await, "ok");
    // Nothing depends on the other nodes.
    for node in 0..3 {
        cluster.kill(node).unwrap();
    }
    cluster.start_node(at).await.unwrap();
    assert_eq!(rows(&cluster, at, "shop").await, ROWS);
}

#[tokio::test(flavor = "multi_thread")]
async fn database_that_comes_back_is_copied_as_a_patch() {
    let cluster = start_with_archives().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let to = (source + 1) % 3;
    move_to(&cluster, 0, "shop", to).await;
    // A tenth of the pages change, the table shrinks, and new pages are written.
    let sql = "UPDATE big SET text = hex(randomblob(500)) WHERE id <= 200; DELETE FROM big WHERE id > 1900; \
               CREATE TABLE new(text TEXT); INSERT INTO new SELECT hex(randomblob(500)) FROM big LIMIT 50";
    execute(&cluster, 0, "shop", sql).await;
    move_to(&cluster, 0, "shop", source).await;
    assert_eq!(rows(&cluster, 0, "shop").await, 1900);
    assert_eq!(text(&cluster, source, "PRAGMA integrity_check").await, "ok");
    let sql = "SELECT (SELECT count(*) FROM new) || ' ' || (SELECT sum(length(text)) FROM big)";
    assert_eq!(text(&cluster, source, sql).await, "50 1900000");
    let report = final_report(&cluster, 0, "shop", 2).await;
    assert_eq!(report["mechanism"], "delta", "{report}");
    assert!(report["reason"].as_str().unwrap().contains("has kept"), "{report}");
    assert!(report["bytes"].as_u64().unwrap() < ROWS as u64 * 300, "{report}");
    // The third node has nothing.
    let sql = format!("ALTER DATABASE shop MOVE TO '{}' USING delta", cluster.name((source + 2) % 3));
    let client = connect(&cluster, 0, "fulmar").await;
    let error = with_timeout(&sql, client.batch_execute(&sql)).await.unwrap_err();
    assert!(message(&error).contains("has no archive of the database"), "{error:?}");
    assert!(manifests(&cluster, to, "shop").await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn branches_are_where_their_source_is_and_impossible_requests_are_refused() {
    let mut cluster = start_private().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let to = (source + 1) % 3;
    for node in 0..3 {
        let sql = format!("CREATE DATABASE branch{node} WITH TEMPLATE shop");
        execute(&cluster, node, "fulmar", &sql).await;
        let branch = format!("branch{node}");
        assert_eq!(owner(&cluster, 0, &branch).await, source);
        assert_eq!(rows(&cluster, node, &branch).await, ROWS);
    }
    // A branch shares its source's segments, and moves without it.
    move_to(&cluster, 0, "branch0", to).await;
    execute(&cluster, 0, "fulmar", "DROP DATABASE shop").await;
    assert_eq!(rows(&cluster, 0, "branch0").await, ROWS);
    assert_eq!(rows(&cluster, 0, "branch1").await, ROWS);

    let client = connect(&cluster, 0, "fulmar").await;
    for (sql, expected) in [
        ("CREATE DATABASE other WITH DURABILITY shared".to_owned(), "cannot have shared durability"),
        ("ALTER DATABASE branch1 SET durability = shared".to_owned(), "cannot have shared durability"),
        (
            format!("ALTER DATABASE branch1 MOVE TO '{}' USING albatross", cluster.name(to)),
            "cannot move this",
        ),
    ] {
        let error = with_timeout(&sql, client.batch_execute(&sql)).await.unwrap_err();
        assert_eq!(error.code().map(tokio_postgres::error::SqlState::code), Some("0A000"), "{sql}");
        assert!(message(&error).contains(expected), "{sql}: {error:?}");
    }
    // A node with a store that the others do not use.
    let number = cluster.add_node().unwrap();
    let store = format!("file://{}", cluster.data(number).with_extension("store").display());
    cluster.set_arguments(number, &["--store", &store]);
    let error = refusal(cluster.command(number)).await;
    assert!(error.contains("start the node without --store"), "{error}");
}
