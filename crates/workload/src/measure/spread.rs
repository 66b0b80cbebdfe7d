//! The median and range of repeated measurements.

use serde::Serialize;

/// The median and range of the rounds of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The middle value, or the mean of the two middle values.
    pub median: f64,
    /// The minimum.
    pub min: f64,
    /// The maximum.
    pub max: f64,
    /// All values, in the order of measurement.
    pub rounds: Vec<f64>,
}

impl Spread {
    /// Returns `None` if there are no rounds, or if one of them is not finite.
    pub fn of(rounds: Vec<f64>) -> Option<Spread> {
        if rounds.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let mut sorted = rounds.clone();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Some(Spread { median, min, max, rounds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even_numbers_of_rounds() {
        let spread = Spread::of(vec![3.0, 1.0, 10.0]).unwrap();
        assert_eq!((spread.median, spread.min, spread.max), (3.0, 1.0, 10.0));
        assert_eq!(spread.rounds, [3.0, 1.0, 10.0]);
        assert_eq!(Spread::of(vec![4.0, 1.0]).unwrap().median, 2.5);
        assert_eq!(Spread::of(vec![]), None);
        assert_eq!(Spread::of(vec![1.0, f64::NAN]), None);
    }
}
