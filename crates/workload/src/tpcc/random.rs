//! The random values of the specification (clauses 2.1.6 and 4.3.2): non-uniform numbers, last
//! names and strings.
//!
//! ```text
//! NURand(A, x, y) = (((random(0, A) | random(x, y)) + C) % (y - x + 1)) + x
//! ```
//!
//! The bitwise or favours numbers with many bits set: about a third of the draws fall on a tenth of
//! the items. C is drawn once per run, so that two runs favour different rows.

use rand::{Rng, RngExt};

use crate::workload::{Random, generator};

/// C for last names during a load. It is fixed, so that runs of any seed know it.
const C_LAST_OF_LOAD: u32 = 157;

/// A for last names, customers and items.
const A_LAST: u32 = 255;
const A_CUSTOMER: u32 = 1023;
const A_ITEM: u32 = 8191;

/// Number of last names.
pub(super) const LAST_NAMES: u32 = 1000;

/// The constants C of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Constants {
    last: u32,
    customer: u32,
    item: u32,
}

impl Constants {
    /// The constants of the initial data, which only draws last names with them.
    pub(super) const LOAD: Constants = Constants { last: C_LAST_OF_LOAD, customer: 0, item: 0 };

    /// The constants of a run with this seed. The constant for last names has the distance from
    /// that of the load that clause 2.1.6.1 requires.
    pub(super) fn of_run(seed: u64) -> Constants {
        let mut random = generator(seed, &[]);
        let last = loop {
            let last = random.random_range(0..=A_LAST);
            let distance = last.abs_diff(C_LAST_OF_LOAD);
            if (65..=119).contains(&distance) && distance != 96 && distance != 112 {
                break last;
            }
        };
        let customer = random.random_range(0..=A_CUSTOMER);
        Constants { last, customer, item: random.random_range(0..=A_ITEM) }
    }

    /// Draws the number of one of `names` last names.
    pub(super) fn last_name(&self, names: u32, random: &mut Random) -> u32 {
        nurand(A_LAST, self.last, 0, names - 1, random)
    }

    /// Draws a customer in `1..=customers`.
    pub(super) fn customer(&self, customers: u32, random: &mut Random) -> u32 {
        nurand(A_CUSTOMER, self.customer, 1, customers, random)
    }

    /// Draws an item in `1..=items`.
    pub(super) fn item(&self, items: u32, random: &mut Random) -> u32 {
        nurand(A_ITEM, self.item, 1, items, random)
    }
}

fn nurand(a: u32, c: u32, from: u32, to: u32, random: &mut Random) -> u32 {
    let or = random.random_range(0..=a) | random.random_range(from..=to);
    (or + c) % (to - from + 1) + from
}

/// Appends the last name with this number, which has a syllable for each of its three digits.
pub(super) fn write_last_name(number: u32, out: &mut Vec<u8>) {
    const SYLLABLES: [&str; 10] =
        ["BAR", "OUGHT", "ABLE", "PRI", "PRES", "ESE", "ANTI", "CALLY", "ATION", "EING"];
    for digit in [number / 100, number / 10, number] {
        out.extend(SYLLABLES[digit as usize % 10].as_bytes());
    }
}

/// Appends `min` to `max` letters and digits.
pub(super) fn write_letters(min: usize, max: usize, random: &mut Random, out: &mut Vec<u8>) {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789AZ";
    let end = out.len() + random.random_range(min..=max);
    while out.len() < end {
        let mut bits = random.next_u64();
        for _ in 0..10.min(end - out.len()) {
            out.push(ALPHABET[(bits & 63) as usize]);
            bits >>= 6;
        }
    }
}

/// Appends `count` decimal digits.
pub(super) fn write_digits(count: usize, random: &mut Random, out: &mut Vec<u8>) {
    out.extend((0..count).map(|_| random.random_range(b'0'..=b'9')));
}

