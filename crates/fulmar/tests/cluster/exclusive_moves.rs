//! `bulk`: moves that copy everything while the partition is frozen, after open transactions
//! have ended.

use super::migrations::{fill, message, wait_for_step};
use super::private_stores::start_private;
use super::*;

const MECHANISMS: [&str; 1] = ["bulk"];

fn start_move(cluster: &Cluster, to: usize, mechanism: &str) -> tokio::task::JoinHandle<Result<(), String>> {
    let (url, sql) = (
        cluster.url(to, "fulmar"),
        format!("ALTER DATABASE shop MOVE TO '{}' USING {mechanism}", cluster.name(to)),
    );
    tokio::spawn(async move {
        let client = try_connect(&url).await.map_err(|error| message(&error))?;
        client.batch_execute(&sql).await.map_err(|error| message(&error))
    })
}

async fn run(client: &Client, sql: &str) {
    with_timeout(sql, client.batch_execute(sql)).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn move_waits_for_open_transactions_and_new_ones_wait_for_the_move() {
    let cluster = start_private().await;
    fill(&cluster, "shop").await;
    for mechanism in MECHANISMS {
        let source = owner(&cluster, 0, "shop").await;
        let to = (source + 1) % 3;
        let (open, other) = (connect(&cluster, source, "shop").await, connect(&cluster, to, "shop").await);
        run(&open, "DELETE FROM t").await;
        run(&open, "BEGIN; INSERT INTO t VALUES (1)").await;
        let moving = start_move(&cluster, to, mechanism);
        wait_for_step(&cluster, 0, "shop", "copying").await;
        let next = tokio::spawn(async move {
            let sql = "BEGIN; INSERT INTO t VALUES (3); COMMIT";
            with_timeout(sql, other.batch_execute(sql)).await
        });
        run(&open, "INSERT INTO t VALUES (2)").await;
        assert_eq!(owner(&cluster, 0, "shop").await, source, "{mechanism}: the transaction is open");
        run(&open, "COMMIT").await;
        with_timeout("the move", moving).await.unwrap().unwrap();
        next.await.unwrap().unwrap();
        assert_eq!(owner(&cluster, 0, "shop").await, to);
        assert_eq!(values(&cluster, 0, "shop").await, [1, 2, 3], "{mechanism}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn move_is_undone_if_a_transaction_stays_open() {
    let cluster = start_private().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let to = (source + 1) % 3;
    for (mechanism, value) in MECHANISMS.into_iter().zip(1i64..) {
        let open = connect(&cluster, to, "shop").await;
        run(&open, &format!("BEGIN; INSERT INTO t VALUES ({value})")).await;
        let moving = start_move(&cluster, to, mechanism);
        let expected = "a transaction in the database did not end for 10 s";
        let error = with_timeout("the move", moving).await.unwrap().unwrap_err();
        assert!(error.contains(expected), "{error}");
        assert_eq!(owner(&cluster, 0, "shop").await, source);
        run(&open, "COMMIT").await;
        assert_eq!(values(&cluster, 0, "shop").await, Vec::from_iter(1..=value), "{mechanism}");
    }
}
