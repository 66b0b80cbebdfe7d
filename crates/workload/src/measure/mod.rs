//! Measurement: counters, latency histograms, availability, and the spread of repeated
//! measurements.

mod availability;
mod latency;
mod meter;
mod spread;

pub(crate) use self::availability::Availability;
pub(crate) use self::latency::Latencies;
pub use self::latency::{Latency, Sample};
pub(crate) use self::meter::{Counts, Event, Interval, Meter, MeterRecord, Window, first_interval};
pub use self::spread::Spread;
