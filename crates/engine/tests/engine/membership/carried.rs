//! Open transactions that continue at their snapshots after their partition has moved.

use super::*;

const SEVEN: PartitionId = PartitionId(7);
const ROWS: i64 = 2000;
const SUM: &str = "SELECT count(*), sum(length(text)) FROM big";

/// Fills a table with rows of a kilobyte, of which few share a page.
async fn fill(member: &Member) {
    member.client(7).run("CREATE TABLE big(id INTEGER PRIMARY KEY, text TEXT)").await.unwrap();
    insert(member, 1, ROWS, 500).await;
}

async fn insert(member: &Member, first: i64, last: i64, bytes: i64) {
    let sql = format!(
        "WITH RECURSIVE n(i) AS (SELECT {first} UNION ALL SELECT i + 1 FROM n WHERE i < {last}) \
         INSERT INTO big SELECT i, hex(randomblob({bytes})) FROM n"
    );
    member.client(7).run(&sql).await.unwrap();
}

async fn update(member: &Member, text: &str, ids: &str) {
    member.client(7).run(&format!("UPDATE big SET text = '{text}' WHERE id IN ({ids})")).await.unwrap();
}

fn select(id: i64) -> String {
    format!("SELECT length(text) FROM big WHERE id = {id}")
}

fn int(value: i64) -> Vec<Vec<Value>> {
    vec![vec![Value::Integer(value)]]
}

/// A transaction that has begun at a member, and its id.
async fn begin(member: &Member) -> (Client, u64) {
    let id = member.engine.new_transaction_id();
    let mut client = member.client(7);
    client.session.set_transaction_id(id);
    client.run("BEGIN").await.unwrap();
    (client, id)
}

/// The repetition of a transaction.
async fn repeat(member: &Member, origin: u64) -> Client {
    let mut client = member.client(7);
    client.session.set_transaction_id(member.engine.new_transaction_id());
    client.session.repeat_transaction(origin);
    client.run("BEGIN").await.unwrap();
    client
}

/// Hands the partition over, and the snapshots of its transactions before.
async fn carry_over(rig: &Rig, source: &Member, to: &Member) {
    source.engine.release(SEVEN, Closing::Prepared).await.unwrap();
    let epoch = rig.record(7).await.epoch + 1;
    let snapshots = source.engine.take_snapshots(SEVEN);
    let snapshots = CarriedSnapshots::decode(&snapshots.encode()).unwrap();
    assert!(to.engine.expect_snapshots(SEVEN, epoch, snapshots).unwrap());
    assert!(rig.hand_over(7, source, to.node).await.unwrap());
}

async fn two_members() -> (Rig, Member, Member) {
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&a, [7]).await;
    fill(&a).await;
    (rig, a, b)
}

