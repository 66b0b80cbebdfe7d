//! Prices the resource usage of a server with a price list.
//!
//! ```text
//! resource,dollars     a CPU or a GiB of memory for an hour; a GiB read, written, received or sent
//! cpu,0.04048
//! memory,0.004445
//! ```
//!
//! The price is that of the resources used, not of the machine, so that servers on the same
//! machine, and runs on different machines, can be compared. Dollars per hour assume that the usage
//! of the window continues for an hour.

use std::path::Path;
use std::str::FromStr;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::record::UsageRecord;

/// The default price list.
const LIST: &str = include_str!("prices.csv");

const HEADER: &str = "resource,dollars";

const GIB: f64 = (1_u64 << 30) as f64;

/// A price list: US dollars per unit of each resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prices {
    /// A CPU for an hour.
    pub cpu: f64,
    /// A GiB of memory for an hour.
    pub memory: f64,
    /// A GiB read from disks.
    pub read: f64,
    /// A GiB written to disks.
    pub written: f64,
    /// A GiB received.
    pub received: f64,
    /// A GiB sent.
    pub sent: f64,
}

impl Prices {
    /// Returns the default list, `prices.csv`.
    pub fn listed() -> anyhow::Result<Prices> {
        LIST.parse()
    }

    /// Reads a list from a file.
    pub fn read(path: &Path) -> anyhow::Result<Prices> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))?;
        text.parse().with_context(|| format!("{} is not a price list", path.display()))
    }

    fn price_mut(&mut self, resource: &str) -> Option<&mut f64> {
        match resource {
            "cpu" => Some(&mut self.cpu),
            "memory" => Some(&mut self.memory),
            "read" => Some(&mut self.read),
            "written" => Some(&mut self.written),
            "received" => Some(&mut self.received),
            "sent" => Some(&mut self.sent),
            _ => None,
        }
    }

    fn dollars_per_hour(&self, usage: &UsageRecord, seconds: f64) -> f64 {
        let hours = seconds / 3600.0;
        let gib = |bytes: u64| bytes as f64 / GIB;
        let traffic = self.read * gib(usage.read_bytes)
            + self.written * gib(usage.written_bytes)
            + self.received * gib(usage.received_bytes)
            + self.sent * gib(usage.sent_bytes);
        self.cpu * usage.cpu_s / seconds + self.memory * gib(usage.pss_bytes) + traffic / hours
    }
}

impl FromStr for Prices {
    type Err = anyhow::Error;

    /// Parses a list. A resource that it does not contain is free.
    fn from_str(text: &str) -> anyhow::Result<Prices> {
        let mut prices = Prices::default();
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        for line in lines.filter(|line| *line != HEADER) {
            let (resource, dollars) = line.split_once(',').with_context(|| {
                format!("invalid line `{line}`; expected `resource,dollars`, such as `cpu,0.04`")
            })?;
            let price = prices.price_mut(resource.trim()).with_context(|| {
                format!(
                    "unknown resource {resource}; the resources are cpu, memory, read, written, \
                     received, sent"
                )
            })?;
            let dollars = dollars.trim().parse::<f64>().ok();
            *price = dollars
                .filter(|dollars| dollars.is_finite() && *dollars >= 0.0)
                .with_context(|| format!("invalid price in `{line}`; expected dollars"))?;
        }
        Ok(prices)
    }
}

/// The resource usage of the server's processes in the window, and its price.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerUsage {
    /// The usage.
    #[serde(flatten)]
    pub usage: UsageRecord,
    /// CPU time per transaction, in microseconds.
    pub cpu_us_per_transaction: f64,
    /// The price of the usage per hour.
    pub dollars_per_hour: f64,
    /// Transactions per dollar, or `None` if the usage is free.
    pub transactions_per_dollar: Option<f64>,
    /// The prices.
    pub prices: Prices,
}

impl ServerUsage {
    pub(super) fn new(usage: UsageRecord, transactions: u64, seconds: f64, prices: Prices) -> ServerUsage {
        let dollars_per_hour = prices.dollars_per_hour(&usage, seconds);
        let per_hour = transactions as f64 / seconds * 3600.0;
        ServerUsage {
            usage,
            cpu_us_per_transaction: usage.cpu_s * 1e6 / transactions.max(1) as f64,
            dollars_per_hour,
            transactions_per_dollar: (dollars_per_hour > 0.0).then(|| per_hour / dollars_per_hour),
            prices,
        }
    }

    /// Names and values for tables.
    pub(crate) fn lines(&self) -> Vec<(&'static str, String)> {
        let usage = &self.usage;
        let mut lines = vec![
            ("server CPU time per transaction", format!("{:.1} us", self.cpu_us_per_transaction)),
            ("server memory (PSS)", mib(usage.pss_bytes)),
            ("server read, written", format!("{}, {}", mib(usage.read_bytes), mib(usage.written_bytes))),
            ("network received, sent", format!("{}, {}", mib(usage.received_bytes), mib(usage.sent_bytes))),
            ("dollars per hour", format!("{:.4}", self.dollars_per_hour)),
        ];
        lines.extend(
            self.transactions_per_dollar
                .map(|transactions| ("transactions per dollar", format!("{transactions:.0}"))),
        );
        lines
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    const USAGE: UsageRecord = UsageRecord {
        cpu_s: 30.0,
        pss_bytes: 2 << 30,
        read_bytes: 0,
        written_bytes: 1 << 29,
        received_bytes: 0,
        sent_bytes: 1 << 30,
    };

    #[test]
    fn usage_of_the_window_is_priced_per_hour() {
        let prices: Prices =
            "# mine\nresource,dollars\ncpu,0.10\nmemory, 0.01\nwritten,0.002\nsent,0.09\n".parse().unwrap();
        // In 60 s: half a CPU, 2 GiB, and per hour 30 GiB written and 60 GiB sent.
        let server = ServerUsage::new(USAGE, 6_000, 60.0, prices);
        assert!((server.dollars_per_hour - (0.05 + 0.02 + 0.06 + 5.4)).abs() < 1e-9, "{server:?}");
        let per_dollar = server.transactions_per_dollar.unwrap();
        assert!((per_dollar - 360_000.0 / server.dollars_per_hour).abs() < 1e-6, "{per_dollar}");
        assert_eq!(server.cpu_us_per_transaction, 5_000.0);
        assert!(server.lines().contains(&("network received, sent", "0.0 MiB, 1024.0 MiB".to_owned())));
    }

    #[test]
    fn free_usage_has_no_transactions_per_dollar() {
        let server = ServerUsage::new(USAGE, 0, 60.0, Prices::default());
        assert_eq!((server.dollars_per_hour, server.transactions_per_dollar), (0.0, None));
    }

    #[test]
    fn default_list_has_prices() {
        let prices = Prices::listed().unwrap();
        assert!(prices.cpu > 0.0 && prices.memory > 0.0, "{prices:?}");
    }

    #[test]
    fn invalid_price_lists_are_rejected() {
        for (text, expected) in [
            ("cpu 0.1", "resource,dollars"),
            ("gpu,1", "received, sent"),
            ("cpu,-1", "dollars"),
            ("cpu,NaN", "dollars"),
        ] {
            let error = format!("{:#}", text.parse::<Prices>().unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }
}
