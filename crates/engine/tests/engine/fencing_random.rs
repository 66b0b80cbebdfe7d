//! Random test of fencing: several processes open the same store, and only the last one owns it
//! ([`crate::two_owners`] has the individual cases). Their requests overlap, and their stores
//! delay, lose and hold answers, and fail.
//!
//! ```text
//!   owner     insert 7 ---------------.   flush ----------.      (a zombie from here on)
//!   zombie         collect -- held ----------------------------------------- released --'
//!   next owner                              starts ----'   insert 8 --'  compact ----'
//! ```
//!
//! The seed determines which operations start in which process, and which faults are injected. It
//! does not determine the interleaving.
//!
//! # Invariants
//! - A process that has lost the store acknowledges no commit and collects nothing in operations
//!   that begin afterwards.
//! - Acknowledged changes are visible to the owner and to every later owner. Rows that were
//!   deleted, or whose insert a zombie rejected, are not. A commit that failed while its process
//!   was the owner may be visible or not; this is settled when the next process starts.
//! - Each row that is read has the bytes that were written.
//! - Retryable faults cause no errors. After any other fault, an owner that has not lost the store
//!   may return errors.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fulmar_engine::{Error, Value};
use fulmar_store::{FailureKind, StoreFault, StoreOperation};
use tokio::task::JoinSet;

use crate::fencing::{Process, SHOP, World, shop};
use crate::seeds::{self, Random};

/// Maximum number of concurrent operations.
const MAX_CONCURRENT: usize = 4;
/// Maximum number of processes that have opened the store.
const MAX_PROCESSES: usize = 4;
/// Larger than the pages that a log record can hold: the commit writes a segment, uploaded in two
/// parts.
const LARGE_BYTES: usize = 10_000_000;

/// The contents of a row: determined by its id, and different for each.
fn content(id: i64) -> Vec<u8> {
    let bytes = if id % 8 == 7 { LARGE_BYTES } else { 2000 };
    let mut state = id as u64 + 1;
    let mut content = Vec::with_capacity(bytes + 8);
    while content.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        content.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    content.truncate(bytes);
    content
}

impl Process {
    async fn insert(&self, id: i64) -> Result<(), Error> {
        let mut client = self.client(SHOP);
        let values = [Value::Integer(id), Value::Blob(content(id))];
        let ran = client.with("INSERT INTO t VALUES ($1, $2)", &values).await;
        client.close().await;
        ran.map(drop)
    }

    /// The ids of all rows. Asserts that their contents are intact.
    async fn contents(&self) -> Result<BTreeSet<i64>, Error> {
        let mut client = self.client(SHOP);
        let read = async {
            let rows = client.run("SELECT id, v FROM t").await?;
            let checked = client.run("PRAGMA integrity_check").await?;
            Ok::<_, Error>((rows, checked))
        };
        let read = read.await;
        client.close().await;
        let (rows, checked) = read?;
        assert_eq!(checked, [[Value::Text("ok".into())]]);
        let mut found = BTreeSet::new();
        for row in &rows {
            let [Value::Integer(id), Value::Blob(bytes)] = &row[..] else { panic!("unexpected columns") };
            // Row 1 is created with the table, with random contents.
            assert!(*id == 1 || *bytes == content(*id), "row {id} has wrong contents");
            assert!(found.insert(*id), "row {id} is duplicated");
        }
        Ok(found)
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert,
    Delete,
    Read,
    Flush,
    Compact,
    Collect,
    Restore,
    TakeOver,
    Kill,
    Fault,
    Hold,
    Release,
    Wait,
}

/// An operation of a process.
#[derive(Debug)]
enum Work {
    Insert(i64),
    Delete(i64),
    /// Rows that certainly exist, and rows that certainly do not, when the read begins.
    Read {
        there: BTreeSet<i64>,
        gone: BTreeSet<i64>,
    },
    Flush,
    Compact,
    Collect,
}

#[derive(Debug)]
struct Begun {
    by: usize,
    /// Its process was the owner when the operation began.
    as_owner: bool,
    work: Work,
}

/// Runs an operation. A read returns the ids that it has found.
async fn carry_out(process: Arc<Process>, begun: Begun) -> (Begun, Result<BTreeSet<i64>, Error>) {
    let nothing = |()| BTreeSet::new();
    let result = match &begun.work {
        Work::Insert(id) => process.insert(*id).await.map(nothing),
        Work::Delete(id) => process.run(&format!("DELETE FROM t WHERE id = {id}")).await.map(nothing),
        Work::Read { .. } => process.contents().await,
        Work::Flush => process.engine.flush().await.map(nothing),
        Work::Compact => process.engine.compact_all().await.map(nothing),
        Work::Collect => process.engine.collect().await.map(nothing),
    };
    (begun, result)
}

struct Member {
    process: Arc<Process>,
    number: usize,
    /// It has had a fault that is not retried, or that may persist: its operations may fail.
    troubled: bool,
}

struct Schedule {
    world: World,
    random: Random,
    /// The last member is the owner.
    members: Vec<Member>,
    started: usize,
    running: JoinSet<(Begun, Result<BTreeSet<i64>, Error>)>,
    next_id: i64,
    /// Rows whose insert was acknowledged.
    rows: BTreeSet<i64>,
    /// Rows that may exist or not.
    uncertain: BTreeSet<i64>,
    /// Rows that do not exist: deleted, or their insert was rejected by a zombie.
    gone: BTreeSet<i64>,
    /// Rows whose deletion has begun.
    deleting: BTreeSet<i64>,
}

impl Schedule {
    async fn new(seed: u64) -> Schedule {
        let mut random = Random::new(seed);
        let hours = random.below(2);
        let world = World::new(Duration::from_secs(3600 * hours));
        let first = Member { process: Arc::new(shop(&world).await), number: 0, troubled: false };
        Schedule {
            world,
            random,
            members: vec![first],
            started: 1,
            running: JoinSet::new(),
            next_id: 2,
            rows: [1].into(),
            uncertain: BTreeSet::new(),
            gone: BTreeSet::new(),
            deleting: BTreeSet::new(),
        }
    }

