//! A node in this process, and clients of it: all that they see.
//!
//! One program: each would compile the node's tasks anew, which takes longer than its tests.

#[path = "../common/mod.rs"]
mod common;

mod copy;
mod databases;
mod durability;
mod events;
mod history;
mod idle;
mod isolation;
mod limits;
mod memory;
mod postgres;
mod procedures;
mod protocol;
mod roles;
mod statistics;
mod tenants;
mod tokens;
mod tools;
mod wire;
mod workers;
