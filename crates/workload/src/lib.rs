//! The load side: workloads, the driver that runs them, and the benches that start servers and compare them.
//!
//! ```text
//!  compare   cases against PostgreSQL, in turns           fulmar bench compare
//!  figure    the experiments of papers' figures           fulmar bench figure elastras/4
//!  ycsb      ElasTraS's YCSB, and E-Store's               fulmar bench run ycsb, fulmar demo
//!  voter     a telephone vote                             fulmar bench run voter
//!  tatp      a home location register                     fulmar bench run tatp
//!  tpcc      TPC-C                                       fulmar bench run tpcc
//!  tpcw      TPC-W's shopping path                       fulmar bench run tpcw
//!  pgbench   PostgreSQL's own driver, as a load
//!  ------------------------------------------------
//!  workload  what a workload is (a trait)                 run       loads, connects, measures
//!  arrival   when transactions start                      report    a run's JSON lines as HTML
//!  server    starts, measures and ends servers            tenants   makes many databases
//!  driver    a thread and event loop for the load         keys      uniform, Zipfian, hot spot
//!  client    a lean Postgres client                       measure   histograms, windows, spreads
//!  conditions   what must hold of the data after a run
//! ```
//! Nothing here is linked into what serves clients, and nothing here knows more of a server than any client may: the
//! Postgres protocol, `/metrics`, and what `/proc` says of its processes.

#![deny(unsafe_code)]

pub mod arrival;
pub mod client;
pub mod compare;
mod conditions;
mod driver;
pub mod figure;
pub mod keys;
pub mod measure;
pub mod pgbench;
mod processors;
pub mod report;
pub mod run;
pub mod server;
mod target;
pub mod tatp;
pub mod tenants;
pub mod tpcc;
pub mod tpcw;
pub mod voter;
pub mod workload;
pub mod ycsb;

pub use target::{Target, TargetError};
