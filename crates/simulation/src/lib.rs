//! Deterministic simulation: processes, virtual time and a faulty network, all from one seed.
//!
//! Code that takes its clock, its network and its stores through traits can run here instead of on
//! real machines. One thread runs everything. A seeded random generator decides which ready task
//! runs next, how long a message takes and which messages are lost. The same seed gives the same
//! run, so a failure that occurs once in a million runs can be replayed and stepped through.
//!
//! - [`Simulation`] is the executor. Tasks belong to processes. A process can be killed (its tasks
//!   are dropped at the await that they had reached) or paused (its tasks do not run, while virtual
//!   time continues for all processes).
//! - [`Network`] carries requests between processes. It delays and loses messages, delivers
//!   requests a second time, and cuts the way between two machines in one or both directions.
//!
//! Virtual time advances only when no task can run, so a virtual minute takes milliseconds.

mod executor;
mod network;

pub use executor::{Process, Simulation, Timeout};
pub use network::{Network, NetworkFaults};
