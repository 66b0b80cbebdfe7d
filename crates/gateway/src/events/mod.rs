//! The event log: administrative actions, failed logins and changes of the node's health. It is
//! shown by `fulmar.events`.
//!
//! ```text
//!   administration, tokens         --record--+
//!   events that clients can repeat -aggregate+--> EventLog: newest events in memory
//!   health changes (polled each 1 s) -record-+       |    |
//!                                                    |    +--> fulmar.events
//!                                                    +--> thread "fulmar-events" --> files
//! ```
//!
//! - **Recording does not block.** An event is added in memory under a short lock. A background
//!   thread writes it to rotating files ([`files`]), which the next start reads. Memory and disk
//!   space are bounded.
//! - **Clients cannot flood the log.** Actions of superusers are recorded individually. Events that
//!   unprivileged clients can cause at any rate, such as failed logins, are aggregated
//!   ([`aggregation`]): the first is recorded immediately, then one summary per kind every 10
//!   minutes.
//! - **Events contain no secrets.** They contain names, numbers and addresses, never text that a
//!   user has entered. The names of other users are shown to superusers only, not to the owner of a
//!   tenant ([`Event::for_owner`]).

mod aggregation;
mod details;
mod event;
mod files;
mod health_monitor;
mod kinds;
mod log;

pub(crate) use event::Actor;
pub use event::Event;
pub(crate) use health_monitor::monitor_health;
pub use kinds::{Kind, Severity};
pub use log::{EventLog, PreviousRun};
