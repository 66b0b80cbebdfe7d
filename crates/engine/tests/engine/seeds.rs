//! Seeds of random tests. They are constant by default, so that runs can be repeated, and can be
//! set by environment variables.
//!
//! ```text
//! FULMAR_TEST_SEED=77 FULMAR_TEST_ROUNDS=20 cargo test -p fulmar-engine --test engine model
//! ```

use std::fmt::Debug;
use std::str::FromStr;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// The first seed of a test: `FULMAR_TEST_SEED`, or 1.
pub fn first() -> u64 {
    from_environment("FULMAR_TEST_SEED").unwrap_or(1)
}

/// The number of rounds of a test, each with its own seed: `FULMAR_TEST_ROUNDS` times `default`.
pub fn rounds(default: u64) -> u64 {
    default * from_environment("FULMAR_TEST_ROUNDS").unwrap_or(1)
}

fn from_environment<T: FromStr<Err: Debug>>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|e| panic!("{name}={text}: {e:?}")))
}

/// A random generator that is determined by its seed.
pub struct Random(StdRng);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(StdRng::seed_from_u64(seed))
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0.random_range(0..bound)
    }

    /// A number from `min` to `max`, inclusive.
    pub fn between(&mut self, min: i64, max: i64) -> i64 {
        self.0.random_range(min..=max)
    }

    /// True with probability 1 / `n`.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// A random item.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }

    /// A random item, with probabilities proportional to the weights.
    pub fn weighted<T: Copy>(&mut self, items: &[(u64, T)]) -> T {
        let mut left = self.below(items.iter().map(|(weight, _)| weight).sum());
        for (weight, item) in items {
            if left < *weight {
                return *item;
            }
            left -= weight;
        }
        unreachable!("the bound is the sum of the weights")
    }
}
