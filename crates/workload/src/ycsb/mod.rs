//! YCSB in ElasTraS's transactional form (2013 paper, 7.2.1 and table III).
//!
//! A tenant has three tables of ten 100-byte columns. A transaction is a number of single-row operations by primary
//! key, by default nine reads and one update, each a statement of its own between BEGIN and COMMIT: the logic runs at
//! the client, as in the paper.
//!
//! E-Store's form (2014 paper, 6.1) is one table and one operation, 85 % reads, with the skews of its section 2.2:
//! `--tables 1 --operations 1 --reads 85 --distribution low-skew`. A transaction of one operation is of a kind by itself.
//!
//! ShuttleDB's form (2014 paper, 6.4) mixes reads, writes, sorts and joins in a transaction: `--reads 60 --sorts 10 --joins 10`. The
//! paper does not say how much of each.

mod procedure;
mod schema;
mod transaction;

use std::rc::Rc;

use clap::Args;
use serde::Serialize;

use self::transaction::{Action, YcsbTerminal};
use crate::keys::Distribution;
use crate::workload::{Kind, Loading, Place, Workload};

/// The workload and its options: the paper's (table III) at a size that loads in a moment.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
pub struct Ycsb {
    /// Keys of each instance: a row of a kilobyte in each table for each
    #[arg(long, default_value_t = 10_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(i32::MAX)))]
    pub records: u32,
    /// Tables of each instance: ElasTraS has three, E-Store one
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=3))]
    pub tables: u8,
    /// uniform, zipfian[:S], hotspot[:OPERATIONS%:KEYS%], low-skew or high-skew[:OPERATIONS%:NUMBER]
    #[arg(long, default_value = "hotspot:90:20", value_name = "NAME")]
    pub distribution: Distribution,
    /// Operations of a transaction (1: a single statement without BEGIN and COMMIT)
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub operations: u32,
    /// Per cent of the operations that read a row; what is left of a hundred updates one field
    #[arg(long, default_value_t = 90.0, value_name = "PERCENT")]
    pub reads: f64,
    /// Per cent of the operations that sort rows by a column without an index (ShuttleDB)
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT")]
    pub sorts: f64,
    /// Per cent of the operations that join rows of two tables (ShuttleDB)
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT")]
    pub joins: f64,
    /// Rows that a sort or a join covers, neighbours by key
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
    /// With as many keys as come to so much data.
    pub(crate) fn of_bytes(self, data_bytes: u64) -> Ycsb {
        let per_key = u64::from(self.tables) * schema::ROW_BYTES;
        let records = (data_bytes / per_key).clamp(1, i32::MAX.unsigned_abs().into());
        Ycsb { records: u32::try_from(records).unwrap_or(u32::MAX), ..self }
    }

    /// What the rows of an instance hold.
    pub(crate) fn data_bytes(&self) -> u64 {
        u64::from(self.records) * u64::from(self.tables) * schema::ROW_BYTES
    }

    /// Per cent of the operations, by what they do. Sorts and joins are there only where they are asked for.
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
            "reads, sorts and joins are 0 to 100 per cent of the operations, and so are all together"
        );
        anyhow::ensure!(
            self.joins == 0.0 || self.tables > 1,
            "a join needs two tables: leave --tables as it is"
        );
        anyhow::ensure!(
            !self.procedure
                || self.operations == procedure::OPERATIONS
                    && percent == [90.0, 0.0, 0.0]
                    && self.tables == 3,
            "the procedure has {} operations on three tables, nine of which read and one updates: leave --operations, \
             --reads, --sorts, --joins and --tables as they are",
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

    async fn load(&self, loading: &mut Loading<'_>) -> anyhow::Result<()> {
        schema::load(loading, self.records, self.tables).await?;
        if self.procedure {
            procedure::create(loading.client, loading.dialect).await?;
        }
        Ok(())
    }

    fn terminal(self: &Rc<Self>, place: Place) -> YcsbTerminal {
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
    fn the_defaults_are_those_of_the_command_line() {
        assert_eq!(Line::try_parse_from(["bench"]).unwrap().workload, Ycsb::default());
    }

    #[test]
    fn nonsense_is_refused() {
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
