//! What a workload is to the driver, so that every workload gets every arrival, measure and report.
//!
//! ```text
//!  Workload   its options (clap), tables, data, kinds of transactions    one for a run, a copy for each tenant
//!     |
//!     v
//!  Terminal   a stream of transactions: generators and plan              one for each connection
//!     |          draw(kind)   decides everything that is random
//!     |          attempt()    sends it; again, unchanged, if the server asks for a retry
//!     v
//!  Statements what is prepared on a connection                           anew after a connection was lost
//! ```
//! A workload says what is sent and whether the answer is right. When, how often, over which connection, what an
//! error means and what is counted is the driver's: see [`crate::run`].
//!
//! All of it runs on the driver's own thread, one event loop for thousands of terminals: futures need not be `Send`, and
//! nothing is boxed or allocated for a statement.

use std::rc::Rc;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use serde::Serialize;

use crate::client::{Client, Error};

/// The generator of everything that is drawn. Equal seeds draw equally on every machine.
pub type Random = Xoshiro256PlusPlus;

/// A workload and its options: the fields are the arguments of the command line, and what the report says of the run.
#[expect(async_fn_in_trait, reason = "runs on the driver's thread alone, which needs no Send")]
pub trait Workload: clap::Args + Clone + Serialize + Send + Sync + 'static {
    /// In reports, and of databases that are made for many tenants.
    const NAME: &'static str;

    /// What runs on a connection.
    type Terminal: Terminal;

    /// Refuses options that do not go together.
    fn validate(&self) -> anyhow::Result<()> {
        Ok(())
    }

    /// The kinds of transactions and their shares, at least one. A terminal is told a kind by its place in this list.
    fn kinds(&self) -> Vec<Kind>;

    /// Rows that [`Workload::load`] leaves: the length of the progress bar.
    fn rows(&self) -> u64;

    /// The same workload over about `factor` times the data: tenants may be of different sizes.
    fn scaled(&self, factor: f64) -> Self;

    /// Makes the tables and procedures of a database and loads what is missing, by COPY. Tables of another size are an
    /// error.
    async fn load(&self, loading: &mut Loading<'_>) -> anyhow::Result<()>;

    /// A terminal, not connected yet.
    fn terminal(self: &Rc<Self>, place: Place) -> Self::Terminal;

    /// After the run, with nothing under way: is the data what the transactions must have left?
    async fn check(&self, _client: &mut Client) -> anyhow::Result<()> {
        Ok(())
    }
}

/// One stream of transactions, on one connection at a time.
#[expect(async_fn_in_trait, reason = "runs on the driver's thread alone, which needs no Send")]
pub trait Terminal: 'static {
    /// What is prepared on a connection.
    type Statements: 'static;

    /// Prepares a new connection.
    async fn prepare(&self, client: &mut Client, dialect: Dialect) -> Result<Self::Statements, Error>;

    /// The kind of the next transaction: the one that was drawn from the mix, unless this workload's transactions follow
    /// each other.
    fn next_kind(&mut self, drawn: usize) -> usize {
        drawn
    }

    /// Draws the next transaction, which is of this kind.
    fn draw(&mut self, kind: usize);

    /// One try of the transaction that was drawn last. The driver rolls back what an error leaves open.
    async fn attempt(&mut self, client: &mut Client, statements: &Self::Statements) -> Result<Done, Failure>;

    /// Closed loop: the pause between drawing a transaction and sending it (TPC-C's keying time).
    fn keying(&mut self) -> Duration {
        Duration::ZERO
    }

    /// Closed loop: the pause after its answer (TPC-C's think time).
    fn thinking(&mut self) -> Duration {
        Duration::ZERO
    }
}

/// A kind of transaction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Kind {
    /// In reports, in the words of the workload's own specification, `lower-case`.
    pub name: &'static str,
    /// Its share of the mix, in units that all kinds of the workload agree on.
    pub weight: f64,
}

/// How a transaction ended that ended as it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// By a commit.
    Committed,
    /// Without effect, as the workload's specification foresees for some (TPC-C's orders of unknown items): the
    /// terminal has rolled it back, or the server refused it and nothing is open.
    RolledBack,
}

/// Why a try came to nothing.
#[derive(Debug)]
pub enum Failure {
    /// The server refused, or is gone. Conflicts are tried again.
    Client(Error),
    /// The data is not what the workload has loaded: the run ends with this message.
    Data(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Client(error)
    }
}

/// Where a terminal stands among all of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The tenant's number.
    pub tenant: usize,
    /// The terminal's number within its tenant.
    pub number: usize,
    /// Terminals of that tenant.
    pub of: usize,
    /// Of the run.
    pub seed: u64,
}

impl Place {
    /// A generator of this terminal's own.
    pub fn random(&self) -> Random {
        generator(self.seed, &[self.tenant as u64, self.number as u64])
    }
}

/// A generator of its own for each path below a seed: (seed, tenant, terminal), (seed, table, row) ...
pub fn generator(seed: u64, path: &[u64]) -> Random {
    // The finaliser of MurmurHash3: neighbouring numbers give unrelated generators.
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

/// What a workload is given to load a database.
pub struct Loading<'a> {
    /// A connection to the database.
    pub client: &'a mut Client,
    /// What the server speaks.
    pub dialect: Dialect,
    /// Of the data: equal seeds load equal rows, also where a load goes on that was interrupted.
    pub seed: u64,
    /// Is told of every number of rows that is there.
    pub loaded: &'a dyn Fn(u64),
}

/// Whose SQL and procedures a server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// SQLite's SQL, procedures in Lua, called by `CALL`.
    Fulmar,
    /// PostgreSQL's SQL, functions in PL/pgSQL, called by `SELECT`.
    Postgres,
}

impl Dialect {
    /// What the server says of itself.
    pub async fn of(client: &mut Client) -> Result<Dialect, Error> {
        let version = client.query("SELECT version()").await?;
        let fulmar = version.iter().flatten().flatten().any(|text| text.contains("Fulmar"));
        Ok(if fulmar { Dialect::Fulmar } else { Dialect::Postgres })
    }

    /// The verb that calls a procedure (Fulmar) or a function (PostgreSQL): `verb name($1, $2)`.
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
    fn every_path_has_a_generator_of_its_own() {
        let mut seen = HashSet::new();
        for seed in 0..20 {
            for tenant in 0..20 {
                for number in 0..20 {
                    assert!(seen.insert(Place { tenant, number, of: 20, seed }.random().next_u64()));
                    assert_eq!(
                        generator(seed, &[tenant as u64, number as u64]),
                        Place { tenant, number, of: 1, seed }.random()
                    );
                }
            }
        }
    }
}
