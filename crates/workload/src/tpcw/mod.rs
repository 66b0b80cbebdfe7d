//! TPC-W's shopping path (CloudTPS 6.1 and its figure 4): emulated browsers in a bookshop, the transactions of which need
//! consistency.
//!
//! ```text
//!  create-cart ---> add-item ---+---> purchase ---> latest-order --+
//!       ^              ^        |     2 + as many rows as items    |
//!       |              +--------+     1 to 10 times, evenly        |
//!       +----------------------------------------------------------+
//! ```
//! A terminal is a browser, and goes this way again and again, each time as another customer: its next transaction is the
//! next step, and not drawn from a mix. Items are chosen by `--distribution`; TPC-W's own choice is uniform. A purchase empties
//! the cart, makes an order with its lines and its payment, and takes the items from the stock, which is filled up below ten,
//! as TPC-W does. What differs from CloudTPS: the tables are TPC-W's own, as many as the path touches, since there are joins
//! here; the customer's latest order is found by an index.

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
use crate::workload::{Kind, Loading, Place, Workload};

/// The most items that a cart has: CloudTPS's, evenly from one on.
const MOST_ITEMS: u32 = 10;

/// The workload and its options.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
pub struct Tpcw {
    /// Items of the shop; CloudTPS has 10,000 and a million
    #[arg(long, default_value_t = 10_000, value_name = "N", value_parser = clap::value_parser!(u32).range(i64::from(MOST_ITEMS)..=i64::from(i32::MAX)))]
    pub items: u32,
    /// Customers, nine of ten of whom have an order already, on average
    #[arg(long, default_value_t = 144_000, value_name = "N", value_parser = clap::value_parser!(u32).range(10..=i64::from(i32::MAX)))]
    pub customers: u32,
    /// Which items are bought: uniform, zipfian[:S], hotspot[:PURCHASES%:ITEMS%], low-skew or high-skew[:PURCHASES%:NUMBER]
    #[arg(long, default_value = "uniform", value_name = "NAME")]
    pub distribution: Distribution,
    /// How long a browser waits after an answer, as a multiple of CloudTPS's half a second on average (closed loop)
    #[arg(long, default_value_t = 0.0, value_name = "FACTOR")]
    pub pauses: f64,
}

impl Default for Tpcw {
    fn default() -> Tpcw {
        Tpcw { items: 10_000, customers: 144_000, distribution: Distribution::Uniform, pauses: 0.0 }
    }
}

impl Tpcw {
    /// Orders that there are before the first purchase, as TPC-W says.
    fn orders(&self) -> u32 {
        (u64::from(self.customers) * 9 / 10) as u32
    }
}

impl Workload for Tpcw {
    const NAME: &'static str = "tpcw";

    type Terminal = TpcwTerminal;

    fn validate(&self) -> anyhow::Result<()> {
        anyhow::ensure!((0.0..=1000.0).contains(&self.pauses), "pauses are 0 to 1000 times half a second");
        Ok(())
    }

    fn kinds(&self) -> Vec<Kind> {
        terminal::KINDS.to_vec()
    }

    /// About: how many lines an order has is drawn.
    fn rows(&self) -> u64 {
        u64::from(self.items) + u64::from(self.orders()) * population::ROWS_PER_ORDER
    }

    fn scaled(&self, factor: f64) -> Tpcw {
        let scale = |count: u32| (f64::from(count) * factor).round().clamp(10.0, f64::from(i32::MAX)) as u32;
        Tpcw { items: scale(self.items), customers: scale(self.customers), ..self.clone() }
    }

    async fn load(&self, loading: &mut Loading<'_>) -> anyhow::Result<()> {
        schema::create(loading.client, loading.dialect).await?;
        population::load(loading, self.items, self.orders(), self.customers).await?;
        schema::number_on(loading.client, loading.dialect).await
    }

    fn terminal(self: &Rc<Self>, place: Place) -> TpcwTerminal {
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
    fn the_defaults_are_those_of_the_command_line() {
        assert_eq!(Line::try_parse_from(["bench"]).unwrap().workload, Tpcw::default());
        assert!(Line::try_parse_from(["bench", "--items", "9"]).is_err(), "a cart of ten would not fill");
    }
}
