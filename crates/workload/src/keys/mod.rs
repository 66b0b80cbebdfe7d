//! Key distributions: uniform, Zipfian and hot spot (ElasTraS 7.3.1, E-Store 2.2).
//!
//! ```text
//! uniform            all keys with the same probability
//! hotspot:90:20      90 % of the operations on the first 20 % of the keys (the paper's Hot90-20)
//! zipfian:1.0        the k-th most popular key with probability proportional to 1 / k^1.0
//! low-skew           Zipfian, with two thirds of the operations on one third of the keys (E-Store)
//! high-skew:60:40    60 % of the operations on the first 40 keys, the others as low-skew (E-Store;
//!                    Voter has 80:30)
//! ```
//!
//! A hot spot is a contiguous range of keys, as in YCSB, so that it fills few pages. Zipfian ranks
//! are scattered over the key space by a permutation. YCSB's scrambled generator uses a hash
//! instead, which lets ranks collide.

mod zipf;

use std::fmt;
use std::str::FromStr;

use rand::{Rng, RngExt};
use serde::{Serialize, Serializer};

use self::zipf::{Scatter, Zipf, low_skew_exponent};

/// How accesses are distributed over the keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Distribution {
    /// All keys with the same probability.
    Uniform,
    /// A share of the operations goes to a share of the keys.
    Hotspot {
        /// Percentage of the operations that touch the hot keys.
        operations_percent: f64,
        /// Percentage of the keys that are hot.
        keys_percent: f64,
    },
    /// The k-th most popular key is drawn with probability proportional to 1 / k^s.
    Zipfian {
        /// The exponent s.
        exponent: f64,
    },
    /// E-Store's low skew: Zipfian with the exponent that gives two thirds of the operations to one
    /// third of the keys.
    LowSkew,
    /// E-Store's high skew: a few hot keys get a share of the operations, and the rest is
    /// distributed over all keys with low skew.
    HighSkew {
        /// Percentage of the operations that touch the hot keys.
        operations_percent: f64,
        /// Number of hot keys.
        hot_keys: u32,
    },
}

impl Distribution {
    /// The paper's Hot90-20.
    pub const HOT_90_20: Distribution =
        Distribution::Hotspot { operations_percent: 90.0, keys_percent: 20.0 };
}

impl Distribution {
    /// The shares of `count` receivers, such as keys or tenants. They add up to 1, and the first is
    /// the largest.
    pub fn shares(self, count: usize) -> Vec<f64> {
        let hot = |percent: f64| ((count as f64 * percent / 100.0).round() as usize).clamp(1, count.max(1));
        let zipf = |number: usize, exponent: f64| ((number + 1) as f64).powf(-exponent);
        let low_exponent = low_skew_exponent(u32::try_from(count).unwrap_or(u32::MAX).max(1));
        let low_sum: f64 = (0..count).map(|number| zipf(number, low_exponent)).sum();
        let weight = |number: usize| match self {
            Distribution::Uniform => 1.0,
            Distribution::Hotspot { keys_percent, .. } if hot(keys_percent) == count => 1.0,
            Distribution::Hotspot { operations_percent, keys_percent } => match hot(keys_percent) {
                hot if number < hot => operations_percent / hot as f64,
                hot => (100.0 - operations_percent) / (count - hot) as f64,
            },
            Distribution::Zipfian { exponent } => zipf(number, exponent),
            Distribution::LowSkew => zipf(number, low_exponent),
            Distribution::HighSkew { operations_percent, hot_keys } => {
                let hot = count.min(hot_keys as usize);
                let of_hot = if number < hot { operations_percent / 100.0 / hot as f64 } else { 0.0 };
                of_hot + (1.0 - operations_percent / 100.0) * zipf(number, low_exponent) / low_sum
            }
        };
        let weights: Vec<f64> = (0..count).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / sum).collect()
    }
}

/// A text that is no distribution.
#[derive(Debug, thiserror::Error)]
#[error(
    "invalid distribution {0:?}; use uniform, zipfian, zipfian:S (S from 0 to 5), hotspot, \
     hotspot:OPERATIONS%:KEYS%, low-skew, high-skew or high-skew:OPERATIONS%:NUMBER"
)]
pub struct DistributionError(String);

impl FromStr for Distribution {
    type Err = DistributionError;

    fn from_str(text: &str) -> Result<Distribution, DistributionError> {
        let bad = || DistributionError(text.to_owned());
        let number = |text: &str, max: f64| match text.trim_end_matches('%').parse::<f64>() {
            Ok(number) if (0.0..=max).contains(&number) => Ok(number),
            _ => Err(bad()),
        };
        let parts: Vec<&str> = text.split(':').collect();
        match parts[..] {
            ["uniform"] => Ok(Distribution::Uniform),
            ["zipfian"] => Ok(Distribution::Zipfian { exponent: 1.0 }),
            ["zipfian", exponent] => Ok(Distribution::Zipfian { exponent: number(exponent, 5.0)? }),
            ["hotspot"] => Ok(Distribution::HOT_90_20),
            ["hotspot", operations, keys] => Ok(Distribution::Hotspot {
                operations_percent: number(operations, 100.0)?,
                keys_percent: number(keys, 100.0)?,
            }),
            ["low-skew"] => Ok(Distribution::LowSkew),
            ["high-skew"] => Ok(Distribution::HighSkew { operations_percent: 60.0, hot_keys: 40 }),
            ["high-skew", operations, keys] => Ok(Distribution::HighSkew {
                operations_percent: number(operations, 100.0)?,
                hot_keys: keys.parse().ok().filter(|keys| *keys > 0).ok_or_else(bad)?,
            }),
            _ => Err(bad()),
        }
    }
}

