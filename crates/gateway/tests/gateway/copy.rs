//! COPY with a driver and with psql, in both directions.

use crate::common::{Node, state};
use bytes::Bytes;
use futures::{SinkExt, TryStreamExt};
use tokio_postgres::Client;

async fn table(client: &Client) {
    client
        .batch_execute(
            "CREATE TABLE t(id INTEGER PRIMARY KEY, yes BOOLEAN, x DOUBLE PRECISION, b BYTEA, s TEXT);
             INSERT INTO t VALUES (1, 1, 0.5, x'00ff', 'a,\"b\"'), (2, 0, NULL, NULL, ''),
                 (3, NULL, 1e300, x'', 'two' || char(10) || 'lines' || char(9) || '\\N'), (4, NULL, 2, NULL, NULL)",
        )
        .await
        .unwrap();
}

async fn out(client: &Client, sql: &str) -> String {
    let pieces: Vec<Bytes> = client.copy_out(sql).await.unwrap().try_collect().await.unwrap();
    String::from_utf8(pieces.concat()).unwrap()
}

async fn copy_in(client: &Client, sql: &str, text: &str) -> Result<u64, tokio_postgres::Error> {
    let sink = client.copy_in::<_, Bytes>(sql).await?;
    let mut sink = std::pin::pin!(sink);
    for piece in text.as_bytes().chunks(7) {
        sink.send(Bytes::copy_from_slice(piece)).await?;
    }
    sink.finish().await
}

