//! Voter (E-Store 6.1): a telephone vote, many short transactions that all insert.
//!
//! A vote takes four steps: is there such a contestant, has the telephone votes left, which state does its area code
//! belong to, count the vote. A vote beyond the limit has no effect, and is counted as rolled back.
//!
//! E-Store's skews are of the telephones: `--distribution uniform`, `low-skew`, or `high-skew:80:30`, in which thirty
//! telephones go on trying though their votes are used up.

mod procedure;
mod schema;
mod vote;

use std::rc::Rc;

use clap::Args;
use serde::Serialize;

use self::vote::VoterTerminal;
use crate::client::Client;
use crate::keys::Distribution;
use crate::workload::{Dialect, Kind, Loading, Place, Workload};

/// The workload and its options.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
pub struct Voter {
    /// Telephones that may call
    #[arg(long, default_value_t = 1_000_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=schema::MOST_PHONES))]
    pub phones: u32,
    /// Contestants
    #[arg(long, default_value_t = 6, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub contestants: u32,
    /// Votes that a telephone has
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub votes: u32,
    /// Which telephone calls: uniform, zipfian[:S], hotspot[:CALLS%:PHONES%], low-skew or high-skew[:CALLS%:NUMBER]
    #[arg(long, default_value = "uniform", value_name = "NAME")]
    pub distribution: Distribution,
    /// Run each vote as one call of a stored procedure
    #[arg(long)]
    pub procedure: bool,
}

impl Default for Voter {
    fn default() -> Voter {
        Voter {
            phones: 1_000_000,
            contestants: 6,
            votes: 10,
            distribution: Distribution::Uniform,
            procedure: false,
        }
    }
}

impl Workload for Voter {
    const NAME: &'static str = "voter";

    type Terminal = VoterTerminal;

    fn kinds(&self) -> Vec<Kind> {
        vec![Kind { name: "vote", weight: 1.0 }]
    }

    fn rows(&self) -> u64 {
        u64::from(self.contestants) + schema::AREA_CODES.len() as u64
    }

    fn scaled(&self, factor: f64) -> Voter {
        let phones = (f64::from(self.phones) * factor).round().clamp(1.0, schema::MOST_PHONES as f64) as u32;
        Voter { phones, ..self.clone() }
    }

    async fn load(&self, loading: &mut Loading<'_>) -> anyhow::Result<()> {
        schema::load(loading, self.contestants).await?;
        if self.procedure {
            procedure::create(loading.client, loading.dialect, self.votes).await?;
        }
        Ok(())
    }

    fn terminal(self: &Rc<Self>, place: Place) -> VoterTerminal {
        VoterTerminal::new(self, place)
    }

    /// No telephone has more votes than it may. Only where transactions are serializable: at READ COMMITTED, two votes at
    /// once both see room for one.
    async fn check(&self, client: &mut Client) -> anyhow::Result<()> {
        if Dialect::of(client).await? == Dialect::Postgres {
            return Ok(());
        }
        let sql = format!(
            "SELECT phone_number FROM votes GROUP BY phone_number HAVING count(*) > {} LIMIT 1",
            self.votes
        );
        match client.query(&sql).await?.into_iter().flatten().flatten().next() {
            None => Ok(()),
            Some(phone) => anyhow::bail!("telephone {phone} has more than its {} votes", self.votes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        workload: Voter,
    }

    #[test]
    fn the_defaults_are_those_of_the_command_line() {
        assert_eq!(Line::try_parse_from(["bench"]).unwrap().workload, Voter::default());
        assert!(Line::try_parse_from(["bench", "--votes", "0"]).is_err());
    }
}
