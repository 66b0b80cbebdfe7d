//! The command line of a YCSB run.

use std::time::Duration;

use clap::Args;

use super::YcsbOptions;
use crate::keys::Distribution;
use crate::{Target, tenants};

/// `fulmar bench run ycsb`: its arguments.
#[derive(Args, Clone, Debug)]
pub struct YcsbArgs {
    /// The server, e.g. postgres://postgres@127.0.0.1:5432/shop
    #[arg(long, value_name = "URL")]
    pub target: Target,
    /// Instances: 1 runs in the URL's database; more run in databases ycsb_0000, ycsb_0001 ..., made there if absent
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub tenants: u32,
    /// Connections of each instance
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub connections: u32,
    /// Keys of each instance: three rows of a kilobyte for each
    #[arg(long, default_value_t = 10_000, value_name = "N")]
    pub records: u32,
    /// uniform, zipfian[:S] or hotspot[:OPERATIONS%:KEYS%]
    #[arg(long, default_value = "hotspot:90:20", value_name = "NAME")]
    pub distribution: Distribution,
    /// Operations of a transaction (1: a single statement without BEGIN and COMMIT)
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub operations: u32,
    /// Per cent of the operations that read; the others update
    #[arg(long, default_value_t = 90.0, value_name = "PERCENT")]
    pub reads: f64,
    /// Run each transaction as one call of a stored procedure
    #[arg(long)]
    pub procedure: bool,
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
    /// Repeats the same choice of keys
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
}

impl YcsbArgs {
    /// The options of the run; makes the databases that it needs.
    pub async fn into_options(self) -> anyhow::Result<YcsbOptions> {
        let databases = match self.tenants {
            1 => Vec::new(),
            count => tenants::names("ycsb_", count),
        };
        tenants::create(&self.target, &databases, |_| ()).await?;
        Ok(YcsbOptions {
            databases,
            connections: self.connections as usize,
            records: self.records,
            distribution: self.distribution,
            operations: self.operations,
            read_percent: self.reads,
            procedure: self.procedure,
            warm_up: Duration::from_secs(self.warm_up),
            measure: Duration::from_secs(self.seconds),
            rate_tps: self.rate,
            patience: Duration::from_secs(self.patience),
            seed: self.seed,
            ..YcsbOptions::new(self.target)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: YcsbArgs,
    }

    #[tokio::test]
    async fn the_defaults_are_those_of_the_options() {
        let line = Line::try_parse_from(["bench", "--target", "postgres://a@b/c"]).unwrap();
        let options = line.arguments.into_options().await.unwrap();
        let defaults = YcsbOptions::new("postgres://a@b/c".parse().unwrap());
        assert_eq!(options.target, defaults.target);
        assert_eq!(options.records, defaults.records);
        assert_eq!(options.connections, defaults.connections);
        assert_eq!(options.distribution, defaults.distribution);
        assert_eq!((options.operations, options.read_percent), (defaults.operations, defaults.read_percent));
        assert_eq!((options.warm_up, options.measure), (defaults.warm_up, defaults.measure));
        assert_eq!((options.patience, options.seed), (defaults.patience, defaults.seed));
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in
            [&["--tenants", "0"], &["--distribution", "zip"], &["--connections", "0"], &["--rate", "x"]]
        {
            let line = ["bench", "--target", "postgres://a@b/c"].iter().chain(bad.iter());
            assert!(Line::try_parse_from(line).is_err(), "{bad:?}");
        }
    }
}
