//! Seeds of random tests: constant by default, so that a run can be repeated; other ones from the environment.
//!
//! ```text
//! FULMAR_TEST_SEED=77 FULMAR_TEST_ROUNDS=20 cargo test -p fulmar-engine --test engine model
//! ```

use std::fmt::Debug;
use std::str::FromStr;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// The first seed of a test: `FULMAR_TEST_SEED`, else 1.
pub fn first() -> u64 {
    from_environment("FULMAR_TEST_SEED").unwrap_or(1)
}

/// How many rounds a test runs, each with a seed of its own: `FULMAR_TEST_ROUNDS` times the usual number.
pub fn rounds(usual: u64) -> u64 {
    usual * from_environment("FULMAR_TEST_ROUNDS").unwrap_or(1)
}

fn from_environment<T: FromStr<Err: Debug>>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|e| panic!("{name}={text}: {e:?}")))
}

/// A generator that always gives the same numbers for a seed.
pub struct Random(StdRng);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(StdRng::seed_from_u64(seed))
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0.random_range(0..bound)
    }

    /// A number from `least` to `most`, both included.
    pub fn between(&mut self, least: i64, most: i64) -> i64 {
        self.0.random_range(least..=most)
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of the items.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }

    /// One of the items, each as often as its weight says.
    pub fn weighted<T: Copy>(&mut self, items: &[(u64, T)]) -> T {
        let mut left = self.below(items.iter().map(|(weight, _)| weight).sum());
        for (weight, item) in items {
            if left < *weight {
                return *item;
            }
            left -= weight;
        }
        unreachable!("the weights' sum is the bound")
    }
}
