//! Copies of tenants, made under load: `CREATE DATABASE ... TEMPLATE` flushes the source and shares its segments.
//!
//! A copy is the source at one moment: it holds everything that was acknowledged before it was asked for, nothing that
//! is not in the source in the end, and its balances add up.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::task::JoinHandle;
use tokio_postgres::error::SqlState;

use crate::books::{Books, Told, balances};
use crate::check::{self, Contents};
use crate::load::{Tenant, told_by};
use crate::node::Node;
use crate::sql::Client;

/// Copies made in one round, at most.
const MOST: usize = 8;

/// A copy that was asked for.
pub struct Copy {
    name: String,
    /// The source's place among the tenants.
    source: usize,
    told: Told,
    /// Ids of the source's transactions that were acknowledged before.
    floor: Vec<i64>,
}

/// Starts making copies of tenants, one after the other.
pub fn start(
    node: &Node,
    round: u64,
    tenants: &[Arc<Tenant>],
    books: &[Books],
) -> JoinHandle<anyhow::Result<Vec<Copy>>> {
    let floors: Vec<Vec<i64>> = books.iter().map(|books| books.ledger.keys().copied().collect()).collect();
    tokio::spawn(make(node.sql, round, tenants.to_vec(), floors))
}

async fn make(
    sql: SocketAddr,
    round: u64,
    tenants: Vec<Arc<Tenant>>,
    floors: Vec<Vec<i64>>,
) -> anyhow::Result<Vec<Copy>> {
    let mut copies = Vec::new();
    let Ok(client) = Client::connect_to(sql, "fulmar").await else { return Ok(copies) };
    for number in 0..MOST {
        let source = (round as usize + number) % tenants.len();
        let tenant = &tenants[source];
        // Something to copy: at the beginning of a round everything may be flushed already.
        while tenant.acknowledged().is_empty() && !client.is_closed() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let name = format!("copy-{round}-{number}");
        let mut floor = floors[source].clone();
        floor.extend(tenant.acknowledged());
        let made = client.query(&format!("CREATE DATABASE \"{name}\" TEMPLATE \"{}\"", tenant.name)).await;
        let told = match made {
            Ok(_) => Told::Yes,
            Err(error) => told_by(&error)?,
        };
        copies.push(Copy { name, source, told, floor });
        if told == Told::Nothing {
            break;
        }
    }
    Ok(copies)
}

/// Looks at what is there of the copies of a round, and drops them. Nothing is there of those of earlier rounds.
pub async fn check_and_drop(node: &Node, copies: Vec<Copy>, books: &[Books]) -> anyhow::Result<()> {
    let system = Client::connect(node, "fulmar").await?;
    let rows = system.query("SELECT datname FROM pg_database").await?;
    let there: BTreeSet<&str> = rows.iter().filter_map(|row| row.get(0)).collect();
    let tenants = books.iter().map(|books| books.name.as_str()).chain(["fulmar"]);
    let known: BTreeSet<&str> = tenants.chain(copies.iter().map(|copy| copy.name.as_str())).collect();
    let strange: Vec<_> = there.difference(&known).collect();
    ensure!(strange.is_empty(), "{strange:?} were dropped, and are there");
    for copy in copies {
        let source = &books[copy.source];
        let context = || format!("{}, a copy of {}", copy.name, source.name);
        match Client::connect(node, &copy.name).await {
            Ok(client) => {
                ensure!(copy.told != Told::No, "{} is there though it was refused", context());
                check(&client, &copy, source).await.with_context(context)?;
                drop(client);
                let dropping = format!("DROP DATABASE \"{}\" WITH (FORCE)", copy.name);
                system.query(&dropping).await.with_context(context)?;
            }
            Err(error) if error.code() == Some(&SqlState::INVALID_CATALOG_NAME) => {
                ensure!(copy.told != Told::Yes, "{} was acknowledged and is not there", context());
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
        "balances are {:?}, its ledger adds up to {:?}",
        contents.balances,
        balances(&contents.ledger)
    );
    let lost: Vec<_> = copy.floor.iter().filter(|xact| !contents.ledger.contains_key(xact)).collect();
    ensure!(lost.is_empty(), "entries {lost:?} were acknowledged before it was made and are not in it");
    let foreign: BTreeMap<_, _> =
        contents.ledger.iter().filter(|(xact, entry)| source.ledger.get(xact) != Some(entry)).collect();
    ensure!(foreign.is_empty(), "entries {foreign:?} are not in its source");
    Ok(())
}
