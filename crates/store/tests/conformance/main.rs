//! Conformance tests: every store, also behind every wrapper, fulfils the contract of the trait
//! `Store`, and `Reliable` tolerates faults.
//!
//! To add a store, add a test in [`stores`]. The requirements are in [`checks`].

mod checks;
mod faults;
mod stores;
mod uncertain_outcomes;
