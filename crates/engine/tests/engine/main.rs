//! What an engine promises to the sessions above it.
//!
//! One program: each would compile the engine's sessions anew. A program of its own have only the tests that look at the memory
//! of the whole process (`large`). Those that run random schedules (`model`, `owners_at_random`, `serializable`, `stress`) take their seeds from
//! the environment ([`seeds`]).

#[path = "../common/mod.rs"]
mod common;

mod beside;
mod beyond_memory;
mod compaction;
mod connections;
mod disk;
mod disk_cache;
mod faults;
mod flushes;
mod history;
mod hot_pages;
mod idle;
mod limits;
mod model;
mod offload;
mod owners_at_random;
mod past;
mod replay;
mod s3;
mod seeds;
mod serializable;
mod shared_log;
mod slices;
mod slow_store;
mod snapshots;
mod sql;
mod stress;
mod temporary_files;
mod two_owners;
mod unopenable;
