//! The event log: administrative actions, failed logins and changes of the node's health. It is
//! shown by `fulmar.events`.
//!
//! ```text
//!   administration, tokens         --record--+
//!   events that clients can repeat --gather--+--> Journal: newest events in memory
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
//!   ([`gathered`]): the first is recorded immediately, then one summary per kind every 10 minutes.
//! - **Events contain no secrets.** They contain names, numbers and addresses, never text that a
//!   user has entered. The names of other users are shown to superusers only, not to the owner of a
//!   tenant ([`Event::for_owner`]).

mod details;
mod event;
mod files;
mod gathered;
mod journal;
mod kinds;
mod watch;

pub(crate) use event::Actor;
pub use event::Event;
pub use journal::{Before, Journal};
pub use kinds::{Kind, Severity};
pub(crate) use watch::watch;
