//! The gateway: the part of a node that holds client sessions and routes their statements.
//!
//! ```text
//!                       +--------------- worker thread (one runtime, its sessions) ----------+
//!  client --TCP/TLS-->  | startup: TLS, user, tenant           fulmar_pgwire: messages,      |
//!      acceptor selects |    v                                     types, authentication     |
//!      the worker with  | session: receives messages,          fulmar_dialect: passes SQL to |
//!      the lowest load  |    |     plans and runs statements        SQLite, rewrites it, or  |
//!                       |    |                                      makes it a command       |
//!                       |    |--> admin (tenants, users)   system (tables about sessions)    |
//!                       |    v                                                               |
//!                       +-- engine session: prepare, execute --------------------------------+
//! ```
//!
//! A statement runs on the worker of its session, without a switch to another thread or task. A
//! point read costs one `recv`, its execution in the engine, one `send`, and almost no allocation.
//! The engine executes SQL. [`fulmar_pgwire`] implements messages and types, [`fulmar_dialect`]
//! PostgreSQL's syntax and catalog. This crate implements sessions, administration and monitoring.
//!
//! | part | modules |
//! | --- | --- |
//! | sessions | `session`, `startup`, `admission`, `settings`, `identity`, `registry` |
//! | clusters | [`cluster`], `relay` (sessions of partitions that other nodes own) |
//! | administration | `admin`, `system`, `tokens`, `advisory` |
//! | workers | `worker`, `worker_scaling` and `cpu_stats` (scaling), `fair` (scheduling), `idle_time` |
//! | memory and connections | `memory`, `connection_slots`, `login_throttle` (login throttling) |
//! | monitoring | [`http`], `monitoring`, `metrics`, `tenant_stats`, `activity`, [`events`] |
//! | statements | `statement_stats`: executions by normalized text, slow statements |
//! | console | `console`: the web page's API, which runs SQL in internal sessions |
//!
//! # State
//!
//! [`Gateway::start`] creates the components once and passes to each part those that it uses:
//! connections in startup get a `startup::Context`, sessions a `session::Context`, administrative
//! statements an `admin::Context`, system tables `system::Sources`. A session's own state
//! (`session::state`) is accessed by no other session. Other components see a session only through
//! its handle in the registry, which can cancel its statement, end it, and show its activity.
//!
//! # Example: one statement
//!
//! `SELECT v FROM t WHERE k = $1`, prepared, arrives as Bind, Execute and Sync in one `recv`:
//!
//! 1. `session::serve` parses each message in place and dispatches it.
//! 2. Bind decodes the parameter into a portal.
//! 3. Execute sees that Sync follows, so the statement is autocommitted. `session::run` executes it
//!    through `session::link`, which watches the connection if the engine has to wait. Rows are
//!    encoded into the output buffer.
//! 4. Sync writes ReadyForQuery. The output is sent with one `send`, and both buffers return to the
//!    worker's pool.
//!
//! # Shutdown
//!
//! No new connections are accepted, idle sessions end, running statements complete within a grace
//! period, and the remaining ones are cancelled ([`Gateway::shutdown`]).

mod activity;
mod admin;
mod admission;
mod advisory;
pub mod cluster;
mod connection_slots;
mod console;
mod cpu_stats;
pub mod events;
mod fair;
mod gateway;
mod histogram;
pub mod http;
mod identity;
mod idle_time;
mod load;
mod login_throttle;
mod memory;
mod metrics;
mod monitoring;
mod registry;
mod relay;
mod session;
mod settings;
mod startup;
mod statement_stats;
mod system;
mod tenant_stats;
mod tokens;
mod worker;
mod worker_scaling;

pub use fulmar_pgwire::auth::scram_verifier;
pub use gateway::{Gateway, GatewayConfig, GatewaySessions, RelayAcceptor};
pub use load::{KeyMode, KeyMonitoring};
pub use memory::session_memory_bytes;
pub use statement_stats::{SlowStatement, StatementCounts, StatementReport};

pub(crate) use fulmar_pgwire::Result;
