//! Which key an operation touches: uniform, Zipfian, or a hot spot (ElasTraS 7.3.1).
//!
//! ```text
//! uniform            every key alike
//! hotspot:90:20      90 % of the operations on the first 20 % of the keys (the paper's Hot90-20)
//! zipfian:1.0        the k-th most popular key with probability proportional to 1 / k^1.0
//! ```
//! A hot spot is a contiguous range, as in YCSB, so that it fills few pages. Zipfian ranks are scattered over the key
//! space by a permutation, as in YCSB's scrambled generator (which hashes, and so lets ranks collide: this does not).
//!
//! YCSB's own Zipfian algorithm divides by 1 - s and cannot do the paper's coefficient of 1.0. This one is
//! rejection-inversion (Hoermann and Derflinger, 1996): exact for every s >= 0, no table, about 1.1 draws per key.

use std::fmt;
use std::str::FromStr;

use rand::{Rng, RngExt};
use serde::{Serialize, Serializer};

/// How accesses are spread over the keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Distribution {
    /// Every key alike.
    Uniform,
    /// A share of the operations goes to a share of the keys.
    Hotspot {
        /// Per cent of the operations that touch the hot set.
        operations_percent: f64,
        /// Per cent of the keys that are hot.
        keys_percent: f64,
    },
    /// The k-th most popular key is drawn with probability proportional to 1 / k^s.
    Zipfian {
        /// The coefficient s.
        exponent: f64,
    },
}

impl Distribution {
    /// The paper's Hot90-20.
    pub const HOT_90_20: Distribution =
        Distribution::Hotspot { operations_percent: 90.0, keys_percent: 20.0 };
}

/// A distribution that could not be understood.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is no distribution; write uniform, zipfian, zipfian:S (0 to 5), hotspot or hotspot:OPERATIONS%:KEYS%"
)]
pub struct DistributionError(String);

impl FromStr for Distribution {
    type Err = DistributionError;

    fn from_str(text: &str) -> Result<Distribution, DistributionError> {
        let bad = || DistributionError(text.to_owned());
        let number = |text: &str, most: f64| match text.trim_end_matches('%').parse::<f64>() {
            Ok(number) if (0.0..=most).contains(&number) => Ok(number),
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
        }
    }
}

/// Draws keys `0..count`.
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
}

impl Keys {
    /// Keys `0..count`; `count` is at least 1.
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
        };
        Keys { count, chooser }
    }

    /// The next key.
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
        }
    }
}

/// Ranks `1..=count` with probability proportional to `rank^-exponent`.
///
/// The area under the hat `x^-exponent` over `[rank - 1/2, rank + 1/2]` is a little more than the rank's probability:
/// a uniform draw of area is inverted to a point, rounded to its rank, and rejected if it fell into the excess.
#[derive(Clone, Debug)]
struct Zipf {
    count: f64,
    exponent: f64,
    area_from: f64,
    area_to: f64,
    /// Points this close above their rank need no test (true for the first ranks, so for most draws).
    sure: f64,
}

impl Zipf {
    fn new(count: u32, exponent: f64) -> Zipf {
        let mut zipf = Zipf { count: f64::from(count), exponent, area_from: 0.0, area_to: 0.0, sure: 0.0 };
        zipf.area_from = zipf.area(1.5) - 1.0;
        zipf.area_to = zipf.area(zipf.count + 0.5);
        zipf.sure = 2.0 - zipf.area_inverse(zipf.area(2.5) - zipf.hat(2.0));
        zipf
    }

    fn draw(&self, random: &mut impl Rng) -> u32 {
        loop {
            let area = self.area_to + random.random::<f64>() * (self.area_from - self.area_to);
            let point = self.area_inverse(area);
            let rank = point.round().clamp(1.0, self.count);
            if rank - point <= self.sure || area >= self.area(rank + 0.5) - self.hat(rank) {
                return rank as u32;
            }
        }
    }

    fn hat(&self, x: f64) -> f64 {
        (-self.exponent * x.ln()).exp()
    }

