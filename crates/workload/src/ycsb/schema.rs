//! The tables, their statements and their data.
//!
//! ```text
//! ycsb_primary      id | field0 ... field9      ElasTraS's primary table
//! ycsb_secondary_1  id | field0 ... field9      and its two secondary ones: a key names
//! ycsb_secondary_2  id | field0 ... field9      a row group, one row in each table
//! ```
//! Fields are VARCHAR(100) filled with 100 random characters. `id` is INTEGER PRIMARY KEY, which is the clustering key
//! in SQLite and an ordinary indexed key in PostgreSQL: the natural form of each.

use rand::Rng;

use super::Ycsb;
use crate::client::{Client, Error, Statement, Type};
use crate::workload::{Dialect, Loading, generator};

pub(super) const TABLES: [&str; 3] = ["ycsb_primary", "ycsb_secondary_1", "ycsb_secondary_2"];
pub(super) const FIELDS: usize = 10;
pub(super) const FIELD_BYTES: usize = 100;
pub(super) const ROW_BYTES: u64 = (FIELDS * FIELD_BYTES) as u64;

/// Rows of one COPY, and so of one transaction, while loading.
const ROWS_PER_COPY: u32 = 20_000;

/// Rows that are sent at once while loading.
const ROWS_PER_PIECE: u32 = 64;

/// A field's value.
pub(super) type Field = [u8; FIELD_BYTES];

/// Fills a field with fresh random characters (64 different ones, all ASCII).
pub(super) fn fill(field: &mut Field, random: &mut impl Rng) {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    for chunk in field.chunks_mut(10) {
        let mut bits = random.next_u64();
        for byte in chunk {
            *byte = ALPHABET[(bits & 63) as usize];
            bits >>= 6;
        }
    }
}

/// The statements of one connection.
pub struct Statements {
    pub(super) begin: Statement,
    pub(super) commit: Statement,
    /// By table.
    pub(super) read: Vec<Statement>,
    /// By table.
    pub(super) update: Vec<Statement>,
    /// By table; empty if nothing is sorted.
    pub(super) sort: Vec<Statement>,
    /// Of the first table with itself and the others; empty if nothing is joined.
    pub(super) join: Vec<Statement>,
    /// The whole transaction as one call, if it is to be that.
    pub(super) call: Option<Statement>,
}

impl Statements {
    /// Prepares what a connection needs. It updates one field of its own, so that two statements per table do:
    /// a backend that kept one for every field would be measured by its plan cache.
    pub(super) async fn prepare(
        client: &mut Client,
        field: usize,
        workload: &Ycsb,
        dialect: Dialect,
    ) -> Result<Statements, Error> {
        let (mut read, mut update, mut sort, mut join) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for table in TABLES.into_iter().take(usize::from(workload.tables)) {
            let sql = format!("SELECT {} FROM {table} WHERE id = $1", fields(", "));
            read.push(client.prepare(&sql, &[Type::Int4]).await?);
            let sql = format!("UPDATE {table} SET field{} = $1 WHERE id = $2", field % FIELDS);
            update.push(client.prepare(&sql, &[Type::Varchar, Type::Int4]).await?);
            if workload.sorts > 0.0 {
                let sql =
                    format!("SELECT id, field0 FROM {table} WHERE id >= $1 AND id < $2 ORDER BY field0");
                sort.push(client.prepare(&sql, &[Type::Int4; 2]).await?);
            }
            if workload.joins > 0.0 {
                let first = TABLES[0];
                let sql = format!(
                    "SELECT a.id, a.field0, b.field1 FROM {first} AS a JOIN {table} AS b ON b.id = a.id \
                     WHERE a.id >= $1 AND a.id < $2"
                );
                join.push(client.prepare(&sql, &[Type::Int4; 2]).await?);
            }
        }
        Ok(Statements {
            begin: client.prepare("BEGIN", &[]).await?,
            commit: client.prepare("COMMIT", &[]).await?,
            read,
            update,
            sort,
            join,
            call: match workload.procedure {
                true => Some(super::procedure::prepare(client, dialect).await?),
                false => None,
            },
        })
    }
}

/// Makes the tables of a database and loads what is missing of keys `0..records`. A load that was interrupted goes on
/// where it was.
pub(super) async fn load(loading: &mut Loading<'_>, records: u32, tables: u8) -> anyhow::Result<()> {
    for (number, table) in TABLES.into_iter().enumerate().take(usize::from(tables)) {
        create(loading.client, table).await?;
        let present = count(loading.client, table).await?;
        anyhow::ensure!(
            present <= records,
            "table {table} has {present} rows already; run with --records {present}, or drop the ycsb_ tables"
        );
        (loading.loaded)(u64::from(present));
        let mut lines = Lines { seed: loading.seed, table: number as u64, next: present, end: present };
        while lines.next < records {
            lines.end = records.min(lines.next + ROWS_PER_COPY);
            let write = |piece: &mut Vec<u8>| {
                let rows = lines.write(piece);
                (loading.loaded)(u64::from(rows));
                rows > 0
            };
            loading.client.copy_in(&format!("COPY {table} FROM STDIN"), write).await?;
        }
    }
    Ok(())
}

/// The rows of a table as COPY's text, each from a generator of its own.
struct Lines {
    seed: u64,
    table: u64,
    next: u32,
    end: u32,
}

impl Lines {
    /// Writes the next ones; answers how many.
    fn write(&mut self, piece: &mut Vec<u8>) -> u32 {
        let rows = ROWS_PER_PIECE.min(self.end - self.next);
        let mut field = [0; FIELD_BYTES];
        for key in self.next..self.next + rows {
            let mut random = generator(self.seed, &[self.table, u64::from(key)]);
            piece.extend_from_slice(key.to_string().as_bytes());
            for _ in 0..FIELDS {
                fill(&mut field, &mut random);
                piece.push(b'\t');
                piece.extend_from_slice(&field);
            }
            piece.push(b'\n');
        }
        self.next += rows;
        rows
    }
}

async fn create(client: &mut Client, table: &str) -> Result<(), Error> {
    let columns = fields(&format!(" VARCHAR({FIELD_BYTES}) NOT NULL, "));
    client
        .query(&format!(
            "CREATE TABLE IF NOT EXISTS {table} \
             (id INTEGER PRIMARY KEY, {columns} VARCHAR({FIELD_BYTES}) NOT NULL)"
        ))
        .await
        .map(drop)
}

/// Keys are loaded in order, so the greatest tells how many there are.
async fn count(client: &mut Client, table: &str) -> anyhow::Result<u32> {
    let rows = client.query(&format!("SELECT coalesce(max(id), -1) + 1 FROM {table}")).await?;
    let text = rows.into_iter().flatten().flatten().next();
    Ok(text.ok_or_else(|| anyhow::anyhow!("no answer to a count of {table}"))?.parse()?)
}

/// `field0<separator>field1<separator>...field9`
pub(super) fn fields(separator: &str) -> String {
    (0..FIELDS).map(|field| format!("field{field}")).collect::<Vec<_>>().join(separator)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::Xoshiro256PlusPlus;
    use std::collections::HashSet;

    #[test]
    fn fields_are_text_and_never_the_same_twice() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(3);
        let mut seen = HashSet::new();
        let mut field = [0; FIELD_BYTES];
        for _ in 0..10_000 {
            fill(&mut field, &mut random);
            assert!(field.iter().all(|byte| byte.is_ascii_graphic()));
            assert!(seen.insert(field));
        }
    }
}
