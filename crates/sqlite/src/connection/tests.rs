use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::time::Duration;

use super::*;
use crate::cancel::CancelFlag;
use crate::fiber::Suspender;
use crate::heap::{Heap, HeapAccount};
use crate::memory_pages::MemoryPages;
use crate::statement::{DiscardRows, Row, RowSink};
use crate::{CancelReason, Canceller};

/// Identifies the database of the tests to the offload pool.
const DATABASE: u64 = 1;

/// A database in memory.
pub(super) struct Database {
    pages: MemoryPages,
    heap: Arc<Heap>,
    directory: tempfile::TempDir,
}

impl Database {
    pub(super) fn empty() -> Database {
        let heap = Arc::new(Heap::of_partition(&Heap::of_node(64 << 20)));
        Database { pages: MemoryPages::default(), heap, directory: tempfile::tempdir().unwrap() }
    }

    pub(super) async fn connect(&self) -> Connection {
        let settings = Settings {
            database: DATABASE,
            heap: self.heap.clone(),
            files: crate::spill::tests::files(self.directory.path(), 4 << 20, u64::MAX),
            time_slice: Duration::MAX,
            max_statement_bytes: MAX_STATEMENT_BYTES,
        };
        let mut connection = Connection::new(Rc::new(self.pages.clone()), settings);
        connection.open().await.unwrap();
        connection
    }

    /// Runs statements on a connection of their own.
    async fn execute(&self, sql: &str) {
        let sql = CString::new(sql).unwrap();
        self.connect().await.run(|connection| connection.execute_here(&sql)).unwrap().await.unwrap();
    }

    async fn with_data() -> Database {
        let database = Database::empty();
        database
            .execute(
                "CREATE TABLE t(id INTEGER PRIMARY KEY, v, parent REFERENCES t); CREATE INDEX i ON t(v);
                 WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500)
                 INSERT INTO t SELECT i, hex(randomblob(700)), i FROM n;
                 CREATE VIRTUAL TABLE f USING fts5(x);
                 INSERT INTO f SELECT v || ' ' || id FROM t",
            )
            .await;
        database
    }
}

/// SQLite checks the clock once per some thousand steps, which it counts over all runs of a cached
/// statement. Eventually it checks after the only step of a BEGIN, which has then succeeded.
#[tokio::test]
async fn cancel_does_not_fail_a_completed_control_statement() {
    let mut connection = Database::empty().connect().await;
    let cancelled = Arc::new(CancelFlag::default());
    cancelled.set(CancelReason::Timeout);
    *connection.link.cancel.borrow_mut() = cancelled;
    for _ in 0..STEPS_PER_CHECKPOINT {
        let controlled = connection.run(|connection| {
            let begun = connection.control_here(BEGIN.0, BEGIN.1);
            assert!(matches!(begun, Step::Done(_)) && !connection.is_autocommit());
            let ended = connection.control_here(ROLLBACK.0, ROLLBACK.1);
            assert!(matches!(ended, Step::Done(_)) && connection.is_autocommit());
        });
        controlled.unwrap().await;
    }
}

/// The rows of one column.
#[derive(Default)]
struct Texts(Vec<String>);

impl RowSink for Texts {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        self.0.push(format!("{:?}", row.get(0).to_owned()));
        Ok(())
    }

    fn reset(&mut self) {
        self.0.clear();
    }
}

/// The result of a check: its rows, or the error.
async fn check(connection: &mut Connection, number: u64, sql: &str) -> (Vec<String>, Option<Error>) {
    let mut texts = Texts::default();
    let step = connection.run(|connection| {
        connection.link.begin_statement();
        let run = Run { id: 100 + number, sql, columns: None, parameters: &[] };
        match sql.contains("_check") {
            true => connection.check_integrity_here(&run, &mut texts),
            false => connection.run_here(&run, &mut texts),
        }
    });
    let step = step.unwrap().await;
    match step {
        Step::Done(_) => (texts.0, None),
        Step::Failed(error) => (texts.0, Some(error)),
        Step::Conflict => panic!("{sql} conflicted"),
    }
}

