//! The gateway: the part of a node that holds client sessions and routes their statements.
//!
//! ```text
//!                       +--------------- worker thread (one runtime, its sessions) ----------+
//!  client --TCP/TLS-->  | startup: TLS, user, tenant           auth: SCRAM-SHA-256           |
//!      acceptor selects |    v                                                               |
//!      the worker with  | session: wire <-> protocol (messages) <-> types (values)           |
//!      the lowest load  |    |        dialect: passes SQL to SQLite, rewrites it, or makes   |
//!                       |    |                 it a command of the gateway                   |
//!                       |    |           admin (tenants, users)   system (pg_catalog, ...)    |
//!                       |    v                                                               |
//!                       +-- engine session: prepare, execute --------------------------------+
//! ```
//!
//! A statement runs on the worker of its session, without a switch to another thread or task. A
//! point read costs one `recv`, its execution in the engine, one `send`, and almost no allocation.
//! The engine executes SQL. This crate implements messages, types, and the few statements that
//! SQLite does not have.
//!
//! [`Gateway::start`] serves SQL, [`http::serve`] serves metrics and health checks. [`events`] is
//! the event log.

mod activity;
mod admin;
mod admission;
mod advisory;
mod auth;
mod copy;
mod crew;
mod crowd;
mod dialect;
pub mod events;
mod failures;
mod fair;
mod gateway;
pub mod http;
mod memory;
mod metrics;
mod processors;
mod protocol;
mod registry;
mod rest;
mod rhythm;
mod session;
mod startup;
mod system;
mod tenants;
mod tokens;
mod types;
mod wire;
mod worker;

pub use auth::scram_verifier;
pub use gateway::{Gateway, GatewayConfig};
pub use memory::session_memory_bytes;

/// The result of most functions. Unless stated otherwise, the error is reported to the client.
pub(crate) type Result<T, E = fulmar_engine::Error> = std::result::Result<T, E>;

/// The emulated PostgreSQL version, followed by the Fulmar version. Drivers parse the leading
/// number.
pub(crate) const SERVER_VERSION: &str = concat!("15.0 (Fulmar ", env!("CARGO_PKG_VERSION"), ")");
/// The emulated PostgreSQL version, in the format of `server_version_num`.
pub(crate) const SERVER_VERSION_NUMBER: &str = "150000";

/// The result of `version()`.
pub(crate) fn version_text() -> String {
    format!("PostgreSQL {SERVER_VERSION}, SQLite SQL dialect")
}
