//! When to stop copying: the two stop conditions of ShuttleDB (3.1), and a maximum.
//!
//! Each round copies what has changed during the previous one. The handover copies the rest while the
//! partition is frozen. So rounds are repeated until the rest is small, or does not shrink any more
//! because the partition changes as fast as it is copied.

use crate::report::Round;

/// Pages in a round from which on another round is not worth it. A handover copies as many in a few
/// milliseconds.
const FEW_PAGES: u64 = 64;
/// A round that has more than this share of the previous one does not shrink.
const SHRINKING_PERCENT: u64 = 75;
/// Maximum number of rounds.
pub const MAX_ROUNDS: usize = 10;

/// Returns true if the rounds, oldest first, should be followed by the handover.
pub fn are_enough(rounds: &[Round]) -> bool {
    let Some((last, before)) = rounds.split_last() else { return false };
    let is_short = last.pages <= FEW_PAGES;
    // The first round copies everything, so the second one says nothing about the trend.
    let is_stuck = before.len() >= 2
        && before.last().is_some_and(|previous| last.pages * 100 > previous.pages * SHRINKING_PERCENT);
    is_short || is_stuck || rounds.len() >= MAX_ROUNDS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(pages: &[u64]) -> Vec<Round> {
        pages.iter().map(|pages| Round { pages: *pages, ..Round::default() }).collect()
    }

    #[test]
    fn copying_ends_when_a_round_is_short_or_does_not_shrink_or_after_the_maximum() {
        assert!(!are_enough(&rounds(&[])));
        assert!(are_enough(&rounds(&[10])), "the whole partition is small");
        assert!(!are_enough(&rounds(&[10_000])));
        assert!(are_enough(&rounds(&[10_000, 64])));
        assert!(!are_enough(&rounds(&[10_000, 9_999])), "the second round says nothing about the trend");
        assert!(!are_enough(&rounds(&[10_000, 1_000, 500])));
        assert!(are_enough(&rounds(&[10_000, 1_000, 900])));
        let shrinking: Vec<u64> = (0..MAX_ROUNDS as u32).map(|round| 1 << (40 - round)).collect();
        assert!(!are_enough(&rounds(&shrinking[..MAX_ROUNDS - 1])));
        assert!(are_enough(&rounds(&shrinking)));
    }
}