impl Serialize for Distribution {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Distribution::Uniform => write!(f, "uniform"),
            Distribution::Hotspot { operations_percent, keys_percent } => {
                write!(f, "hotspot:{operations_percent}:{keys_percent}")
            }
            Distribution::Zipfian { exponent } => write!(f, "zipfian:{exponent}"),
            Distribution::LowSkew => write!(f, "low-skew"),
            Distribution::HighSkew { operations_percent, hot_keys } => {
                write!(f, "high-skew:{operations_percent}:{hot_keys}")
            }
        }
    }
}

/// A generator of keys in `0..count`.
#[derive(Clone, Debug)]
pub struct Keys {
    count: u32,
    chooser: Chooser,
}

#[derive(Clone, Debug)]
enum Chooser {
    Uniform,
    Hotspot { hot_keys: u32, hot_share: f64 },
    Zipfian { ranks: Zipf, scatter: Scatter },
    HighSkew { hot_keys: u32, hot_share: f64, ranks: Zipf, scatter: Scatter },
}

impl Keys {
    /// Creates a generator of keys in `0..count`. A `count` of 0 is treated as 1.
    pub fn new(distribution: Distribution, count: u32) -> Keys {
        let count = count.max(1);
        let chooser = match distribution {
            Distribution::Uniform => Chooser::Uniform,
            Distribution::Hotspot { operations_percent, keys_percent } => {
                let hot_keys = (f64::from(count) * keys_percent / 100.0).round() as u32;
                Chooser::Hotspot { hot_keys: hot_keys.clamp(1, count), hot_share: operations_percent / 100.0 }
            }
            Distribution::Zipfian { exponent } => {
                Chooser::Zipfian { ranks: Zipf::new(count, exponent), scatter: Scatter::new(count) }
            }
            Distribution::LowSkew => {
                let ranks = Zipf::new(count, low_skew_exponent(count));
                Chooser::Zipfian { ranks, scatter: Scatter::new(count) }
            }
            Distribution::HighSkew { operations_percent, hot_keys } => Chooser::HighSkew {
                hot_keys: hot_keys.clamp(1, count),
                hot_share: operations_percent / 100.0,
                ranks: Zipf::new(count, low_skew_exponent(count)),
                scatter: Scatter::new(count),
            },
        };
        Keys { count, chooser }
    }

