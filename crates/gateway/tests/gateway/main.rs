//! Tests of a node in this process, as its clients see it.
//!
//! They are one test program, since each further program would compile the node again, which takes
//! longer than running its tests.

#[path = "../common/mod.rs"]
mod common;

mod console;
mod copy;
mod databases;
mod durability;
mod events;
mod history;
mod idle;
mod isolation;
mod limits;
mod load;
mod memory;
mod postgres;
mod procedures;
mod protocol;
mod relay;
mod roles;
mod statements;
mod statistics;
mod tenants;
mod tokens;
mod tools;
mod wire;
mod workers;
