//! TLS certificates: issues them, reads them from PEM files, checks them, and detects changes of
//! the files.
//!
//! ```text
//!   fulmar cert ──> Authority ──> certificate and key of a node
//!                                   |
//!   PemFile, PemPair  <── files ────'
//!     |        `── FileWatch   have the files changed since they were read?
//!     v
//!   TrustedAuthorities   checks a chain: issuer, validity, usage
//! ```
//!
//! A node's certificate contains the node's name as a DNS name, and may be used as a client and as
//! a server certificate.

#![forbid(unsafe_code)]

mod check;
mod issue;
mod pem;
mod reload;

pub use check::{Role, TrustedAuthorities, check_name, describe};
pub use issue::{Authority, Issued};
pub use pem::{PemFile, PemPair};
pub use reload::{FileWatch, Reload};

/// Why a certificate cannot be issued or used. The text contains the cause and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);
