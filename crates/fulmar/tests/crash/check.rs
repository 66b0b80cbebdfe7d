//! After a restart: a tenant is compared with its books.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use anyhow::{Context, bail, ensure};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::IteratorRandom;

use crate::books::{Attempt, Books, Change, Entry, TOKEN_BYTES, balances};
use crate::node::Node;
use crate::sql::{Answer, Client, Outcome, number};

/// Outcomes of older transactions that are asked for again, each round.
const ASKED_AGAIN: usize = 5;
/// Differences shown.
const MOST_SHOWN: usize = 8;

/// All that is in a tenant.
#[derive(PartialEq, Debug)]
pub struct Contents {
    pub balances: BTreeMap<i64, i64>,
    pub ledger: BTreeMap<i64, Entry>,
    pub notes: BTreeMap<i64, i64>,
}

impl Contents {
    /// Reads a tenant; an error if a note's text is not what its number and length make it.
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

/// SQLite's own opinion.
pub async fn integrity(client: &Client) -> anyhow::Result<()> {
    for pragma in ["PRAGMA integrity_check", "PRAGMA foreign_key_check"] {
        let rows = client.query(pragma).await?;
        let said: Vec<_> = rows.iter().filter_map(|row| row.get(0)).filter(|said| *said != "ok").collect();
        ensure!(said.is_empty(), "{pragma} says {said:?}");
    }
    Ok(())
}

/// Settles what nobody was told of, and compares. Answers how many of those transactions had happened.
pub async fn tenant(node: &Node, books: &mut Books, seed: u64) -> anyhow::Result<usize> {
    let name = books.name.clone();
    compare(node, books, seed).await.with_context(|| name)
}

async fn compare(node: &Node, books: &mut Books, seed: u64) -> anyhow::Result<usize> {
    let client = Client::connect(node, &books.name).await?;
    // Before anything is asked for: asking may write.
    let contents = Contents::read(&client).await?;
    let (mut outcomes, mut happened) = (Vec::new(), 0);
    for attempt in std::mem::take(&mut books.unanswered) {
        outcomes.extend(ask(&client, &contents, attempt.xact).await?);
        if has_happened(&contents, &attempt)? {
            happened += 1;
            books.apply(&attempt);
        } else {
            books.aborted.extend(attempt.xact);
        }
    }
    differences("ledger entries", &books.ledger, &contents.ledger)?;
    differences("notes", &books.notes, &contents.notes)?;
    differences("balances", &balances(&books.ledger), &contents.balances)?;
    integrity(&client).await?;

    for (xact, outcome) in std::mem::take(&mut books.answers) {
        let is_there = contents.ledger.contains_key(&xact);
        ensure!(
            is_there == (outcome == Outcome::Committed),
            "under load the outcome of {xact} was {outcome:?}, but its entry is {}there",
            if is_there { "" } else { "not " }
        );
        outcomes.push((xact, outcome));
    }
    outcomes.extend(known(books, seed));
    let another = Client::connect(node, &books.name).await?;
    for (xact, expected) in outcomes {
        let outcome = another.outcome(xact).await?;
        let kind = if books.unchanging.contains(&xact) { "read-only transaction" } else { "transaction" };
        ensure!(outcome == expected, "{kind} {xact} is {expected:?}, but pg_xact_status says {outcome:?}");
    }
    let after = Contents::read(&another).await?;
    ensure!(after == contents, "asking for outcomes has changed the data");
    books.unchanging.push(commit_nothing(&another).await?);
    Ok(happened)
}

/// Asks for the outcome of a transaction that nobody was told of, if it can be asked for.
async fn ask(client: &Client, contents: &Contents, xact: Option<i64>) -> anyhow::Result<Option<Answer>> {
    let Some(xact) = xact else { return Ok(None) };
    let outcome = client.outcome(xact).await?;
    let is_there = contents.ledger.contains_key(&xact);
    ensure!(
        is_there == (outcome == Outcome::Committed),
        "transaction {xact} is {outcome:?}, but its entry is {}there",
        if is_there { "" } else { "not " }
    );
    Ok(Some((xact, outcome)))
}

/// Whether a transaction is there, by one of its changes; that the others are is for the comparison to find.
fn has_happened(contents: &Contents, attempt: &Attempt) -> anyhow::Result<bool> {
    match (attempt.xact, attempt.changes.as_slice()) {
        (Some(xact), _) => Ok(contents.ledger.contains_key(&xact)),
        (None, [Change::Add { note, .. }]) => Ok(contents.notes.contains_key(note)),
        (None, [Change::Remove { note }]) => Ok(!contents.notes.contains_key(note)),
        (None, other) => bail!("nobody can tell whether {other:?} has happened"),
    }
}

/// A transaction that only reads has an outcome too, which outlives the node.
async fn commit_nothing(client: &Client) -> anyhow::Result<i64> {
    let rows =
        client.query("BEGIN; SELECT pg_current_xact_id(); SELECT count(*) FROM ledger; COMMIT").await?;
    number(rows.first().context("no transaction id")?, 0)
}

/// Outcomes that are known from the books: of all that did not happen in this round, and of some of all others.
fn known(books: &mut Books, seed: u64) -> Vec<Answer> {
    let mut random = StdRng::seed_from_u64(seed);
    let (before, fresh) = books.aborted.split_at(books.aborted_before);
    let again = before.iter().sample(&mut random, ASKED_AGAIN);
    let aborted = fresh.iter().chain(again).map(|xact| (*xact, Outcome::Aborted));
    let committed = books.ledger.keys().sample(&mut random, ASKED_AGAIN);
    let unchanging = books.unchanging.iter().rev().take(ASKED_AGAIN);
    let committed = committed.into_iter().chain(unchanging).map(|xact| (*xact, Outcome::Committed));
    let known = aborted.chain(committed).collect();
    books.aborted_before = books.aborted.len();
    known
}

/// An error that shows what differs.
fn differences<V: PartialEq + Debug>(
    what: &str,
    expected: &BTreeMap<i64, V>,
    found: &BTreeMap<i64, V>,
) -> anyhow::Result<()> {
    let keys: BTreeSet<_> = expected.keys().chain(found.keys()).collect();
    let differing: Vec<_> = keys.into_iter().filter(|key| expected.get(key) != found.get(key)).collect();
    if differing.is_empty() {
        return Ok(());
    }
    let shown = differing.iter().take(MOST_SHOWN).fold(String::new(), |text, key| {
        format!("{text}\n  {key}: expected {:?}, found {:?}", expected.get(key), found.get(key))
    });
    bail!("{} {what} differ:{shown}", differing.len())
}
