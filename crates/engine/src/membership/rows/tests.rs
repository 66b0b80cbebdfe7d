//! Copies as rows from one engine to another.

use std::sync::Arc;

use fulmar_pages::{PartitionId, Timeline};
use fulmar_sqlite::{Row, RowSink, Scope};
use fulmar_store::VERSION_BITS;

use super::*;
use crate::{Config, Engine};

const ID: PartitionId = PartitionId(7);

/// All kinds of objects, values and keys.
const SCHEMA_AND_ROWS: &str = "
    CREATE TABLE plain(a INTEGER PRIMARY KEY, b TEXT DEFAULT 'none', c REAL, d BLOB, e NUMERIC, f ANY);
    INSERT INTO plain VALUES(-5, 'text', 1, x'00ff', '12', 'x'), (3, NULL, -0.5, x'', 'abc', x'ff'),
      (9223372036854775807, CAST(x'ff41' AS TEXT), 9e999, zeroblob(400000), 3, 4),
      (0, CAST(x'610062' AS TEXT), -9e999, NULL, 1e300, NULL);
    ALTER TABLE plain ADD COLUMN later INTEGER DEFAULT 42;
    CREATE TABLE gaps(x);
    INSERT INTO gaps(rowid, x) VALUES(10, 'a'), (20, 'b'), (-3, 'c');
    CREATE TABLE named(rowid TEXT, x);
    INSERT INTO named(_rowid_, rowid, x) VALUES(100, 'r', 1);
    CREATE TABLE hidden(rowid, _rowid_, oid);
    INSERT INTO hidden VALUES(1, 2, 3), (1, 2, 3);
    CREATE TABLE \"odd \"\"name'\"(\"a b\" TEXT COLLATE NOCASE, \"select\" INT, UNIQUE(\"a b\", \"select\"));
    INSERT INTO \"odd \"\"name'\" VALUES('x', 1), ('y', 2);
    CREATE TABLE keyed(a TEXT, b INT, c, PRIMARY KEY(b DESC, a)) WITHOUT ROWID;
    INSERT INTO keyed VALUES('one', 1, 1.5), ('two', 2, NULL), ('zwei', 2, 'z');
    CREATE TABLE strictly(a INT NOT NULL CHECK(a > 0), b TEXT) STRICT;
    INSERT INTO strictly VALUES(1, '1');
    CREATE TABLE counted(id INTEGER PRIMARY KEY AUTOINCREMENT, v);
    INSERT INTO counted(v) VALUES('a'), ('b'); INSERT INTO counted VALUES(500, 'c');
    DELETE FROM counted WHERE id = 500;
    CREATE TABLE parent(id INTEGER PRIMARY KEY);
    CREATE TABLE child(id INTEGER PRIMARY KEY, parent REFERENCES parent ON DELETE CASCADE);
    INSERT INTO parent VALUES(1); INSERT INTO child VALUES(1, 1), (2, NULL);
    CREATE TABLE computed(a INT, twice AS (a * 2), sum INT AS (a + 1) STORED, b TEXT);
    INSERT INTO computed(b, a) VALUES('x', 1), ('y', 5);
    CREATE TABLE many(id INTEGER PRIMARY KEY, text TEXT);
    WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)
      INSERT INTO many SELECT i, hex(randomblob(40)) || i FROM n;
    CREATE INDEX by_text ON many(text);
    CREATE UNIQUE INDEX by_expression ON plain(lower(b), a) WHERE a > 0;
    CREATE VIRTUAL TABLE words USING fts5(title, body);
    INSERT INTO words VALUES('first', 'some words'), ('second', 'other words');
    DELETE FROM words WHERE title = 'first';
    CREATE VIRTUAL TABLE boxes USING rtree(id, x0, x1);
    INSERT INTO boxes VALUES(1, 0, 2), (2, 5, 9);
    CREATE VIEW joined AS SELECT many.text, gaps.x FROM many JOIN gaps ON gaps.rowid = many.id;
    CREATE TABLE log(what TEXT);
    CREATE TRIGGER logged AFTER INSERT ON gaps BEGIN INSERT INTO log VALUES('gap ' || new.x); END;
    CREATE TRIGGER through INSTEAD OF INSERT ON joined BEGIN INSERT INTO gaps(x) VALUES(new.x); END;
    ANALYZE;
    PRAGMA user_version = -77;
    PRAGMA application_id = 123456;
";

/// Everything that statements can see.
const QUERIES: [&str; 24] = [
    "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name",
    "SELECT *, typeof(b), hex(b), typeof(c), typeof(d), typeof(e), typeof(f), rowid FROM plain",
    "SELECT rowid, x FROM gaps",
    "SELECT _rowid_, rowid, x FROM named",
    "SELECT * FROM hidden",
    "SELECT rowid, * FROM \"odd \"\"name'\"",
    "SELECT * FROM keyed",
    "SELECT rowid, * FROM strictly",
    "SELECT * FROM counted",
    "SELECT * FROM sqlite_sequence",
    "SELECT * FROM child",
    "SELECT * FROM computed",
    "SELECT count(*), sum(id), min(text), max(text) FROM many",
    "SELECT text, id FROM many ORDER BY text LIMIT 5",
    "SELECT a FROM plain WHERE lower(b) = 'text' OR a > 0",
    "SELECT rowid, * FROM words WHERE words MATCH 'words'",
    "SELECT * FROM words('first')",
    "SELECT * FROM boxes WHERE x0 > 1",
    "SELECT * FROM joined",
    "SELECT * FROM log",
    "SELECT tbl, idx, stat FROM sqlite_stat1 ORDER BY tbl, idx",
    "PRAGMA user_version",
    "PRAGMA application_id",
    "PRAGMA integrity_check",
];

