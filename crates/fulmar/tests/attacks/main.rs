//! Attacks of a tenant's users on the node: no client can crash, freeze or exhaust it.
//!
//! ```text
//!   attacker (owner, or a user with SELECT only) ──┐
//!   neighbour: statements, logins, /healthz ───────┼──> fulmar start --memory 256MiB
//!   monitor: VmHWM, temporary files ───────────────┘
//! ```
//!
//! | module | |
//! | --- | --- |
//! | [`arena`] | starts the node and judges each attack |
//! | [`neighbour`] | another tenant, and how long it waits |
//! | [`process`] | memory and temporary files of the node |
//! | [`client`] | sessions and raw connections |
//! | [`stack`], [`freeze`], [`memory`], [`disk`], [`integrity`], [`flood`] | the attacks, a table in each |
//! | [`pipeline`] | what a client leaves behind that is cancelled or disconnects |
//! | [`fuzz`] | programs at random, judged in the same way |
//!
//! The node holds if the process lives on, the attacker gets one of the expected SQLSTATEs, the neighbour's requests succeed within 5 s (the
//! requirement is 1 s on idle cores), the process stays below 512 MiB and temporary files stay within the tenant's limit. All attacks of a
//! family are tried. Those that succeeded are listed at its end:
//!
//! ```text
//! cargo test -p fulmar --test attacks -- --nocapture deep_statements
//! ```

#[path = "../common/mod.rs"]
mod common;

mod arena;
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
