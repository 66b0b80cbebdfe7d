//! YCSB in the transactional form of ElasTraS (2013 paper, 7.2.1 and table III).
//!
//! - **ElasTraS**: a tenant has three tables with ten columns of 100 bytes. A transaction is a
//!   number of single-row operations by primary key, by default nine reads and one update. Each is
//!   a separate statement between BEGIN and COMMIT: the logic runs at the client, as in the paper.
//! - **E-Store** (2014 paper, 6.1): one table and one operation, 85 % reads, with the skews of its
//!   section 2.2: `--tables 1 --operations 1 --reads 85 --distribution low-skew`. Transactions of
//!   one operation have a kind per action.
//! - **ShuttleDB** (2014 paper, 6.4): reads, writes, sorts and joins in one transaction: `--reads
//!   60 --sorts 10 --joins 10`. The paper does not state the shares.

mod procedure;
mod schema;
mod transaction;

use std::rc::Rc;

use clap::Args;
use serde::Serialize;

use self::transaction::{Action, YcsbTerminal};
use crate::keys::Distribution;
use crate::workload::{Kind, LoadContext, TerminalId, Workload};

/// YCSB and its options. The defaults are those of ElasTraS (table III), with data that loads
/// quickly.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
pub struct Ycsb {
    /// Keys per instance, each with a row of 1 KB in each table
    #[arg(long, default_value_t = 10_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(i32::MAX)))]
    pub records: u32,
    /// Tables per instance; ElasTraS has three, E-Store one
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=3))]
    pub tables: u8,
    /// Distribution of the operations over the keys: uniform, zipfian[:S],
    /// hotspot[:OPERATIONS%:KEYS%], low-skew or high-skew[:OPERATIONS%:NUMBER]
    #[arg(long, default_value = "hotspot:90:20", value_name = "NAME")]
    pub distribution: Distribution,
    /// Operations per transaction; 1 is a single statement without BEGIN and COMMIT
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub operations: u32,
    /// Percentage of operations that read a row; the rest of 100 % updates one field
    #[arg(long, default_value_t = 90.0, value_name = "PERCENT")]
    pub reads: f64,
    /// Percentage of operations that sort rows by a column without an index (ShuttleDB)
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT")]
    pub sorts: f64,
    /// Percentage of operations that join rows of two tables (ShuttleDB)
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT")]
    pub joins: f64,
    /// Number of rows, with consecutive keys, that a sort or a join covers
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub span: u32,
    /// Run each transaction as one call of a stored procedure
    #[arg(long)]
    pub procedure: bool,
}

impl Default for Ycsb {
    fn default() -> Ycsb {
        Ycsb {
            records: 10_000,
            tables: 3,
            distribution: Distribution::HOT_90_20,
            operations: 10,
            reads: 90.0,
            sorts: 0.0,
            joins: 0.0,
            span: 100,
            procedure: false,
        }
    }
}

impl Ycsb {
    /// Sets the number of keys so that the data has about `data_bytes`.
    pub(crate) fn of_bytes(self, data_bytes: u64) -> Ycsb {
        let per_key = u64::from(self.tables) * schema::ROW_BYTES;
        let records = (data_bytes / per_key).clamp(1, i32::MAX.unsigned_abs().into());
        Ycsb { records: u32::try_from(records).unwrap_or(u32::MAX), ..self }
    }

    /// The size of the data of an instance.
    pub(crate) fn data_bytes(&self) -> u64 {
        u64::from(self.records) * u64::from(self.tables) * schema::ROW_BYTES
    }

    /// The percentage of operations per action. Sorts and joins are included only if they are used.
    fn shares(&self) -> Vec<(Action, f64)> {
        let updates = 100.0 - self.reads - self.sorts - self.joins;
        let scans = [(Action::Sort, self.sorts), (Action::Join, self.joins)];
        let scans = scans.into_iter().filter(|(_, percent)| *percent > 0.0);
        [(Action::Read, self.reads), (Action::Update, updates)].into_iter().chain(scans).collect()
    }
}

impl Workload for Ycsb {
    const NAME: &'static str = "ycsb";

    type Terminal = YcsbTerminal;

    fn validate(&self) -> anyhow::Result<()> {
        let percent = [self.reads, self.sorts, self.joins];
        anyhow::ensure!(
            percent.iter().all(|percent| *percent >= 0.0) && percent.iter().sum::<f64>() <= 100.0,
            "--reads, --sorts and --joins must not be negative, and their sum must not exceed 100"
        );
        anyhow::ensure!(self.joins == 0.0 || self.tables > 1, "--joins requires at least two --tables");
        anyhow::ensure!(
            !self.procedure
                || self.operations == procedure::OPERATIONS
                    && percent == [90.0, 0.0, 0.0]
                    && self.tables == 3,
            "--procedure supports only {} operations on three tables, nine reads and one update; \
             do not set --operations, --reads, --sorts, --joins and --tables",
            procedure::OPERATIONS
        );
        Ok(())
    }

    fn kinds(&self) -> Vec<Kind> {
        match self.operations {
            1 => {
                let kind = |(action, weight): (Action, f64)| Kind { name: action.name(), weight };
                self.shares().into_iter().map(kind).collect()
            }
            _ => vec![Kind { name: "transaction", weight: 1.0 }],
        }
    }

    fn rows(&self) -> u64 {
        u64::from(self.records) * u64::from(self.tables)
    }

    fn scaled(&self, factor: f64) -> Ycsb {
        let records = (f64::from(self.records) * factor).round().clamp(1.0, f64::from(i32::MAX)) as u32;
        Ycsb { records, ..self.clone() }
    }

    async fn load(&self, loading: &mut LoadContext<'_>) -> anyhow::Result<()> {
        schema::load(loading, self.records, self.tables).await?;
        if self.procedure {
            procedure::create(loading.client, loading.dialect).await?;
        }
        Ok(())
    }

    fn terminal(self: &Rc<Self>, place: TerminalId) -> YcsbTerminal {
        YcsbTerminal::new(self.clone(), place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        workload: Ycsb,
    }

    #[test]
    fn argument_defaults_equal_option_defaults() {
        assert_eq!(Line::try_parse_from(["bench"]).unwrap().workload, Ycsb::default());
    }

    #[test]
    fn invalid_options_are_rejected() {
        let invalid = [
            Ycsb { reads: 90.0, sorts: 6.0, joins: 5.0, ..Ycsb::default() },
            Ycsb { reads: 0.0, joins: 1.0, tables: 1, ..Ycsb::default() },
            Ycsb { reads: f64::NAN, ..Ycsb::default() },
            Ycsb { sorts: 10.0, procedure: true, ..Ycsb::default() },
        ];
        assert!(invalid.iter().all(|workload| workload.validate().is_err()));
        for bad in [["--distribution", "zip"], ["--operations", "0"], ["--records", "0"]] {
            assert!(Line::try_parse_from(["bench"].iter().chain(&bad)).is_err(), "{bad:?}");
        }
        Ycsb { reads: 101.0, ..Ycsb::default() }.validate().unwrap_err();
        Ycsb { operations: 5, procedure: true, ..Ycsb::default() }.validate().unwrap_err();
    }
}
