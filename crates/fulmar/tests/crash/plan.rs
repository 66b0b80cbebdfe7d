//! The plan of a round: where and how the node dies.
//!
//! Every sequence of [`DECK`]`.len()` rounds uses each card of the deck once, in an order
//! determined by the seed.

use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// What makes a node reach its failpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trigger {
    /// The load, or copies of tenants, which flush their source.
    Load,
    /// SIGTERM under load: a clean shutdown flushes everything.
    Stop,
}

/// How a node dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Death {
    /// SIGKILL by the test, after the load has run for some time.
    Random,
    /// By itself, at the given passage of a failpoint of the crate `fulmar-store`.
    Failpoint { name: &'static str, passage: u64, trigger: Trigger },
}

impl Death {
    /// Returns the value of `FULMAR_FAILPOINTS`.
    pub fn failpoints(&self) -> Option<String> {
        match self {
            Death::Random => None,
            Death::Failpoint { name, passage, .. } => Some(format!("{name}=exit:{passage}")),
        }
    }
}

/// How the checked node ends before the next round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RoundEnd {
    Kill,
    Stop,
}

#[derive(Debug)]
pub struct Plan {
    pub death: Death,
    /// How long the load runs before the test sends a signal.
    pub load: Duration,
    /// Whether tenants are copied under load.
    pub copies: bool,
    /// The node is restarted and killed after each of these times, during its recovery.
    pub recoveries: Vec<Duration>,
    pub round_end: RoundEnd,
}

/// A kind of death, with the range of passages at which it happens.
pub struct Card {
    /// `None` for a random moment.
    failpoint: Option<(&'static str, Trigger)>,
    max_passage: u64,
    copies: bool,
}

const fn random_moment(copies: bool) -> Card {
    Card { failpoint: None, max_passage: 1, copies }
}

const fn at_failpoint(name: &'static str, trigger: Trigger, max_passage: u64, copies: bool) -> Card {
    Card { failpoint: Some((name, trigger)), max_passage, copies }
}

/// A shutdown writes one segment, and a manifest for each changed tenant. A copy writes one of
/// each.
pub const DECK: [Card; 14] = [
    random_moment(false),
    random_moment(false),
    random_moment(false),
    random_moment(true),
    at_failpoint("log-mid-record", Trigger::Load, 30, false),
    at_failpoint("log-mid-record", Trigger::Load, 60, true),
    at_failpoint("log-after-write", Trigger::Load, 30, false),
    at_failpoint("log-after-write", Trigger::Load, 60, true),
    at_failpoint("flush-after-segment", Trigger::Stop, 1, false),
    at_failpoint("flush-after-segment", Trigger::Load, 4, true),
    at_failpoint("flush-after-manifest", Trigger::Stop, super::TENANTS as u64, false),
    at_failpoint("flush-after-manifest", Trigger::Load, 4, true),
    at_failpoint("flush-before-truncate", Trigger::Stop, 1, false),
    at_failpoint("flush-before-truncate", Trigger::Load, 2, true),
];

/// Returns the failpoints in the deck.
pub fn failpoints() -> impl Iterator<Item = &'static str> {
    DECK.iter().filter_map(|card| card.failpoint).map(|(name, _)| name)
}

impl Plan {
    /// Returns the plan of a round. Rounds are numbered from 1.
    pub fn of(seed: u64, round: u64) -> Plan {
        let deck = DECK.len() as u64;
        let mut order: Vec<usize> = (0..DECK.len()).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed ^ ((round - 1) / deck)));
        let card = &DECK[order[((round - 1) % deck) as usize]];
        let mut random = StdRng::seed_from_u64(seed ^ (round << 20));
        let death = match card.failpoint {
            None => Death::Random,
            Some((name, trigger)) => {
                Death::Failpoint { name, passage: random.random_range(1..=card.max_passage), trigger }
            }
        };
        let load = Duration::from_millis(random.random_range(60..=260));
        let recoveries = match random.random_range(0..5) {
            0 => (0..random.random_range(1..=3))
                .map(|_| Duration::from_millis(random.random_range(0..=60)))
                .collect(),
            _ => Vec::new(),
        };
        let round_end = if random.random_range(0..4) == 0 { RoundEnd::Stop } else { RoundEnd::Kill };
        Plan { death, load, copies: card.copies, recoveries, round_end }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.death {
            Death::Random => write!(f, "killed after {:?}", self.load)?,
            Death::Failpoint { name, passage, trigger: Trigger::Load } => {
                write!(f, "killed at {name}, passage {passage}")?
            }
            Death::Failpoint { name, passage, trigger: Trigger::Stop } => {
                write!(f, "SIGTERM after {:?}, killed at {name}, passage {passage}", self.load)?;
            }
        }
        if self.copies {
            f.write_str(", with copies")?;
        }
        if !self.recoveries.is_empty() {
            write!(f, ", then killed during recovery, after {:?}", self.recoveries)?;
        }
        Ok(())
    }
}
