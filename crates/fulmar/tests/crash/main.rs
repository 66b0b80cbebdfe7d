//! A node is killed under load, a hundred times over, and after each time everything it said must be true.
//!
//! ```text
//!  round:   start, armed ──> load: 3 tenants x (3 workers, 1 asker), copies ──> killed, somewhere
//!           (sometimes: start, killed while it recovers)
//!           start ──> ask for every outcome that nobody was told ──> compare all rows with the books ──> end
//! ```
//!
//! The node is the real binary, its clients are `tokio-postgres` over TCP, and the end is always SIGKILL: from outside
//! at a random moment, or by the node itself at a place named in `FULMAR_FAILPOINTS` ([`plan`]). Each client writes
//! down what it tried and what it was told of it: yes, no, or nothing ([`load`], [`books`]). [`check`] then
//! demands equality, not plausibility: the rows that are there are exactly those of the transactions that were answered
//! with yes, and of those unanswered ones of which `pg_xact_status` says "committed"; the balances are what these
//! add up to. A transaction of which a half is there, or one that comes back, differs from the books.
//!
//! SIGKILL loses nothing that was handed to the kernel; what a power cut loses is tested on simulated files in the
//! crate `fulmar-store`.
//!
//! ```text
//! FULMAR_CRASH_SEED=7 FULMAR_CRASH_ROUNDS=500 cargo test -p fulmar --test crash -- --nocapture
//! ```
//!
//! The seed fixes the plan (what is killed where, what clients try); the interleaving is the machine's. A failure
//! prints seed, round and place, and keeps the data directory.

mod books;
mod check;
mod copies;
mod large;
mod load;
mod node;
mod past;
mod plan;
mod sql;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use books::Books;
use node::Node;
use plan::{Between, Death, Plan, Trigger};

/// Rounds, unless `FULMAR_CRASH_ROUNDS` says otherwise.
const ROUNDS: u64 = 100;
/// The seed, unless `FULMAR_CRASH_SEED` says otherwise.
const SEED: u64 = 1;
const TENANTS: usize = 3;

/// Everything that goes on from round to round.
struct Run<'a> {
    directory: &'a Path,
    seed: u64,
    books: Vec<Books>,
    /// How often the node was killed at each place.
    hits: BTreeMap<&'static str, u64>,
    restarts: Vec<Duration>,
    totals: Totals,
}

#[derive(Default)]
struct Totals {
    yes: usize,
    no: usize,
    nothing: usize,
    /// Of those that nobody was told of: these had happened.
    happened: usize,
    asked: usize,
    copies: usize,
}

#[test]
fn what_was_acknowledged_survives_being_killed() {
    let (seed, rounds) = (setting("FULMAR_CRASH_SEED", SEED), setting("FULMAR_CRASH_ROUNDS", ROUNDS));
    let directory = tempfile::Builder::new().prefix("fulmar-crash-").tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    if let Err(error) = runtime.block_on(run(directory.path(), seed, rounds)) {
        let kept = directory.keep();
        panic!(
            "seed {seed}, {error:#}\nthe data directory and the node's log are kept in {}",
            kept.display()
        );
    }
}

fn setting(name: &str, usual: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")),
        Err(_) => usual,
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
        let missed: BTreeSet<_> = plan::places().filter(|place| !run.hits.contains_key(place)).collect();
        ensure!(
            missed.is_empty(),
            "no node was killed at {missed:?}: does `fulmar start` arm its failpoints?"
        );
    }
    Ok(())
}

