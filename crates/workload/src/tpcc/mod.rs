//! TPC-C (revision 5.11): a wholesale supplier's orders. All five transactions on all nine tables, with the
//! specification's distributions; what is not done is its pricing, its terminals' screens, and the queue of deliveries.
//!
//! ```text
//!  45 %  new-order      an order of 5 to 15 items; 1 % of the lines from another warehouse, 1 % of the orders fail
//!  43 %  payment        a customer pays, by last name in 60 %; 15 % belong to another warehouse
//!   4 %  order-status   a customer's last order and its lines
//!   4 %  delivery       the oldest open order of each of the ten districts
//!   4 %  stock-level    which of the last twenty orders' items run low
//! ```
//! Statement by statement the logic is at the client, a round trip for each; as procedures ([`procedures`]) a
//! transaction is one call. In a payment the rows that many transactions write (district, warehouse) come last; the lines
//! of an order come in the order of their keys, so that no circle of waiting transactions can close.
//!
//! What a terminal would show is fetched, and not formatted.

mod consistency;
mod delivery;
mod inputs;
mod load;
mod new_order;
mod payment;
mod population;
mod procedures;
mod queries;
mod random;
mod schema;
mod steps;
mod terminal;

use std::rc::Rc;

use clap::Args;
use serde::Serialize;

use self::terminal::TpccTerminal;
use crate::client::Client;
use crate::keys::Distribution;
use crate::workload::{Kind, Loading, Place, Workload};

/// Districts of a warehouse: the specification's, and the number of `s_dist_` columns.
const DISTRICTS: u32 = 10;

/// Items, and customers of a district, of the specification.
const ITEMS: u32 = 100_000;
const CUSTOMERS: u32 = 3_000;

/// TPC-C and its options.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
pub struct Tpcc {
    /// Warehouses: some 90 MB each
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub warehouses: u32,
    /// Keep each transaction in one warehouse, as ElasTraS and the thesis do: no remote orders and payments
    #[arg(long)]
    pub one_warehouse: bool,
    /// At which warehouse a transaction takes place: low-skew and high-skew:60:3 are E-Store's (6.1); with uniform a
    /// terminal stays at its warehouse
    #[arg(long, default_value = "uniform", value_name = "NAME")]
    pub distribution: Distribution,
    /// Run each transaction as one call of a stored procedure
    #[arg(long)]
    pub procedure: bool,
    /// Keying and think times, as a multiple of the specification's (closed loop)
    #[arg(long, default_value_t = 0.0, value_name = "FACTOR")]
    pub pauses: f64,
    /// Items, each of which every warehouse has in stock; fewer for tests
    #[arg(long, default_value_t = ITEMS, value_name = "N", value_parser = clap::value_parser!(u32).range(20..=100_000))]
    pub items: u32,
    /// Customers of a district, who begin with an order each; fewer for tests
    #[arg(long, default_value_t = CUSTOMERS, value_name = "N", value_parser = clap::value_parser!(u32).range(10..=3_000))]
    pub customers: u32,
}

impl Default for Tpcc {
    fn default() -> Tpcc {
        Tpcc {
            warehouses: 1,
            one_warehouse: false,
            distribution: Distribution::Uniform,
            procedure: false,
            pauses: 0.0,
            items: ITEMS,
            customers: CUSTOMERS,
        }
    }
}

impl Tpcc {
    /// The first orders of a district, which have been delivered already.
    fn delivered(&self) -> u32 {
        self.customers * 7 / 10
    }

    /// How many last names are in use.
    fn last_names(&self) -> u32 {
        self.customers.min(random::LAST_NAMES)
    }
}

impl Workload for Tpcc {
    const NAME: &'static str = "tpcc";

    type Terminal = TpccTerminal;

    fn validate(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            (0.0..=1000.0).contains(&self.pauses),
            "pauses are 0 to 1000 times the specification's"
        );
        Ok(())
    }

    fn kinds(&self) -> Vec<Kind> {
        terminal::KINDS.iter().map(|kind| kind.kind).collect()
    }

    fn rows(&self) -> u64 {
        load::rows(self)
    }

    fn scaled(&self, factor: f64) -> Tpcc {
        let warehouses = (f64::from(self.warehouses) * factor).round().max(1.0) as u32;
        Tpcc { warehouses, ..self.clone() }
    }

    async fn load(&self, loading: &mut Loading<'_>) -> anyhow::Result<()> {
        load::load(self, loading).await
    }

    fn terminal(self: &Rc<Self>, place: Place) -> TpccTerminal {
        TpccTerminal::new(self.clone(), place)
    }

    async fn check(&self, client: &mut Client) -> anyhow::Result<()> {
        consistency::check(client).await
    }
}
