//! A client's session: reads protocol messages, executes them and sends the responses.
//!
//! Each session is one loop ([`Session::serve`]) on one worker. Between two messages it can migrate
//! to another worker:
//!
//! ```text
//!      +--> read: one recv; idle sessions wait here and hold no buffer
//!      |       v
//!      |    each complete message in the buffer, in order:
//!      |       Query                      -> simple    several statements, one transaction
//!      |       Parse Bind Describe
//!      |         Execute Close            -> extended  responses are collected in `output`
//!      |       CopyData CopyDone CopyFail -> copy
//!      |       v
//!      +--- Sync, end of a Query, Flush: one send
//! ```
//!
//! | module | contents |
//! | --- | --- |
//! | [`state`], [`context`], [`outcome`] | a session's state, the components it uses, outcomes |
//! | [`serve`], [`receive`], [`handoff`] | the loop; long messages; migration between workers |
//! | [`simple`], [`extended`], [`copy`] | the protocols |
//! | [`relayed`], [`temporary_tables`] | messages between a session and its front |
//! | [`run`], [`command`], [`link`] | running statements, in the engine or here |
//! | [`statements`], [`portals`], [`rows`] | prepared statements, portals, results |
//! | [`memory_quota`], [`limits`], [`privileges`] | memory accounting; changes of limits and access rights |
//!
//! - A statement of the extended protocol that is directly followed by Sync is autocommitted
//!   ([`fulmar_engine::Scope::Auto`]). Otherwise it joins the implicit transaction that Sync ends.
//! - After an error in the extended protocol, messages are skipped until Sync.

mod command;
mod context;
mod copy;
mod copy_database;
mod copy_in;
mod copy_out;
mod extended;
pub(crate) mod handoff;
mod limits;
mod link;
mod memory_quota;
mod outcome;
mod portals;
mod primary_key;
mod privileges;
mod receive;
mod relayed;
mod rows;
mod run;
mod serve;
mod simple;
mod slow;
mod stall;
mod state;
mod statements;
mod temporary_tables;
mod time_travel;

pub(crate) use context::Context;
pub(crate) use link::Link;
pub(crate) use memory_quota::{Quota, Reservation};
pub(crate) use outcome::End;
pub(crate) use slow::SlowLog;
pub(crate) use state::Session;
