//! The interface between a workload and the driver, so that every workload supports all arrival
//! processes, measurements and reports.
//!
//! ```text
//!  Workload   options (clap), tables, data, kinds of transactions    per run, copied per tenant
//!     |
//!     v
//!  Terminal   a stream of transactions: generators and plan          one per connection
//!     |          draw(kind)   draws all random inputs
//!     |          attempt()    sends the transaction; again, unchanged, for a retry
//!     v
//!  Statements the prepared statements of a connection                new after a lost connection
//! ```
//!
//! A workload defines what is sent and whether the answer is correct. The driver ([`crate::run`])
//! defines when, how often and over which connection it is sent, what an error means, and what is
//! counted.
//!
//! All terminals of a driver thread share one event loop, which may run thousands of them. Futures
//! need not be `Send`, and nothing is boxed or allocated per statement.

use std::rc::Rc;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use serde::Serialize;

use crate::client::{Client, Error};

/// The random generator of all workloads. Equal seeds yield equal values on every machine.
pub type Random = Xoshiro256PlusPlus;

/// A workload and its options. The fields are both the command-line arguments and the options in
/// the report.
#[expect(async_fn_in_trait, reason = "runs on one driver thread, so no Send is needed")]
pub trait Workload: clap::Args + Clone + Serialize + Send + Sync + 'static {
    /// The name in reports, and the prefix of the databases that are created for tenants.
    const NAME: &'static str;

    /// The terminal of a connection.
    type Terminal: Terminal;

    /// Rejects invalid combinations of options.
    fn validate(&self) -> anyhow::Result<()> {
        Ok(())
    }

    /// The kinds of transactions and their weights, at least one. A kind is identified by its index
    /// in this list.
    fn kinds(&self) -> Vec<Kind>;

    /// Number of rows after [`Workload::load`], for the progress display.
    fn rows(&self) -> u64;

    /// The same workload with about `factor` times the data, for tenants of different sizes.
    fn scaled(&self, factor: f64) -> Self;

    /// Creates the tables and procedures of a database and loads missing rows with COPY. Fails if
    /// existing tables have another size.
    async fn load(&self, loading: &mut LoadContext<'_>) -> anyhow::Result<()>;

    /// Creates a terminal, which is not connected.
    fn terminal(self: &Rc<Self>, place: TerminalId) -> Self::Terminal;

    /// Checks the data after the run, when no transactions are in progress.
    async fn check(&self, _client: &mut Client) -> anyhow::Result<()> {
        Ok(())
    }
}

/// A stream of transactions on one connection at a time.
#[expect(async_fn_in_trait, reason = "runs on one driver thread, so no Send is needed")]
pub trait Terminal: 'static {
    /// The prepared statements of a connection.
    type Statements: 'static;

    /// Prepares the statements on a new connection.
    async fn prepare(&self, client: &mut Client, dialect: Dialect) -> Result<Self::Statements, Error>;

    /// The kind of the next transaction: `drawn`, which comes from the mix, unless the workload
    /// defines the order of its transactions.
    fn next_kind(&mut self, drawn: usize) -> usize {
        drawn
    }

    /// Draws the inputs of the next transaction, which is of this kind.
    fn draw(&mut self, kind: usize);

    /// Runs one attempt of the transaction drawn last. If it fails, the driver rolls back.
    async fn attempt(
        &mut self,
        client: &mut Client,
        statements: &Self::Statements,
    ) -> Result<TransactionOutcome, AttemptError>;

    /// Closed loop: the pause between drawing a transaction and sending it (TPC-C's keying time).
    fn keying_time(&mut self) -> Duration {
        Duration::ZERO
    }

    /// Closed loop: the pause after the answer (TPC-C's think time).
    fn think_time(&mut self) -> Duration {
        Duration::ZERO
    }
}

/// A kind of transaction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Kind {
    /// The name in reports, as in the specification of the workload, in lower case with hyphens.
    pub name: &'static str,
    /// Its share of the mix, relative to the weights of the other kinds.
    pub weight: f64,
}

/// The outcome of a transaction that ended as intended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransactionOutcome {
    /// Committed.
    Committed,
    /// Without effect, as the specification of the workload expects for some transactions (TPC-C's
    /// orders with unknown items). The terminal has rolled it back, or the server rejected it and
    /// no transaction is open.
    RolledBack,
}

/// Why an attempt failed.
#[derive(Debug)]
pub enum AttemptError {
    /// The server returned an error or is gone. Conflicts are retried.
    Client(Error),
    /// The data differs from what the workload has loaded. Ends the run with this message.
    Data(String),
}

impl From<Error> for AttemptError {
    fn from(error: Error) -> AttemptError {
        AttemptError::Client(error)
    }
}

/// Identifies a terminal of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalId {
    /// The number of the tenant.
    pub tenant: usize,
    /// The number of the terminal within its tenant.
    pub number: usize,
    /// Number of terminals of the tenant.
    pub of: usize,
    /// The seed of the run.
    pub seed: u64,
}

impl TerminalId {
    /// The random generator of this terminal.
    pub fn random(&self) -> Random {
        generator(self.seed, &[self.tenant as u64, self.number as u64])
    }
}

/// Returns a separate generator for each path below a seed, such as (seed, tenant, terminal) or
/// (seed, table, row).
pub fn generator(seed: u64, path: &[u64]) -> Random {
    // The finaliser of MurmurHash3: similar paths yield unrelated generators.
    let mix = |mut bits: u64| {
        bits = (bits ^ (bits >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        bits = (bits ^ (bits >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        bits ^ (bits >> 33)
    };
    let start = mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
    let state = path.iter().fold(start, |state, step| {
        mix(state.rotate_left(17) ^ step.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1))
    });
    Random::seed_from_u64(state)
}

/// The context for loading a database.
pub struct LoadContext<'a> {
    /// A connection to the database.
    pub client: &'a mut Client,
    /// The dialect of the server.
    pub dialect: Dialect,
    /// The seed of the data. Equal seeds load equal rows, also when an interrupted load continues.
    pub seed: u64,
    /// Called with the number of rows of each step that are loaded or already exist.
    pub loaded: &'a dyn Fn(u64),
}

/// The dialect of SQL and procedures of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// SQLite's SQL, with procedures in Lua, called with `CALL`.
    Fulmar,
    /// PostgreSQL's SQL, with functions in PL/pgSQL, called with `SELECT`.
    Postgres,
}

impl Dialect {
    /// Determines the dialect from the version string of the server.
    pub async fn of(client: &mut Client) -> Result<Dialect, Error> {
        let version = client.query("SELECT version()").await?;
        let fulmar = version.iter().flatten().flatten().any(|text| text.contains("Fulmar"));
        Ok(if fulmar { Dialect::Fulmar } else { Dialect::Postgres })
    }

    /// The verb that calls a procedure (Fulmar) or a function (PostgreSQL), as in `verb name($1,
    /// $2)`.
    pub fn call(self) -> &'static str {
        match self {
            Dialect::Fulmar => "CALL",
            Dialect::Postgres => "SELECT",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::Rng;
    use std::collections::HashSet;

    #[test]
    fn generators_of_all_paths_differ() {
        let mut seen = HashSet::new();
        for seed in 0..20 {
            for tenant in 0..20 {
                for number in 0..20 {
                    assert!(seen.insert(TerminalId { tenant, number, of: 20, seed }.random().next_u64()));
                    assert_eq!(
                        generator(seed, &[tenant as u64, number as u64]),
                        TerminalId { tenant, number, of: 1, seed }.random()
                    );
                }
            }
        }
    }
}