#[tokio::test(flavor = "multi_thread")]
async fn reader_keeps_its_snapshot() {
    let (rig, a, b) = two_members().await;
    let (mut reader, origin) = begin(&a).await;
    assert_eq!(reader.run(&select(1)).await.unwrap(), int(1000));
    let seeded = "SELECT random(), now(), last_insert_rowid(), total_changes()";
    let before = reader.run(seeded).await.unwrap();
    let (mut query, query_origin) = begin(&a).await;
    query.run(&select(1)).await.unwrap();
    update(&a, "x", "1, 1500").await;
    carry_over(&rig, &a, &b).await;
    assert_eq!(reader.state(&select(1)).await, sqlstate::PARTITION_MOVED);
    update(&b, "yy", "2, 1500").await;

    let mut repeated = repeat(&b, origin).await;
    assert_eq!(repeated.run(&select(1)).await.unwrap(), int(1000));
    assert_eq!(repeated.run(seeded).await.unwrap(), before);
    // A page that has not been read: a transaction that is not repeated would see the change.
    update(&b, "z", "700").await;
    assert_eq!(repeated.run(&select(700)).await.unwrap(), int(1000));
    repeated.session.end_repetition();
    let sums = repeated.run(SUM).await.unwrap();
    assert_eq!(sums, [[Value::Integer(ROWS), Value::Integer(ROWS * 1000)]]);
    repeated.run("COMMIT").await.unwrap();
    // A query of which the client has got some rows.
    let mut query = b.client(7);
    query.session.set_transaction_id(b.engine.new_transaction_id());
    query.session.repeat_transaction(query_origin);
    assert_eq!(query.run(SUM).await.unwrap(), sums);
    let sums = query.run(SUM).await.unwrap();
    let expected = ROWS * 1000 - 4 * 1000 + 1 + 2 + 2 + 1;
    assert_eq!(sums, [[Value::Integer(ROWS), Value::Integer(expected)]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn writer_is_validated_as_precisely_as_at_the_source() {
    let (rig, a, b) = two_members().await;
    let (mut first, first_origin) = begin(&a).await;
    assert_eq!(first.run(&select(1)).await.unwrap(), int(1000));
    let (mut second, second_origin) = begin(&a).await;
    assert_eq!(second.run(&select(1500)).await.unwrap(), int(1000));
    update(&a, "x", "1500").await;
    carry_over(&rig, &a, &b).await;
    update(&b, "y", "700").await;

    let replays = || b.engine.partition_statistics(SEVEN).unwrap().replays;
    let mut repeated = repeat(&b, first_origin).await;
    assert_eq!(repeated.run(&select(1)).await.unwrap(), int(1000));
    repeated.run("UPDATE big SET text = 'mine' WHERE id = 2").await.unwrap();
    repeated.session.end_repetition();
    repeated.run("COMMIT").await.unwrap();
    assert_eq!(replays(), 0, "no page that it read has changed");
    assert_eq!(b.client(7).run(&select(2)).await.unwrap(), int(4));
    assert_eq!(b.client(7).run(&select(700)).await.unwrap(), int(1));

    let mut repeated = repeat(&b, second_origin).await;
    assert_eq!(repeated.run(&select(1500)).await.unwrap(), int(1000));
    repeated.session.end_repetition();
    let state = repeated.state("UPDATE big SET text = 'mine' WHERE id = 3").await;
    assert_eq!(state, sqlstate::SERIALIZATION_FAILURE, "what it has read was changed at the source");
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_that_were_cut_off_are_carried_and_freed_afterwards() {
    let (rig, a, b) = two_members().await;
    let (mut reader, origin) = begin(&a).await;
    let sums = reader.run(SUM).await.unwrap();
    a.client(7).run("DELETE FROM big WHERE id > 10").await.unwrap();
    a.client(7).run("VACUUM").await.unwrap();
    carry_over(&rig, &a, &b).await;
    assert_eq!(b.client(7).run("SELECT count(*) FROM big").await.unwrap(), int(10));
    let used = || b.engine.statistics().memory_bytes;
    let before = used();
    // The partition grows over them again.
    insert(&b, 11, ROWS / 2, 500).await;
    let mut repeated = repeat(&b, origin).await;
    assert_eq!(repeated.run(SUM).await.unwrap(), sums);
    repeated.run("COMMIT").await.unwrap();
    b.client(7).run("DELETE FROM big WHERE id > 10").await.unwrap();
    b.client(7).run("VACUUM").await.unwrap();
    drop(repeated);
    b.engine.flush().await.unwrap();
    wait_until("the memory is released", async || used() + (1 << 20) < before).await;
    assert_eq!(b.client(7).run("SELECT count(*) FROM big").await.unwrap(), int(10));
    let check = b.client(7).run("PRAGMA integrity_check").await.unwrap();
    assert_eq!(check[0][0], Value::Text("ok".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_that_need_too_much_are_left_out_oldest_first() {
    let (rig, a, b) = two_members().await;
    insert(&a, ROWS + 1, 3 * ROWS, 1500).await;
    let (mut old, old_origin) = begin(&a).await;
    let random = "SELECT random()";
    let value = old.run(random).await.unwrap();
    assert_eq!(old.run(&select(ROWS + 1)).await.unwrap(), int(3000));
    a.client(7).run("UPDATE big SET text = text || 'x'").await.unwrap();
    let (mut new, new_origin) = begin(&a).await;
    assert_eq!(new.run(&select(ROWS + 1)).await.unwrap(), int(3001));
    update(&a, "y", "1, 2001").await;
    carry_over(&rig, &a, &b).await;
    let mut repeated = repeat(&b, new_origin).await;
    assert_eq!(repeated.run(&select(ROWS + 1)).await.unwrap(), int(3001));
    let mut repeated = repeat(&b, old_origin).await;
    assert_eq!(repeated.run(random).await.unwrap(), value, "it needs no pages");
    assert_eq!(repeated.run(&select(ROWS + 1)).await.unwrap(), int(1), "the newest version");
}

/// The transaction continues after the second move, or its session is lost during the repetition.
#[tokio::test(flavor = "multi_thread")]
async fn snapshot_is_carried_again_until_the_repetition_has_ended() {
    let (rig, a, b) = two_members().await;
    let c = rig.start(3).await;
    let (mut reader, origin) = begin(&a).await;
    assert_eq!(reader.run(&select(1)).await.unwrap(), int(1000));
    update(&a, "x", "1").await;
    carry_over(&rig, &a, &b).await;
    update(&b, "y", "1, 700").await;
    carry_over(&rig, &b, &c).await;
    update(&c, "z", "1, 1500").await;
    for _ in 0..2 {
        let mut lost = repeat(&c, origin).await;
        assert_eq!(lost.run(&select(1)).await.unwrap(), int(1000));
        lost.close().await;
    }
    let mut lost = repeat(&c, origin).await;
    assert_eq!(lost.run(&select(1)).await.unwrap(), int(1000));
    carry_over(&rig, &c, &a).await;
    assert_eq!(lost.state(&select(1)).await, sqlstate::PARTITION_MOVED);
    let mut repeated = repeat(&a, origin).await;
    let sums = repeated.run(SUM).await.unwrap();
    assert_eq!(sums, [[Value::Integer(ROWS), Value::Integer(ROWS * 1000)]]);
    repeated.session.end_repetition();
    repeated.run("COMMIT").await.unwrap();
    // Its snapshot is used once.
    assert_eq!(repeat(&a, origin).await.run(&select(1)).await.unwrap(), int(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_that_is_not_repeated_releases_its_snapshot() {
    let (rig, a, b) = two_members().await;
    let (mut reader, origin) = begin(&a).await;
    assert_eq!(reader.run(&select(1)).await.unwrap(), int(1000));
    update(&a, "x", "1").await;
    carry_over(&rig, &a, &b).await;
    let mut client = b.client(7);
    client.session.set_transaction_id(b.engine.new_transaction_id());
    client.session.abandon_transaction(origin);
    assert_eq!(client.run(&select(1)).await.unwrap(), int(1), "it begins at a new snapshot");
    assert_eq!(repeat(&b, origin).await.run(&select(1)).await.unwrap(), int(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn temporary_tables_are_copied_between_members_and_survive_a_handover_that_fails() {
    let (rig, a, b) = two_members().await;
    let mut client = a.client(7);
    client.run("CREATE TEMP TABLE mine AS SELECT * FROM big; BEGIN; DELETE FROM mine").await.unwrap();
    assert!(client.session.has_temporary_tables() && !client.session.have_temporary_tables_moved());
    carry_over(&rig, &a, &b).await;
    assert_eq!(client.state("SELECT count(*) FROM mine").await, sqlstate::PARTITION_MOVED);
    assert!(client.session.have_temporary_tables_moved());
    let tables = client.session.save_temporary_tables().await.unwrap().unwrap();
    let mut next = b.client(7);
    next.session.load_temporary_tables(tables.bytes()).await.unwrap();
    drop(tables);
    let both = "SELECT count(*) FROM mine JOIN big USING (id, text)";
    assert_eq!(next.run(both).await.unwrap(), int(ROWS), "the transaction was rolled back");

    b.engine.release(SEVEN, Closing::Prepared).await.unwrap();
    let is_moved = rig.hand_over(7, &b, NodeId(9)).await.unwrap();
    assert!(!is_moved, "the destination does not exist");
    assert_eq!(next.run(both).await.unwrap(), int(ROWS));
}

#[tokio::test(flavor = "multi_thread")]
async fn late_and_foreign_snapshots_are_refused() {
    let (rig, a, b) = two_members().await;
    let (mut reader, origin) = begin(&a).await;
    assert_eq!(reader.run(&select(1)).await.unwrap(), int(1000));
    update(&a, "x", "1").await;
    a.engine.release(SEVEN, Closing::Prepared).await.unwrap();
    let snapshots = a.engine.take_snapshots(SEVEN);
    assert!(!snapshots.is_empty() && a.engine.take_snapshots(SEVEN).is_empty());
    let epoch = rig.record(7).await.epoch + 1;
    // Of a handover that did not take place.
    assert!(b.engine.expect_snapshots(SEVEN, epoch - 1, snapshots.clone()).unwrap());
    assert!(rig.hand_over(7, &a, b.node).await.unwrap());
    assert_eq!(repeat(&b, origin).await.run(&select(1)).await.unwrap(), int(1));
    update(&b, "yy", "1").await;
    assert!(!b.engine.expect_snapshots(SEVEN, epoch, snapshots).unwrap(), "the partition is open");
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_continues_if_the_source_keeps_the_partition() {
    let (rig, a, _b) = two_members().await;
    let (mut reader, origin) = begin(&a).await;
    assert_eq!(reader.run(&select(1)).await.unwrap(), int(1000));
    update(&a, "x", "1").await;
    a.engine.release(SEVEN, Closing::Prepared).await.unwrap();
    let epoch = rig.record(7).await.epoch + 1;
    let snapshots = a.engine.take_snapshots(SEVEN);
    assert!(a.engine.expect_snapshots(SEVEN, epoch, snapshots).unwrap());
    let is_moved = rig.hand_over(7, &a, NodeId(9)).await.unwrap();
    assert!(!is_moved, "the destination does not exist");
    update(&a, "yy", "1").await;
    assert_eq!(reader.state(&select(1)).await, sqlstate::PARTITION_MOVED);
    assert_eq!(repeat(&a, origin).await.run(&select(1)).await.unwrap(), int(1000));
}
