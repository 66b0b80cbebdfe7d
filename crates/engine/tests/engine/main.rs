//! Integration tests of the engine, through its sessions.
//!
//! One test program, because each program would compile the engine's sessions again. Only tests
//! that measure the memory of the whole process (`large`) have their own. Tests with random
//! schedules (`model`, `fencing_random`, `serializable`, `stress`) take their seeds from the
//! environment ([`seeds`]).

#[path = "../common/mod.rs"]
mod common;

mod beyond_memory;
mod compaction;
mod connections;
mod disk_cache;
mod disk_space;
mod faults;
mod fencing;
mod fencing_random;
mod flushes;
mod history;
mod idle;
mod limits;
mod membership;
mod model;
mod offload;
mod prewarm;
mod replay;
mod replica;
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
mod time_travel;
mod unopenable_partition;
