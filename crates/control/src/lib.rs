//! Elasticity: pure functions that decide where the load of a cluster is served.
//!
//! ```text
//!   report      what the nodes measure
//!      |
//!   picture     nodes, partitions, hot keys and cold blocks with their loads (JSON)
//!      |
//!   forecast    the load at the horizon: what acting takes
//!      |
//!   policy      when to act, which tenants, which nodes, which mechanism  --> Decision
//!      |
//!   planners    the new placement: E-Store's algorithms, and ours          --> Plan
//!      |
//!   plan        moves, and their evaluation against a lower bound
//!
//!   simulator   runs all of the above on virtual time
//! ```
//!
//! Nothing here does I/O, starts threads or reads a clock: time is an argument. The one exception
//! is the time limit of the integer programs, which the solver measures. The same code therefore
//! decides in a cluster, in tests and in the simulator.
//!
//! Units: load and capacity in CPUs (CPU seconds per second), sizes in bytes, latency in
//! milliseconds, time in seconds.

#![forbid(unsafe_code)]

pub mod forecast;
pub mod picture;
pub mod plan;
pub mod planners;
pub mod policy;
pub mod report;
pub mod simulator;
pub mod space_saving;
