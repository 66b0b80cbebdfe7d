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
mod options;
mod payment;
mod population;
mod procedures;
mod queries;
mod random;
mod schema;
mod statements;
mod steps;
mod terminal;

use std::rc::Rc;

use self::terminal::TpccTerminal;
use crate::client::Client;
use crate::workload::{Kind, LoadContext, TerminalId, Workload};
pub use options::Tpcc;

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
