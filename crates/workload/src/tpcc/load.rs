//! Loads missing warehouses with COPY, one at a time.
//!
//! All rows of a warehouse, including its own, are loaded in one transaction. A warehouse therefore
//! either exists completely or not at all. An interrupted load continues with the next warehouse,
//! and so does a load that requests more warehouses than exist.

use super::options::Tpcc;
use super::population::Rows;
use super::procedures;
use super::schema::{Table, statements};
use crate::client::Client;
use crate::workload::{Dialect, LoadContext};

/// Approximate length of a CopyData message.
const MESSAGE_BYTES: usize = 64 << 10;

/// Number of rows after a load.
pub(super) fn rows(scale: &Tpcc) -> u64 {
    let count = |table| Rows::new(scale, table, 1, 0).count();
    count(Table::Item) + u64::from(scale.warehouses) * Table::of_warehouse().map(count).sum::<u64>()
}

pub(super) async fn load(scale: &Tpcc, loading: &mut LoadContext<'_>) -> anyhow::Result<()> {
    for statement in statements(loading.dialect) {
        loading.client.query(&statement).await?;
    }
    let present = present(scale, loading.client).await?;
    if present == 0 {
        // Without a warehouse the items may be from an interrupted load, so they are loaded again.
        loading.client.query("DELETE FROM item").await?;
        copy(scale, Table::Item, 0, loading).await?;
    } else {
        let there = Tpcc { warehouses: present.min(scale.warehouses), ..scale.clone() };
        (loading.loaded)(rows(&there));
    }
    for warehouse in present + 1..=scale.warehouses {
        loading.client.query("BEGIN").await?;
        for table in Table::of_warehouse() {
            copy(scale, table, warehouse, loading).await?;
        }
        loading.client.query("COMMIT").await?;
    }
    if present < scale.warehouses && loading.dialect == Dialect::Postgres {
        // Autovacuum would do this about a minute later. Fulmar finds every row by its key without
        // statistics.
        loading.client.query("ANALYZE").await?;
    }
    if scale.procedure {
        procedures::create(loading.client, loading.dialect).await?;
    }
    Ok(())
}

/// Returns the number of existing warehouses. Fails if they have another scale.
async fn present(scale: &Tpcc, client: &mut Client) -> anyhow::Result<u32> {
    let present = number(client, "SELECT count(*) FROM warehouse").await?;
    if present > 0 {
        let items = number(client, "SELECT max(i_id) FROM item").await?;
        let customers = "SELECT max(c_id) FROM customer WHERE c_w_id = 1 AND c_d_id = 1";
        let customers = number(client, customers).await?;
        anyhow::ensure!(
            (items, customers) == (scale.items, scale.customers),
            "the existing TPC-C tables have {items} items and {customers} customers per district; \
             run with --items {items} --customers {customers}, or drop the tables"
        );
    }
    Ok(present)
}

async fn number(client: &mut Client, sql: &str) -> anyhow::Result<u32> {
    let rows = client.query(sql).await?;
    let text = rows.into_iter().flatten().flatten().next();
    Ok(text.ok_or_else(|| anyhow::anyhow!("no rows returned by {sql}"))?.parse()?)
}

async fn copy(
    scale: &Tpcc,
    table: Table,
    warehouse: u32,
    loading: &mut LoadContext<'_>,
) -> anyhow::Result<()> {
    let mut rows = Rows::new(scale, table, warehouse, loading.seed);
    let loaded = loading.loaded;
    let command = format!("COPY {} ({}) FROM STDIN", table.name(), table.names());
    loading
        .client
        .copy_in(&command, |message| {
            let written = rows.write(MESSAGE_BYTES, message);
            loaded(written);
            written > 0
        })
        .await?;
    Ok(())
}
