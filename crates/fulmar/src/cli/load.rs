//! The flags of `fulmar start` for the load monitor.

use std::time::Duration;

use clap::{Args, ValueEnum};
use fulmar_gateway::{KeyMode, KeyMonitoring};

/// The flags of the load monitor.
#[derive(Args, Clone, Debug)]
pub struct LoadReportArgs {
    /// CPUs that load reports state as the capacity of the node [default: those that the process
    /// can use, by affinity and control groups]
    #[arg(long, value_name = "CPUS", value_parser = cpus)]
    pub cpus: Option<f64>,
    /// Measure the load, for fulmar.load. `off` only serves to measure what that costs
    #[arg(long, value_enum, default_value_t = Switch::On, hide = true)]
    pub load_monitor: Switch,
    /// Count accesses per primary key, for fulmar.hot_keys: off, on (a sample), full (every access,
    /// with up to 200 MB of memory), or auto: a sample while the node's CPU utilisation is at
    /// --key-watermark or above, or above the controller's threshold control.high
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub key_monitoring: KeyMode,
    /// How long accesses are counted for a list of keys, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub key_window: u64,
    /// Number of keys listed for each database
    #[arg(long, value_name = "KEYS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub key_count: u64,
    /// CPU utilisation of the node at which --key-monitoring auto starts to count
    #[arg(long, value_name = "SHARE", default_value_t = 0.8, value_parser = share)]
    pub key_watermark: f64,
}

impl LoadReportArgs {
    /// How accesses per key are counted.
    pub fn key_monitoring(&self) -> KeyMonitoring {
        KeyMonitoring {
            mode: self.key_monitoring,
            window: Duration::from_secs(self.key_window),
            keys: self.key_count as usize,
            watermark: self.key_watermark,
        }
    }
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

fn cpus(text: &str) -> Result<f64, String> {
    let cpus = text.parse().ok().filter(|cpus| (0.001..=4096.0).contains(cpus));
    cpus.ok_or_else(|| "must be a number between 0.001 and 4096".to_owned())
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "must be a number between 0 and 1".to_owned())
}