#[tokio::test]
async fn copied_rows_round_trip() {
    let node = Node::insecure().await;
    let client = node.database("shop").await;
    table(&client).await;
    // The output of PostgreSQL 15 for the same rows.
    let text = "1\tt\t0.5\t\\\\x00ff\ta,\"b\"\n2\tf\t\\N\t\\N\t\n3\t\\N\t1e+300\t\\\\x\ttwo\\nlines\\t\\\\N\n4\t\\N\t2\t\\N\t\\N\n";
    assert_eq!(out(&client, "COPY t TO STDOUT").await, text);
    let csv = "id,yes,x,b,s\n1,t,0.5,\\x00ff,\"a,\"\"b\"\"\"\n2,f,,,\"\"\n3,,1e+300,\\x,\"two\nlines\t\\N\"\n4,,2,,\n";
    assert_eq!(out(&client, "COPY t TO STDOUT (FORMAT csv, HEADER)").await, csv);
    assert_eq!(
        out(&client, "COPY (SELECT s, id FROM t WHERE id < 3) TO STDOUT CSV FORCE_QUOTE *").await,
        "\"a,\"\"b\"\"\",\"1\"\n\"\",\"2\"\n"
    );
    assert_eq!(out(&client, "COPY (SELECT 1 AS a WHERE 0) TO STDOUT CSV HEADER").await, "a\n");

    for (format, written) in [("(FORMAT text)", text), ("(FORMAT csv, HEADER MATCH)", csv)] {
        client.batch_execute("DROP TABLE IF EXISTS u; CREATE TABLE u(id INTEGER PRIMARY KEY, yes BOOLEAN, x DOUBLE PRECISION, b BYTEA, s TEXT)").await.unwrap();
        let rows = copy_in(&client, &format!("COPY u FROM STDIN {format}"), written).await.unwrap();
        assert_eq!(rows, 4, "{format}");
        assert_eq!(out(&client, "COPY u TO STDOUT").await, text, "{format}");
    }
    let twice = copy_in(&client, "COPY u FROM STDIN", text).await;
    assert_eq!(state(twice), "23505");
    let header = copy_in(&client, "COPY u (s, id) FROM STDIN (FORMAT csv, HEADER MATCH)", "id,s\n").await;
    assert_eq!(state(header), "22P04");
    let not_null = "COPY u (S, id) FROM STDIN (FORMAT csv, FORCE_NOT_NULL (S))";
    assert_eq!(copy_in(&client, not_null, ",7\n").await.unwrap(), 1);
    assert_eq!(out(&client, "COPY (SELECT s FROM u WHERE id = 7) TO STDOUT").await, "\n");
    let longer = format!("8\tt\t1\t\\N{}\n", "\t".repeat(1 << 20));
    assert_eq!(state(copy_in(&client, "COPY u FROM STDIN", &longer).await), "22P04");
    for (statement, expected) in [
        ("COPY t TO STDOUT CSV FORCE_QUOTE (nothing)", "42703"),
        ("COPY nowhere TO STDOUT", "42P01"),
        ("COPY (DELETE FROM t) TO STDOUT", "0A000"),
        ("COPY (SELECT 1; SELECT 2) TO STDOUT", "42601"),
        ("COPY (SELECT abs(-9223372036854775808)) TO STDOUT", "22003"),
    ] {
        let outcome = client.simple_query(statement).await;
        assert_eq!(state(outcome), expected, "{statement}");
    }
    // Generated columns are neither written nor read, for any kind of table.
    client
        .batch_execute(
            "CREATE TABLE g(a INTEGER, twice INTEGER GENERATED ALWAYS AS (a * 2) STORED, b TEXT, l AS (length(b)));
             INSERT INTO g(a, b) VALUES (1, 'x'); CREATE TEMP TABLE scratch(a, b AS (a + 1), c); CREATE VIEW v AS SELECT twice, l FROM g",
        )
        .await
        .unwrap();
    assert_eq!(out(&client, "COPY g TO STDOUT (FORMAT csv, HEADER)").await, "a,b\n1,x\n");
    assert_eq!(
        copy_in(&client, "COPY g FROM STDIN (FORMAT csv, HEADER)", "a,b\r2,y\r3,z\r").await.unwrap(),
        2
    );
    assert_eq!(out(&client, "COPY g (twice, l) TO STDOUT").await, "2\t1\n4\t1\n6\t1\n");
    assert_eq!(copy_in(&client, "COPY scratch FROM STDIN", "1\t2\n").await.unwrap(), 1);
    assert_eq!(out(&client, "COPY scratch TO STDOUT").await, "1\t2\n");
    assert_eq!(out(&client, "COPY v TO STDOUT").await, "2\t1\n4\t1\n6\t1\n");
    for system in ["pg_catalog.pg_namespace", "pg_namespace"] {
        assert!(out(&client, &format!("COPY {system} TO STDOUT")).await.contains("public"));
    }
    // The session remains usable, inside a transaction as well.
    client.batch_execute("BEGIN; INSERT INTO t(id) VALUES (5)").await.unwrap();
    assert_eq!(out(&client, "COPY (SELECT count(*) FROM t) TO STDOUT").await, "5\n");
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(out(&client, "COPY (SELECT count(*) FROM t) TO STDOUT").await, "4\n");
    node.stop().await;
}

/// More rows than a result keeps in memory.
#[tokio::test(flavor = "multi_thread")]
async fn psql_copies_many_rows_out_and_in() {
    let node = Node::insecure().await;
    let client = node.database("shop").await;
    client
        .batch_execute(
            "CREATE TABLE t(id INTEGER PRIMARY KEY, s TEXT); CREATE TABLE u(id INTEGER PRIMARY KEY, s TEXT);
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)
             INSERT INTO t SELECT i, hex(randomblob(300)) FROM n",
        )
        .await
        .unwrap();
    let path = node.directory.path().join("rows.csv");
    for (command, tag) in [
        (format!("\\copy t to '{}' csv header", path.display()), "COPY 20000\n"),
        (format!("\\copy u from '{}' csv header", path.display()), "COPY 20000\n"),
    ] {
        let ran = node.run("psql", "shop", &["-X", "-c", &command]).await;
        assert_eq!(String::from_utf8_lossy(&ran.stdout), tag, "{}", String::from_utf8_lossy(&ran.stderr));
    }
    let same = "SELECT count(*) FROM t JOIN u USING (id, s)";
    assert_eq!(client.query_one(same, &[]).await.unwrap().get::<_, i64>(0), 20000);
    node.stop().await;
}
