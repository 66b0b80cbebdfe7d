//! Crash tests: a node is killed under load in 100 rounds, and its data is compared with a model
//! after each restart.
//!
//! ```text
//!  round:   start, armed ──> load: 3 tenants x (3 workers, 1 outcome poller), copies ──> kill
//!           (sometimes: start, kill during recovery)
//!           start ──> query all unknown outcomes ──> compare all rows with the books ──> end
//! ```
//!
//! - The node is the real executable. Its clients use `tokio-postgres` over TCP.
//! - The node always dies by SIGKILL: from this process at a random moment, or by itself at a
//!   failpoint named in `FULMAR_FAILPOINTS` ([`plan`]).
//! - Each client records its transactions and their outcomes: acknowledged, rejected or unknown
//!   ([`load`], [`books`]).
//! - [`check`] requires exact equality. The rows must be those of the acknowledged transactions and
//!   of the unknown ones that `pg_xact_status` reports as committed, and the balances must add up.
//!   A partial transaction, or one that reappears, differs from the books.
//!
//! SIGKILL loses no data that was passed to the kernel. The crate `fulmar-store` tests power
//! failures on simulated files.
//!
//! ```text
//! FULMAR_CRASH_SEED=7 FULMAR_CRASH_ROUNDS=500 cargo test -p fulmar --test crash -- --nocapture
//! ```
//!
//! The seed determines the plan (the failpoints and the transactions of the clients), but not the
//! interleaving. A failure prints the seed, the round and the failpoint, and keeps the data
//! directory.

mod books;
mod check;
mod copies;
mod large;
mod load;
mod node;
mod plan;
mod restore;
mod sql;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use books::Books;
use node::Node;
use plan::{Death, Plan, RoundEnd, Trigger};

/// Default number of rounds. `FULMAR_CRASH_ROUNDS` overrides it.
const ROUNDS: u64 = 100;
/// Default seed. `FULMAR_CRASH_SEED` overrides it.
const SEED: u64 = 1;
const TENANTS: usize = 3;

/// State that persists across rounds.
struct Run<'a> {
    directory: &'a Path,
    seed: u64,
    books: Vec<Books>,
    /// Number of kills at each failpoint.
    hits: BTreeMap<&'static str, u64>,
    restarts: Vec<Duration>,
    totals: Totals,
}

#[derive(Default)]
struct Totals {
    acknowledged: usize,
    rejected: usize,
    unknown: usize,
    /// Transactions with an unknown outcome that have committed.
    unknown_committed: usize,
    outcome_queries: usize,
    copies: usize,
}

#[test]
fn acknowledged_commits_survive_crashes() {
    let (seed, rounds) = (setting("FULMAR_CRASH_SEED", SEED), setting("FULMAR_CRASH_ROUNDS", ROUNDS));
    let directory = tempfile::Builder::new().prefix("fulmar-crash-").tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    if let Err(error) = runtime.block_on(run(directory.path(), seed, rounds)) {
        let path = directory.keep();
        panic!("seed {seed}, {error:#}\nthe data directory and the node's log are in {}", path.display());
    }
}

fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")),
        Err(_) => default,
    }
}

async fn run(directory: &Path, seed: u64, rounds: u64) -> anyhow::Result<()> {
    let began = Instant::now();
    let mut run = Run {
        directory,
        seed,
        books: (0..TENANTS).map(Books::new).collect(),
        hits: BTreeMap::new(),
        restarts: Vec::new(),
        totals: Totals::default(),
    };
    run.prepare().await.context("before the first round")?;
    for round in 1..=rounds {
        let plan = Plan::of(seed, round);
        run.round(round, &plan).await.with_context(|| format!("round {round}, {plan}"))?;
    }
    run.end().await.context("after the last round")?;
    run.report(rounds, began.elapsed());
    if rounds >= plan::DECK.len() as u64 {
        let missed: BTreeSet<_> = plan::failpoints().filter(|place| !run.hits.contains_key(place)).collect();
        ensure!(
            missed.is_empty(),
            "no node was killed at {missed:?}; check that `fulmar start` arms its failpoints"
        );
    }
    Ok(())
}

