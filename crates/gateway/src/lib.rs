//! The gateway: the side of a node that holds client sessions and routes their statements.
//!
//! ```text
//!                       +--------------------- worker thread (one runtime, its sessions) ----+
//!  client --TCP/TLS-->  | startup: TLS, who, which tenant      auth: SCRAM-SHA-256            |
//!      acceptor chooses |    v                                                                |
//!      the worker with  | session: wire <-> protocol (messages) <-> types (values)            |
//!      fewest sessions  |    |        dialect: what is SQLite's own, what is rewritten,       |
//!                       |    |                 what the gateway does itself                   |
//!                       |    |           admin (tenants, users)   system (pg_catalog ...)      |
//!                       |    v                                                                |
//!                       +-- engine session: prepare, execute --------------------------------+
//! ```
//!
//! A session stays on its worker: a statement takes no hop to another thread or task. What a point read costs is one
//! `recv`, the engine, one `send`, and next to no allocation. SQL is the engine's matter; this crate knows messages,
//! types, and the handful of statements that SQLite does not have.
//!
//! [`Gateway::start`] serves SQL, [`http::serve`] metrics and health. What happens is noted in [`events`].

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

/// What most functions here answer: an error is one for the client, unless something else is said.
pub(crate) type Result<T, E = fulmar_engine::Error> = std::result::Result<T, E>;

/// As which Postgres Fulmar speaks, and its own version: drivers read the number in front.
pub(crate) const SERVER_VERSION: &str = concat!("15.0 (Fulmar ", env!("CARGO_PKG_VERSION"), ")");
/// The number in front, as `server_version_num` has it.
pub(crate) const SERVER_VERSION_NUMBER: &str = "150000";

/// What `version()` answers.
pub(crate) fn version_text() -> String {
    format!("PostgreSQL {SERVER_VERSION}, SQL as SQLite has it")
}
