//! `ALTER NODE ... MOVE TO` and `fulmar node move`: all databases of a node in one move.

use serde_json::Value;

use super::migrations::{ROWS, fill, message, rows, wait_for_step};
use super::*;

/// The owners of databases.
async fn owners(cluster: &Cluster, names: &[&str]) -> Vec<usize> {
    let mut owners = Vec::new();
    for name in names {
        owners.push(owner(cluster, 2, name).await);
    }
    owners
}

/// Moves all databases of the first node to the second one.
fn move_node(cluster: &Cluster) -> Value {
    let server = cluster.url(2, "fulmar");
    serde_json::from_str(&stdout(&run(&["node", "move", "n1", "--to", "n2", "--json", "--server", &server])))
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn all_databases_of_a_node_move_while_they_are_in_use() {
    let cluster = start().await;
    let names = ["a", "b", "c", "d", "e"];
    for name in &names[..4] {
        create(&cluster, name).await;
    }
    fill(&cluster, "e").await;
    create(&cluster, "other").await;
    for name in names {
        move_to(&cluster, 1, name, 0).await;
    }
    move_to(&cluster, 1, "other", 2).await;
    let stop = Arc::new(AtomicBool::new(false));
    let (client, stopped) = (connect(&cluster, 2, "b").await, stop.clone());
    let writer = tokio::spawn(async move {
        let mut written = 0_i64;
        while !stopped.load(Ordering::Relaxed) {
            let values: [&(dyn tokio_postgres::types::ToSql + Sync); 1] = [&written];
            let insert = client.execute("INSERT INTO t VALUES ($1)", &values);
            with_timeout("an insert", insert).await.unwrap_or_else(|error| panic!("{written}: {error:?}"));
            written += 1;
        }
        written
    });

    // The report contains the reports of the databases that are known within 5 s after their moves.
    let mut report = Value::Null;
    wait_until("the reports of all databases", async || {
        report = move_node(&cluster);
        assert_eq!(owners(&cluster, &names).await, [1; 5]);
        if report["unknown"] == 0 {
            return true;
        }
        for name in names {
            move_to(&cluster, 2, name, 0).await;
        }
        false
    })
    .await;
    assert_eq!(owner(&cluster, 2, "other").await, 2, "databases of other nodes stay");
    let ends = (&report["mechanism"], &report["source"], &report["destination"]);
    assert_eq!(ends, (&"machine".into(), &"n1".into(), &"n2".into()), "{report}");
    assert_eq!((&report["databases"], &report["failed"]), (&5.into(), &0.into()), "{report}");
    assert!(report["bytes"].as_u64().unwrap() > 400 * 4096, "the pages of e: {report}");
    assert!(report["total_ms"].as_u64() >= report["pause_ms"].as_u64(), "{report}");
    stop.store(true, Ordering::Relaxed);
    let written = writer.await.unwrap();
    assert_eq!(values(&cluster, 0, "b").await, (0..written).collect::<Vec<_>>());
    assert_eq!(rows(&cluster, 0, "e").await, ROWS);

    // Nothing is left.
    assert_eq!(move_node(&cluster)["databases"], 0);
    let sql = "SELECT CAST(details AS TEXT) FROM fulmar.events WHERE kind = 'node.moved' ORDER BY id";
    let mut events = Vec::new();
    for node in 0..3 {
        let found = connect(&cluster, node, "fulmar").await.query(sql, &[]).await.unwrap();
        events.extend(found.iter().map(|row| row.get::<_, String>(0)));
    }
    assert!(events.iter().any(|details| details.contains("\"databases\":5")), "{events:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn move_of_a_node_is_cancelled_and_repeated() {
    let cluster = start().await;
    let names = ["shop", "bank"];
    for name in names {
        fill(&cluster, name).await;
        move_to(&cluster, 1, name, 0).await;
    }
    let client = connect(&cluster, 2, "fulmar").await;
    for (sql, expected) in [
        ("ALTER NODE n1 MOVE TO 'n9'", "node \"n9\" does not exist"),
        ("ALTER NODE n9 MOVE TO 'n1'", "node \"n9\" does not exist"),
        ("ALTER NODE n1 MOVE TO 'n1'", "both source and destination"),
        ("ALTER NODE n1 MOVE TO 'n2' USING teleport", "2 of 2 databases of node \"n1\" were not moved"),
    ] {
        let error = with_timeout(sql, client.batch_execute(sql)).await.unwrap_err();
        assert!(message(&error).contains(expected), "{sql}: {error:?}");
    }
    let token = client.cancel_token();
    // Slower than this test takes.
    let slowly = "ALTER NODE n1 MOVE TO 'n2' LIMIT '1kB'";
    let moving = tokio::spawn(async move { client.batch_execute(slowly).await });
    for name in names {
        wait_for_step(&cluster, 1, name, "copying").await;
    }
    with_timeout("a cancel request", token.cancel_query(NoTls)).await.unwrap();
    let error = with_timeout("the cancelled move", moving).await.unwrap().unwrap_err();
    let error = error.as_db_error().unwrap();
    let detail = "Moves that were cancelled: 2. Moves that can no longer be cancelled: 0.";
    assert_eq!((error.code().code(), error.detail()), ("57014", Some(detail)));
    for name in names {
        wait_for_step(&cluster, 1, name, "undone").await;
    }
    assert_eq!(owners(&cluster, &names).await, [0, 0]);

    // Repeated, it moves what is left.
    move_to(&cluster, 1, "shop", 1).await;
    assert_eq!(move_node(&cluster)["databases"], 1);
    assert_eq!(owners(&cluster, &names).await, [1, 1]);
    assert_eq!(rows(&cluster, 2, "bank").await, ROWS);
}
