//! Attacks of a tenant's users on the node: no client can crash, freeze or exhaust it.
//!
//! ```text
//!   attacker (owner, or a user with SELECT only) ──┐
//!   neighbour: statements, logins, /healthz ───────┼──> fulmar start --memory 256MiB
//!   monitor: VmHWM, temporary files ───────────────┘
//! ```
//!
//! | module | contents |
//! | --- | --- |
//! | [`test_bench`] | starts the node and checks each attack |
//! | [`neighbour`] | another tenant, and the latency of its requests |
//! | [`process`] | memory and temporary files of the node |
//! | [`client`] | sessions and raw connections |
//! | [`stack`], [`freeze`], [`memory`], [`disk`], [`integrity`], [`flood`] | tables of attacks |
//! | [`pipeline`] | pending statements of a client that is cancelled or disconnects |
//! | [`fuzz`] | random programs, checked in the same way |
//!
//! The node passes if all of these hold:
//!
//! - The process does not exit.
//! - The attacker gets one of the expected SQLSTATEs.
//! - The neighbour's requests succeed within 5 s (the requirement is 1 s on idle cores).
//! - The process stays below 512 MiB of memory, and temporary files below the tenant's limit.
//!
//! A test runs all attacks of its family, and lists the successful ones at the end:
//!
//! ```text
//! cargo test -p fulmar --test attacks -- --nocapture deep_statements
//! ```

#[path = "../common/mod.rs"]
mod common;

mod client;
mod disk;
mod flood;
mod freeze;
mod fuzz;
mod integrity;
mod memory;
mod neighbour;
mod pipeline;
mod process;
mod stack;
mod test_bench;
