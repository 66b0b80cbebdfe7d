//! At which warehouse a transaction takes place: E-Store's three access patterns (6.1).

use clap::ValueEnum;
use rand::RngExt;
use serde::Serialize;

use crate::keys::{Distribution, Keys};
use crate::workload::Random;

/// Warehouses that a high skew favours ("located initially on partition 0"), and their share of the transactions.
const HOT_WAREHOUSES: u32 = 3;
const HOT_SHARE: f64 = 0.6;

/// How transactions are spread over the warehouses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Skew {
    /// Evenly: every terminal has a warehouse, as in the specification.
    None,
    /// Zipf-distributed, so that a third of the warehouses gets two thirds of the transactions.
    Low,
    /// 60 % at three warehouses, the others as with the low skew.
    High,
}

/// Chooses the warehouse of each transaction of a terminal.
pub(super) enum Home {
    Fixed(u32),
    Drawn { keys: Keys, hot: Option<u32> },
}

impl Home {
    /// Of the terminal with this number, among `warehouses`.
    pub(super) fn new(skew: Skew, warehouses: u32, terminal: usize) -> Home {
        let hot = HOT_WAREHOUSES.min(warehouses);
        let keys = || Keys::new(Distribution::Zipfian { exponent: exponent(warehouses) }, warehouses);
        match skew {
            Skew::None => Home::Fixed((terminal % warehouses as usize) as u32 + 1),
            Skew::Low => Home::Drawn { keys: keys(), hot: None },
            Skew::High => Home::Drawn { keys: keys(), hot: Some(hot) },
        }
    }

    pub(super) fn draw(&self, random: &mut Random) -> u32 {
        match self {
            Home::Fixed(warehouse) => *warehouse,
            Home::Drawn { hot: Some(hot), .. } if random.random::<f64>() < HOT_SHARE => {
                random.random_range(1..=*hot)
            }
            Home::Drawn { keys, .. } => keys.draw(random) + 1,
        }
    }
}

/// The Zipf coefficient with which the most popular third of `count` gets two thirds, found by halving.
fn exponent(count: u32) -> f64 {
    let third = count.div_ceil(3);
    let sum = |to: u32, exponent: f64| (1..=to).map(|rank| f64::from(rank).powf(-exponent)).sum::<f64>();
    let (mut low, mut high) = (0.0, 4.0);
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        match sum(third, middle) / sum(count, middle) < 2.0 / 3.0 {
            true => low = middle,
            false => high = middle,
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::generator;

    const DRAWS: u32 = 100_000;

    /// The shares of the warehouses, the greatest first, and that of the first three.
    fn shares(skew: Skew, warehouses: u32) -> (Vec<f64>, f64) {
        let (home, mut random) = (Home::new(skew, warehouses, 0), generator(9, &[]));
        let mut counts = vec![0.0; warehouses as usize];
        (0..DRAWS).for_each(|_| counts[home.draw(&mut random) as usize - 1] += 1.0 / f64::from(DRAWS));
        let first = counts.iter().take(3).sum();
        counts.sort_unstable_by(|a, b| f64::total_cmp(b, a));
        (counts, first)
    }

    #[test]
    fn a_low_skew_gives_two_thirds_to_a_third() {
        for warehouses in [3, 30, 99, 300] {
            let (shares, _) = shares(Skew::Low, warehouses);
            let third: f64 = shares[..warehouses as usize / 3].iter().sum();
            assert!((third - 2.0 / 3.0).abs() < 0.02, "{warehouses}: {third}");
        }
    }

    #[test]
    fn a_high_skew_gives_most_to_the_first_three() {
        let (shares, first) = shares(Skew::High, 100);
        let (_, first_of_low) = self::shares(Skew::Low, 100);
        assert!((first - (0.6 + 0.4 * first_of_low)).abs() < 0.02, "{first}, {first_of_low}");
        assert!(shares.iter().all(|share| *share > 0.0), "every warehouse gets some");
    }

    #[test]
    fn small_numbers_of_warehouses_are_fine() {
        for warehouses in 1..5 {
            for skew in [Skew::None, Skew::Low, Skew::High] {
                assert_eq!(shares(skew, warehouses).0.len(), warehouses as usize);
            }
        }
    }

    #[test]
    fn without_skew_terminals_are_dealt_out_over_the_warehouses() {
        let mut random = generator(1, &[]);
        let homes: Vec<u32> =
            (0..7).map(|terminal| Home::new(Skew::None, 3, terminal).draw(&mut random)).collect();
        assert_eq!(homes, [1, 2, 3, 1, 2, 3, 1]);
    }
}
