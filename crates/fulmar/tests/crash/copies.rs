//! Copies of tenants, created under load: `CREATE DATABASE ... TEMPLATE` flushes the source and
//! shares its segments.
//!
//! A copy is a consistent snapshot of its source:
//!
//! - It contains every commit acknowledged before the copy was requested.
//! - It contains only entries that are in the source after the restart.
//! - Its balances match its ledger.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::task::JoinHandle;
use tokio_postgres::error::SqlState;

use crate::books::{Books, ClientOutcome, balances};
use crate::check::{self, Contents};
use crate::load::{Tenant, outcome_of_error};
use crate::node::Node;
use crate::sql::Client;

/// Maximum number of copies per round.
const MAX_COPIES: usize = 8;

/// A requested copy.
pub struct Copy {
    name: String,
    /// Index of the source among the tenants.
    source: usize,
    outcome: ClientOutcome,
    /// Ids of the source's transactions that were acknowledged before the request.
    acknowledged: Vec<i64>,
}

/// Starts to create copies of tenants, one after the other.
pub fn start(
    node: &Node,
    round: u64,
    tenants: &[Arc<Tenant>],
    books: &[Books],
) -> JoinHandle<anyhow::Result<Vec<Copy>>> {
    let ledgers: Vec<Vec<i64>> = books.iter().map(|books| books.ledger.keys().copied().collect()).collect();
    tokio::spawn(create_copies(node.sql, round, tenants.to_vec(), ledgers))
}

async fn create_copies(
    sql: SocketAddr,
    round: u64,
    tenants: Vec<Arc<Tenant>>,
    ledgers: Vec<Vec<i64>>,
) -> anyhow::Result<Vec<Copy>> {
    let mut copies = Vec::new();
    let Ok(client) = Client::connect_to(sql, "fulmar").await else { return Ok(copies) };
    for number in 0..MAX_COPIES {
        let source = (round as usize + number) % tenants.len();
        let tenant = &tenants[source];
        // Wait for a commit, so that the copy has something to flush.
        while tenant.acknowledged().is_empty() && !client.is_closed() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let name = format!("copy-{round}-{number}");
        let mut acknowledged = ledgers[source].clone();
        acknowledged.extend(tenant.acknowledged());
        let created = client.query(&format!("CREATE DATABASE \"{name}\" TEMPLATE \"{}\"", tenant.name)).await;
        let outcome = match created {
            Ok(_) => ClientOutcome::Acknowledged,
            Err(error) => outcome_of_error(&error)?,
        };
        copies.push(Copy { name, source, outcome, acknowledged });
        if outcome == ClientOutcome::Unknown {
            break;
        }
    }
    Ok(copies)
}

/// Checks the copies of a round and drops them. Copies of earlier rounds must not exist.
pub async fn check_and_drop(node: &Node, copies: Vec<Copy>, books: &[Books]) -> anyhow::Result<()> {
    let system = Client::connect(node, "fulmar").await?;
    let rows = system.query("SELECT datname FROM pg_database").await?;
    let existing: BTreeSet<&str> = rows.iter().filter_map(|row| row.get(0)).collect();
    let tenants = books.iter().map(|books| books.name.as_str()).chain(["fulmar"]);
    let known: BTreeSet<&str> = tenants.chain(copies.iter().map(|copy| copy.name.as_str())).collect();
    let unknown: Vec<_> = existing.difference(&known).collect();
    ensure!(unknown.is_empty(), "dropped databases exist again: {unknown:?}");
    for copy in copies {
        let source = &books[copy.source];
        let context = || format!("{}, a copy of {}", copy.name, source.name);
        match Client::connect(node, &copy.name).await {
            Ok(client) => {
                ensure!(
                    copy.outcome != ClientOutcome::NotCommitted,
                    "{} exists, but its creation failed",
                    context()
                );
                check(&client, &copy, source).await.with_context(context)?;
                drop(client);
                let statement = format!("DROP DATABASE \"{}\" WITH (FORCE)", copy.name);
                system.query(&statement).await.with_context(context)?;
            }
            Err(error) if error.code() == Some(&SqlState::INVALID_CATALOG_NAME) => {
                ensure!(
                    copy.outcome != ClientOutcome::Acknowledged,
                    "{} was acknowledged, but does not exist",
                    context()
                );
            }
            Err(error) => return Err(error).with_context(context),
        }
    }
    Ok(())
}

async fn check(client: &Client, copy: &Copy, source: &Books) -> anyhow::Result<()> {
    check::integrity(client).await?;
    let contents = Contents::read(client).await?;
    ensure!(
        contents.balances == balances(&contents.ledger),
        "balances are {:?}, but the ledger adds up to {:?}",
        contents.balances,
        balances(&contents.ledger)
    );
    let lost: Vec<_> = copy.acknowledged.iter().filter(|xact| !contents.ledger.contains_key(xact)).collect();
    ensure!(lost.is_empty(), "entries {lost:?}, acknowledged before the copy was requested, are missing");
    let foreign: BTreeMap<_, _> =
        contents.ledger.iter().filter(|(xact, entry)| source.ledger.get(xact) != Some(entry)).collect();
    ensure!(foreign.is_empty(), "entries {foreign:?} are not in the source");
    Ok(())
}