    /// Draws the next key.
    pub fn draw(&self, random: &mut impl Rng) -> u32 {
        match &self.chooser {
            Chooser::Uniform => random.random_range(0..self.count),
            Chooser::Hotspot { hot_keys, hot_share } => {
                let hot = *hot_keys == self.count || random.random::<f64>() < *hot_share;
                if hot {
                    random.random_range(0..*hot_keys)
                } else {
                    random.random_range(*hot_keys..self.count)
                }
            }
            Chooser::Zipfian { ranks, scatter } => scatter.key(ranks.draw(random) - 1),
            Chooser::HighSkew { hot_keys, hot_share, ranks, scatter } => {
                if random.random::<f64>() < *hot_share {
                    random.random_range(0..*hot_keys)
                } else {
                    scatter.key(ranks.draw(random) - 1)
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::Xoshiro256PlusPlus;

    const DRAWS: usize = 400_000;

    fn counts(distribution: Distribution, keys: u32) -> Vec<f64> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(7);
        let keys_of = Keys::new(distribution, keys);
        let mut counts = vec![0.0; keys as usize];
        for _ in 0..DRAWS {
            counts[keys_of.draw(&mut random) as usize] += 1.0;
        }
        counts
    }

    /// Pearson's statistic divided by its degrees of freedom: about 1 if `counts` were drawn from
    /// `expected`.
    fn misfit(counts: &[f64], expected: &[f64]) -> f64 {
        let terms =
            counts.iter().zip(expected).map(|(count, expected)| (count - expected).powi(2) / expected);
        terms.sum::<f64>() / (counts.len() - 1) as f64
    }

    fn zipf_counts(exponent: f64, keys: u32) -> Vec<f64> {
        let weights: Vec<f64> = (1..=keys).map(|rank| f64::from(rank).powf(-exponent)).collect();
        let sum: f64 = weights.iter().sum();
        let scatter = Scatter::new(keys);
        let mut expected = vec![0.0; keys as usize];
        for (rank, weight) in weights.iter().enumerate() {
            expected[scatter.key(rank as u32) as usize] = DRAWS as f64 * weight / sum;
        }
        expected
    }

    #[test]
    fn zipfian_draws_match_the_theory() {
        for exponent in [0.0, 0.5, 0.99, 1.0, 1.5] {
            let counts = counts(Distribution::Zipfian { exponent }, 1000);
            let misfit_right = misfit(&counts, &zipf_counts(exponent, 1000));
            assert!((0.8..1.2).contains(&misfit_right), "exponent {exponent}: {misfit_right}");
            // The statistic detects a slightly wrong exponent.
            let misfit_wrong = misfit(&counts, &zipf_counts(exponent + 0.05, 1000));
            assert!(misfit_wrong > 1.5, "exponent {exponent}: {misfit_wrong}");
        }
    }

    #[test]
    fn uniform_draws_are_uniform() {
        let misfit = misfit(&counts(Distribution::Uniform, 500), &vec![DRAWS as f64 / 500.0; 500]);
        assert!((0.8..1.2).contains(&misfit), "{misfit}");
    }

    #[test]
    fn hot_keys_get_their_share() {
        let counts = counts(Distribution::HOT_90_20, 1000);
        let hot: f64 = counts[..200].iter().sum::<f64>() / DRAWS as f64;
        assert!((hot - 0.9).abs() < 0.002, "{hot}");
        assert!(misfit(&counts[..200], &[DRAWS as f64 * 0.9 / 200.0; 200]) < 1.3);
        assert!(misfit(&counts[200..], &[DRAWS as f64 * 0.1 / 800.0; 800]) < 1.3);
    }

    #[test]
    fn shares_add_up_to_one() {
        assert_eq!(Distribution::Uniform.shares(4), [0.25; 4]);
        let zipf = Distribution::Zipfian { exponent: 1.0 }.shares(3);
        for (share, expected) in zipf.into_iter().zip([6.0 / 11.0, 3.0 / 11.0, 2.0 / 11.0]) {
            assert!((share - expected).abs() < 1e-12);
        }
        let hot = Distribution::HOT_90_20.shares(10);
        assert!((hot[0] - 0.45).abs() < 1e-12 && (hot[9] - 0.0125).abs() < 1e-12, "{hot:?}");
        assert_eq!(Distribution::HOT_90_20.shares(1), [1.0]);
        assert!(Distribution::Uniform.shares(0).is_empty());
    }

    #[test]
    fn low_skew_gives_two_thirds_to_one_third() {
        for count in [3, 99, 3_000] {
            let mut counts = counts(Distribution::LowSkew, count);
            counts.sort_unstable_by(|a, b| b.total_cmp(a));
            let third: f64 = counts[..count as usize / 3].iter().sum();
            assert!((third / DRAWS as f64 - 2.0 / 3.0).abs() < 0.01, "{count}: {third}");
        }
        // For many keys, the share of one third is (1/3)^(1-s).
        let expected = 1.0 - (2.0_f64 / 3.0).ln() / (1.0_f64 / 3.0).ln();
        assert!((low_skew_exponent(60_000_000) - expected).abs() < 0.01);
    }

    #[test]
    fn high_skew_favours_the_hot_keys() {
        let high = counts(Distribution::HighSkew { operations_percent: 60.0, hot_keys: 40 }, 3_000);
        let low = counts(Distribution::LowSkew, 3_000);
        let first = |counts: &[f64]| counts[..40].iter().sum::<f64>() / DRAWS as f64;
        assert!((first(&high) - (0.6 + 0.4 * first(&low))).abs() < 0.005);
        let shares = Distribution::HighSkew { operations_percent: 60.0, hot_keys: 3 }.shares(99);
        assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9 && shares[2] > 0.2, "{shares:?}");
    }

    #[test]
    fn scatter_is_a_permutation() {
        for count in [1, 2, 3, 10, 97, 1000, 4096] {
            let scatter = Scatter::new(count);
            let mut keys: Vec<u32> = (0..count).map(|rank| scatter.key(rank)).collect();
            keys.sort_unstable();
            assert!(keys.into_iter().eq(0..count), "{count}");
        }
    }

    #[test]
    fn single_key_is_always_drawn() {
        for distribution in [
            "uniform",
            "zipfian",
            "zipfian:0",
            "hotspot",
            "hotspot:50:100",
            "hotspot:0:0",
            "low-skew",
            "high-skew",
        ] {
            let distribution = distribution.parse().unwrap();
            let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
            assert_eq!(Keys::new(distribution, 1).draw(&mut random), 0);
        }
    }

    #[test]
    fn names_round_trip_and_invalid_names_are_rejected() {
        for text in ["uniform", "zipfian:1", "zipfian:0.99", "hotspot:90:20", "low-skew", "high-skew:80:30"] {
            assert_eq!(text.parse::<Distribution>().unwrap().to_string(), text);
        }
        assert_eq!("hotspot".parse::<Distribution>().unwrap(), Distribution::HOT_90_20);
        for text in [
            "",
            "zipf",
            "zipfian:x",
            "zipfian:-1",
            "hotspot:90",
            "hotspot:101:5",
            "hotspot:1:2:3",
            "high-skew:60:0",
        ] {
            assert!(text.parse::<Distribution>().is_err(), "{text}");
        }
    }
}
