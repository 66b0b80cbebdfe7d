//! Engines of a cluster: partitions move between nodes and survive the death of their owner.

mod administration;
mod arrivals;
mod carried;
mod garbage;
mod random;
mod rig;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fulmar_cluster::NodeId;
use fulmar_engine::*;
use fulmar_pages::PartitionId;
use fulmar_store::{FailureKind, StoreFault, StoreOperation};

use crate::common::{Client, wait_until, with_timeout};
use rig::{Member, Rig};

const CREATE: &str = "CREATE TABLE t(id INTEGER PRIMARY KEY, v INT)";

async fn insert(client: &mut Client, id: u64) -> Result<()> {
    client.run(&format!("INSERT INTO t VALUES ({id}, {id})")).await.map(drop)
}

async fn ids(client: &mut Client) -> Vec<u64> {
    let rows = client.run("SELECT id FROM t ORDER BY id").await.unwrap();
    let id = |row: &Vec<Value>| match row[0] {
        Value::Integer(id) => id as u64,
        ref other => panic!("{other:?}"),
    };
    rows.iter().map(id).collect()
}

/// Inserts rows until it is stopped, at whichever node serves the partition. Returns the rows whose
/// inserts succeeded. A row is inserted again only if the error states that it had no effect.
async fn insert_until_stopped(
    engines: Arc<Vec<Arc<Engine>>>,
    partition: u64,
    next: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
) -> BTreeSet<u64> {
    let mut acknowledged = BTreeSet::new();
    let mut clients: Vec<Client> =
        engines.iter().map(|engine| Client { session: engine.session(PartitionId(partition)) }).collect();
    while !stop.load(Ordering::Relaxed) {
        let id = next.fetch_add(1, Ordering::Relaxed);
        'row: loop {
            for client in &mut clients {
                match insert(client, id).await {
                    Ok(()) => {
                        acknowledged.insert(id);
                        break 'row;
                    }
                    Err(error) if error.state() == sqlstate::PARTITION_MOVED => {}
                    Err(error) => panic!("{error:?}"),
                }
            }
            tokio::task::yield_now().await;
        }
    }
    acknowledged
}

