//! Processes that all believe to own one store, at random ([`crate::two_owners`] has the cases one by one): what they do overlaps, their
//! stores answer late, lose answers, hold them back and fail.
//!
//! ```text
//!   owner     insert 7 ---------------.   flush ----------.      (a zombie from here on)
//!   zombie         collect -- held ----------------------------------------- released --'
//!   next owner                              starts ----'   insert 8 --'  compact ----'
//! ```
//!
//! What is begun, by whom, and which faults there are, comes from the seed; in which order it meets does not.
//!
//! # What must hold
//! - Who begins something when another one owns the store already acknowledges no commit and collects nothing.
//! - What was acknowledged is there: for who reads as the owner, and for every later one. What was refused to a zombie, or deleted, is not.
//!   A commit that failed while its process was the owner may be there or not; that is settled when the next process starts.
//! - Each row that anybody reads has the bytes that were written.
//! - Faults that are worth another try are not noticed. Of the others an owner that was not taken over may have errors, from then on.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fulmar_engine::{Error, Value};
use fulmar_store::{FailureKind, StoreFault, StoreOperation};
use tokio::task::JoinSet;

use crate::seeds::{self, Random};
use crate::two_owners::{Process, SHOP, World, shop};

/// What is under way at the same time, at most.
const AT_ONCE: usize = 4;
/// Processes that believe to own the store.
const MOST_PROCESSES: usize = 4;
/// Above what a commit may hold in pages of its log record: its pages are a segment, in two parts.
const LARGE_BYTES: usize = 10_000_000;

/// What a row holds: the same for everybody, different for each.
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

    /// The rows, each of which is what was written.
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
            let [Value::Integer(id), Value::Blob(bytes)] = &row[..] else { panic!("it is no row of ours") };
            // The first one comes with the table.
            assert!(*id == 1 || *bytes == content(*id), "row {id} is not what was written");
            assert!(found.insert(*id), "row {id} is doubled");
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

/// What a process does while others do something else.
#[derive(Debug)]
enum What {
    Insert(i64),
    Delete(i64),
    /// When it began there were certainly these rows, and certainly not those.
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
    /// Nobody had taken over from it when it began.
    as_owner: bool,
    what: What,
}

/// Does it. Answers the rows that it has read.
async fn carry_out(process: Arc<Process>, begun: Begun) -> (Begun, Result<BTreeSet<i64>, Error>) {
    let nothing = |()| BTreeSet::new();
    let result = match &begun.what {
        What::Insert(id) => process.insert(*id).await.map(nothing),
        What::Delete(id) => process.run(&format!("DELETE FROM t WHERE id = {id}")).await.map(nothing),
        What::Read { .. } => process.contents().await,
        What::Flush => process.engine.flush().await.map(nothing),
        What::Compact => process.engine.compact_all().await.map(nothing),
        What::Collect => process.engine.collect().await.map(nothing),
    };
    (begun, result)
}

struct Member {
    process: Arc<Process>,
    number: usize,
    /// It has had a fault that is not tried again, or that may last: what it does may fail.
    troubled: bool,
}

