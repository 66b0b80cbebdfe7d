//! TPC-C (revision 5.11): the orders of a wholesale supplier, with all five transactions on all
//! nine tables and the distributions of the specification. Pricing, terminal screens and the
//! delivery queue are not implemented.
//!
//! ```text
//!  45 %  new-order      an order of 5 to 15 items; 1 % of the lines are from another warehouse,
//!                       1 % of the orders are rolled back
//!  43 %  payment        a payment of a customer, selected by last name in 60 %; 15 % of the
//!                       customers belong to another warehouse
//!   4 %  order-status   a customer's last order and its lines
//!   4 %  delivery       the oldest open order of each of the ten districts
//!   4 %  stock-level    items of the last 20 orders with low stock
//! ```
//!
//! - Statement by statement, the logic is in the client, with one round trip per statement. With
//!   [`procedures`], a transaction is one call.
//! - A payment writes the rows that many transactions write (district, warehouse) last. The lines
//!   of an order are processed in the order of their keys. Transactions can therefore not deadlock.
//! - Values that a terminal would display are fetched but not formatted.

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
use crate::workload::{Kind, LoadContext, TerminalId, Workload};

/// Districts per warehouse, as in the specification. Also the number of `s_dist_` columns.
const DISTRICTS: u32 = 10;

/// Items, and customers per district, in the specification.
const ITEMS: u32 = 100_000;
const CUSTOMERS: u32 = 3_000;

/// TPC-C and its options.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
pub struct Tpcc {
    /// Warehouses, about 90 MB each
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub warehouses: u32,
    /// Keep each transaction within one warehouse, as in ElasTraS and the thesis: no remote orders
    /// and payments
    #[arg(long)]
    pub one_warehouse: bool,
    /// Distribution of the transactions over the warehouses; low-skew and high-skew:60:3 are those
    /// of E-Store (6.1), and with uniform each terminal has a fixed warehouse
    #[arg(long, default_value = "uniform", value_name = "NAME")]
    pub distribution: Distribution,
    /// Run each transaction as one call of a stored procedure
    #[arg(long)]
    pub procedure: bool,
    /// Keying and think times in a closed loop, as a multiple of the specification's
    #[arg(long, default_value_t = 0.0, value_name = "FACTOR")]
    pub pauses: f64,
    /// Items, each of which every warehouse stocks; fewer for tests
    #[arg(long, default_value_t = ITEMS, value_name = "N", value_parser = clap::value_parser!(u32).range(20..=100_000))]
    pub items: u32,
    /// Customers per district, each with one initial order; fewer for tests
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
    /// Number of initial orders of a district that have been delivered.
    fn delivered(&self) -> u32 {
        self.customers * 7 / 10
    }

    /// Number of last names in use.
    fn last_names(&self) -> u32 {
        self.customers.min(random::LAST_NAMES)
    }
}

impl Workload for Tpcc {
    const NAME: &'static str = "tpcc";

    type Terminal = TpccTerminal;

    fn validate(&self) -> anyhow::Result<()> {
        anyhow::ensure!((0.0..=1000.0).contains(&self.pauses), "--pauses must be between 0 and 1000");
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

    async fn load(&self, loading: &mut LoadContext<'_>) -> anyhow::Result<()> {
        load::load(self, loading).await
    }

    fn terminal(self: &Rc<Self>, place: TerminalId) -> TpccTerminal {
        TpccTerminal::new(self.clone(), place)
    }

    async fn check(&self, client: &mut Client) -> anyhow::Result<()> {
        consistency::check(client).await
    }
}
