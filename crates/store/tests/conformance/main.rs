//! Every store keeps the contract, through every wrapper; and what is relied on stands up to faults.
//!
//! A new store is one more test in [`stores`]; what it must do is in [`checks`].

mod checks;
mod doubts;
mod faults;
mod stores;
