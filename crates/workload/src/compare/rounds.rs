//! Runs the rounds of two servers alternately.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::cases::Case;
use super::result::{CaseResult, Peer};
use super::{CompareOptions, Sizes};
use crate::server::{Product, Server};

pub(super) type MakeProduct = Arc<dyn Fn() -> anyhow::Result<Box<dyn Product>> + Send + Sync>;

/// The state shared by all cases of a comparison.
pub(super) struct Bench {
    pub(super) sizes: Sizes,
    pub(super) time: Duration,
    pub(super) rounds: u32,
    /// The number of the current round, 0 before the first one.
    round: AtomicU32,
    memory_bytes: u64,
    fulmar: MakeProduct,
    pub(super) peer: Peer,
    of_peer: MakeProduct,
    progress: Arc<Progress>,
}

impl Bench {
    pub(super) fn new(
        options: &CompareOptions,
        sizes: Sizes,
        fulmar: MakeProduct,
        peer: Peer,
        of_peer: MakeProduct,
    ) -> Bench {
        Bench {
            sizes,
            time: Duration::from_secs(options.seconds),
            rounds: options.rounds,
            round: AtomicU32::new(0),
            memory_bytes: options.memory_bytes,
            fulmar,
            peer,
            of_peer,
            progress: Arc::new(Progress::new()),
        }
    }

    /// The same bench with the peer in place of Fulmar, for cases that measure one server.
    pub(super) fn of_peer(&self) -> Bench {
        Bench {
            round: AtomicU32::new(0),
            fulmar: self.of_peer.clone(),
            of_peer: self.fulmar.clone(),
            progress: self.progress.clone(),
            ..*self
        }
    }

    /// Reports progress on stderr.
    pub(super) fn step(&self, text: &str) {
        self.progress.step(text);
    }

    /// Starts a round and reports it on stderr. `of` names the measured server if there are two.
    pub(super) fn begin_round(&self, names: &str, round: u32, of: &str) {
        self.round.store(round, Ordering::Relaxed);
        self.step(&format!("{names}: round {round} of {}{of}", self.rounds));
    }

    /// The seed of the current round. Every round draws a different load, and both servers get the
    /// same.
    pub(super) fn seed(&self) -> u64 {
        u64::from(self.round.load(Ordering::Relaxed))
    }

    /// Starts an empty Fulmar and resets the round, since loading belongs to none.
    pub(super) async fn fulmar(&self, connections: u32) -> anyhow::Result<Server> {
        self.fulmar_with(self.memory_bytes, connections).await
    }

    /// Starts an empty Fulmar with enough memory for `data_bytes`, also if less was requested.
    pub(super) async fn fulmar_with_memory_for(
        &self,
        data_bytes: u64,
        connections: u32,
    ) -> anyhow::Result<Server> {
        self.fulmar_with(self.memory_for(data_bytes), connections).await
    }

    /// The same with half of the CPUs, leaving the other half to the drivers.
    pub(super) async fn fulmar_on_separate_cpus(
        &self,
        data_bytes: u64,
        connections: u32,
    ) -> anyhow::Result<Server> {
        Server::start_on_separate_cpus(self.new_fulmar()?, self.memory_for(data_bytes), connections).await
    }

    fn memory_for(&self, data_bytes: u64) -> u64 {
        self.memory_bytes.max(data_bytes * 3 / 2)
    }

    async fn fulmar_with(&self, memory_bytes: u64, connections: u32) -> anyhow::Result<Server> {
        Server::start(self.new_fulmar()?, memory_bytes, connections).await
    }

    fn new_fulmar(&self) -> anyhow::Result<Box<dyn Product>> {
        self.round.store(0, Ordering::Relaxed);
        let fulmar = (self.fulmar)()?;
        self.step(&format!("starting {}", fulmar.name()));
        Ok(fulmar)
    }

    /// Starts an empty Fulmar and an empty peer.
    pub(super) async fn pair(&self, connections: u32) -> anyhow::Result<Pair> {
        let fulmar = self.fulmar(connections).await?;
        self.step(&format!("starting {}", self.peer.name()));
        let peer = Server::start((self.of_peer)()?, self.memory_bytes, connections).await?;
        Ok(Pair::of(fulmar, peer))
    }

    /// Measures both servers in alternating rounds. A measurement yields a number for each of
    /// `cases`. If one fails, all of them fail.
    pub(super) async fn alternate<const N: usize>(
        &self,
        pair: &mut Pair,
        cases: [&'static Case; N],
        mut measurement: impl AsyncFnMut(&Server) -> anyhow::Result<[f64; N]>,
    ) -> [CaseResult; N] {
        let names = cases.map(|case| case.name).join(", ");
        let (mut fulmar, mut of_peer) = (Vec::new(), Vec::new());
        for round in 1..=self.rounds {
            for (side, measured) in [(Side::Fulmar, &mut fulmar), (Side::Peer, &mut of_peer)] {
                self.begin_round(&names, round, &format!(", {}", pair.name(side)));
                match pair.alone(side, &mut measurement).await {
                    Ok(numbers) => measured.push(numbers),
                    Err(error) => return cases.map(|case| CaseResult::failed(case, format!("{error:#}"))),
                }
            }
        }
        let column = |rounds: &[[f64; N]], number: usize| rounds.iter().map(|round| round[number]).collect();
        std::array::from_fn(|number| {
            CaseResult::ratio(cases[number], column(&fulmar, number), self.peer, column(&of_peer, number))
        })
    }
}

/// A side of the comparison.
#[derive(Clone, Copy, Debug)]
pub(super) enum Side {
    Fulmar,
    Peer,
}

/// The two servers of a comparison.
pub(super) struct Pair {
    fulmar: Server,
    peer: Server,
}

impl Pair {
    pub(super) fn of(fulmar: Server, peer: Server) -> Pair {
        Pair { fulmar, peer }
    }

    pub(super) fn name(&self, side: Side) -> &'static str {
        match side {
            Side::Fulmar => self.fulmar.name(),
            Side::Peer => self.peer.name(),
        }
    }

    /// Runs `work` on one server and then on the other.
    pub(super) async fn each(
        &mut self,
        mut work: impl AsyncFnMut(&Server) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.alone(Side::Fulmar, &mut work).await?;
        self.alone(Side::Peer, &mut work).await
    }

    /// Runs `work` on one server while the other one is frozen.
    pub(super) async fn alone<T>(
        &mut self,
        side: Side,
        work: &mut impl AsyncFnMut(&Server) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let (server, idle) = match side {
            Side::Fulmar => (&self.fulmar, &mut self.peer),
            Side::Peer => (&self.peer, &mut self.fulmar),
        };
        idle.freeze()?;
        let result = work(server).await;
        idle.thaw()?;
        result.map_err(|error| error.context(format!("on {}", self.name(side))))
    }
}

/// Reports progress on stderr: one updated line on a terminal, one line per step otherwise.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
}

impl Progress {
    pub(super) fn new() -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed_precise} {msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Progress { bar }
    }

    pub(super) fn step(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(text.to_owned()),
            None => eprintln!("{text}"),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
