//! The system tables about the node and its sessions, in addition to those of the dialect
//! ([`fulmar_dialect::system`]), and the functions that act on sessions.
//!
//! | module | contents |
//! | --- | --- |
//! | [`statistics`] | `pg_stat_activity`, `pg_stat_database`, `fulmar.limits`, `fulmar.history` |
//! | [`stats`] | statistics: `fulmar.tenant_stats`, `fulmar.partition_stats`, ... |
//! | [`cluster`] | `fulmar.nodes`, `fulmar.partitions` |
//! | [`forecast`] | `fulmar.forecast`, `fulmar.forecast_errors` |
//! | [`load`] | `fulmar.node_load`, `fulmar.load`, `fulmar.hot_keys` |
//! | [`statements`] | `fulmar.statements`, `fulmar.slow_statements` |
//! | [`event_log`] | `fulmar.events`, `fulmar.tokens` |
//! | [`catalog`] | the list of these tables; `set_config`, advisory locks, `pg_cancel_backend` |
//! | [`viewer`] | the querying session, and what it may see |

mod catalog;
mod cluster;
mod event_log;
mod forecast;
mod load;
mod statements;
mod statistics;
mod stats;
mod viewer;

pub(crate) use forecast::forecasts_needed;
pub(crate) use load::loads_needed;
pub(crate) use statements::statements_needed;
pub(crate) use viewer::{Remote, Sources, Viewer, owned_tenants};
