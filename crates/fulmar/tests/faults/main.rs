//! Faults of the machine, against the real binary: it has no more threads, its disk is full, its store is slow.
//!
//! | module | fault |
//! | --- | --- |
//! | [`threads`] | the system refuses new threads |
//! | [`full_disk`] | no space while the catalog is written |
//! | [`slow_store`] | the object store holds or delays its answers during a start |
//!
//! The node serves on or ends with a clear error. Everything that it acknowledged is there after a restart without the fault.

#[path = "../common/mod.rs"]
mod common;

mod full_disk;
mod slow_store;
mod threads;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use common::Node;
use tokio_postgres::Client;

/// Starts a node with this command, or returns its refusal. Its log goes to a file.
fn start(mut command: Command, log: &Path) -> Result<Node, String> {
    command.stderr(std::fs::File::create(log).unwrap()).stdout(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    if line.is_empty() {
        let status = common::wait(&mut process);
        let refusal = std::fs::read_to_string(log).unwrap();
        assert_eq!(status.code(), Some(1), "a start is refused with an error: {refusal}");
        return Err(refusal);
    }
    let address = |name: &str| {
        let (_, rest) = line.split_once(&format!("{name} ")).unwrap();
        rest.split([',', '\n']).next().unwrap().to_owned()
    };
    Ok(Node { sql: address("sql"), http: address("http"), process })
}

/// The first column of an answer.
async fn column(client: &Client, sql: &str) -> Vec<String> {
    client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}
