//! The options of TPC-C, and the sizes that its specification fixes.

use clap::Args;
use serde::Serialize;

use super::random::LAST_NAMES;
use crate::keys::Distribution;

/// Districts per warehouse, as in the specification. Also the number of `s_dist_` columns.
pub(super) const DISTRICTS: u32 = 10;

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
    pub(super) fn delivered(&self) -> u32 {
        self.customers * 7 / 10
    }

    /// Number of last names in use.
    pub(super) fn last_names(&self) -> u32 {
        self.customers.min(LAST_NAMES)
    }
}
