//! Benchmark workloads, the load driver that runs them, and the benchmarks that start and compare
//! servers.
//!
//! ```text
//!  compare     cases against PostgreSQL, in alternating rounds   fulmar bench compare
//!  paper_figures   the experiments behind figures of papers      fulmar bench figure elastras/4
//!  ycsb        YCSB as in ElasTraS and E-Store                   fulmar bench run ycsb, demo
//!  voter       a telephone vote                                  fulmar bench run voter
//!  tatp        a home location register                          fulmar bench run tatp
//!  tpcc        TPC-C                                             fulmar bench run tpcc
//!  tpcw        the shopping path of TPC-W                        fulmar bench run tpcw
//!  pgbench     PostgreSQL's pgbench as a load
//!  ------------------------------------------------
//!  workload    the trait of all workloads
//!  run         loads a workload, connects and measures
//!  arrival     arrival processes: when transactions start
//!  keys        key distributions: uniform, Zipfian, hot spot
//!  measure     histograms, time windows, spreads
//!  conditions  consistency conditions, checked after a run
//!  history     checks histories of list appends for strict serializability
//!  driver      the thread and event loop of the load
//!  client      a PostgreSQL client with little overhead
//!  server      starts, measures and stops servers
//!  tenants     creates many databases
//!  report      renders the JSON lines of a run as HTML
//! ```
//!
//! No server code links this crate. The crate uses only what any client of a server can use: the
//! PostgreSQL protocol, `/metrics`, and `/proc` for the processes of the server. Figures without a
//! server use the planners and the model of `fulmar-control`.

#![deny(unsafe_code)]

pub mod arrival;
pub mod client;
pub mod compare;
mod conditions;
mod cpu_affinity;
mod driver;
pub mod history;
pub mod keys;
pub mod measure;
pub mod paper_figures;
pub mod pgbench;
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
