//! TPC-W's shopping path (CloudTPS 6.1 and its figure 4): the transactions of emulated browsers in
//! a bookshop that require consistency.
//!
//! ```text
//!  create-cart ---> add-item ---+---> purchase ---> latest-order --+
//!       ^              ^        |     2 rows, and one per item     |
//!       |              +--------+     1 to 10 times, uniformly     |
//!       +----------------------------------------------------------+
//! ```
//!
//! - A terminal is a browser that repeats this path, each time as a different customer. Its next
//!   transaction is the next step of the path instead of a draw from a mix.
//! - `--distribution` selects the items. TPC-W selects them uniformly.
//! - A purchase empties the cart, inserts an order with its lines and its payment, and takes the
//!   items from stock. Stock below ten is refilled, as in TPC-W.
//! - Differences from CloudTPS: the tables are those of TPC-W that the path uses, because joins are
//!   available here. An index finds the latest order of a customer.

mod population;
mod schema;
mod terminal;

use std::rc::Rc;

use clap::Args;
use serde::Serialize;

use self::terminal::TpcwTerminal;
use crate::client::Client;
use crate::conditions;
use crate::keys::Distribution;
use crate::workload::{Kind, LoadContext, TerminalId, Workload};

/// The maximum number of items in a cart (CloudTPS). The number is uniform, from one.
const MAX_CART_ITEMS: u32 = 10;

/// TPC-W and its options.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
pub struct Tpcw {
    /// Items of the shop; CloudTPS uses 10,000 and 1,000,000
    #[arg(long, default_value_t = 10_000, value_name = "N", value_parser = clap::value_parser!(u32).range(i64::from(MAX_CART_ITEMS)..=i64::from(i32::MAX)))]
    pub items: u32,
    /// Customers, with 0.9 initial orders per customer on average
    #[arg(long, default_value_t = 144_000, value_name = "N", value_parser = clap::value_parser!(u32).range(10..=i64::from(i32::MAX)))]
    pub customers: u32,
    /// Distribution of the purchases over the items: uniform, zipfian[:S],
    /// hotspot[:PURCHASES%:ITEMS%], low-skew or high-skew[:PURCHASES%:NUMBER]
    #[arg(long, default_value = "uniform", value_name = "NAME")]
    pub distribution: Distribution,
    /// Wait of a browser after each answer in a closed loop, as a multiple of CloudTPS's mean of
    /// 0.5 s
    #[arg(long, default_value_t = 0.0, value_name = "FACTOR")]
    pub pauses: f64,
}

impl Default for Tpcw {
    fn default() -> Tpcw {
        Tpcw { items: 10_000, customers: 144_000, distribution: Distribution::Uniform, pauses: 0.0 }
    }
}

impl Tpcw {
    /// Number of initial orders, as in TPC-W.
    fn orders(&self) -> u32 {
        (u64::from(self.customers) * 9 / 10) as u32
    }
}

impl Workload for Tpcw {
    const NAME: &'static str = "tpcw";

    type Terminal = TpcwTerminal;

    fn validate(&self) -> anyhow::Result<()> {
        anyhow::ensure!((0.0..=1000.0).contains(&self.pauses), "--pauses must be between 0 and 1000");
        Ok(())
    }

    fn kinds(&self) -> Vec<Kind> {
        terminal::KINDS.to_vec()
    }

    /// An approximate number, because the number of lines of an order is random.
    fn rows(&self) -> u64 {
        u64::from(self.items) + u64::from(self.orders()) * population::ROWS_PER_ORDER
    }

    fn scaled(&self, factor: f64) -> Tpcw {
        let scale = |count: u32| (f64::from(count) * factor).round().clamp(10.0, f64::from(i32::MAX)) as u32;
        Tpcw { items: scale(self.items), customers: scale(self.customers), ..self.clone() }
    }

    async fn load(&self, loading: &mut LoadContext<'_>) -> anyhow::Result<()> {
        schema::create(loading.client, loading.dialect).await?;
        population::load(loading, self.items, self.orders(), self.customers).await?;
        schema::number_on(loading.client, loading.dialect).await
    }

    fn terminal(self: &Rc<Self>, place: TerminalId) -> TpcwTerminal {
        TpcwTerminal::new(self, place)
    }

    async fn check(&self, client: &mut Client) -> anyhow::Result<()> {
        conditions::check(client, "TPC-W", &schema::CONDITIONS).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        workload: Tpcw,
    }

    #[test]
    fn argument_defaults_equal_option_defaults() {
        assert_eq!(Line::try_parse_from(["bench"]).unwrap().workload, Tpcw::default());
        let too_few_items = Line::try_parse_from(["bench", "--items", "9"]);
        assert!(too_few_items.is_err(), "a cart can have ten different items");
    }
}
