//! Compares a tenant with its books after a restart.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use anyhow::{Context, bail, ensure};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::IteratorRandom;

use crate::books::{Attempt, Books, Change, Entry, TOKEN_BYTES, balances};
use crate::node::Node;
use crate::sql::{Client, Outcome, QueriedOutcome, number};

/// Number of older transactions of each kind with an outcome that is queried again in each round.
const RECHECKED_OUTCOMES: usize = 5;
/// Maximum number of differences in an error message.
const MAX_SHOWN_DIFFERENCES: usize = 8;

/// The contents of a tenant.
#[derive(PartialEq, Debug)]
pub struct Contents {
    pub balances: BTreeMap<i64, i64>,
    pub ledger: BTreeMap<i64, Entry>,
    pub notes: BTreeMap<i64, i64>,
}

impl Contents {
    /// Reads a tenant. Returns an error if the text of a note does not match its id and length.
    pub async fn read(client: &Client) -> anyhow::Result<Contents> {
        let mut contents =
            Contents { balances: BTreeMap::new(), ledger: BTreeMap::new(), notes: BTreeMap::new() };
        for row in client.query("SELECT id, balance FROM account").await? {
            contents.balances.insert(number(&row, 0)?, number(&row, 1)?);
        }
        for row in client.query("SELECT xact, payer, payee, amount FROM ledger").await? {
            let entry = Entry { payer: number(&row, 1)?, payee: number(&row, 2)?, amount: number(&row, 3)? };
            contents.ledger.insert(number(&row, 0)?, entry);
        }
        let notes = format!(
            "SELECT id, length(body),
                    body = replace(hex(zeroblob(length(body) / {TOKEN_BYTES})), '00', printf('%016d', id)) AS whole
             FROM note"
        );
        for row in client.query(&notes).await? {
            let (note, bytes): (i64, i64) = (number(&row, 0)?, number(&row, 1)?);
            ensure!(row.get(2) == Some("1"), "the text of note {note} ({bytes} bytes) is wrong");
            contents.notes.insert(note, bytes);
        }
        Ok(contents)
    }
}

/// Runs SQLite's integrity checks.
pub async fn integrity(client: &Client) -> anyhow::Result<()> {
    for pragma in ["PRAGMA integrity_check", "PRAGMA foreign_key_check"] {
        let rows = client.query(pragma).await?;
        let problems: Vec<_> =
            rows.iter().filter_map(|row| row.get(0)).filter(|text| *text != "ok").collect();
        ensure!(problems.is_empty(), "{pragma} reports {problems:?}");
    }
    Ok(())
}

/// Determines the outcomes of transactions with an unknown outcome, and compares the tenant with
/// its books. Returns how many of these transactions have committed.
pub async fn tenant(node: &Node, books: &mut Books, seed: u64) -> anyhow::Result<usize> {
    let name = books.name.clone();
    compare(node, books, seed).await.with_context(|| name)
}

async fn compare(node: &Node, books: &mut Books, seed: u64) -> anyhow::Result<usize> {
    let client = Client::connect(node, &books.name).await?;
    // Read before any outcome is queried, because such a query may write.
    let contents = Contents::read(&client).await?;
    let (mut outcomes, mut committed) = (Vec::new(), 0);
    for attempt in std::mem::take(&mut books.unknown) {
        outcomes.extend(query_outcome(&client, &contents, attempt.xact).await?);
        if has_committed(&contents, &attempt)? {
            committed += 1;
            books.apply(&attempt);
        } else {
            books.aborted.extend(attempt.xact);
        }
    }
    compare_maps("ledger entries", &books.ledger, &contents.ledger)?;
    compare_maps("notes", &books.notes, &contents.notes)?;
    compare_maps("balances", &balances(&books.ledger), &contents.balances)?;
    integrity(&client).await?;

    for (xact, outcome) in std::mem::take(&mut books.queried_outcomes) {
        let exists = contents.ledger.contains_key(&xact);
        ensure!(
            exists == (outcome == Outcome::Committed),
            "under load, transaction {xact} was reported as {outcome:?}, but its entry {}",
            if exists { "exists" } else { "does not exist" }
        );
        outcomes.push((xact, outcome));
    }
    outcomes.extend(known_outcomes(books, seed));
    let another = Client::connect(node, &books.name).await?;
    for (xact, expected) in outcomes {
        let outcome = another.outcome(xact).await?;
        let kind = if books.read_only.contains(&xact) { "read-only transaction" } else { "transaction" };
        ensure!(outcome == expected, "{kind} {xact} is {expected:?}, but pg_xact_status returns {outcome:?}");
    }
    let after = Contents::read(&another).await?;
    ensure!(after == contents, "outcome queries must not change the data");
    books.read_only.push(commit_read_only_transaction(&another).await?);
    Ok(committed)
}