impl Run<'_> {
    /// `None` if the node was killed before it was ready.
    async fn start(&mut self, failpoints: Option<&str>) -> anyhow::Result<Option<Node>> {
        let node = Node::start(self.directory, failpoints).await?;
        self.restarts.extend(node.as_ref().map(|node| node.ready_after));
        Ok(node)
    }

    /// A start that must succeed.
    async fn start_plainly(&mut self) -> anyhow::Result<Node> {
        self.start(None).await?.context("the node was killed while it started, and not by this test")
    }

    /// Makes the tenants.
    async fn prepare(&mut self) -> anyhow::Result<()> {
        let node = self.start_plainly().await?;
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
            // It came to the place before it was ready.
            None => {
                self.note_hit(&plan.death, true);
                (Vec::new(), Vec::new())
            }
        };
        for (books, heard) in self.books.iter_mut().zip(heard) {
            self.totals.count(&heard);
            books.enter(heard);
        }
        for after in &plan.recoveries {
            node::start_and_kill(self.directory, *after).await?;
        }
        let node = self.start_plainly().await?;
        self.check(&node, &mut random).await?;
        self.totals.copies += copies.len();
        copies::check_and_drop(&node, copies, &self.books).await?;
        match plan.between {
            Between::Kill => node.kill().await,
            Between::Stop => node.stop().await,
        }
    }

    fn note_hit(&mut self, death: &Death, hit: bool) {
        if let (Death::Place { name, .. }, true) = (death, hit) {
            *self.hits.entry(name).or_default() += 1;
        }
    }

    async fn check(&mut self, node: &Node, random: &mut StdRng) -> anyhow::Result<()> {
        let seeds: Vec<u64> = self.books.iter().map(|_| random.random()).collect();
        let checks = self.books.iter_mut().zip(seeds).map(|(books, seed)| check::tenant(node, books, seed));
        self.totals.happened += futures::future::try_join_all(checks).await?.into_iter().sum::<usize>();
        Ok(())
    }

    /// Clean stops, which leave the log shorter each time: nothing that was said before depends on what is cut off.
    async fn end(&mut self) -> anyhow::Result<()> {
        self.start_plainly().await?.stop().await?;
        for _ in 0..3 {
            let node = self.start_plainly().await?;
            self.check(&node, &mut StdRng::seed_from_u64(self.seed)).await?;
            node.stop().await?;
        }
        Ok(())
    }

    fn report(&mut self, rounds: u64, took: Duration) {
        self.restarts.sort_unstable();
        let Totals { yes, no, nothing, happened, asked, copies } = self.totals;
        let entries: usize = self.books.iter().map(Books::entries).sum();
        println!("{rounds} rounds in {took:.1?}, seed {}", self.seed);
        println!(
            "transactions: {yes} acknowledged, {no} refused, {nothing} unanswered, of which {happened} had happened"
        );
        println!(
            "entries in ledgers: {entries}; outcomes asked for under load: {asked}; copies tried: {copies}"
        );
        println!("killed at: {:?}, else at random moments", self.hits);
        println!(
            "restarts: {}, median {:.0?}, longest {:.0?}",
            self.restarts.len(),
            self.restarts[self.restarts.len() / 2],
            self.restarts[self.restarts.len() - 1]
        );
    }
}

impl Totals {
    fn count(&mut self, heard: &books::Heard) {
        for attempt in &heard.attempts {
            *match attempt.told {
                books::Told::Yes => &mut self.yes,
                books::Told::No => &mut self.no,
                books::Told::Nothing => &mut self.nothing,
            } += 1;
        }
        self.asked += heard.answers.len();
    }
}

/// Lets the load run and the node die as planned. Answers whether it died where it was told to, by itself.
async fn die(node: &mut Node, plan: &Plan) -> anyhow::Result<bool> {
    /// More than it takes to come to any place: then the plan has missed.
    const PATIENCE: Duration = Duration::from_secs(30);
    let killed_itself = match &plan.death {
        Death::Moment => {
            tokio::time::sleep(plan.load).await;
            false
        }
        Death::Place { trigger: Trigger::Load, .. } => node.is_killed_within(PATIENCE).await?,
        Death::Place { trigger: Trigger::Stop, .. } => {
            if !node.is_killed_within(plan.load).await? {
                node.ask_to_stop()?;
            }
            // It may have ended cleanly as well: then there was nothing to flush.
            node.is_killed_within(PATIENCE).await?
        }
    };
    if !killed_itself {
        node.end_by_kill().await?;
    }
    Ok(killed_itself)
}
