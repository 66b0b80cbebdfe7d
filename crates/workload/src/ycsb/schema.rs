//! The tables of YCSB, their data, and the prepared statements of a connection.
//!
//! ```text
//! ycsb_primary      id | field0 ... field9      ElasTraS's primary table
//! ycsb_secondary_1  id | field0 ... field9      and its two secondary tables: a key identifies
//! ycsb_secondary_2  id | field0 ... field9      a row group with one row in each table
//! ```
//!
//! Fields are VARCHAR(100) with 100 random characters. `id` is INTEGER PRIMARY KEY, which is the
//! clustering key in SQLite and an ordinary indexed key in PostgreSQL: the usual form at each
//! server.

use rand::Rng;

use super::Ycsb;
use crate::client::{Client, Error, Statement, Type};
use crate::workload::{Dialect, LoadContext, generator};

pub(super) const TABLES: [&str; 3] = ["ycsb_primary", "ycsb_secondary_1", "ycsb_secondary_2"];
pub(super) const FIELDS: usize = 10;
pub(super) const FIELD_BYTES: usize = 100;
pub(super) const ROW_BYTES: u64 = (FIELDS * FIELD_BYTES) as u64;

/// Rows per COPY, and so per transaction, during a load.
const ROWS_PER_COPY: u32 = 20_000;

/// Rows per CopyData message.
const ROWS_PER_MESSAGE: u32 = 64;

/// The value of a field.
pub(super) type Field = [u8; FIELD_BYTES];

/// Fills a field with new random characters from an alphabet of 64 ASCII characters.
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

/// The prepared statements of a connection.
pub struct Statements {
    pub(super) begin: Statement,
    pub(super) commit: Statement,
    /// By table.
    pub(super) read: Vec<Statement>,
    /// By table.
    pub(super) update: Vec<Statement>,
    /// By table. Empty if the workload does not sort.
    pub(super) sort: Vec<Statement>,
    /// Joins of the first table with itself and with each other table. Empty if the workload does
    /// not join.
    pub(super) join: Vec<Statement>,
    /// The transaction as one call, if the workload uses a procedure.
    pub(super) call: Option<Statement>,
}

impl Statements {
    /// Prepares the statements. A connection always updates the same field, so that it needs only
    /// two statements per table. With a statement per field, the plan cache of the backend would be
    /// measured.
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

/// Creates the tables of a database and loads the missing keys of `0..records`. An interrupted load
/// continues.
pub(super) async fn load(loading: &mut LoadContext<'_>, records: u32, tables: u8) -> anyhow::Result<()> {
    for (number, table) in TABLES.into_iter().enumerate().take(usize::from(tables)) {
        create(loading.client, table).await?;
        let present = count(loading.client, table).await?;
        anyhow::ensure!(
            present <= records,
            "table {table} already has {present} rows; run with --records {present}, \
             or drop the ycsb_ tables"
        );
        (loading.loaded)(u64::from(present));
        let mut lines = Lines { seed: loading.seed, table: number as u64, next: present, end: present };
        while lines.next < records {
            lines.end = records.min(lines.next + ROWS_PER_COPY);
            let write = |message: &mut Vec<u8>| {
                let rows = lines.write(message);
                (loading.loaded)(u64::from(rows));
                rows > 0
            };
            loading.client.copy_in(&format!("COPY {table} FROM STDIN"), write).await?;
        }
    }
    Ok(())
}

/// The rows of a table in COPY's text format. Each row has its own random generator.
struct Lines {
    seed: u64,
    table: u64,
    next: u32,
    end: u32,
}

impl Lines {
    /// Writes the next rows and returns their number.
    fn write(&mut self, message: &mut Vec<u8>) -> u32 {
        let rows = ROWS_PER_MESSAGE.min(self.end - self.next);
        let mut field = [0; FIELD_BYTES];
        for key in self.next..self.next + rows {
            let mut random = generator(self.seed, &[self.table, u64::from(key)]);
            message.extend_from_slice(key.to_string().as_bytes());
            for _ in 0..FIELDS {
                fill(&mut field, &mut random);
                message.push(b'\t');
                message.extend_from_slice(&field);
            }
            message.push(b'\n');
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

/// The number of rows. Keys are loaded in order, so it follows from the largest.
async fn count(client: &mut Client, table: &str) -> anyhow::Result<u32> {
    let rows = client.query(&format!("SELECT coalesce(max(id), -1) + 1 FROM {table}")).await?;
    let text = rows.into_iter().flatten().flatten().next();
    Ok(text.ok_or_else(|| anyhow::anyhow!("no rows returned by a count of {table}"))?.parse()?)
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
    fn fields_are_printable_and_unique() {
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
