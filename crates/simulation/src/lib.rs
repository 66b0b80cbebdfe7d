//! Deterministic simulation: processes, virtual time and a faulty network, all from one seed.
//!
//! Code that takes its clock, its network and its stores through traits can run here instead of on
//! real machines. One thread runs everything; which ready task runs next, how long a message takes
//! and what is lost comes from a seeded random generator. The same seed gives the same run, so a
//! failure that occurs once in a million runs can be replayed and stepped through.
//!
//! - [`Simulation`] is the executor. Tasks belong to processes. A process can be killed (its tasks
//!   are dropped at whatever await they had reached) or paused (its tasks do not run, while virtual
//!   time passes for everybody).
//! - [`Network`] carries requests between processes: delayed, lost, answered twice, cut in one or
//!   both directions.
//!
//! Time passes only when no task can run: a run of a virtual minute takes milliseconds.

mod executor;
mod network;

pub use executor::{Process, Simulation, Timeout};
pub use network::{Network, NetworkFaults};
