//! TATP, the telecommunication application transaction processing benchmark: a home location
//! register with seven kinds of short transactions, 80 % of which are reads.
//!
//! Some transactions find no rows by design. They have no effect and are counted as rolled back.
//! `--distribution` selects the subscribers. One difference from the specification: a location is a
//! 31-bit number, because parameters are `int4`.

mod population;
mod schema;
mod terminal;

use std::rc::Rc;

use clap::Args;
use serde::Serialize;

use self::terminal::TatpTerminal;
use crate::keys::Distribution;
use crate::workload::{Kind, LoadContext, TerminalId, Workload};

/// TATP and its options.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
pub struct Tatp {
    /// Subscribers per instance
    #[arg(long, default_value_t = 100_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(i32::MAX)))]
    pub subscribers: u32,
    /// Distribution of the calls over the subscribers: uniform, zipfian[:S],
    /// hotspot[:CALLS%:SUBSCRIBERS%], low-skew or high-skew[:CALLS%:NUMBER]
    #[arg(long, default_value = "uniform", value_name = "NAME")]
    pub distribution: Distribution,
}

impl Default for Tatp {
    fn default() -> Tatp {
        Tatp { subscribers: 100_000, distribution: Distribution::Uniform }
    }
}

impl Workload for Tatp {
    const NAME: &'static str = "tatp";

    type Terminal = TatpTerminal;

    fn kinds(&self) -> Vec<Kind> {
        terminal::KINDS.to_vec()
    }

    /// An approximate number, because the rows of three tables are random.
    fn rows(&self) -> u64 {
        u64::from(self.subscribers) * population::ROWS_PER_SUBSCRIBER_HALVES / 2
    }

    fn scaled(&self, factor: f64) -> Tatp {
        let subscribers = (f64::from(self.subscribers) * factor).round().clamp(1.0, f64::from(i32::MAX));
        Tatp { subscribers: subscribers as u32, ..self.clone() }
    }

    async fn load(&self, loading: &mut LoadContext<'_>) -> anyhow::Result<()> {
        schema::create(loading.client).await?;
        population::load(loading, self.subscribers).await
    }

    fn terminal(self: &Rc<Self>, place: TerminalId) -> TatpTerminal {
        TatpTerminal::new(self, place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        workload: Tatp,
    }

    #[test]
    fn argument_defaults_equal_option_defaults() {
        assert_eq!(Line::try_parse_from(["bench"]).unwrap().workload, Tatp::default());
    }

    #[test]
    fn mix_equals_the_specification() {
        let weights: Vec<f64> = Tatp::default().kinds().iter().map(|kind| kind.weight).collect();
        assert_eq!(weights, [35.0, 10.0, 35.0, 2.0, 14.0, 2.0, 2.0]);
    }
}
