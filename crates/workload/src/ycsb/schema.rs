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

use crate::client::{ANSWER_TIMEOUT, Client, Error, Parameter, Statement, Type, within};

pub(super) const TABLES: [&str; 3] = ["ycsb_primary", "ycsb_secondary_1", "ycsb_secondary_2"];
pub(super) const FIELDS: usize = 10;
pub(super) const FIELD_BYTES: usize = 100;

/// Rows of one INSERT while loading: enough to make round trips cheap, few enough parameters for every server.
const ROWS_PER_INSERT: u32 = 64;

/// Rows of one transaction while loading.
const ROWS_PER_COMMIT: u32 = 2_048;

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
pub(super) struct Statements {
    pub(super) begin: Statement,
    pub(super) commit: Statement,
    pub(super) rollback: Statement,
    /// By table.
    pub(super) read: Vec<Statement>,
    /// By table.
    pub(super) update: Vec<Statement>,
    /// The whole transaction as one call, if it is to be that.
    pub(super) call: Option<Statement>,
}

impl Statements {
    /// Prepares what a connection needs. It updates one field of its own, so that two statements per table do:
    /// a backend that kept one for every field would be measured by its plan cache.
    pub(super) async fn prepare(
        client: &mut Client,
        field: usize,
        procedure: bool,
    ) -> Result<Statements, Error> {
        let (mut read, mut update) = (Vec::new(), Vec::new());
        for table in TABLES {
            let sql = format!("SELECT {} FROM {table} WHERE id = $1", fields(", "));
            read.push(client.prepare(&sql, &[Type::Int4]).await?);
            let sql = format!("UPDATE {table} SET field{} = $1 WHERE id = $2", field % FIELDS);
            update.push(client.prepare(&sql, &[Type::Varchar, Type::Int4]).await?);
        }
        Ok(Statements {
            begin: client.prepare("BEGIN", &[]).await?,
            commit: client.prepare("COMMIT", &[]).await?,
            rollback: client.prepare("ROLLBACK", &[]).await?,
            read,
            update,
            call: if procedure { Some(super::procedure::prepare(client).await?) } else { None },
        })
    }
}

/// Makes the tables of a database and loads what is missing of keys `0..records`; calls `loaded` with every number of
/// rows that is there. A load that was interrupted goes on where it was.
pub(super) async fn load(
    client: &mut Client,
    records: u32,
    random: &mut impl Rng,
    mut loaded: impl FnMut(u32),
) -> anyhow::Result<()> {
    for table in TABLES {
        create(client, table).await?;
        let present = count(client, table).await?;
        anyhow::ensure!(
            present <= records,
            "table {table} has {present} rows already; run with --records {present}, or drop the ycsb_ tables"
        );
        loaded(present);
        let mut insert = Insert::default();
        let mut next = present;
        while next < records {
            let until = records.min(next + ROWS_PER_COMMIT);
            client.query("BEGIN").await?;
            for first in (next..until).step_by(ROWS_PER_INSERT as usize) {
                insert.run(client, table, first..until.min(first + ROWS_PER_INSERT), random).await?;
                loaded(until.min(first + ROWS_PER_INSERT) - first);
            }
            client.query("COMMIT").await?;
            next = until;
        }
    }
    Ok(())
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

/// The multi-row INSERT of a table, prepared for the number of rows that it was last used for.
#[derive(Default)]
struct Insert {
    statement: Option<(u32, Statement)>,
    values: Vec<Field>,
}

impl Insert {
    async fn run(
        &mut self,
        client: &mut Client,
        table: &str,
        keys: std::ops::Range<u32>,
        random: &mut impl Rng,
    ) -> anyhow::Result<()> {
        let rows = keys.end - keys.start;
        let statement = match self.statement.take() {
            Some((prepared, statement)) if prepared == rows => statement,
            _ => prepare_insert(client, table, rows as usize).await?,
        };
        self.values.resize(rows as usize * FIELDS, [0; FIELD_BYTES]);
        self.values.iter_mut().for_each(|field| fill(field, random));
        let mut parameters = Vec::with_capacity(rows as usize * (FIELDS + 1));
        for (key, row) in keys.zip(self.values.chunks(FIELDS)) {
            parameters.push(Parameter::Int4(i32::try_from(key)?));
            parameters.extend(row.iter().map(|field| Parameter::Text(field)));
        }
        within(ANSWER_TIMEOUT, client.execute(&statement, &parameters)).await?;
        self.statement = Some((rows, statement));
        Ok(())
    }
}

async fn prepare_insert(client: &mut Client, table: &str, rows: usize) -> Result<Statement, Error> {
    let mut types = [Type::Varchar; FIELDS + 1];
    types[0] = Type::Int4;
    let row = |row: usize| {
        let parameters = (1..=types.len()).map(|column| format!("${}", row * types.len() + column));
        format!("({})", parameters.collect::<Vec<_>>().join(", "))
    };
    let values = (0..rows).map(row).collect::<Vec<_>>().join(", ");
    let sql = format!("INSERT INTO {table} (id, {}) VALUES {values}", fields(", "));
    client.prepare(&sql, &types.repeat(rows)).await
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
