//! Integration tests of the engine, through its sessions.
//!
//! One test program, because each program would compile the engine's sessions again. Only tests
//! that measure the memory of the whole process (`large`) have their own. Tests with random
//! schedules (`model`, `owners_at_random`, `serializable`, `stress`) take their seeds from the
//! environment ([`seeds`]).

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