    fn owner(&self) -> &Member {
        self.members.last().expect("there is always an owner")
    }

    async fn take_over(&mut self) {
        let process = Arc::new(self.world.start().await);
        self.members.push(Member { process, number: self.started, troubled: false });
        self.started += 1;
    }

    /// The index of a random member. The owner is preferred.
    fn random_member(&mut self) -> usize {
        let last = self.members.len() - 1;
        if self.random.below(10) < 6 { last } else { self.random.below(last as u64 + 1) as usize }
    }

    /// Starts an operation in a random process.
    async fn begin(&mut self, work: Work) {
        if self.running.len() >= MAX_CONCURRENT {
            self.release();
            self.finish_one().await;
        }
        let at = self.random_member();
        let as_owner = at + 1 == self.members.len();
        let begun = Begun { by: self.members[at].number, as_owner, work };
        self.running.spawn(carry_out(self.members[at].process.clone(), begun));
    }

    /// Waits for an operation to complete, and checks its result.
    async fn finish_one(&mut self) {
        if let Some(ended) = self.running.join_next().await {
            let (begun, result) = ended.unwrap();
            self.judge(begun, result);
        }
    }

    /// Waits for all operations to complete.
    async fn finish_all(&mut self) {
        self.release();
        while !self.running.is_empty() {
            self.finish_one().await;
        }
    }

    fn judge(&mut self, begun: Begun, result: Result<BTreeSet<i64>, Error>) {
        let owner = self.owner();
        let must_succeed = begun.as_owner && begun.by == owner.number && !owner.troubled;
        assert!(result.is_ok() || !must_succeed, "{begun:?}: {result:?}");
        match (begun.work, result) {
            (Work::Insert(id), Ok(_)) => {
                assert!(begun.as_owner, "a fenced process acknowledged row {id}");
                self.rows.insert(id);
            }
            (Work::Insert(id), Err(_)) if begun.as_owner => {
                self.uncertain.insert(id);
            }
            (Work::Insert(id), Err(_)) => {
                self.gone.insert(id);
            }
            // A process that does not see the row deletes nothing, and commits nothing.
            (Work::Delete(_), _) if !begun.as_owner => {}
            (Work::Delete(id), Ok(_)) => {
                self.rows.remove(&id);
                // Another delete of the same row may have failed before, or may fail later.
                self.uncertain.remove(&id);
                self.gone.insert(id);
            }
            (Work::Delete(id), Err(_)) => self.uncertain.extend(self.rows.take(&id)),
            (Work::Collect, Ok(_)) => assert!(begun.as_owner, "a fenced process collected garbage"),
            (Work::Read { there, gone }, Ok(found)) if begun.as_owner => {
                let lost = there.difference(&found).find(|id| !self.deleting.contains(*id));
                assert_eq!(lost, None, "acknowledged row is lost: {found:?}");
                assert_eq!(gone.intersection(&found).next(), None, "deleted row is back: {found:?}");
            }
            _ => {}
        }
    }

    fn release(&self) {
        for member in &self.members {
            for operation in [StoreOperation::Put, StoreOperation::Get, StoreOperation::Delete] {
                member.process.store.hold(operation, false);
            }
        }
    }

    fn fault(&mut self) {
        use StoreOperation::*;
        let delay = Duration::from_millis(self.random.below(100));
        let operation = *self.random.pick(&[Put, Put, Get, List, Delete, Upload]);
        let mut faults = vec![
            StoreFault::LoseResponse,
            StoreFault::Delay(delay),
            StoreFault::Linger(delay),
            StoreFault::Fail(FailureKind::Unavailable),
        ];
        let is_hard = self.random.once_in(6);
        if is_hard {
            faults = vec![StoreFault::Fail(FailureKind::Other)];
            faults.extend((operation == List).then_some(StoreFault::EmptyPage));
        }
        let fault = *self.random.pick(&faults);
        let at = self.random_member();
        let member = &mut self.members[at];
        member.troubled |= is_hard;
        // One fault at a time: more faults than retries would cause an error.
        member.process.store.forget(operation);
        member.process.store.next(operation, fault);
    }

