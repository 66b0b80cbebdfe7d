//! Environment faults, tested with the real executable.
//!
//! | module | fault |
//! | --- | --- |
//! | [`threads`] | the system refuses new threads |
//! | [`full_disk`] | no disk space while the catalog is written |
//! | [`slow_store`] | the object store delays or withholds its responses during startup |
//!
//! The node must continue to serve, or end with a clear error. After a restart without the fault,
//! all acknowledged changes must exist.

#[path = "../common/mod.rs"]
mod common;

mod full_disk;
mod slow_store;
mod threads;

use std::path::Path;
use std::process::{Command, Stdio};

use common::Node;
use tokio_postgres::Client;

/// Starts a node with this command. Returns its log if it refuses to start.
fn start(mut command: Command, log: &Path) -> Result<Node, String> {
    command.stderr(std::fs::File::create(log).unwrap()).stdout(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let line = common::first_line(&mut process);
    if line.is_empty() {
        let status = common::wait(&mut process);
        let error = std::fs::read_to_string(log).unwrap();
        assert_eq!(status.code(), Some(1), "a refused start must exit with code 1: {error}");
        return Err(error);
    }
    Ok(Node::ready(process, &line))
}

/// Returns the first column of a result.
async fn column(client: &Client, sql: &str) -> Vec<String> {
    client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}
