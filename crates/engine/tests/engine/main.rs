//! What an engine promises to the sessions above it.
//!
//! One program: each would compile the engine's tasks anew. Tests of their own are those that look at the memory of the whole process
//! (`large`) and those that run for minutes with seeds (`model`, `serializable`, `stress`).

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/seeds.rs"]
mod seeds;

mod beside;
mod beyond_memory;
mod compaction;
mod disk;
mod disk_cache;
mod faults;
mod flushes;
mod history;
mod hot_pages;
mod idle;
mod limits;
mod past;
mod s3;
mod shared_log;
mod slices;
mod slow_store;
mod snapshots;
mod sql;
mod two_owners;
