//! Sessions of databases that another node owns.

mod cluster;
mod health;
mod lost;

use std::sync::atomic::Ordering;

use futures::{SinkExt, StreamExt, pin_mut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::{NoTls, SimpleQueryMessage};

use crate::common::{state, wait_until, with_timeout};
use cluster::TestCluster;

fn tags(messages: &[SimpleQueryMessage]) -> usize {
    messages.iter().filter(|message| matches!(message, SimpleQueryMessage::CommandComplete(_))).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn both_protocols_work_at_the_owner_and_at_another_node() {
    let cluster = TestCluster::start(2, 2).await;
    for node in [1, 2] {
        let client = cluster.client(node, "shop").await;
        let sql = "CREATE TABLE IF NOT EXISTS t (k INT PRIMARY KEY, v TEXT); DELETE FROM t; INSERT INTO t VALUES (1, 'a')";
        assert_eq!(tags(&client.simple_query(sql).await.unwrap()), 3);
        let row = client.query_one("SELECT v FROM t WHERE k = $1", &[&1_i64]).await.unwrap();
        assert_eq!(row.get::<_, String>(0), "a");
        assert_eq!(state(client.simple_query("SELECT * FROM missing").await), "42P01");
        assert_eq!(state(client.execute("INSERT INTO t VALUES (1, 'b')", &[]).await), "23505");
        let row = client.query_one("SELECT count(*) FROM t", &[]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn large_results_and_copies_are_relayed() {
    let cluster = TestCluster::start(2, 2).await;
    let client = cluster.client(1, "shop").await;
    client.batch_execute("CREATE TABLE t (k INT PRIMARY KEY, v TEXT)").await.unwrap();
    let sink = client.copy_in("COPY t FROM STDIN").await.unwrap();
    pin_mut!(sink);
    for row in 0..20_000 {
        sink.send(bytes::Bytes::from(format!("{row}\t{row:0>100}\n"))).await.unwrap();
    }
    assert_eq!(sink.finish().await.unwrap(), 20_000);
    let rows = client.query("SELECT * FROM t", &[]).await.unwrap();
    assert_eq!(rows.len(), 20_000);
    let copied = client.copy_out("COPY t TO STDOUT").await.unwrap();
    pin_mut!(copied);
    let mut bytes = 0;
    while let Some(piece) = copied.next().await {
        bytes += piece.unwrap().len();
    }
    assert!(bytes > 2_000_000, "{bytes}");
    assert_eq!(client.query_one("SELECT 1", &[]).await.unwrap().get::<_, i64>(0), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_requests_arrive_through_any_node() {
    let cluster = TestCluster::start(3, 2).await;
    for cancel_at in [1, 2, 3] {
        let client = cluster.client(1, "shop").await;
        let token = client.cancel_token();
        let port = cluster.gateways[&cancel_at].local_addr().port();
        let endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n";
        let running = tokio::spawn(async move { state(client.simple_query(endless).await) });
        wait_until("the statement is cancelled", async || {
            let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            token.cancel_query_raw(stream, NoTls).await.unwrap();
            running.is_finished()
        })
        .await;
        assert_eq!(running.await.unwrap(), "57014");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_and_prepared_statements_survive_a_move() {
    let cluster = TestCluster::start(3, 2).await;
    let client = cluster.client(1, "shop").await;
    client.batch_execute("SET my.setting = 'x'; SET statement_timeout = '77s'").await.unwrap();
    let statement = client.prepare("SELECT '<' || $1::TEXT").await.unwrap();
    for node in [3, 1, 2] {
        cluster.move_to(node);
        let row = client.query_one(&statement, &[&"x"]).await.unwrap();
        assert_eq!(row.get::<_, String>(0), "<x", "at node {node}");
        for (name, value) in [("my.setting", "x"), ("statement_timeout", "77s")] {
            let row = client.query_one(&format!("SHOW {name}"), &[]).await.unwrap();
            assert_eq!(row.get::<_, String>(0), value, "{name} at node {node}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_survives_a_move() {
    let cluster = TestCluster::start(3, 2).await;
    let client = cluster.client(1, "shop").await;
    client.batch_execute("CREATE TABLE t (k INT PRIMARY KEY, v INT)").await.unwrap();
    client.batch_execute("BEGIN").await.unwrap();
    client.execute("INSERT INTO t VALUES (1, $1)", &[&5_i64]).await.unwrap();
    let row = client.query_one("SELECT v FROM t", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 5);
    cluster.move_to(3);
    client.execute("UPDATE t SET v = v + 1", &[]).await.unwrap();
    cluster.shared.break_connections();
    client.batch_execute("COMMIT").await.unwrap();
    let other = cluster.client(2, "shop").await;
    let row = other.query_one("SELECT count(*), max(v) FROM t", &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (1, 6));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_whose_repetition_differs_fails() {
    let cluster = TestCluster::start(3, 2).await;
    let client = cluster.client(1, "shop").await;
    client.batch_execute("CREATE TABLE t (k INT PRIMARY KEY)").await.unwrap();
    client.batch_execute("BEGIN; INSERT INTO t VALUES (1)").await.unwrap();
    client.simple_query("SELECT pg_current_xact_id()").await.unwrap();
    cluster.move_to(3);
    wait_until("the next statement fails", async || match client.simple_query("SELECT 1").await {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.code().unwrap().code(), "40001");
            true
        }
    })
    .await;
    assert_eq!(state(client.simple_query("SELECT 1").await), "25P02");
    client.batch_execute("ROLLBACK").await.unwrap();
    let row = client.query_one("SELECT count(*) FROM t", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 0);
}

/// Drivers ignore errors when they close a statement. The COMMIT after that must fail.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_transaction_is_not_reported_to_a_closed_statement() {
    let cluster = TestCluster::start(3, 2).await;
    let client = cluster.client(1, "shop").await;
    client.batch_execute("CREATE TABLE t (k INT PRIMARY KEY)").await.unwrap();
    let statement = client.prepare("SELECT count(*) FROM t").await.unwrap();
    client.batch_execute("BEGIN; INSERT INTO t VALUES (1)").await.unwrap();
    client.simple_query("SELECT pg_current_xact_id()").await.unwrap();
    cluster.move_to(3);
    cluster.shared.break_connections();
    drop(statement);
    assert_eq!(state(client.batch_execute("COMMIT").await), "40001");
    // A COMMIT that fails ends the transaction.
    let row = client.query_one("SELECT count(*) FROM t", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_in_flight_are_executed_once() {
    let cluster = TestCluster::start(3, 2).await;
    let (shared, watcher) = (cluster.shared.clone(), cluster.client(2, "shop").await);
    watcher.batch_execute("CREATE TABLE t (k INT)").await.unwrap();
    let rows = async || watcher.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get::<_, i64>(0);
    let insert = "INSERT INTO t VALUES (1)";

    // The answer is lost after the commit.
    let client = cluster.client(1, "shop").await;
    shared.stops_answers.store(true, Ordering::Release);
    let running = tokio::spawn(async move { state(client.simple_query(insert).await) });
    wait_until("the row is committed", async || rows().await == 1).await;
    shared.break_connections();
    shared.stops_answers.store(false, Ordering::Release);
    assert_eq!(with_timeout("an answer", running).await.unwrap(), "08007");
    assert_eq!(rows().await, 1);

    // The request does not arrive.
    let client = cluster.client(1, "shop").await;
    client.simple_query("SELECT 1").await.unwrap();
    let stopped = shared.stopped_requests.load(Ordering::Acquire);
    shared.stops_requests.store(true, Ordering::Release);
    let running = tokio::spawn(async move { client.simple_query(insert).await.map(drop) });
    wait_until("the request is stopped", async || shared.stopped_requests.load(Ordering::Acquire) > stopped)
        .await;
    shared.break_connections();
    shared.stops_requests.store(false, Ordering::Release);
    with_timeout("an answer", running).await.unwrap().unwrap();
    assert_eq!(rows().await, 2);
}

/// The session sends the answer of an autocommitted statement before the statement is durable, and
/// before the node may answer. The connection breaks after that, or sometimes before.
#[tokio::test(flavor = "multi_thread")]
async fn a_committed_statement_whose_session_is_lost_is_answered() {
    let cluster = TestCluster::start(3, 2).await;
    let shared = cluster.shared.clone();
    let watcher = cluster.client(2, "shop").await;
    watcher.batch_execute("CREATE TABLE t (k INTEGER PRIMARY KEY, v TEXT)").await.unwrap();
    let rows = async || watcher.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get::<_, i64>(0);
    let mut expected = 0;
    for is_simple in [true, false] {
        wait_until("a lost answer is known", async || {
            let client = cluster.client(1, "shop").await;
            let statement = client.prepare("INSERT INTO t (v) VALUES ('a') RETURNING k, v").await.unwrap();
            shared.may_answer.send_replace(false);
            let progress = || {
                let [sent, withheld] = [&shared.answers, &shared.withheld_answers];
                sent.load(Ordering::Acquire) + withheld.load(Ordering::Acquire)
            };
            let before = progress();
            let running = tokio::spawn(async move {
                match is_simple {
                    true => {
                        let sql = "INSERT INTO t (v) VALUES ('a') RETURNING k, v";
                        let messages = client.simple_query(sql).await?;
                        let row = messages.iter().find_map(|message| match message {
                            SimpleQueryMessage::Row(row) => row.get(0)?.parse().ok(),
                            _ => None,
                        });
                        assert_eq!(tags(&messages), 1);
                        Ok(row.expect("a row"))
                    }
                    false => client.query_one(&statement, &[]).await.map(|row| row.get::<_, i64>(0)),
                }
            });
            // The answer is known if the front gets it while the statement waits for its commit. A
            // statement that does not have to wait has only an answer that is withheld.
            wait_until("the statement is executed", async || progress() > before).await;
            shared.break_connections();
            shared.may_answer.send_replace(true);
            let answer = with_timeout("an answer", running).await.unwrap();
            expected += 1;
            assert_eq!(rows().await, expected, "the statement is executed once");
            match answer {
                Ok(row) => {
                    assert_eq!(row, expected, "the row that was inserted");
                    true
                }
                Err(error) => {
                    assert_eq!(error.code().expect("an error of the server").code(), "08007");
                    false
                }
            }
        })
        .await;
    }
}

/// A unit of the extended protocol commits, and the owner stops before Sync.
#[tokio::test(flavor = "multi_thread")]
async fn a_committed_part_of_a_unit_is_not_repeated() {
    let message =
        |kind: u8, body: &[u8]| [&[kind], &(body.len() as u32 + 4).to_be_bytes()[..], body].concat();
    let run = |sql: &str| {
        let parse = message(b'P', format!("\0{sql}\0\0\0").as_bytes());
        [parse, message(b'B', &[0; 8]), message(b'E', &[0; 5])].concat()
    };
    let mut cluster = TestCluster::start(3, 2).await;
    let watcher = cluster.client(1, "shop").await;
    watcher.batch_execute("CREATE TABLE t (k INT)").await.unwrap();
    let mut stream = TcpStream::connect(cluster.gateways[&1].local_addr()).await.unwrap();
    let body = [&196_608_u32.to_be_bytes()[..], b"user\0anna\0database\0shop\0\0"].concat();
    let startup = [&(body.len() as u32 + 4).to_be_bytes()[..], &body].concat();
    let unit = [run("BEGIN"), run("INSERT INTO t VALUES (1)"), run("COMMIT"), message(b'H', b"")].concat();
    stream.write_all(&[startup, unit].concat()).await.unwrap();
    while receive(&mut stream).await != (b'C', b"COMMIT\0".to_vec()) {}
    let (partition, shared) = (cluster.partition("shop"), cluster.shared.clone());
    cluster.stop(2).await;
    shared.set_owner(partition, 3);
    let error = loop {
        let (kind, body) = receive(&mut stream).await;
        if kind == b'E' {
            break String::from_utf8(body).unwrap();
        }
    };
    assert!(error.contains("C08007"), "{error}");
    stream.write_all(&message(b'S', b"")).await.unwrap();
    let status = loop {
        let (kind, body) = receive(&mut stream).await;
        // The address of the owner has changed.
        if kind != b'S' {
            break (kind, body);
        }
    };
    assert_eq!(status, (b'Z', b"I".to_vec()));
    let row = watcher.query_one("SELECT count(*) FROM t", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 1);
}

/// The kind and the body of the next message.
async fn receive(stream: &mut TcpStream) -> (u8, Vec<u8>) {
    let read = async {
        let (kind, length) = (stream.read_u8().await.unwrap(), stream.read_u32().await.unwrap());
        let mut body = vec![0; length as usize - 4];
        stream.read_exact(&mut body).await.unwrap();
        (kind, body)
    };
    with_timeout("a message", read).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_in_flight_is_answered() {
    let cluster = TestCluster::start(3, 2).await;
    let (shared, watcher) = (cluster.shared.clone(), cluster.client(2, "shop").await);
    watcher.batch_execute("CREATE TABLE t (k INT)").await.unwrap();
    let rows = async || watcher.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get::<_, i64>(0);
    for (round, is_simple) in [(1, true), (2, false)] {
        let client = cluster.client(1, "shop").await;
        client.batch_execute("BEGIN; INSERT INTO t VALUES (1)").await.unwrap();
        let commit = client.prepare("COMMIT").await.unwrap();
        shared.stops_answers.store(true, Ordering::Release);
        let running = tokio::spawn(async move {
            match is_simple {
                true => client.batch_execute("COMMIT").await.unwrap(),
                false => drop(client.execute(&commit, &[]).await.unwrap()),
            }
            client.query_one("SELECT 7", &[]).await.unwrap().get::<_, i64>(0)
        });
        wait_until("the row is committed", async || rows().await == round).await;
        shared.break_connections();
        cluster.move_to(3);
        shared.stops_answers.store(false, Ordering::Release);
        assert_eq!(with_timeout("an answer", running).await.unwrap(), 7);
        assert_eq!(rows().await, round);
        cluster.move_to(2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_ends_with_its_client() {
    let cluster = TestCluster::start(2, 2).await;
    let client = cluster.client(1, "shop").await;
    client.batch_execute("CREATE TABLE t (k INT); BEGIN; INSERT INTO t VALUES (1)").await.unwrap();
    assert_eq!(cluster.gateways[&2].sessions(), 1);
    drop(client);
    wait_until("both sides have ended", async || cluster.gateways.values().all(|node| node.sessions() == 0))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_survive_the_shutdown_of_the_owner() {
    let mut cluster = TestCluster::start(3, 2).await;
    let client = cluster.client(1, "shop").await;
    client.batch_execute("CREATE TABLE t (k INT); SET my.x = '1'").await.unwrap();
    client.batch_execute("BEGIN; INSERT INTO t VALUES (1)").await.unwrap();
    let stopping = cluster.partition("shop");
    let shared = cluster.shared.clone();
    cluster.stop(2).await;
    shared.set_owner(stopping, 3);
    client.batch_execute("INSERT INTO t VALUES (2); COMMIT").await.unwrap();
    let row = client.query_one("SELECT count(*), current_setting('my.x') FROM t", &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, String>(1)), (2, "1".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_connects_waits_for_an_owner() {
    let cluster = TestCluster::start(2, 2).await;
    let partition = cluster.partition("shop");
    let (shared, searches) = (cluster.shared.clone(), cluster.shared.searches.load(Ordering::Acquire));
    shared.remove_owner(partition);
    let config = cluster.config(1, "shop");
    let connecting = tokio::spawn(async move { crate::common::connect(&config).await.map(drop) });
    wait_until("the owner is searched", async || shared.searches.load(Ordering::Acquire) > searches).await;
    assert!(!connecting.is_finished());
    shared.set_owner(partition, 2);
    with_timeout("a connection", connecting).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_leaves_without_the_lease() {
    let cluster = TestCluster::start(2, 2).await;
    let client = cluster.client(1, "shop").await;
    client.simple_query("SELECT 1").await.unwrap();
    cluster.shared.may_answer.send_replace(false);
    let running = tokio::spawn(async move { client.simple_query("SELECT 2").await.map(drop) });
    wait_until("the session waits for the lease", async || cluster.shared.may_answer.receiver_count() > 0)
        .await;
    assert!(!running.is_finished());
    cluster.shared.may_answer.send_replace(true);
    with_timeout("an answer", running).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_address_of_the_owner_is_reported() {
    let cluster = TestCluster::start(2, 2).await;
    for (node, owner) in [(1, "127.0.0.1:2"), (2, "")] {
        let (client, connection) = cluster.config(node, "shop").connect(NoTls).await.unwrap();
        assert_eq!(connection.parameter("fulmar.owner"), Some(owner));
        tokio::spawn(connection);
        let row = client.query_one("SHOW fulmar.owner", &[]).await.unwrap();
        assert_eq!(row.get::<_, String>(0), owner);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn databases_are_administrated_through_the_cluster() {
    let cluster = TestCluster::start(2, 2).await;
    let admin = cluster.client(1, "fulmar").await;
    let owner = async || {
        let sql = "SELECT node FROM fulmar.partitions WHERE tenant = 'shop'";
        admin.query_one(sql, &[]).await.unwrap().get::<_, String>(0)
    };
    assert_eq!(owner().await, "node2");
    admin.batch_execute("ALTER DATABASE shop MOVE TO 'node1'").await.unwrap();
    assert_eq!(owner().await, "node1");
    for (sql, expected) in [
        ("ALTER DATABASE shop MOVE TO 'node7'", "22023"),
        ("ALTER DATABASE shop SET durability = 'local'", "0A000"),
        ("ALTER DATABASE shop RESTORE TO TIMESTAMP '2026-01-01'", "0A000"),
    ] {
        assert_eq!(state(admin.batch_execute(sql).await), expected, "{sql}");
    }
    let client = cluster.client(2, "shop").await;
    client.batch_execute("CREATE TABLE t (k INT)").await.unwrap();
    admin.batch_execute("DROP DATABASE shop WITH (FORCE)").await.unwrap();
    assert!(client.batch_execute("INSERT INTO t VALUES (1)").await.is_err());
    let nodes = admin.query("SELECT name FROM fulmar.nodes ORDER BY id", &[]).await.unwrap();
    assert_eq!(nodes.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_whose_node_fails_twice_is_not_repeated_again() {
    let cluster = TestCluster::start(2, 2).await;
    let (client, watcher) = (cluster.client(1, "shop").await, cluster.client(2, "shop").await);
    let endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n";
    let running = tokio::spawn(async move {
        let outcome = state(client.simple_query(endless).await);
        (outcome, client.query_one("SELECT 7", &[]).await.unwrap().get::<_, i64>(0))
    });
    let active = "SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'WITH RECURSIVE n%'";
    wait_until("the statement has failed", async || {
        if !watcher.query(active, &[]).await.unwrap().is_empty() {
            cluster.shared.break_connections();
        }
        running.is_finished()
    })
    .await;
    assert_eq!(running.await.unwrap(), ("57P02".to_owned(), 7));
}
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_is_interrupted_is_executed_once() {
    let cluster = TestCluster::start(3, 2).await;
    let client = cluster.client(1, "shop").await;
    client.batch_execute("CREATE TABLE t (k INT)").await.unwrap();
    // The first copy can be repeated; the second one is too long for that.
    for (rows, expected) in [(1_000, Ok(1_000)), (300_000, Err("40001".to_owned()))] {
        client.batch_execute("DELETE FROM t").await.unwrap();
        let sink = client.copy_in("COPY t FROM STDIN").await.unwrap();
        pin_mut!(sink);
        let mut sent = Ok(());
        for row in 0..rows {
            if row == rows - 500 {
                cluster.shared.break_connections();
            }
            sent = sink.send(bytes::Bytes::from(format!("{row}\n"))).await;
            if sent.is_err() {
                break;
            }
        }
        let outcome = match sent {
            Ok(()) => sink.finish().await,
            Err(error) => Err(error),
        };
        let outcome =
            outcome.map_err(|error| error.code().map_or_else(String::new, |code| code.code().to_owned()));
        assert_eq!(outcome, expected);
        let row = client.query_one("SELECT count(*) FROM t", &[]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0) as u64, expected.unwrap_or(0));
    }
}