#[tokio::test(flavor = "multi_thread")]
async fn partition_moves_under_load_without_losing_or_doubling_a_commit() {
    let rig = Rig::new();
    let members = [rig.start(1).await, rig.start(2).await];
    rig.create(&members[0], [7]).await;
    members[0].client(7).run(CREATE).await.unwrap();
    let engines = Arc::new(members.iter().map(|member| member.engine.clone()).collect::<Vec<_>>());
    let (next, stop) = (Arc::new(AtomicU64::new(1)), Arc::new(AtomicBool::new(false)));
    let writers: Vec<_> = (0..4)
        .map(|_| tokio::spawn(insert_until_stopped(engines.clone(), 7, next.clone(), stop.clone())))
        .collect();
    for round in 0..6 {
        let (from, to) = (&members[round % 2], &members[(round + 1) % 2]);
        let before = next.load(Ordering::Relaxed);
        wait_until("rows are inserted", async || next.load(Ordering::Relaxed) > before + 20).await;
        assert!(rig.hand_over(7, from, to.node).await.unwrap());
        assert_eq!(from.client(7).state("SELECT 1 FROM t").await, sqlstate::PARTITION_MOVED);
    }
    stop.store(true, Ordering::Relaxed);
    let mut acknowledged = BTreeSet::new();
    for writer in writers {
        acknowledged.append(&mut with_timeout("a writer", writer).await.unwrap());
    }
    assert!(acknowledged.len() > 100, "{}", acknowledged.len());
    assert_eq!(ids(&mut members[0].client(7)).await, acknowledged.into_iter().collect::<Vec<_>>());
    let epochs = rig.record(7).await.epoch;
    assert_eq!(epochs, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_commits_survive_a_failover() {
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&a, 1..=5).await;
    for partition in 1..=5 {
        let mut client = a.client(partition);
        client.run(CREATE).await.unwrap();
        for id in 1..=partition {
            insert(&mut client, id).await.unwrap();
        }
        client.close().await;
        if partition == 3 {
            a.engine.flush().await.unwrap();
        }
    }
    rig.fail_over(&a, b.node).await;
    for partition in 1..=5 {
        let mut client = b.client(partition);
        assert_eq!(ids(&mut client).await, (1..=partition).collect::<Vec<_>>());
        insert(&mut client, 100).await.unwrap();
        client.close().await;
    }
    // The next owner reads the logs of both.
    rig.kill(a);
    let c = rig.start(3).await;
    rig.fail_over(&b, c.node).await;
    for partition in 1..=5 {
        let expected: Vec<u64> = (1..=partition).chain([100]).collect();
        assert_eq!(ids(&mut c.client(partition)).await, expected);
    }
}

/// A suspended process continues after its partitions were assigned to another node.
#[tokio::test(flavor = "multi_thread")]
async fn zombie_commits_nothing() {
    let rig = Rig::new();
    let (zombie, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&zombie, [7]).await;
    let mut client = zombie.client(7);
    client.run(CREATE).await.unwrap();
    insert(&mut client, 1).await.unwrap();
    // Its next commits are on their way to the store.
    zombie.store.hold_under(StoreOperation::Put, "logs/");
    let late = tokio::spawn(async move {
        let error = insert(&mut client, 2).await.unwrap_err();
        (client, error)
    });
    with_timeout("the put", zombie.store.is_holding()).await;
    rig.fail_over(&zombie, b.node).await;
    let mut other = b.client(7);
    assert_eq!(ids(&mut other).await, [1]);
    insert(&mut other, 3).await.unwrap();
    zombie.store.hold(StoreOperation::Put, false);
    with_timeout("the log is fenced", zombie.engine.fenced()).await;
    let (mut client, error) = with_timeout("the commit fails", late).await.unwrap();
    assert_ne!(error.state(), sqlstate::PARTITION_MOVED, "{error:?}");
    insert(&mut client, 4).await.unwrap_err();
    client.run("SELECT * FROM t").await.unwrap_err();
    assert!(zombie.engine.flush().await.is_err(), "a fenced process must not store manifests");
    assert_eq!(ids(&mut other).await, [1, 3]);
    b.engine.flush().await.unwrap();
    rig.kill(b);
    let c = rig.start(2).await;
    assert_eq!(ids(&mut c.client(7)).await, [1, 3]);
    with_timeout("the shutdown of a fenced engine", zombie.engine.shutdown()).await.unwrap_err();
}

/// The manifest of a suspended process is stored after its successor has committed.
#[tokio::test(flavor = "multi_thread")]
async fn late_manifest_of_a_previous_owner_hides_no_commit() {
    let rig = Rig::new();
    let (zombie, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&zombie, [7]).await;
    let mut client = zombie.client(7);
    client.run(CREATE).await.unwrap();
    insert(&mut client, 1).await.unwrap();
    zombie.store.hold_under(StoreOperation::Put, "manifests/");
    let engine = zombie.engine.clone();
    let flush = tokio::spawn(async move { engine.flush().await });
    with_timeout("the put", zombie.store.is_holding()).await;
    rig.fail_over(&zombie, b.node).await;
    let mut other = b.client(7);
    insert(&mut other, 2).await.unwrap();
    insert(&mut other, 3).await.unwrap();
    zombie.store.hold(StoreOperation::Put, false);
    let _ = with_timeout("the late flush", flush).await.unwrap();
    rig.kill(b);
    let c = rig.start(2).await;
    assert_eq!(ids(&mut c.client(7)).await, [1, 2, 3]);
    // The late manifest may be the newest one.
    let d = rig.start(3).await;
    assert!(rig.hand_over(7, &c, d.node).await.unwrap());
    assert_eq!(ids(&mut d.client(7)).await, [1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_node_keeps_its_partitions() {
    let rig = Rig::new();
    let mut a = rig.start(1).await;
    rig.create(&a, [7, 8]).await;
    for partition in [7, 8] {
        a.client(partition).run(CREATE).await.unwrap();
    }
    for round in 1..=6 {
        insert(&mut a.client(7), round).await.unwrap();
        if round % 3 == 0 {
            a.engine.shutdown().await.unwrap();
        }
        rig.kill(a);
        a = rig.start(1).await;
        assert_eq!(a.begun.incarnation, round + 1);
        assert_eq!(ids(&mut a.client(7)).await, (1..=round).collect::<Vec<_>>());
    }
    // The records of earlier incarnations, which a failover must not miss.
    let b = rig.start(2).await;
    insert(&mut a.client(7), 7).await.unwrap();
    rig.fail_over(&a, b.node).await;
    assert_eq!(ids(&mut b.client(7)).await, (1..=7).collect::<Vec<_>>());
    assert_eq!(ids(&mut b.client(8)).await, [] as [u64; 0]);
}

/// A node dies twice. The second incarnation has not opened the partition, or could not flush it.
#[tokio::test(flavor = "multi_thread")]
async fn records_of_earlier_incarnations_survive_a_second_death() {
    let rig = Rig::new();
    let a = rig.start(1).await;
    rig.create(&a, [7, 8]).await;
    for partition in [7, 8] {
        let mut client = a.client(partition);
        client.run(CREATE).await.unwrap();
        insert(&mut client, 1).await.unwrap();
    }
    rig.kill(a);
    let again = rig.start(1).await;
    again.store.always(StoreOperation::Upload, Some(StoreFault::Fail(FailureKind::Unavailable)));
    again.store.hold_under(StoreOperation::Put, "segments/");
    again.store.hold_under(StoreOperation::Put, "manifests/");
    insert(&mut again.client(8), 2).await.unwrap();
    let b = rig.start(2).await;
    rig.fail_over(&again, b.node).await;
    assert_eq!(ids(&mut b.client(7)).await, [1]);
    assert_eq!(ids(&mut b.client(8)).await, [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn unopened_partition_is_released_with_its_records() {
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&a, [7]).await;
    a.client(7).run(CREATE).await.unwrap();
    insert(&mut a.client(7), 1).await.unwrap();
    rig.kill(a);
    let a = rig.start(1).await;
    let released = a.engine.release(PartitionId(7), Closing::Prepared).await.unwrap().end;
    assert_eq!(
        a.engine.release(PartitionId(7), Closing::Prepared).await.unwrap().end,
        released,
        "a release is idempotent"
    );
    assert!(rig.hand_over(7, &a, b.node).await.unwrap());
    let reads = rig.store.log_reads.load(Ordering::Relaxed);
    assert_eq!(ids(&mut b.client(7)).await, [1]);
    assert_eq!(rig.store.log_reads.load(Ordering::Relaxed), reads, "a released range must be empty");
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_a_released_partition_are_refused_and_waits_end() {
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&a, [7]).await;
    a.client(7).run(CREATE).await.unwrap();
    insert(&mut a.client(7), 1).await.unwrap();
    let [mut holder, mut reader, mut idle] = [a.client(7), a.client(7), a.client(7)];
    holder.run("BEGIN; SELECT * FROM t WHERE id = 1 FOR UPDATE").await.unwrap();
    reader.run("BEGIN; SELECT * FROM t").await.unwrap();
    idle.run("SELECT * FROM t").await.unwrap();
    let mut waiting = a.client(7);
    let waiter = tokio::spawn(async move { waiting.state("UPDATE t SET v = 9 WHERE id = 1").await });
    // The waiter either waits for the row already, or is refused when it begins.
    assert!(rig.hand_over(7, &a, b.node).await.unwrap());
    assert_eq!(with_timeout("the waiter", waiter).await.unwrap(), sqlstate::PARTITION_MOVED);
    assert_eq!(holder.state("UPDATE t SET v = 2 WHERE id = 1").await, sqlstate::PARTITION_MOVED);
    assert_eq!(reader.state("SELECT * FROM t").await, sqlstate::PARTITION_MOVED);
    for client in [&mut holder, &mut reader] {
        client.run("ROLLBACK").await.unwrap();
        assert_eq!(client.state("SELECT * FROM t").await, sqlstate::PARTITION_MOVED);
    }
    insert(&mut b.client(7), 2).await.unwrap();
    // The sessions work again if the partition comes back.
    assert!(rig.hand_over(7, &b, a.node).await.unwrap());
    for client in [&mut holder, &mut reader, &mut idle] {
        assert_eq!(ids(client).await, [1, 2]);
        assert_eq!(client.int("SELECT v FROM t WHERE id = 1").await, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partition_is_taken_back_if_its_destination_is_dead() {
    let rig = Rig::new();
    let a = rig.start(1).await;
    rig.create(&a, [7]).await;
    let mut client = a.client(7);
    client.run(CREATE).await.unwrap();
    insert(&mut client, 1).await.unwrap();
    assert!(!rig.hand_over(7, &a, NodeId(9)).await.unwrap());
    insert(&mut client, 2).await.unwrap();
    assert_eq!(ids(&mut client).await, [1, 2]);
    assert_eq!(rig.record(7).await.epoch, 2);
    rig.kill(a);
    let a = rig.start(1).await;
    assert_eq!(ids(&mut a.client(7)).await, [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_release_loses_nothing() {
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&a, [7]).await;
    let mut client = a.client(7);
    client.run(CREATE).await.unwrap();
    insert(&mut client, 1).await.unwrap();
    // The first flush fails: the partition is still served.
    a.store.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Refused)));
    a.engine.release(PartitionId(7), Closing::Prepared).await.unwrap_err();
    a.store.always(StoreOperation::Put, None);
    insert(&mut client, 2).await.unwrap();
    assert_eq!(ids(&mut client).await, [1, 2]);
    assert!(rig.hand_over(7, &a, b.node).await.unwrap());
    assert_eq!(ids(&mut b.client(7)).await, [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn outcome_of_a_transaction_is_known_to_later_owners() {
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&a, [7]).await;
    let mut client = a.client(7);
    client.run(CREATE).await.unwrap();
    let ids: Vec<u64> = (0..4).map(|n| [&a, &b][n % 2].engine.new_transaction_id()).collect();
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), 4, "ids of two nodes must differ");
    let outcome = async |member: &Member, id| member.engine.outcome(PartitionId(7), id).await.unwrap();
    // A single statement, a transaction, and one that is asked about before it commits.
    client.session.set_transaction_id(ids[0]);
    insert(&mut client, 1).await.unwrap();
    client.session.set_transaction_id(ids[1]);
    client.run("BEGIN; INSERT INTO t VALUES (2, 2); COMMIT").await.unwrap();
    client.session.set_transaction_id(ids[2]);
    client.run("BEGIN; INSERT INTO t VALUES (3, 3)").await.unwrap();
    assert_eq!(outcome(&a, ids[2]).await, TransactionOutcome::Ended(false));
    assert_eq!(client.state("COMMIT").await, sqlstate::SERIALIZATION_FAILURE);
    // The next transaction has no id.
    insert(&mut client, 4).await.unwrap();
    let check = async |member: &Member| {
        let expected = [true, true, false, false].map(TransactionOutcome::Ended);
        for (id, expected) in ids.iter().zip(expected) {
            assert_eq!(outcome(member, *id).await, expected);
        }
        let mut client = member.client(7);
        assert_eq!(self::ids(&mut client).await, [1, 2, 4]);
        // The transaction of the last id arrives late.
        client.session.set_transaction_id(ids[3]);
        assert_eq!(client.state("INSERT INTO t VALUES (5, 5)").await, sqlstate::SERIALIZATION_FAILURE);
    };
    check(&a).await;
    assert!(rig.hand_over(7, &a, b.node).await.unwrap());
    check(&b).await;
    rig.kill(b);
    let b = rig.start(2).await;
    check(&b).await;
    rig.fail_over(&b, a.node).await;
    check(&a).await;
}

/// The rows of a statement, and its completion as announced before it is durable.
#[derive(Default)]
struct Announced {
    rows: usize,
    is_announced: Arc<AtomicBool>,
}

impl RowSink for Announced {
    fn row(&mut self, _: &dyn Row) -> Result<()> {
        self.rows += 1;
        Ok(())
    }

    fn reset(&mut self) {
        self.rows = 0;
    }

    fn committed(&mut self, completion: &Completion) {
        assert_eq!(self.rows, 2, "all rows come before");
        assert_eq!(completion.tag, CommandTag::Insert(2));
        self.is_announced.store(true, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_of_an_autocommitted_statement_is_known_before_it_is_durable() {
    let rig = Rig::new();
    let a = rig.start(1).await;
    rig.create(&a, [7]).await;
    let mut client = a.client(7);
    client.run(CREATE).await.unwrap();
    let mut announced = Announced::default();
    let is_announced = announced.is_announced.clone();
    let sql = "INSERT INTO t VALUES (1, 1), (2, 2) RETURNING id";
    let (statement, _) = client.session.prepare(sql).await.unwrap();
    a.store.hold_under(StoreOperation::Put, "logs/");
    let mut insert = Box::pin(client.session.execute(&statement, &[], Scope::Auto, &mut announced));
    tokio::select! {
        biased;
        _ = &mut insert => panic!("the insert cannot be durable"),
        () = wait_until("it is announced", async || is_announced.load(Ordering::Relaxed)) => {}
    }
    a.store.hold(StoreOperation::Put, false);
    let completion = with_timeout("the insert", insert).await.unwrap();
    assert_eq!(completion.tag, CommandTag::Insert(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_with_an_assigned_id_write_nothing() {
    let rig = Rig::new();
    let a = rig.start(1).await;
    rig.create(&a, [7]).await;
    let mut client = a.client(7);
    client.run(CREATE).await.unwrap();
    let before = a.engine.statistics().records;
    for sql in ["SELECT * FROM t", "BEGIN; SELECT * FROM t; COMMIT", "DELETE FROM t WHERE id = 9"] {
        client.session.set_transaction_id(a.engine.new_transaction_id());
        client.run(sql).await.unwrap();
    }
    assert_eq!(a.engine.statistics().records, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn sealed_log_is_read_once_for_all_partitions() {
    const PARTITIONS: u64 = 300;
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&a, 1..=PARTITIONS).await;
    for partition in 1..=PARTITIONS {
        let mut client = a.client(partition);
        client.run(CREATE).await.unwrap();
        client.close().await;
    }
    let objects = rig.store.log_objects(a.node).await;
    rig.kill(a.into_dead(&rig, b.node).await);
    let before = rig.store.log_reads.load(Ordering::Relaxed);
    let opening = (1..=PARTITIONS).map(|partition| {
        let mut client = b.client(partition);
        async move {
            assert_eq!(ids(&mut client).await, [] as [u64; 0]);
            client.close().await;
        }
    });
    let opening: Vec<_> = opening.collect();
    for open in opening {
        open.await;
    }
    let reads = rig.store.log_reads.load(Ordering::Relaxed) - before;
    assert!(objects >= 10, "{objects} objects are too few for this test");
    assert!(reads <= objects + 3, "{reads} reads of {objects} objects");
}