/// Queries an unknown outcome, if the transaction has an id.
async fn query_outcome(
    client: &Client,
    contents: &Contents,
    xact: Option<i64>,
) -> anyhow::Result<Option<QueriedOutcome>> {
    let Some(xact) = xact else { return Ok(None) };
    let outcome = client.outcome(xact).await?;
    let exists = contents.ledger.contains_key(&xact);
    ensure!(
        exists == (outcome == Outcome::Committed),
        "transaction {xact} is {outcome:?}, but its entry {}",
        if exists { "exists" } else { "does not exist" }
    );
    Ok(Some((xact, outcome)))
}

/// Returns true if one change of the transaction is in the contents. The comparison finds missing
/// other changes.
fn has_committed(contents: &Contents, attempt: &Attempt) -> anyhow::Result<bool> {
    match (attempt.xact, attempt.changes.as_slice()) {
        (Some(xact), _) => Ok(contents.ledger.contains_key(&xact)),
        (None, [Change::Add { note, .. }]) => Ok(contents.notes.contains_key(note)),
        (None, [Change::Remove { note }]) => Ok(!contents.notes.contains_key(note)),
        (None, other) => bail!("cannot determine whether {other:?} has committed"),
    }
}

/// Commits a read-only transaction and returns its id. Its outcome must survive crashes as well.
async fn commit_read_only_transaction(client: &Client) -> anyhow::Result<i64> {
    let rows =
        client.query("BEGIN; SELECT pg_current_xact_id(); SELECT count(*) FROM ledger; COMMIT").await?;
    number(rows.first().context("no transaction id")?, 0)
}

/// Returns outcomes known from the books: of all transactions that did not commit in this round,
/// and of a sample of all others.
fn known_outcomes(books: &mut Books, seed: u64) -> Vec<QueriedOutcome> {
    let mut random = StdRng::seed_from_u64(seed);
    let (before, fresh) = books.aborted.split_at(books.checked_aborted);
    let again = before.iter().sample(&mut random, RECHECKED_OUTCOMES);
    let aborted = fresh.iter().chain(again).map(|xact| (*xact, Outcome::Aborted));
    let committed = books.ledger.keys().sample(&mut random, RECHECKED_OUTCOMES);
    let unchanging = books.read_only.iter().rev().take(RECHECKED_OUTCOMES);
    let committed = committed.into_iter().chain(unchanging).map(|xact| (*xact, Outcome::Committed));
    let known = aborted.chain(committed).collect();
    books.checked_aborted = books.aborted.len();
    known
}

/// Returns an error that lists the differences, if any.
fn compare_maps<V: PartialEq + Debug>(
    kind: &str,
    expected: &BTreeMap<i64, V>,
    found: &BTreeMap<i64, V>,
) -> anyhow::Result<()> {
    let keys: BTreeSet<_> = expected.keys().chain(found.keys()).collect();
    let differing: Vec<_> = keys.into_iter().filter(|key| expected.get(key) != found.get(key)).collect();
    if differing.is_empty() {
        return Ok(());
    }
    let shown = differing.iter().take(MAX_SHOWN_DIFFERENCES).fold(String::new(), |text, key| {
        format!("{text}\n  {key}: expected {:?}, found {:?}", expected.get(key), found.get(key))
    });
    bail!("{} {kind} differ:{shown}", differing.len())
}
