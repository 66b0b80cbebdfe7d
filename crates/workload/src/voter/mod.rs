//! Voter (E-Store 6.1): a telephone vote with many short transactions, all of which insert.
//!
//! A vote has four steps: check that the contestant exists, check that the telephone has votes
//! left, look up the state of its area code, and insert the vote. A vote beyond the limit has no
//! effect and is counted as rolled back.
//!
//! E-Store's skews apply to the telephones: `--distribution uniform`, `low-skew` or
//! `high-skew:80:30`. With the last one, 30 telephones keep trying after their votes are used up.

mod procedure;
mod schema;
mod vote;

use std::rc::Rc;

use clap::Args;
use serde::Serialize;

use self::vote::VoterTerminal;
use crate::client::Client;
use crate::keys::Distribution;
use crate::workload::{Dialect, Kind, LoadContext, TerminalId, Workload};

/// Voter and its options.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
pub struct Voter {
    /// Telephones
    #[arg(long, default_value_t = 1_000_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=schema::MOST_PHONES))]
    pub phones: u32,
    /// Contestants
    #[arg(long, default_value_t = 6, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub contestants: u32,
    /// Votes per telephone
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub votes: u32,
    /// Distribution of the calls over the telephones: uniform, zipfian[:S],
    /// hotspot[:CALLS%:PHONES%], low-skew or high-skew[:CALLS%:NUMBER]
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

    async fn load(&self, loading: &mut LoadContext<'_>) -> anyhow::Result<()> {
        schema::load(loading, self.contestants).await?;
        if self.procedure {
            procedure::create(loading.client, loading.dialect, self.votes).await?;
        }
        Ok(())
    }

    fn terminal(self: &Rc<Self>, place: TerminalId) -> VoterTerminal {
        VoterTerminal::new(self, place)
    }

    /// Checks that no telephone has more votes than allowed. This holds only with serializable
    /// transactions: at READ COMMITTED, two concurrent votes can both see room for one.
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
            Some(phone) => anyhow::bail!("telephone {phone} has more than {} votes", self.votes),
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
    fn argument_defaults_equal_option_defaults() {
        assert_eq!(Line::try_parse_from(["bench"]).unwrap().workload, Voter::default());
        assert!(Line::try_parse_from(["bench", "--votes", "0"]).is_err());
    }
}
