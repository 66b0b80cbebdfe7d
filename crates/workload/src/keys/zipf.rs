//! Zipfian ranks, and the permutation from ranks to keys.
//!
//! Ranks are drawn by rejection-inversion (Hoermann and Derflinger, 1996): it is exact for all
//! exponents s from 0 on, needs no table and takes about 1.1 draws per rank. YCSB's algorithm
//! divides by 1 - s and therefore does not support the papers' exponent of 1.0.

use rand::{Rng, RngExt};

/// The exponent with which one third of `count` ranks gets two thirds of the draws, found by
/// bisection.
pub(super) fn low_skew_exponent(count: u32) -> f64 {
    /// Number of ranks that are summed exactly. The rest is approximated by an integral, which is
    /// accurate to five digits there. This is fast, because every terminal calls the function and
    /// there may be thousands.
    const EXACT: u32 = 32;
    let sum = |exponent: f64, to: u32| {
        let zipf = Zipf { count: 0.0, exponent, area_from: 0.0, area_to: 0.0, acceptance: 0.0 };
        let first: f64 = (1..=to.min(EXACT)).map(|rank| zipf.hat(f64::from(rank))).sum();
        first + zipf.area(f64::from(to.max(EXACT)) + 0.5) - zipf.area(f64::from(EXACT) + 0.5)
    };
    // With three ranks the exponent is 1.6. With more it is lower.
    let (mut low, mut high) = (0.0, 2.0);
    for _ in 0..30 {
        let middle = (low + high) / 2.0;
        let share = sum(middle, count.div_ceil(3)) / sum(middle, count);
        if share < 2.0 / 3.0 { low = middle } else { high = middle }
    }
    low
}

/// Draws ranks `1..=count` with probability proportional to `rank^-exponent`.
///
/// The area under the hat `x^-exponent` over `[rank - 1/2, rank + 1/2]` is slightly larger than the
/// probability of the rank. A uniform draw of area is inverted to a point and rounded to a rank,
/// and rejected if it is in the excess.
#[derive(Clone, Debug)]
pub(super) struct Zipf {
    count: f64,
    exponent: f64,
    area_from: f64,
    area_to: f64,
    /// Points at most this far below their rank are accepted without a test. This holds for the
    /// first ranks, and so for most draws.
    acceptance: f64,
}

impl Zipf {
    pub(super) fn new(count: u32, exponent: f64) -> Zipf {
        let count = f64::from(count);
        let mut zipf = Zipf { count, exponent, area_from: 0.0, area_to: 0.0, acceptance: 0.0 };
        zipf.area_from = zipf.area(1.5) - 1.0;
        zipf.area_to = zipf.area(zipf.count + 0.5);
        zipf.acceptance = 2.0 - zipf.area_inverse(zipf.area(2.5) - zipf.hat(2.0));
        zipf
    }

    pub(super) fn draw(&self, random: &mut impl Rng) -> u32 {
        loop {
            let area = self.area_to + random.random::<f64>() * (self.area_from - self.area_to);
            let point = self.area_inverse(area);
            let rank = point.round().clamp(1.0, self.count);
            if rank - point <= self.acceptance || area >= self.area(rank + 0.5) - self.hat(rank) {
                return rank as u32;
            }
        }
    }

    fn hat(&self, x: f64) -> f64 {
        (-self.exponent * x.ln()).exp()
    }

    /// The antiderivative of the hat: `(x^(1-s) - 1) / (1-s)`, or `ln x` if s is 1.
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

/// A permutation of `0..count` that separates adjacent numbers: multiplication by a factor coprime
/// to `count`.
#[derive(Clone, Debug)]
pub(super) struct Scatter {
    count: u64,
    factor: u64,
}

impl Scatter {
    pub(super) fn new(count: u32) -> Scatter {
        let count = u64::from(count);
        // A factor near the golden ratio of the range places consecutive ranks far apart.
        let mut factor = ((count as f64 * 0.618_033_988_749_895) as u64).max(1);
        while greatest_common_divisor(factor, count) != 1 {
            factor += 1;
        }
        Scatter { count, factor }
    }

    pub(super) fn key(&self, rank: u32) -> u32 {
        (u64::from(rank) * self.factor % self.count) as u32
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