    /// An antiderivative of the hat: `(x^(1-s) - 1) / (1-s)`, which is `ln x` where s is 1.
    fn area(&self, x: f64) -> f64 {
        let log = x.ln();
        let t = (1.0 - self.exponent) * log;
        if t.abs() < 1e-8 { log * (1.0 + t / 2.0) } else { t.exp_m1() / t * log }
    }

    fn area_inverse(&self, area: f64) -> f64 {
        let t = ((1.0 - self.exponent) * area).max(-1.0);
        let log = if t.abs() < 1e-8 { area * (1.0 - t / 2.0) } else { t.ln_1p() / t * area };
        log.exp()
    }
}

/// A permutation of `0..count` that tears neighbours apart: multiplication by a number coprime to `count`.
#[derive(Clone, Debug)]
struct Scatter {
    count: u64,
    factor: u64,
}

impl Scatter {
    fn new(count: u32) -> Scatter {
        let count = u64::from(count);
        // Near the golden ratio of the range, consecutive ranks fall far from each other.
        let mut factor = ((count as f64 * 0.618_033_988_749_895) as u64).max(1);
        while greatest_common_divisor(factor, count) != 1 {
            factor += 1;
        }
        Scatter { count, factor }
    }

    fn key(&self, rank: u32) -> u32 {
        (u64::from(rank) * self.factor % self.count) as u32
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
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

    /// Pearson's statistic divided by its degrees of freedom: about 1 if `counts` were drawn from `expected`.
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
    fn zipfian_draws_have_the_shape_of_the_theory() {
        for exponent in [0.0, 0.5, 0.99, 1.0, 1.5] {
            let counts = counts(Distribution::Zipfian { exponent }, 1000);
            let misfit_right = misfit(&counts, &zipf_counts(exponent, 1000));
            assert!((0.8..1.2).contains(&misfit_right), "exponent {exponent}: {misfit_right}");
            // The measure is sharp enough to tell a slightly wrong coefficient.
            let misfit_wrong = misfit(&counts, &zipf_counts(exponent + 0.05, 1000));
            assert!(misfit_wrong > 1.5, "exponent {exponent}: {misfit_wrong}");
        }
    }

    #[test]
    fn uniform_draws_are_even() {
        let misfit = misfit(&counts(Distribution::Uniform, 500), &vec![DRAWS as f64 / 500.0; 500]);
        assert!((0.8..1.2).contains(&misfit), "{misfit}");
    }

    #[test]
    fn a_hot_spot_gets_its_share() {
        let counts = counts(Distribution::HOT_90_20, 1000);
        let hot: f64 = counts[..200].iter().sum::<f64>() / DRAWS as f64;
        assert!((hot - 0.9).abs() < 0.002, "{hot}");
        assert!(misfit(&counts[..200], &[DRAWS as f64 * 0.9 / 200.0; 200]) < 1.3);
        assert!(misfit(&counts[200..], &[DRAWS as f64 * 0.1 / 800.0; 800]) < 1.3);
    }

    #[test]
    fn scattering_is_a_permutation() {
        for count in [1, 2, 3, 10, 97, 1000, 4096] {
            let scatter = Scatter::new(count);
            let mut keys: Vec<u32> = (0..count).map(|rank| scatter.key(rank)).collect();
            keys.sort_unstable();
            assert!(keys.into_iter().eq(0..count), "{count}");
        }
    }

    #[test]
    fn one_key_and_all_hot_are_fine() {
        for distribution in ["uniform", "zipfian", "zipfian:0", "hotspot", "hotspot:50:100", "hotspot:0:0"] {
            let distribution = distribution.parse().unwrap();
            let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
            assert_eq!(Keys::new(distribution, 1).draw(&mut random), 0);
        }
    }

    #[test]
    fn names_round_trip_and_nonsense_is_refused() {
        for text in ["uniform", "zipfian:1", "zipfian:0.99", "hotspot:90:20"] {
            assert_eq!(text.parse::<Distribution>().unwrap().to_string(), text);
        }
        assert_eq!("hotspot".parse::<Distribution>().unwrap(), Distribution::HOT_90_20);
        for text in ["", "zipf", "zipfian:x", "zipfian:-1", "hotspot:90", "hotspot:101:5", "hotspot:1:2:3"] {
            assert!(text.parse::<Distribution>().is_err(), "{text}");
        }
    }
}