    fn hold(&mut self) {
        use StoreOperation::*;
        let operation = *self.random.pick(&[Put, Get, Delete, Delete]);
        let at = self.random_member();
        let member = &mut self.members[at];
        // A flush may time out while its log is held.
        member.troubled |= operation != Delete;
        member.process.store.hold(operation, true);
    }

    /// Restores the partition to its current version, which starts a new lineage that the other
    /// processes do not know.
    async fn restore(&mut self) {
        self.finish_all().await;
        if self.owner().troubled {
            return;
        }
        let process = self.owner().process.clone();
        process.engine.flush().await.unwrap();
        // A restored version is dated one millisecond later.
        self.world.advance(Duration::from_millis(2));
        let time_ms = process.engine.history(SHOP).await.unwrap().last().unwrap().time_unix_ms;
        let mut decided = None;
        let decide = async |era| {
            decided = Some(era);
            Ok(())
        };
        process.engine.restore_partition(SHOP, time_ms, decide).await.unwrap();
        self.world.eras.insert(SHOP, decided.unwrap());
    }

    /// Ends a process that is not the owner and has no running operation.
    fn kill(&mut self) {
        self.release();
        let zombies = self.members.len() - 1;
        if zombies > 0 {
            let at = self.random.below(zombies as u64) as usize;
            if Arc::strong_count(&self.members[at].process) == 1 {
                drop(self.members.remove(at));
            }
        }
    }

    async fn step(&mut self, step: Step) {
        match step {
            Step::Insert => {
                self.next_id += 1;
                self.begin(Work::Insert(self.next_id - 1)).await;
            }
            Step::Delete => {
                let all: Vec<i64> = self.rows.iter().copied().collect();
                if !all.is_empty() {
                    let id = *self.random.pick(&all);
                    self.deleting.insert(id);
                    self.begin(Work::Delete(id)).await;
                }
            }
            Step::Read => {
                let (there, gone) = (self.rows.clone(), self.gone.clone());
                self.begin(Work::Read { there, gone }).await;
            }
            Step::Flush => self.begin(Work::Flush).await,
            Step::Compact => self.begin(Work::Compact).await,
            Step::Collect => self.begin(Work::Collect).await,
            Step::Restore => self.restore().await,
            Step::TakeOver if self.members.len() < MAX_PROCESSES => self.take_over().await,
            Step::TakeOver => {}
            Step::Kill => self.kill(),
            Step::Fault => self.fault(),
            Step::Hold => self.hold(),
            Step::Release => self.release(),
            Step::Wait => {
                self.release();
                self.finish_one().await;
            }
        }
    }

    /// Checks the owner's contents while no operation is running. Returns the ids, which settle the
    /// uncertain rows.
    async fn check(&self) -> BTreeSet<i64> {
        let found = self.owner().process.contents().await.unwrap();
        assert_eq!(
            self.rows.difference(&found).next(),
            None,
            "acknowledged row is lost: {found:?} of {:?}",
            self.rows
        );
        let unexpected = found.iter().find(|id| !self.rows.contains(*id) && !self.uncertain.contains(*id));
        assert_eq!(unexpected, None, "unexpected row: {found:?} of {:?}", self.rows);
        found
    }

    /// Starts another process after all others have died. Its contents settle the uncertain rows.
    async fn restart(&mut self) {
        self.members.clear();
        self.take_over().await;
        self.rows = self.check().await;
        self.uncertain.clear();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn last_owner_keeps_all_acknowledged_changes() {
    use Step::*;
    let steps = [
        (5, Insert),
        (2, Delete),
        (2, Read),
        (3, Flush),
        (2, Compact),
        (3, Collect),
        (1, Restore),
        (2, TakeOver),
        (2, Kill),
        (4, Fault),
        (2, Hold),
        (2, Release),
        (2, Wait),
    ];
    for seed in seeds::first()..seeds::first() + seeds::rounds(12) {
        let mut schedule = Schedule::new(seed).await;
        for _ in 0..60 {
            let step = schedule.random.weighted(&steps);
            eprintln!("seed {seed}: {step:?}");
            schedule.step(step).await;
        }
        schedule.finish_all().await;
        if !schedule.owner().troubled {
            schedule.check().await;
        }
        // All processes die. The last one's acknowledged rows must survive.
        schedule.restart().await;
        schedule.owner().process.engine.collect().await.unwrap();
        schedule.check().await;
        schedule.owner().process.engine.shutdown().await.unwrap();
        schedule.restart().await;
        schedule.owner().process.engine.collect().await.unwrap();
        schedule.check().await;
    }
}