/// Appends 26 to 50 letters, with "ORIGINAL" at a random position in 10 % of the cases (clause
/// 4.3.3.1).
pub(super) fn write_data(random: &mut Random, out: &mut Vec<u8>) {
    const ORIGINAL: &[u8] = b"ORIGINAL";
    let start = out.len();
    write_letters(26, 50, random, out);
    if random.random_range(0..10) == 0 {
        let at = random.random_range(start..=out.len() - ORIGINAL.len());
        out[at..at + ORIGINAL.len()].copy_from_slice(ORIGINAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAWS: u32 = 300_000;

    /// The probability of each number in `from..=to`, computed by enumerating all pairs of random
    /// numbers in the formula.
    fn theory(a: u32, c: u32, from: u32, to: u32) -> Vec<f64> {
        let count = to - from + 1;
        let mut shares = vec![0.0; count as usize];
        for left in 0..=a {
            for right in from..=to {
                shares[(((left | right) + c) % count) as usize] += 1.0;
            }
        }
        let pairs = f64::from(a + 1) * f64::from(count);
        shares.iter().map(|share| share / pairs).collect()
    }

    /// Pearson's statistic divided by its degrees of freedom, for the numbers that can be drawn at
    /// all. It is about 1 for a match.
    fn misfit(drawn: impl Fn(&mut Random) -> u32, from: u32, shares: &[f64]) -> f64 {
        let mut random = generator(11, &[]);
        let mut counts = vec![0.0; shares.len()];
        for _ in 0..DRAWS {
            counts[(drawn(&mut random) - from) as usize] += 1.0;
        }
        let (mut sum, mut cells) = (0.0, 0);
        for (count, share) in counts.iter().zip(shares) {
            let expected = share * f64::from(DRAWS);
            if expected == 0.0 {
                assert_eq!(*count, 0.0, "a number with probability zero must not be drawn");
                continue;
            }
            sum += (count - expected).powi(2) / expected;
            cells += 1;
        }
        sum / f64::from(cells - 1)
    }

    #[test]
    fn non_uniform_numbers_match_the_formula() {
        let constants = Constants { last: 90, customer: 700, item: 5000 };
        let names = theory(A_LAST, 90, 0, 999);
        let of_names = misfit(|random| constants.last_name(1000, random), 0, &names);
        assert!((0.8..1.2).contains(&of_names), "{of_names}");
        let customers = theory(A_CUSTOMER, 700, 1, 3000);
        let of_customers = misfit(|random| constants.customer(3000, random), 1, &customers);
        assert!((0.9..1.1).contains(&of_customers), "{of_customers}");
        // The statistic detects another C.
        let shifted = theory(A_CUSTOMER, 701, 1, 3000);
        assert!(misfit(|random| constants.customer(3000, random), 1, &shifted) > 2.0);
        let few = theory(A_ITEM, 5000, 1, 100);
        let of_few = misfit(|random| constants.item(100, random), 1, &few);
        assert!((0.6..1.4).contains(&of_few), "{of_few}");
    }

    #[test]
    fn tenth_of_the_items_gets_most_draws() {
        let constants = Constants::of_run(3);
        let mut random = generator(4, &[]);
        let mut counts = vec![0_u32; 100_000];
        for _ in 0..DRAWS {
            counts[constants.item(100_000, &mut random) as usize - 1] += 1;
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let share = f64::from(counts[..10_000].iter().sum::<u32>()) / f64::from(DRAWS);
        assert!((0.5..0.75).contains(&share), "share of the most popular tenth: {share}");
    }

    #[test]
    fn constant_of_last_names_has_the_required_distance() {
        for seed in 0..2000 {
            let distance = Constants::of_run(seed).last.abs_diff(Constants::LOAD.last);
            assert!((65..=119).contains(&distance) && ![96, 112].contains(&distance), "{distance}");
        }
    }

    #[test]
    fn last_names_match_the_specification() {
        let name = |number| {
            let mut out = Vec::new();
            write_last_name(number, &mut out);
            String::from_utf8(out).unwrap()
        };
        assert_eq!(name(371), "PRICALLYOUGHT");
        assert_eq!(
            (name(40), name(999), name(0)),
            ("BARPRESBAR".into(), "EINGEINGEING".into(), "BARBARBAR".into())
        );
    }

    #[test]
    fn tenth_of_the_data_contains_original() {
        let mut random = generator(5, &[]);
        let originals = (0..20_000).filter(|_| {
            let mut out = Vec::new();
            write_data(&mut random, &mut out);
            assert!((26..=50).contains(&out.len()));
            out.windows(8).any(|window| window == b"ORIGINAL")
        });
        let count = originals.count();
        assert!((1_850..2_150).contains(&count), "{count}");
    }
}
