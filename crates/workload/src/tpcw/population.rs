//! The initial rows: items in stock and shipped orders, each with its own random generator.

use std::fmt::Write;

use rand::RngExt;

use crate::client::Client;
use crate::workload::{LoadContext, generator};

/// An order, its payment, and three lines on average.
pub(super) const ROWS_PER_ORDER: u64 = 5;
const MAX_LINES: u32 = 5;

/// Items or orders per COPY, and per CopyData message.
const ROWS_PER_COPY: u32 = 20_000;
const ROWS_PER_MESSAGE: u32 = 200;

/// Distinguish the random generators.
const ITEM: u64 = 0;
const ORDER: u64 = 1;

/// The tables with rows of an order.
const ORDER_TABLES: [(&str, WriteOrder); 3] =
    [("orders", write_order), ("order_line", write_lines), ("cc_xacts", write_payment)];

type WriteOrder = fn(&Order, &mut String) -> u64;

/// Loads missing rows. Existing tables must not have another size.
pub(super) async fn load(
    loading: &mut LoadContext<'_>,
    items: u32,
    orders: u32,
    customers: u32,
) -> anyhow::Result<()> {
    let present = number(loading.client, "SELECT coalesce(max(i_id), 0) FROM item").await?;
    let shipped = "SELECT coalesce(max(o_id), 0) FROM orders WHERE o_status = 'SHIPPED'";
    let shipped = number(loading.client, shipped).await?;
    let all = number(loading.client, "SELECT coalesce(max(o_id), 0) FROM orders").await?;
    // An interrupted load can continue, but not after orders of a run have been added.
    let fits = present <= items && shipped <= orders && (shipped == orders || all == shipped);
    anyhow::ensure!(
        fits && (shipped == 0 || present == items),
        "the existing TPC-W tables have {present} items and {shipped} orders; run with \
         --items {present} and 10/9 times as many --customers, or drop item, shopping_cart, \
         shopping_cart_line, orders, order_line and cc_xacts"
    );
    (loading.loaded)(u64::from(present) + u64::from(shipped) * ROWS_PER_ORDER);
    let seed = loading.seed;
    let mut next = present + 1;
    while next <= items {
        let end = items.min(next + ROWS_PER_COPY - 1);
        copy(loading, "item", next..=end, |id, text| Item::drawn(seed, id).write(id, text)).await?;
        next = end + 1;
    }
    let mut next = shipped + 1;
    while next <= orders {
        let end = orders.min(next + ROWS_PER_COPY - 1);
        loading.client.query("BEGIN").await?;
        for (table, write) in ORDER_TABLES {
            let drawn = |id, text: &mut String| write(&Order::drawn(seed, id, items, customers), text);
            copy(loading, table, next..=end, drawn).await?;
        }
        loading.client.query("COMMIT").await?;
        next = end + 1;
    }
    Ok(())
}

async fn number(client: &mut Client, sql: &str) -> anyhow::Result<u32> {
    let text = client.query(sql).await?.into_iter().flatten().flatten().next();
    Ok(text.ok_or_else(|| anyhow::anyhow!("no rows returned by {sql}"))?.parse()?)
}

/// Copies the rows that `write` generates for each number into a table.
async fn copy(
    loading: &mut LoadContext<'_>,
    table: &str,
    numbers: std::ops::RangeInclusive<u32>,
    write: impl Fn(u32, &mut String) -> u64,
) -> anyhow::Result<()> {
    let (mut numbers, loaded) = (numbers.peekable(), loading.loaded);
    let messages = |message: &mut Vec<u8>| {
        let mut text = String::new();
        let more = numbers.peek().is_some();
        let next = numbers.by_ref().take(ROWS_PER_MESSAGE as usize);
        loaded(next.map(|number| write(number, &mut text)).sum());
        message.extend_from_slice(text.as_bytes());
        more
    };
    loading.client.copy_in(&format!("COPY {table} FROM STDIN"), messages).await?;
    Ok(())
}

/// An item of the shop.
struct Item {
    title: String,
    cost: u32,
    stock: u32,
}

impl Item {
    fn drawn(seed: u64, id: u32) -> Item {
        let mut random = generator(seed, &[ITEM, u64::from(id)]);
        let length = random.random_range(14..=60);
        let title = (0..length).map(|_| char::from(random.random_range(b'A'..=b'Z'))).collect();
        Item { title, cost: random.random_range(100..=9_999), stock: random.random_range(10..=30) }
    }

    fn write(&self, id: u32, text: &mut String) -> u64 {
        let Item { title, cost, stock } = self;
        // Writing to a string cannot fail. The same applies below.
        let _ = writeln!(text, "{id}\t{title}\t{cost}\t{stock}\t{stock}");
        1
    }
}

/// A shipped order.
struct Order {
    id: u32,
    customer: u32,
    day: u32,
    card: u64,
    /// Item, quantity and unit price of each line.
    lines: Vec<[u32; 3]>,
}

impl Order {
    fn drawn(seed: u64, id: u32, items: u32, customers: u32) -> Order {
        let mut random = generator(seed, &[ORDER, u64::from(id)]);
        let (customer, day) = (random.random_range(1..=customers), random.random_range(1..=28));
        let card = random.random_range(0..10_000_000_000_000_000);
        let count = random.random_range(1..=MAX_LINES);
        let mut line = || {
            let item = random.random_range(1..=items);
            [item, random.random_range(1..=300), Item::drawn(seed, item).cost]
        };
        let lines = (0..count).map(|_| line()).collect();
        Order { id, customer, day, card, lines }
    }

    fn total(&self) -> u32 {
        self.lines.iter().map(|[_, quantity, cost]| quantity * cost).sum()
    }
}

fn write_order(order: &Order, text: &mut String) -> u64 {
    let Order { id, customer, day, .. } = order;
    let _ = writeln!(text, "{id}\t{customer}\t2010-01-{day:02} 12:00:00\t{}\tSHIPPED", order.total());
    1
}

fn write_lines(order: &Order, text: &mut String) -> u64 {
    for (number, [item, quantity, cost]) in (1..).zip(&order.lines) {
        let _ = writeln!(text, "{}\t{number}\t{item}\t{quantity}\t{cost}", order.id);
    }
    order.lines.len() as u64
}

fn write_payment(order: &Order, text: &mut String) -> u64 {
    let _ = writeln!(text, "{}\tVISA\t{:016}\t{}", order.id, order.card, order.total());
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_have_random_customers_and_three_lines_on_average() {
        let orders: Vec<Order> = (1..=5_000).map(|id| Order::drawn(7, id, 100, 50)).collect();
        let lines: usize = orders.iter().map(|order| order.lines.len()).sum();
        assert!((14_600..15_400).contains(&lines), "{lines}");
        for customer in 1..=50 {
            let count = orders.iter().filter(|order| order.customer == customer).count();
            assert!((60..=145).contains(&count), "{customer}: {count}");
        }
        let mut text = String::new();
        assert_eq!(write_lines(&orders[0], &mut text), orders[0].lines.len() as u64);
        assert_eq!(text.lines().count(), orders[0].lines.len());
    }

    #[test]
    fn equal_seeds_draw_equal_rows() {
        let text = |seed| {
            let mut text = String::new();
            Item::drawn(seed, 3).write(3, &mut text);
            write_order(&Order::drawn(seed, 3, 100, 50), &mut text);
            write_payment(&Order::drawn(seed, 3, 100, 50), &mut text);
            text
        };
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
    }
}