/// SQLite's check returns a row for each page that it cannot read, and continues.
#[tokio::test]
async fn cancelled_check_reports_no_damage() {
    let database = Database::with_data().await;
    for (reason, state) in [
        (CancelReason::Timeout, sqlstate::QUERY_CANCELED),
        (CancelReason::User, sqlstate::QUERY_CANCELED),
        (CancelReason::Shutdown, sqlstate::ADMIN_SHUTDOWN),
    ] {
        let checks = [
            "PRAGMA integrity_check",
            "PRAGMA integrity_check(t)",
            "PRAGMA quick_check",
            "SELECT * FROM pragma_integrity_check",
            "SELECT count(*) FROM pragma_quick_check",
            "PRAGMA foreign_key_check",
            "INSERT INTO f(f) VALUES ('integrity-check')",
        ];
        for (number, sql) in (0..).zip(checks) {
            let mut connection = database.connect().await;
            let sound = check(&mut connection, number, sql).await;
            assert!(sound.1.is_none(), "{sql}: {sound:?}");
            let flag = Arc::new(CancelFlag::default());
            flag.set(reason);
            *connection.link.cancel.borrow_mut() = flag;
            let (rows, error) = check(&mut connection, number, sql).await;
            let error = error.unwrap_or_else(|| panic!("{sql} was not cancelled: {rows:?}"));
            assert_eq!(error.state(), state, "{sql}: {error}");
        }
    }
}

/// The same for a check that runs out of memory at any point.
#[tokio::test]
async fn check_without_memory_reports_no_damage() {
    const STEP: u64 = 64 << 10;
    let database = Database::with_data().await;
    let heap = &database.heap;
    let (mut refused, mut sound) = (0, 0);
    for left in 0..24 {
        let mut connection = database.connect().await;
        let mut others = Vec::new();
        while heap.used_bytes() + STEP <= heap.limit_bytes() - left * STEP {
            let held = HeapAccount::default();
            assert!(held.take(STEP, heap));
            others.push(held);
        }
        match check(&mut connection, 0, "PRAGMA integrity_check").await {
            (_, Some(error)) => {
                assert_eq!(error.state(), sqlstate::OUT_OF_MEMORY, "{error}");
                refused += 1;
            }
            (rows, None) => {
                assert_eq!(rows, ["Text(\"ok\")"]);
                sound += 1;
            }
        }
        drop(connection);
        others.iter().for_each(|held| held.give_all(heap));
    }
    assert!(refused > 0 && sound > 0, "{refused} {sound}");
}

/// Occupies the tenant's only thread of the offload pool until the sender is dropped.
fn occupy_pool(tenant: u64) -> mpsc::Sender<()> {
    let (release, held) = mpsc::channel::<()>();
    let (started, runs) = mpsc::channel();
    std::thread::spawn(move || {
        let suspender = Suspender::new();
        let body = || {
            suspender.offload(tenant);
            started.send(()).unwrap();
            let _ = held.recv(); // fails when the sender is dropped
        };
        // SAFETY: the suspender outlives the fiber.
        let fiber = unsafe { Fiber::new(&raw const suspender, ptr::null(), body) };
        futures::executor::block_on(fiber.unwrap());
    });
    runs.recv_timeout(std::time::Duration::from_secs(120)).unwrap();
    release
}

/// Runs `body` until it ends, or waits for the offload pool, whose thread is occupied. Returns true
/// in the second case; the fiber is then dropped.
async fn moves_to_pool(connection: &mut Connection, body: impl FnOnce(&mut Connection)) -> bool {
    let flag = Arc::new(CancelFlag::default());
    *connection.link.cancel.borrow_mut() = flag.clone();
    let canceller = Canceller::new(flag, Arc::default());
    let mut fiber = pin!(connection.run(body).unwrap());
    std::future::poll_fn(|cx| match fiber.as_mut().poll(cx) {
        Poll::Ready(()) => Poll::Ready(false),
        Poll::Pending if canceller.is_offloaded() => Poll::Ready(true),
        Poll::Pending => Poll::Pending,
    })
    .await
}

/// A short query that expands to an expression of 2 to the power of `times` terms.
fn doubled(times: usize) -> String {
    let expressions: Vec<String> = (0..times)
        .map(|n| match n {
            0 => "x0(a) AS (SELECT v||v FROM t)".to_owned(),
            n => format!("x{n}(a) AS (SELECT a||a FROM x{})", n - 1),
        })
        .collect();
    format!("WITH {} SELECT count(a) FROM x{}", expressions.join(", "), times - 1)
}