impl Run<'_> {
    /// Starts a node. Returns `None` if it was killed before it was ready.
    async fn start(&mut self, failpoints: Option<&str>) -> anyhow::Result<Option<Node>> {
        let node = Node::start(self.directory, failpoints).await?;
        self.restarts.extend(node.as_ref().map(|node| node.ready_after));
        Ok(node)
    }

    /// Starts a node without failpoints.
    async fn start_unarmed(&mut self) -> anyhow::Result<Node> {
        self.start(None).await?.context("the node was killed during startup, but not by this test")
    }

    /// Creates the tenants.
    async fn prepare(&mut self) -> anyhow::Result<()> {
        let node = self.start_unarmed().await?;
        for books in &self.books {
            books.create(&node).await?;
        }
        node.stop().await
    }

    async fn round(&mut self, round: u64, plan: &Plan) -> anyhow::Result<()> {
        let mut random = StdRng::seed_from_u64(self.seed ^ (round << 32));
        let failpoints = plan.death.failpoints();
        let (heard, copies) = match self.start(failpoints.as_deref()).await? {
            Some(mut node) => {
                let clients = load::start(&node, round, &self.books, &mut random);
                let copier = plan.copies.then(|| copies::start(&node, round, &clients.tenants, &self.books));
                let hit = die(&mut node, plan).await?;
                self.note_hit(&plan.death, hit);
                let copies = match copier {
                    Some(copier) => load::join(copier).await?,
                    None => Vec::new(),
                };
                (clients.join().await?, copies)
            }
            // The node reached the failpoint during startup.
            None => {
                self.note_hit(&plan.death, true);
                (Vec::new(), Vec::new())
            }
        };
        for (books, heard) in self.books.iter_mut().zip(heard) {
            self.totals.count(&heard);
            books.apply_round(heard);
        }
        for after in &plan.recoveries {
            node::start_and_kill(self.directory, *after).await?;
        }
        let node = self.start_unarmed().await?;
        self.check(&node, &mut random).await?;
        self.totals.copies += copies.len();
        copies::check_and_drop(&node, copies, &self.books).await?;
        match plan.round_end {
            RoundEnd::Kill => node.kill().await,
            RoundEnd::Stop => node.stop().await,
        }
    }

    fn note_hit(&mut self, death: &Death, hit: bool) {
        if let (Death::Failpoint { name, .. }, true) = (death, hit) {
            *self.hits.entry(name).or_default() += 1;
        }
    }

    async fn check(&mut self, node: &Node, random: &mut StdRng) -> anyhow::Result<()> {
        let seeds: Vec<u64> = self.books.iter().map(|_| random.random()).collect();
        let checks = self.books.iter_mut().zip(seeds).map(|(books, seed)| check::tenant(node, books, seed));
        self.totals.unknown_committed +=
            futures::future::try_join_all(checks).await?.into_iter().sum::<usize>();
        Ok(())
    }

    /// Checks all tenants after several clean shutdowns. Each of them truncates the log, which must
    /// not lose any outcome.
    async fn end(&mut self) -> anyhow::Result<()> {
        self.start_unarmed().await?.stop().await?;
        for _ in 0..3 {
            let node = self.start_unarmed().await?;
            self.check(&node, &mut StdRng::seed_from_u64(self.seed)).await?;
            node.stop().await?;
        }
        Ok(())
    }

    fn report(&mut self, rounds: u64, took: Duration) {
        self.restarts.sort_unstable();
        let Totals { acknowledged, rejected, unknown, unknown_committed, outcome_queries, copies } =
            self.totals;
        let entries: usize = self.books.iter().map(Books::entries).sum();
        println!("{rounds} rounds in {took:.1?}, seed {}", self.seed);
        println!(
            "transactions: {acknowledged} acknowledged, {rejected} rejected, {unknown} with \
             unknown outcome, {unknown_committed} of them committed"
        );
        println!(
            "ledger entries: {entries}; outcome queries under load: {outcome_queries}; copies \
             attempted: {copies}"
        );
        println!("killed at failpoints: {:?}; otherwise at random moments", self.hits);
        println!(
            "restarts: {}, median {:.0?}, longest {:.0?}",
            self.restarts.len(),
            self.restarts[self.restarts.len() / 2],
            self.restarts[self.restarts.len() - 1]
        );
    }
}

impl Totals {
    fn count(&mut self, heard: &books::RoundRecord) {
        for attempt in &heard.attempts {
            *match attempt.outcome {
                books::ClientOutcome::Acknowledged => &mut self.acknowledged,
                books::ClientOutcome::NotCommitted => &mut self.rejected,
                books::ClientOutcome::Unknown => &mut self.unknown,
            } += 1;
        }
        self.outcome_queries += heard.queried_outcomes.len();
    }
}

/// Runs the load until the node dies as planned. Returns true if it has killed itself at its
/// failpoint.
async fn die(node: &mut Node, plan: &Plan) -> anyhow::Result<bool> {
    /// Timeout for the node to reach its failpoint. After it, the round counts as a miss.
    const FAILPOINT_TIMEOUT: Duration = Duration::from_secs(30);
    let killed_itself = match &plan.death {
        Death::Random => {
            tokio::time::sleep(plan.load).await;
            false
        }
        Death::Failpoint { trigger: Trigger::Load, .. } => node.is_killed_within(FAILPOINT_TIMEOUT).await?,
        Death::Failpoint { trigger: Trigger::Stop, .. } => {
            if !node.is_killed_within(plan.load).await? {
                node.ask_to_stop()?;
            }
            // The node may also shut down cleanly, if it has nothing to flush.
            node.is_killed_within(FAILPOINT_TIMEOUT).await?
        }
    };
    if !killed_itself {
        node.end_by_kill().await?;
    }
    Ok(killed_itself)
}
