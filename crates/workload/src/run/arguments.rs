//! The command line of a run, whatever the workload.

use std::time::Duration;

use clap::Args;

use super::RunOptions;
use crate::workload::Workload;
use crate::{Target, tenants};

/// `fulmar bench run WORKLOAD`: the arguments that all workloads share.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// The server, e.g. postgres://postgres@127.0.0.1:5432/shop
    #[arg(long, value_name = "URL")]
    pub target: Target,
    /// Instances: 1 runs in the URL's database; more run in databases ycsb_0000, ycsb_0001 ..., made there if absent
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub tenants: u32,
    /// Connections of each instance
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub connections: u32,
    /// Transactions a second over all instances, at random moments (open loop); without it, as many as go (closed loop)
    #[arg(long, value_name = "TPS")]
    pub rate: Option<f64>,
    /// Seconds before the measured window
    #[arg(long, default_value_t = 2, value_name = "SECONDS")]
    pub warm_up: u64,
    /// Seconds of the measured window
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    pub seconds: u64,
    /// Seconds for which a lost connection is tried again (0: its loss ends the run)
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    pub patience: u64,
    /// Repeats the same data and the same choices
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
}

impl RunArgs {
    /// The options of the run; makes the databases that it needs.
    pub async fn into_options<W: Workload>(self) -> anyhow::Result<RunOptions> {
        let databases = match self.tenants {
            1 => Vec::new(),
            count => tenants::names(&format!("{}_", W::NAME), count),
        };
        tenants::create(&self.target, &databases, |_| ()).await?;
        Ok(RunOptions {
            databases,
            connections: self.connections as usize,
            warm_up: Duration::from_secs(self.warm_up),
            measure: Duration::from_secs(self.seconds),
            rate_tps: self.rate,
            patience: Duration::from_secs(self.patience),
            seed: self.seed,
            ..RunOptions::new(self.target)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ycsb::Ycsb;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: RunArgs,
    }

    #[tokio::test]
    async fn the_defaults_are_those_of_the_options() {
        let line = Line::try_parse_from(["bench", "--target", "postgres://a@b/c"]).unwrap();
        let options = line.arguments.into_options::<Ycsb>().await.unwrap();
        let defaults = RunOptions::new("postgres://a@b/c".parse().unwrap());
        assert_eq!(options.target, defaults.target);
        assert_eq!(options.connections, defaults.connections);
        assert_eq!((options.warm_up, options.measure), (defaults.warm_up, defaults.measure));
        assert_eq!((options.patience, options.seed), (defaults.patience, defaults.seed));
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [&["--tenants", "0"], &["--connections", "0"], &["--rate", "x"]] {
            let line = ["bench", "--target", "postgres://a@b/c"].iter().chain(bad.iter());
            assert!(Line::try_parse_from(line).is_err(), "{bad:?}");
        }
    }
}
