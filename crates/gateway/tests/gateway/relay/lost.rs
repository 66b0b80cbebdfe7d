//! Sessions that are lost, and cannot continue yet: the client cancels, disconnects, or its node stops.

use std::sync::atomic::Ordering;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_postgres::{CancelToken, Client, Error, NoTls};

use super::cluster::TestCluster;
use crate::common::{connect, state, wait_until, with_timeout};

/// A client of node 1 whose COMMIT is executed at node 2, and whose answer is lost. Its outcome is
/// not told before `may_decide`. `setup` runs in the transaction.
async fn commit_in_doubt(
    cluster: &TestCluster,
    client: Client,
    setup: &str,
) -> JoinHandle<(Client, Result<(), Error>)> {
    let (shared, watcher) = (cluster.shared.clone(), cluster.client(2, "shop").await);
    watcher.batch_execute("CREATE TABLE IF NOT EXISTS t (k INT); DELETE FROM t").await.unwrap();
    client.batch_execute(&format!("BEGIN; INSERT INTO t VALUES (1); {setup}")).await.unwrap();
    shared.stops_answers.store(true, Ordering::Release);
    let running = tokio::spawn(async move {
        let committed = client.batch_execute("COMMIT").await;
        (client, committed)
    });
    wait_until("the row is committed", async || rows(&watcher).await == 1).await;
    shared.may_decide.send_replace(false);
    shared.break_connections();
    shared.stops_answers.store(false, Ordering::Release);
    wait_until("the front asks for the outcome", async || shared.may_decide.receiver_count() > 0).await;
    running
}

async fn rows(client: &Client) -> i64 {
    client.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_in_doubt_can_be_cancelled() {
    let cluster = TestCluster::start(3, 2).await;
    let client = cluster.client(1, "shop").await;
    let (token, port) = (client.cancel_token(), cluster.gateways[&1].local_addr().port());
    let running = commit_in_doubt(&cluster, client, "SELECT 1").await;
    let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    token.cancel_query_raw(stream, NoTls).await.unwrap();
    let (client, committed) = with_timeout("an answer", running).await.unwrap();
    assert_eq!(state(committed), "08007", "the client must not conclude that nothing was committed");
    // The client continues, in no transaction.
    cluster.shared.may_decide.send_replace(true);
    assert_eq!(rows(&client).await, 1);
    client.batch_execute("BEGIN; DELETE FROM t; ROLLBACK").await.unwrap();
    assert_eq!(rows(&client).await, 1);
}

/// Sends a cancel request, and waits until the gateway has closed its connection: a request that arrived
/// later could cancel the next statement.
async fn cancel(token: &CancelToken, port: u16) {
    let (near, mut far) = tokio::io::duplex(1024);
    token.cancel_query_raw(near, NoTls).await.unwrap();
    let mut request = Vec::new();
    far.read_to_end(&mut request).await.unwrap();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.write_all(&request).await.unwrap();
    with_timeout("the end of the connection", stream.read_to_end(&mut request)).await.unwrap();
}

/// A statement that has had no effect, because the partition has no owner.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_waits_for_an_owner_can_be_cancelled() {
    let cluster = TestCluster::start(2, 2).await;
    let client = cluster.client(1, "shop").await;
    client.batch_execute("CREATE TABLE t (k INT)").await.unwrap();
    client.batch_execute("BEGIN; INSERT INTO t VALUES (1)").await.unwrap();
    let (token, port) = (client.cancel_token(), cluster.gateways[&1].local_addr().port());
    let partition = cluster.partition("shop");
    let (shared, searches) = (cluster.shared.clone(), cluster.shared.searches.load(Ordering::Acquire));
    shared.set_owner(partition, 3);
    wait_until("the front searches the owner", async || shared.searches.load(Ordering::Acquire) > searches)
        .await;
    let running = tokio::spawn(async move {
        let inserted = client.batch_execute("INSERT INTO t VALUES (2)").await;
        (client, inserted)
    });
    // Requests arrive before the statement too, and have no effect then.
    wait_until("the statement is cancelled", async || {
        cancel(&token, port).await;
        running.is_finished()
    })
    .await;
    let (client, inserted) = running.await.unwrap();
    assert_eq!(state(inserted), "57014");
    cluster.shared.set_owner(partition, 2);
    assert_eq!(state(client.batch_execute("SELECT 1").await), "25P02", "the transaction has failed");
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(rows(&client).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_ends_with_its_client() {
    let cluster = TestCluster::start(3, 2).await;
    let config = cluster.config(1, "shop");
    let (client, connection) = config.connect(NoTls).await.unwrap();
    let connection = tokio::spawn(connection);
    let running = commit_in_doubt(&cluster, client, "SELECT 1").await;
    connection.abort();
    let shared = cluster.shared.clone();
    wait_until("the front ends", async || shared.may_decide.receiver_count() == 0).await;
    let (_, committed) = running.await.unwrap();
    committed.unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_ends_a_front_that_asks() {
    let mut cluster = TestCluster::start(3, 2).await;
    let client = cluster.client(1, "shop").await;
    let running = commit_in_doubt(&cluster, client, "SELECT 1").await;
    with_timeout("the node stops", cluster.stop(1)).await;
    let (_, committed) = with_timeout("an answer", running).await.unwrap();
    assert_eq!(state(committed), "57P01");
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_of_a_committed_transaction_survive_the_loss_of_its_answer() {
    let cluster = TestCluster::start(3, 2).await;
    let client = cluster.client(1, "shop").await;
    client.batch_execute("SET my.kept = '0'; SET my.local = '0'").await.unwrap();
    let setup = "SET my.kept = '1'; SET LOCAL my.local = '1'; SELECT 1";
    let running = commit_in_doubt(&cluster, client, setup).await;
    cluster.shared.may_decide.send_replace(true);
    let (client, committed) = with_timeout("an answer", running).await.unwrap();
    committed.unwrap();
    let sql = "SELECT current_setting('my.kept') || current_setting('my.local')";
    assert_eq!(client.query_one(sql, &[]).await.unwrap().get::<_, String>(0), "10");
}

/// The password changes after a client has authenticated, and before its session starts.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_does_not_start_with_an_old_password() {
    let cluster = TestCluster::start_with(2, 2, false).await;
    cluster.client(1, "shop").await.batch_execute("SELECT 1").await.unwrap();
    let partition = cluster.partition("shop");
    let admin = cluster.admin(2).await;
    let (shared, searches) = (cluster.shared.clone(), cluster.shared.searches.load(Ordering::Acquire));
    shared.remove_owner(partition);
    let config = cluster.config(1, "shop");
    let connecting = tokio::spawn(async move { connect(&config).await.map(drop) });
    wait_until("the client has logged in", async || shared.searches.load(Ordering::Acquire) > searches).await;
    admin.batch_execute("ALTER USER anna PASSWORD 'other'").await.unwrap();
    cluster.shared.set_owner(partition, 2);
    assert_eq!(state(with_timeout("an answer", connecting).await.unwrap()), "28000");
    let mut config = cluster.config(1, "shop");
    connect(config.password("other")).await.unwrap();
}
