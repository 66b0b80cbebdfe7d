//! Where and how the node of a round dies.
//!
//! The deaths are dealt like cards: every run of [`DECK`]`.len()` rounds has each of them once, in an order by seed.

use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// How a node comes to the place where it dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trigger {
    /// By the load alone, or by copies of tenants, which flush what they copy.
    Load,
    /// By SIGTERM under load: a clean end flushes everything.
    Stop,
}

/// How a node dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Death {
    /// SIGKILL from outside, when the load has run for a while.
    Moment,
    /// By itself at the given passage of a place that the crate `fulmar-store` names.
    Place { name: &'static str, passage: u64, trigger: Trigger },
}

impl Death {
    /// For the environment of the node.
    pub fn failpoints(&self) -> Option<String> {
        match self {
            Death::Moment => None,
            Death::Place { name, passage, .. } => Some(format!("{name}=exit:{passage}")),
        }
    }
}

/// How the node that was checked ends before the next round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Between {
    Kill,
    Stop,
}

#[derive(Debug)]
pub struct Plan {
    pub death: Death,
    /// How long the load runs before it is ended from outside.
    pub load: Duration,
    /// Whether tenants are copied under the load.
    pub copies: bool,
    /// The node is started again and killed after each of these times: in the middle of its recovery.
    pub recoveries: Vec<Duration>,
    pub between: Between,
}

/// A death with its range of passages: a card.
pub struct Card {
    /// `None`: at a random moment.
    place: Option<(&'static str, Trigger)>,
    most_passages: u64,
    copies: bool,
}

const fn moment(copies: bool) -> Card {
    Card { place: None, most_passages: 1, copies }
}

const fn at(name: &'static str, trigger: Trigger, most_passages: u64, copies: bool) -> Card {
    Card { place: Some((name, trigger)), most_passages, copies }
}

/// As many manifests as tenants change are written at the end, and one segment; a copy writes one of each.
pub const DECK: [Card; 14] = [
    moment(false),
    moment(false),
    moment(false),
    moment(true),
    at("log-mid-record", Trigger::Load, 30, false),
    at("log-mid-record", Trigger::Load, 60, true),
    at("log-after-write", Trigger::Load, 30, false),
    at("log-after-write", Trigger::Load, 60, true),
    at("flush-after-segment", Trigger::Stop, 1, false),
    at("flush-after-segment", Trigger::Load, 4, true),
    at("flush-after-manifest", Trigger::Stop, super::TENANTS as u64, false),
    at("flush-after-manifest", Trigger::Load, 4, true),
    at("flush-before-truncate", Trigger::Stop, 1, false),
    at("flush-before-truncate", Trigger::Load, 2, true),
];

/// The places in the deck.
pub fn places() -> impl Iterator<Item = &'static str> {
    DECK.iter().filter_map(|card| card.place).map(|(name, _)| name)
}

impl Plan {
    /// The plan of a round (they count from 1).
    pub fn of(seed: u64, round: u64) -> Plan {
        let deck = DECK.len() as u64;
        let mut order: Vec<usize> = (0..DECK.len()).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed ^ ((round - 1) / deck)));
        let card = &DECK[order[((round - 1) % deck) as usize]];
        let mut random = StdRng::seed_from_u64(seed ^ (round << 20));
        let death = match card.place {
            None => Death::Moment,
            Some((name, trigger)) => {
                Death::Place { name, passage: random.random_range(1..=card.most_passages), trigger }
            }
        };
        let load = Duration::from_millis(random.random_range(60..=260));
        let recoveries = match random.random_range(0..5) {
            0 => (0..random.random_range(1..=3))
                .map(|_| Duration::from_millis(random.random_range(0..=60)))
                .collect(),
            _ => Vec::new(),
        };
        let between = if random.random_range(0..4) == 0 { Between::Stop } else { Between::Kill };
        Plan { death, load, copies: card.copies, recoveries, between }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.death {
            Death::Moment => write!(f, "killed after {:?}", self.load)?,
            Death::Place { name, passage, trigger: Trigger::Load } => {
                write!(f, "killed at {name}, passage {passage}")?
            }
            Death::Place { name, passage, trigger: Trigger::Stop } => {
                write!(f, "asked to stop after {:?}, killed at {name}, passage {passage}", self.load)?;
            }
        }
        if self.copies {
            f.write_str(", with copies")?;
        }
        if !self.recoveries.is_empty() {
            write!(f, ", then killed while it recovered, after {:?}", self.recoveries)?;
        }
        Ok(())
    }
}
