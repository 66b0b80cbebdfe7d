//! The tables of Voter, their data, and the prepared statements of a connection.
//!
//! ```text
//! contestants       contestant_number | contestant_name
//! area_code_state   area_code | state
//! votes             phone_number | state | contestant_number, with an index on phone_number
//! ```

use crate::client::{Client, Error, Statement, Type};
use crate::workload::{Dialect, LoadContext};

/// Some North American area codes and their states, so that the state of a vote depends on its
/// telephone.
pub(super) const AREA_CODES: [(&str, &str); 32] = [
    ("201", "NJ"),
    ("202", "DC"),
    ("203", "CT"),
    ("205", "AL"),
    ("206", "WA"),
    ("207", "ME"),
    ("208", "ID"),
    ("212", "NY"),
    ("213", "CA"),
    ("214", "TX"),
    ("215", "PA"),
    ("216", "OH"),
    ("217", "IL"),
    ("218", "MN"),
    ("219", "IN"),
    ("225", "LA"),
    ("228", "MS"),
    ("229", "GA"),
    ("231", "MI"),
    ("239", "FL"),
    ("240", "MD"),
    ("252", "NC"),
    ("262", "WI"),
    ("270", "KY"),
    ("302", "DE"),
    ("303", "CO"),
    ("304", "WV"),
    ("307", "WY"),
    ("308", "NE"),
    ("314", "MO"),
    ("316", "KS"),
    ("319", "IA"),
];

/// Each area code has seven-digit numbers.
const PHONES_PER_CODE: u32 = 10_000_000;

pub(super) const MOST_PHONES: i64 = AREA_CODES.len() as i64 * PHONES_PER_CODE as i64;

/// A telephone number: an area code and seven digits.
pub(super) type Phone = [u8; 10];

/// Returns the number of the n-th telephone. Consecutive telephones have different area codes.
pub(super) fn phone(number: u32) -> Phone {
    let codes = AREA_CODES.len() as u32;
    let (code, mut rest) = (number % codes, number / codes % PHONES_PER_CODE);
    let mut phone = [b'0'; 10];
    phone[..3].copy_from_slice(AREA_CODES[code as usize].0.as_bytes());
    for digit in phone[3..].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    phone
}

const CREATE: [&str; 4] = [
    "CREATE TABLE IF NOT EXISTS contestants \
     (contestant_number INTEGER PRIMARY KEY, contestant_name VARCHAR(50) NOT NULL)",
    "CREATE TABLE IF NOT EXISTS area_code_state (area_code VARCHAR(3) PRIMARY KEY, state VARCHAR(2) NOT NULL)",
    "CREATE TABLE IF NOT EXISTS votes \
     (phone_number VARCHAR(10) NOT NULL, state VARCHAR(2) NOT NULL, contestant_number INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS votes_by_phone ON votes (phone_number)",
];

/// Creates the tables and loads those that are empty. Votes of earlier runs are kept.
pub(super) async fn load(loading: &mut LoadContext<'_>, contestants: u32) -> anyhow::Result<()> {
    for sql in CREATE {
        loading.client.query(sql).await?;
    }
    let names = (1..=contestants).map(|number| format!("{number}\tContestant {number}\n"));
    fill(loading, "contestants", names.collect(), u64::from(contestants)).await?;
    let codes = AREA_CODES.iter().map(|(code, state)| format!("{code}\t{state}\n"));
    fill(loading, "area_code_state", codes.collect(), AREA_CODES.len() as u64).await
}

/// Copies `lines` into an empty table. A table that already has `rows` rows is left unchanged.
async fn fill(loading: &mut LoadContext<'_>, table: &str, lines: String, rows: u64) -> anyhow::Result<()> {
    let answer = loading.client.query(&format!("SELECT count(*) FROM {table}")).await?;
    let present = answer.into_iter().flatten().flatten().next().unwrap_or_default();
    if present == "0" {
        let mut lines = Some(lines.into_bytes());
        let write = |message: &mut Vec<u8>| lines.take().map(|bytes| *message = bytes).is_some();
        loading.client.copy_in(&format!("COPY {table} FROM STDIN"), write).await?;
    } else {
        anyhow::ensure!(
            present == rows.to_string(),
            "table {table} has {present} rows instead of {rows}; \
             drop the tables contestants, area_code_state and votes"
        );
    }
    (loading.loaded)(rows);
    Ok(())
}

/// The prepared statements of a connection.
pub struct Statements {
    pub(super) begin: Statement,
    pub(super) commit: Statement,
    pub(super) contestant: Statement,
    pub(super) votes: Statement,
    pub(super) vote: Statement,
    /// The vote as one call, if the workload uses a procedure.
    pub(super) call: Option<Statement>,
}

impl Statements {
    pub(super) async fn prepare(
        client: &mut Client,
        procedure: Option<Dialect>,
    ) -> Result<Statements, Error> {
        const CONTESTANT: &str = "SELECT contestant_number FROM contestants WHERE contestant_number = $1";
        const VOTES: &str = "SELECT contestant_number FROM votes WHERE phone_number = $1";
        const VOTE: &str = "INSERT INTO votes (phone_number, state, contestant_number) \
                            SELECT $1, state, $2 FROM area_code_state WHERE area_code = $3";
        Ok(Statements {
            begin: client.prepare("BEGIN", &[]).await?,
            commit: client.prepare("COMMIT", &[]).await?,
            contestant: client.prepare(CONTESTANT, &[Type::Int4]).await?,
            votes: client.prepare(VOTES, &[Type::Varchar]).await?,
            vote: client.prepare(VOTE, &[Type::Varchar, Type::Int4, Type::Varchar]).await?,
            call: match procedure {
                Some(dialect) => Some(super::procedure::prepare(client, dialect).await?),
                None => None,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn telephones_are_unique_and_have_known_area_codes() {
        let mut seen = HashSet::new();
        for number in (0..200_000).chain([(MOST_PHONES - 1) as u32]) {
            let phone = phone(number);
            assert!(seen.insert(phone), "{number}");
            assert!(AREA_CODES.iter().any(|(code, _)| phone.starts_with(code.as_bytes())));
            assert!(phone.iter().all(u8::is_ascii_digit));
        }
    }
}