#[tokio::test]
async fn statements_that_need_much_memory_to_compile_are_offloaded() {
    let database = Database::with_data().await;
    let _occupied = occupy_pool(DATABASE);
    let run = |number, sql: String| {
        move |connection: &mut Connection| {
            let run = Run { id: number, sql: &sql, columns: None, parameters: &[] };
            connection.run_here(&run, &mut DiscardRows);
        }
    };
    // Its expression exceeds the tenant's memory before a single allocation exceeds 64 KiB.
    const TIMES: usize = 20;
    let mut connection = database.connect().await;
    let ordinary = [
        "SELECT count(*) FROM t AS a JOIN t AS b USING (id)".to_owned(),
        doubled(5),
        // Two MiB of changed pages in SQLite's cache.
        "UPDATE t SET v = v || 'more'".to_owned(),
        "CREATE VIEW few AS SELECT v AS a FROM t".to_owned(),
        "SELECT count(a) FROM few".to_owned(),
    ];
    for (number, sql) in (100..).zip(ordinary) {
        let moved = moves_to_pool(&mut connection, run(number, sql.clone())).await;
        assert!(!moved, "{sql}");
    }
    // A cached statement is compiled again after a schema change.
    database
        .execute(&format!("DROP VIEW few; CREATE VIEW few AS {}", doubled(TIMES).replace("count(a)", "a")))
        .await;
    let kept = run(104, "SELECT count(a) FROM few".to_owned());
    assert!(moves_to_pool(&mut connection, kept).await, "recompilation must leave the worker");
    drop(connection);

    let mut connection = database.connect().await;
    assert!(
        moves_to_pool(&mut connection, run(200, doubled(TIMES))).await,
        "first compilation must leave the worker"
    );
}

/// SQLite keeps their statement journal in chunks of 64 KiB and a header.
#[tokio::test]
async fn multi_row_inserts_in_a_transaction_are_not_offloaded() {
    let database = Database::with_data().await;
    let _occupied = occupy_pool(DATABASE);
    let mut connection = database.connect().await;
    let mut ended = false;
    let moved = moves_to_pool(&mut connection, |connection| {
        let begun = connection.control_here(BEGIN.0, BEGIN.1);
        assert!(matches!(begun, Step::Done(_)));
        for number in 100..110 {
            let rows = vec!["(hex(randomblob(400)))"; 100].join(", ");
            let sql = format!("INSERT INTO t(v) VALUES {rows}");
            let run = Run { id: number, sql: &sql, columns: Some(0), parameters: &[] };
            assert!(matches!(connection.run_here(&run, &mut DiscardRows), Step::Done(_)));
        }
        connection.control_here(ROLLBACK.0, ROLLBACK.1);
        ended = true;
    })
    .await;
    assert!(!moved && ended);
}

/// A call that must run on the offload pool must not run on the thread that drops the statement.
#[tokio::test]
async fn statement_dropped_before_it_is_offloaded_fails() {
    let database = Database::with_data().await;
    let _occupied = occupy_pool(DATABASE);
    let large = "x".repeat(100_000);
    for (sql, parameters) in [
        ("SELECT length(hex(zeroblob(100000)))".to_owned(), Vec::new()),
        (format!("SELECT '{large}'"), Vec::new()),
        ("SELECT length($1)".to_owned(), vec![crate::Value::Text(large)]),
    ] {
        let mut connection = database.connect().await;
        let mut outcome = None;
        let moved = moves_to_pool(&mut connection, |connection| {
            let run = Run { id: 100, sql: &sql, columns: None, parameters: &parameters };
            outcome = Some(connection.run_here(&run, &mut DiscardRows));
        });
        assert!(moved.await, "{sql:.40}");
        assert!(matches!(outcome, Some(Step::Failed(_))), "{sql:.40}");
    }
}

#[tokio::test]
async fn temporary_tables_are_copied_to_another_connection() {
    let database = Database::with_data().await;
    let (mut source, mut target) = (database.connect().await, database.connect().await);
    let nothing = source.run(|connection| connection.save_temporary_here(0)).unwrap().await.unwrap();
    assert_eq!(nothing, [0; 0]);
    let create =
        c"CREATE TEMP TABLE s(id INTEGER PRIMARY KEY AUTOINCREMENT, v); CREATE INDEX temp.si ON s(v);
        INSERT INTO s(v) SELECT v FROM t; CREATE TEMP VIEW joined AS SELECT t.id FROM t JOIN s USING (v);
        BEGIN; DELETE FROM s; ROLLBACK";
    source.run(|connection| connection.execute_here(create)).unwrap().await.unwrap();
    let copied = source.run(|connection| connection.save_temporary_here(100_000)).unwrap().await;
    assert_eq!(copied.unwrap_err().state(), sqlstate::PROGRAM_LIMIT);
    let copy = source.run(|connection| connection.save_temporary_here(64 << 20)).unwrap().await.unwrap();
    assert!(copy.len() > 500 * 1400, "{} bytes", copy.len());
    target.run(|connection| connection.load_temporary_here(&copy)).unwrap().await.unwrap();
    drop((copy, source));
    // A violated constraint would fail the statements.
    let check = c"CREATE TEMP TABLE found(n CHECK (n = 500), highest CHECK (highest = 501));
        INSERT INTO s(v) VALUES ('new'); INSERT INTO found SELECT count(*), (SELECT max(id) FROM s) FROM joined";
    target.run(|connection| connection.execute_here(check)).unwrap().await.unwrap();
    target.run(|connection| connection.execute_here(c"REINDEX temp.s")).unwrap().await.unwrap();
}