#[derive(Default)]
struct Texts(Vec<String>);

impl RowSink for Texts {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        let values: Vec<String> = (0..row.len()).map(|at| format!("{:?}", row.get(at))).collect();
        self.0.push(values.join("|"));
        Ok(())
    }

    fn reset(&mut self) {
        self.0.clear();
    }
}

async fn rows(engine: &Arc<Engine>, sql: &str) -> Vec<String> {
    let mut session = engine.session(ID);
    let (statement, _) = session.prepare(sql).await.unwrap();
    let mut texts = Texts::default();
    session.execute(&statement, &[], Scope::Auto, &mut texts).await.unwrap();
    session.close().await;
    texts.0
}

async fn run(engine: &Arc<Engine>, sql: &str) {
    let mut session = engine.session(ID);
    session.run(sql).await;
    session.close().await;
}

async fn start(directory: &tempfile::TempDir) -> Arc<Engine> {
    Engine::start(Config::new(directory.path(), 256 << 20)).await.unwrap()
}

/// Copies the partition. `change` may change the parts on their way.
async fn copy(source: &Arc<Engine>, to: &Arc<Engine>, mut change: impl FnMut(&mut Vec<u8>)) -> Result<()> {
    let mut outgoing = source.copy_out(ID);
    outgoing.begin_round().await?;
    let manifest = outgoing.manifest().unwrap().clone();
    let timeline = Timeline { lineage: manifest.version.lineage, epoch: manifest.version.epoch };
    let mut incoming = to.maintenance().copy_in(ID, timeline, 1 << VERSION_BITS).await?;
    let mut reader = source.read_rows(&manifest).await?;
    let mut loader = to.load_rows(ID, timeline).await?;
    let mut part = Vec::new();
    while reader.next(&mut part).await? {
        change(&mut part);
        loader.push(&part).await?;
        part.clear();
    }
    loader.finish().await?.store(&mut incoming).await?;
    incoming.end_round(Some(manifest)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost() {
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let (source, to) = (start(&directories[0]).await, start(&directories[1]).await);
    run(&source, SCHEMA_AND_ROWS).await;
    copy(&source, &to, |_| {}).await.unwrap();
    for sql in QUERIES {
        assert_eq!(rows(&to, sql).await, rows(&source, sql).await, "{sql}");
    }
    assert_eq!(rows(&to, "PRAGMA integrity_check").await, ["Text([111, 107])"]);
    // Keys, triggers, constraints and generated columns work as before.
    let changes = "INSERT INTO counted(v) VALUES('next'); INSERT INTO joined(x) VALUES('new'); \
                   DELETE FROM parent; UPDATE computed SET a = 7; INSERT INTO words VALUES('third', 'words')";
    for engine in [&source, &to] {
        run(engine, changes).await;
    }
    for sql in QUERIES {
        assert_eq!(rows(&to, sql).await, rows(&source, sql).await, "after changes: {sql}");
    }
    assert_eq!(rows(&to, "SELECT max(id) FROM counted").await, ["Integer(501)"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_that_differs_is_refused() {
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let (source, to) = (start(&directories[0]).await, start(&directories[1]).await);
    run(&source, "CREATE TABLE t(text TEXT); INSERT INTO t VALUES('aaaaaaaa'); CREATE VIEW v AS SELECT 1")
        .await;
    let replace = |part: &mut Vec<u8>, from: &[u8], by: u8| {
        if let Some(at) = part.windows(from.len()).position(|window| window == from) {
            part[at] = by;
        }
    };
    for (from, by, expected) in [
        (&b"aaaaaaaa"[..], b'b', "the rows of table \"t\" would differ"),
        (b"VIEW v AS", b'v', "the schema would differ"),
        (b"CREATE TABLE", b'D', "received damaged rows"),
    ] {
        let error = copy(&source, &to, |part| replace(part, from, by)).await.unwrap_err();
        assert!(error.message().contains(expected), "{error:?}");
    }
    // A copy without its end.
    let mut is_first = true;
    let cut = |part: &mut Vec<u8>| {
        if !std::mem::take(&mut is_first) {
            part.clear();
        }
    };
    let error = copy(&source, &to, cut).await.unwrap_err();
    assert!(error.message().contains("received damaged rows"), "{error:?}");
    assert_eq!(to.stored_partitions().await.unwrap(), [], "nothing of a refused copy may be named");
    copy(&source, &to, |_| {}).await.unwrap();
    assert_eq!(rows(&to, "SELECT text FROM t").await, rows(&source, "SELECT text FROM t").await);
}