struct Schedule {
    world: World,
    random: Random,
    /// The last one is the owner.
    members: Vec<Member>,
    started: usize,
    under_way: JoinSet<(Begun, Result<BTreeSet<i64>, Error>)>,
    next: i64,
    /// What is there: acknowledged.
    rows: BTreeSet<i64>,
    /// What may be there, or not.
    unsure: BTreeSet<i64>,
    /// What is not there: deleted, or refused to who was not the owner any more.
    gone: BTreeSet<i64>,
    /// What somebody has begun to delete.
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
            under_way: JoinSet::new(),
            next: 2,
            rows: [1].into(),
            unsure: BTreeSet::new(),
            gone: BTreeSet::new(),
            deleting: BTreeSet::new(),
        }
    }

    fn owner(&self) -> &Member {
        self.members.last().expect("there is always one")
    }

    async fn take_over(&mut self) {
        let process = Arc::new(self.world.start().await);
        self.members.push(Member { process, number: self.started, troubled: false });
        self.started += 1;
    }

    /// One of them, the owner more often than not: its place.
    fn somebody(&mut self) -> usize {
        let last = self.members.len() - 1;
        if self.random.below(10) < 6 { last } else { self.random.below(last as u64 + 1) as usize }
    }

    /// Lets somebody begin something.
    async fn begin(&mut self, what: What) {
        if self.under_way.len() >= AT_ONCE {
            self.release();
            self.one_ends().await;
        }
        let at = self.somebody();
        let as_owner = at + 1 == self.members.len();
        let begun = Begun { by: self.members[at].number, as_owner, what };
        self.under_way.spawn(carry_out(self.members[at].process.clone(), begun));
    }

    /// Waits for one of those that are under way, and judges what came of it.
    async fn one_ends(&mut self) {
        if let Some(ended) = self.under_way.join_next().await {
            let (begun, result) = ended.unwrap();
            self.judge(begun, result);
        }
    }

    /// Waits for all that are under way.
    async fn all_end(&mut self) {
        self.release();
        while !self.under_way.is_empty() {
            self.one_ends().await;
        }
    }

    fn judge(&mut self, begun: Begun, result: Result<BTreeSet<i64>, Error>) {
        let owner = self.owner();
        let is_smooth = begun.as_owner && begun.by == owner.number && !owner.troubled;
        assert!(result.is_ok() || !is_smooth, "{begun:?}: {result:?}");
        match (begun.what, result) {
            (What::Insert(id), Ok(_)) => {
                assert!(begun.as_owner, "it has acknowledged row {id}, which is not its any more");
                self.rows.insert(id);
            }
            (What::Insert(id), Err(_)) if begun.as_owner => {
                self.unsure.insert(id);
            }
            (What::Insert(id), Err(_)) => {
                self.gone.insert(id);
            }
            // One that has not seen the row has nothing to delete, and nothing to commit.
            (What::Delete(_), _) if !begun.as_owner => {}
            (What::Delete(id), Ok(_)) => {
                self.rows.remove(&id);
                // Another one's delete of the same row may have failed before, or may fail later.
                self.unsure.remove(&id);
                self.gone.insert(id);
            }
            (What::Delete(id), Err(_)) => self.unsure.extend(self.rows.take(&id)),
            (What::Collect, Ok(_)) => assert!(begun.as_owner, "it has collected what is not its any more"),
            (What::Read { there, gone }, Ok(found)) if begun.as_owner => {
                let lost = there.difference(&found).find(|id| !self.deleting.contains(*id));
                assert_eq!(lost, None, "lost: {found:?}");
                assert_eq!(gone.intersection(&found).next(), None, "revived: {found:?}");
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
        let a_while = Duration::from_millis(self.random.below(100));
        let operation = *self.random.pick(&[Put, Put, Get, List, Delete, Upload]);
        let mut faults = vec![
            StoreFault::LoseAnswer,
            StoreFault::Delay(a_while),
            StoreFault::Linger(a_while),
            StoreFault::Fail(FailureKind::Unavailable),
        ];
        let is_hard = self.random.once_in(6);
        if is_hard {
            faults = vec![StoreFault::Fail(FailureKind::Other)];
            faults.extend((operation == List).then_some(StoreFault::EmptyPage));
        }
        let fault = *self.random.pick(&faults);
        let at = self.somebody();
        let member = &mut self.members[at];
        member.troubled |= is_hard;
        // One at a time: more than its tries would be noticed.
        member.process.store.forget(operation);
        member.process.store.next(operation, fault);
    }

    fn hold(&mut self) {
        use StoreOperation::*;
        let operation = *self.random.pick(&[Put, Get, Delete, Delete]);
        let at = self.somebody();
        let member = &mut self.members[at];
        // A flush does not wait for its log as long as a hold may last.
        member.troubled |= operation != Delete;
        member.process.store.hold(operation, true);
    }

    /// Restores the partition to what it is now: the others do not know that it begins anew.
    async fn restore(&mut self) {
        self.all_end().await;
        if self.owner().troubled {
            return;
        }
        let process = self.owner().process.clone();
        process.engine.flush().await.unwrap();
        // A restore's own version is of the millisecond after it.
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

    /// Ends one that is not the owner any more and does nothing.
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
                self.next += 1;
                self.begin(What::Insert(self.next - 1)).await;
            }
            Step::Delete => {
                let all: Vec<i64> = self.rows.iter().copied().collect();
                if !all.is_empty() {
                    let id = *self.random.pick(&all);
                    self.deleting.insert(id);
                    self.begin(What::Delete(id)).await;
                }
            }
            Step::Read => {
                let (there, gone) = (self.rows.clone(), self.gone.clone());
                self.begin(What::Read { there, gone }).await;
            }
            Step::Flush => self.begin(What::Flush).await,
            Step::Compact => self.begin(What::Compact).await,
            Step::Collect => self.begin(What::Collect).await,
            Step::Restore => self.restore().await,
            Step::TakeOver if self.members.len() < MOST_PROCESSES => self.take_over().await,
            Step::TakeOver => {}
            Step::Kill => self.kill(),
            Step::Fault => self.fault(),
            Step::Hold => self.hold(),
            Step::Release => self.release(),
            Step::Wait => {
                self.release();
                self.one_ends().await;
            }
        }
    }

    /// Nothing is under way. Of what was not settled the answer shows what became of it.
    async fn check(&self) -> BTreeSet<i64> {
        let found = self.owner().process.contents().await.unwrap();
        assert_eq!(self.rows.difference(&found).next(), None, "lost: {found:?} of {:?}", self.rows);
        let strange = found.iter().find(|id| !self.rows.contains(*id) && !self.unsure.contains(*id));
        assert_eq!(strange, None, "revived: {found:?} of {:?}", self.rows);
        found
    }

    /// Another process starts when all the others are dead: what it has is what there is.
    async fn restart(&mut self) {
        self.members.clear();
        self.take_over().await;
        self.rows = self.check().await;
        self.unsure.clear();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_they_do_the_last_one_has_what_it_has_acknowledged() {
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
        schedule.all_end().await;
        if !schedule.owner().troubled {
            schedule.check().await;
        }
        // All of them die; what the last one had is there.
        schedule.restart().await;
        schedule.owner().process.engine.collect().await.unwrap();
        schedule.check().await;
        schedule.owner().process.engine.shutdown().await.unwrap();
        schedule.restart().await;
        schedule.owner().process.engine.collect().await.unwrap();
        schedule.check().await;
    }
}
