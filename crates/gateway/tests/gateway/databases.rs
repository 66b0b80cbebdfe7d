//! Export and import of whole databases as SQLite files, checked with a driver, psql, and stock
//! SQLite.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::{Node, connect, state};
use bytes::Bytes;
use futures::{SinkExt, TryStreamExt};
use tokio_postgres::Client;

const OUT: &str = "COPY DATABASE TO STDOUT (FORMAT sqlite)";

async fn export(client: &Client) -> Vec<u8> {
    let pieces: Vec<Bytes> = client.copy_out(OUT).await.unwrap().try_collect().await.unwrap();
    pieces.concat()
}

async fn import(admin: &Client, sql: &str, file: &[u8]) -> Result<u64, tokio_postgres::Error> {
    let sink = admin.copy_in::<_, Bytes>(sql).await?;
    let mut sink = std::pin::pin!(sink);
    // The pieces do not end at page boundaries.
    for piece in file.chunks(100_003) {
        sink.send(Bytes::copy_from_slice(piece)).await?;
    }
    sink.finish().await
}

fn into(name: &str) -> String {
    format!("COPY DATABASE {name} FROM STDIN (FORMAT sqlite)")
}

async fn number(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// The result of a query in stock SQLite.
fn stock(file: &Path, sql: &str) -> String {
    let connection = rusqlite::Connection::open(file).unwrap();
    connection.query_row(sql, [], |row| row.get::<_, String>(0)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn export_is_consistent_under_concurrent_writes() {
    const ACCOUNTS: i64 = 5000;
    let node = Node::insecure().await;
    let client = node.database("bank").await;
    let accounts = format!(
        "CREATE TABLE account(id INTEGER PRIMARY KEY, balance INTEGER NOT NULL, note TEXT);
         WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ACCOUNTS})
         INSERT INTO account SELECT i, 100, hex(randomblob(100)) FROM n;
         CREATE INDEX by_note ON account(note);
         CREATE VIRTUAL TABLE words USING fts5(w); INSERT INTO words VALUES ('feather'), ('storm')"
    );
    client.batch_execute(&accounts).await.unwrap();

    // Writers that transfer money, and make the file shrink and grow, until the exports are done.
    let (stop, moved) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writers: Vec<_> = (0..3)
        .map(|writer: i64| {
            let (stop, moved, config) = (stop.clone(), moved.clone(), node.config("bank", "anna"));
            tokio::spawn(async move {
                let client = connect(&config).await.unwrap();
                let mut round = writer;
                while !stop.load(Ordering::Relaxed) {
                    round += 7;
                    let (from, to) = (round % ACCOUNTS + 1, round * 13 % ACCOUNTS + 1);
                    let moving = format!(
                        "UPDATE account SET balance = balance - 1, note = hex(randomblob(100)) WHERE id = {from};
                         UPDATE account SET balance = balance + 1 WHERE id = {to};
                         INSERT INTO account VALUES ({0}, 0, hex(zeroblob({1}))) ON CONFLICT DO NOTHING;
                         DELETE FROM account WHERE id = {2}",
                        ACCOUNTS + 1 + round % 50,
                        round % 9000,
                        ACCOUNTS + 1 + (round + 25) % 50
                    );
                    match client.batch_execute(&moving).await {
                        Ok(()) => drop(moved.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => assert_eq!(state::<()>(Err(error)), "40001"),
                    }
                }
            })
        })
        .collect();
    let mut files = Vec::new();
    for round in 0..4 {
        let before = moved.load(Ordering::Relaxed);
        let file = node.directory.path().join(format!("bank-{round}.db"));
        std::fs::write(&file, export(&client).await).unwrap();
        files.push(file);
        while moved.load(Ordering::Relaxed) == before {
            tokio::task::yield_now().await;
        }
    }
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    let balance = format!("SELECT 'sum ' || sum(balance) FROM account WHERE id <= {ACCOUNTS}");
    for file in &files {
        assert_eq!(stock(file, "PRAGMA integrity_check"), "ok");
        assert_eq!(stock(file, &balance), format!("sum {}", ACCOUNTS * 100));
    }

    // Without writers, an export contains everything. The imported database has the same content
    // and can be written.
    let file = export(&client).await;
    let admin = node.client("fulmar").await;
    assert_eq!(import(&admin, &into("copy"), &file).await.unwrap() as usize, file.len() / 4096);
    let copy = node.client("copy").await;
    assert_eq!(
        number(&copy, "SELECT count(*) FROM account").await,
        number(&client, "SELECT count(*) FROM account").await
    );
    let digest = "SELECT group_concat(id || '/' || balance || '/' || note) FROM account";
    let rows = |row: tokio_postgres::Row| row.get::<_, String>(0);
    assert_eq!(
        rows(copy.query_one(digest, &[]).await.unwrap()),
        rows(client.query_one(digest, &[]).await.unwrap())
    );
    assert_eq!(number(&copy, "SELECT count(*) FROM words WHERE words MATCH 'storm'").await, 1);
    copy.batch_execute("UPDATE account SET balance = 0; CREATE TABLE t(x); INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    assert_eq!(number(&copy, "SELECT CAST(sum(balance) AS BIGINT) FROM account").await, 0);
    assert_eq!(number(&client, "SELECT CAST(sum(balance) AS BIGINT) FROM account").await, ACCOUNTS * 100);
    drop((client, copy, admin));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_imports_leave_nothing_behind() {
    let node = Node::insecure().await;
    let admin = node.client("fulmar").await;
    let directory = tempfile::tempdir().unwrap();
    let sqlite_file = |name: &str, pragma: &str| {
        let path = directory.path().join(name);
        let stock = rusqlite::Connection::open(&path).unwrap();
        stock.execute_batch(&format!(
            "{pragma}; CREATE TABLE t(x); CREATE INDEX i ON t(x);
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000) INSERT INTO t SELECT i FROM n"
        )).unwrap();
        stock.close().unwrap();
        std::fs::read(path).unwrap()
    };
    let sound = sqlite_file("sound.db", "PRAGMA page_size = 4096");
    let mut damaged = sound.clone();
    let pages = damaged.len() / 4096;
    assert!(pages > 8);
    damaged[3 * 4096..5 * 4096].fill(0xA5);
    let bad: [(&str, &[u8], &str); 6] = [
        ("no database", b"id,name\n1,a\n", "file is not an SQLite database"),
        ("page size", &sqlite_file("small.db", "PRAGMA page_size = 512"), "512 bytes"),
        ("utf-16", &sqlite_file("wide.db", "PRAGMA encoding = 'UTF-16le'"), "UTF-16"),
        ("cut at a page", &sound[..sound.len() - 4096], "database file is truncated"),
        ("cut in a page", &sound[..sound.len() - 5], "database file is truncated"),
        ("damaged", &damaged, "damaged"),
    ];
    for (case, file, message) in bad {
        let error = import(&admin, &into("shop"), file).await.unwrap_err();
        let database_error = error.as_db_error().unwrap_or_else(|| panic!("{case}: {error}"));
        assert_eq!(database_error.code().code(), "22P04", "{case}: {database_error:?}");
        assert!(
            database_error.message().contains(message) && database_error.hint().is_some(),
            "{case}: {database_error:?}"
        );
        assert_eq!(state(connect(&node.config("shop", "anna")).await), "3D000", "{case}");
    }
    // An import that the client aborts leaves nothing either.
    let refused = {
        let sink = admin.copy_in::<_, Bytes>(&into("shop")).await.unwrap();
        let mut sink = std::pin::pin!(sink);
        sink.send(Bytes::copy_from_slice(&sound[..10_000])).await.unwrap();
        state(connect(&node.config("shop", "anna")).await)
    };
    assert_eq!(refused, "3D000", "a database must not be visible before its import is complete");
    // The aborted import is still being cleaned up for a moment. (The driver's connection is
    // unusable after a rejected COPY.)
    loop {
        let config = node.config("fulmar", "anna");
        let (client, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
        let connection = tokio::spawn(connection);
        match client.copy_in::<_, Bytes>(&into("shop")).await {
            Err(error) => assert_eq!(state::<()>(Err(error)), "55006"),
            Ok(sink) => {
                connection.abort();
                break drop(sink);
            }
        }
    }
    let mut in_wal = sound.clone();
    in_wal[18..20].fill(2);
    while let Err(error) = import(&node.client("fulmar").await, &into("shop"), &in_wal).await {
        assert_eq!(state::<()>(Err(error)), "55006");
    }
    let shop = node.client("shop").await;
    assert_eq!(number(&shop, "SELECT CAST(sum(x) AS BIGINT) FROM t").await, 3000 * 3001 / 2);
    assert_eq!(state(import(&node.client("fulmar").await, &into("shop"), &sound).await), "42P04");
    assert_eq!(state(import(&node.client("shop").await, &into("other"), &sound).await), "0A000");
    let admin = node.client("fulmar").await;
    admin.batch_execute("CREATE USER ada").await.unwrap();
    let owned = "COPY DATABASE imported FROM STDIN WITH (FORMAT sqlite, OWNER ada)";
    import(&admin, owned, &[]).await.unwrap();
    let imported = node.client("imported").await;
    assert_eq!(number(&imported, "SELECT count(*) FROM sqlite_schema").await, 0);
    let file = export(&imported).await;
    assert!(file.len() <= 4096);
    shop.batch_execute("BEGIN").await.unwrap();
    assert_eq!(state(shop.batch_execute(OUT).await), "25001");
}

#[tokio::test(flavor = "multi_thread")]
async fn psql_can_export_a_database() {
    let node = Node::insecure().await;
    let client = node.database("shop").await;
    client.batch_execute("CREATE TABLE t(x); INSERT INTO t VALUES (42)").await.unwrap();
    let file = node.directory.path().join("shop.db");
    let output = node.run("psql", "shop", &["-qc", OUT]).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::write(&file, &output.stdout).unwrap();
    assert_eq!(stock(&file, "SELECT 'x ' || x FROM t"), "x 42");
}
