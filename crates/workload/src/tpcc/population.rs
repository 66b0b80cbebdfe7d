//! The initial rows (clause 4.3.3.1), as lines in COPY's text format.
//!
//! The rows of a table and a warehouse are written in *units*: a row, or the lines of one order.
//! Each table of each warehouse has its own random generator, so that a load that continues after
//! an interruption creates the same rows. Values that must agree between tables are drawn from a
//! generator per order.
//!
//! No text contains a byte that COPY would escape.

use std::io::Write;

use rand::RngExt;
use rand::seq::SliceRandom;

use super::options::{DISTRICTS, Tpcc};
use super::random::{Constants, LAST_NAMES, write_data, write_digits, write_last_name, write_letters};
use super::schema::Table;
use crate::workload::{Random, generator};

/// The date of all initial rows. It is fixed, so that equal seeds create equal rows.
const LOADED_AT: &str = "2026-01-01 00:00:00";

/// The initial payment of each customer in cents, recorded in one row of the history.
const FIRST_PAYMENT_CENTS: u32 = 1_000;

/// The mean number of lines per order, for the progress display.
const LINES_OF_ORDER: u64 = 10;

/// The rows of a table that belong to a warehouse. Items belong to no warehouse and have number 0.
pub(super) struct Rows<'a> {
    scale: &'a Tpcc,
    table: Table,
    warehouse: u32,
    seed: u64,
    random: Random,
    next: u32,
    /// The customers of the current district, by order.
    customers: Vec<u32>,
}

impl<'a> Rows<'a> {
    pub(super) fn new(scale: &'a Tpcc, table: Table, warehouse: u32, seed: u64) -> Rows<'a> {
        let random = generator(seed, &[table as u64, u64::from(warehouse)]);
        Rows { scale, table, warehouse, seed, random, next: 0, customers: Vec::new() }
    }

    fn units(&self) -> u32 {
        let customers = DISTRICTS * self.scale.customers;
        match self.table {
            Table::Item | Table::Stock => self.scale.items,
            Table::Warehouse => 1,
            Table::District => DISTRICTS,
            Table::Customer | Table::History | Table::Orders | Table::OrderLine => customers,
            Table::NewOrder => DISTRICTS * (self.scale.customers - self.scale.delivered()),
        }
    }

    /// The number of rows. For order lines it is approximate.
    pub(super) fn count(&self) -> u64 {
        u64::from(self.units()) * self.rows_of_unit()
    }

    fn rows_of_unit(&self) -> u64 {
        if self.table == Table::OrderLine { LINES_OF_ORDER } else { 1 }
    }

    /// Writes the next rows, until `out` has at least `bytes` bytes. Returns their number, as
    /// counted by [`Rows::count`], or 0 if there are none left.
    pub(super) fn write(&mut self, bytes: usize, out: &mut Vec<u8>) -> u64 {
        let first = self.next;
        while self.next < self.units() && out.len() < bytes {
            self.write_unit(out);
            self.next += 1;
        }
        u64::from(self.next - first) * self.rows_of_unit()
    }

    fn write_unit(&mut self, out: &mut Vec<u8>) {
        let (warehouse, customers) = (self.warehouse, self.scale.customers);
        let (district, number) = (self.next / customers + 1, self.next % customers + 1);
        match self.table {
            Table::Item => item(self.next + 1, &mut self.random, out),
            Table::Warehouse => warehouse_row(warehouse, customers, &mut self.random, out),
            Table::District => district_row(warehouse, self.next + 1, customers, &mut self.random, out),
            Table::Customer => customer(self.scale, warehouse, district, number, &mut self.random, out),
            Table::History => history(warehouse, district, number, &mut self.random, out),
            Table::Stock => stock(warehouse, self.next + 1, &mut self.random, out),
            Table::NewOrder => {
                let open = customers - self.scale.delivered();
                let (district, number) = (self.next / open + 1, self.next % open + 1);
                line(out, format_args!("{}\t{district}\t{warehouse}", self.scale.delivered() + number));
            }
            Table::Orders => {
                if number == 1 {
                    self.customers = (1..=customers).collect();
                    self.customers.shuffle(&mut self.random);
                }
                let buyer = self.customers[number as usize - 1];
                self.order(district, number, buyer, out);
            }
            Table::OrderLine => self.lines_of_order(district, number, out),
        }
    }

    /// The number of lines of an order, which is the same in both tables.
    fn lines(&self, district: u32, order: u32) -> u32 {
        let path = [Table::Orders as u64, u64::from(self.warehouse), u64::from(district), u64::from(order)];
        generator(self.seed, &path).random_range(5..=15)
    }

    fn order(&mut self, district: u32, order: u32, customer: u32, out: &mut Vec<u8>) {
        let (warehouse, lines) = (self.warehouse, self.lines(district, order));
        field(out, format_args!("{order}\t{district}\t{warehouse}\t{customer}\t{LOADED_AT}"));
        match order <= self.scale.delivered() {
            true => field(out, self.random.random_range(1..=10)),
            false => field(out, "\\N"),
        }
        line(out, format_args!("{lines}\t1"));
    }

    fn lines_of_order(&mut self, district: u32, order: u32, out: &mut Vec<u8>) {
        let (warehouse, delivered) = (self.warehouse, order <= self.scale.delivered());
        for number in 1..=self.lines(district, order) {
            let item = self.random.random_range(1..=self.scale.items);
            let amount_cents = if delivered { 0 } else { self.random.random_range(1..=999_999) };
            let delivery = if delivered { LOADED_AT } else { "\\N" };
            field(out, format_args!("{order}\t{district}\t{warehouse}\t{number}\t{item}\t{warehouse}"));
            field(out, format_args!("{delivery}\t5\t{amount_cents}"));
            write_letters(24, 24, &mut self.random, out);
            out.push(b'\n');
        }
    }
}

/// Writes a field and a tab. Writing to memory cannot fail.
fn field(out: &mut Vec<u8>, value: impl std::fmt::Display) {
    let _ = write!(out, "{value}\t");
}

/// Writes the last field of a line.
fn line(out: &mut Vec<u8>, value: impl std::fmt::Display) {
    let _ = writeln!(out, "{value}");
}

fn text(min: usize, max: usize, random: &mut Random, out: &mut Vec<u8>) {
    write_letters(min, max, random, out);
    out.push(b'\t');
}

/// Writes two streets, a city, a state and a zip code.
fn address(random: &mut Random, out: &mut Vec<u8>) {
    for _ in 0..3 {
        text(10, 20, random, out);
    }
    text(2, 2, random, out);
    write_digits(4, random, out);
    field(out, "11111");
}

fn item(item: u32, random: &mut Random, out: &mut Vec<u8>) {
    field(out, format_args!("{item}\t{}", random.random_range(1..=10_000)));
    text(14, 24, random, out);
    field(out, random.random_range(100..=10_000));
    write_data(random, out);
    out.push(b'\n');
}

fn warehouse_row(warehouse: u32, customers: u32, random: &mut Random, out: &mut Vec<u8>) {
    field(out, warehouse);
    text(6, 10, random, out);
    address(random, out);
    let ytd_cents = u64::from(DISTRICTS) * u64::from(customers) * u64::from(FIRST_PAYMENT_CENTS);
    line(out, format_args!("{}\t{ytd_cents}", random.random_range(0..=2_000)));
}

fn district_row(warehouse: u32, district: u32, customers: u32, random: &mut Random, out: &mut Vec<u8>) {
    field(out, format_args!("{district}\t{warehouse}"));
    text(6, 10, random, out);
    address(random, out);
    let ytd_cents = u64::from(customers) * u64::from(FIRST_PAYMENT_CENTS);
    line(out, format_args!("{}\t{ytd_cents}\t{}", random.random_range(0..=2_000), customers + 1));
}

fn customer(
    scale: &Tpcc,
    warehouse: u32,
    district: u32,
    customer: u32,
    random: &mut Random,
    out: &mut Vec<u8>,
) {
    field(out, format_args!("{customer}\t{district}\t{warehouse}"));
    text(8, 16, random, out);
    field(out, "OE");
    let name = match customer {
        first @ ..=LAST_NAMES => first - 1,
        _ => Constants::LOAD.last_name(scale.last_names(), random),
    };
    write_last_name(name, out);
    out.push(b'\t');
    address(random, out);
    write_digits(16, random, out);
    let credit = if random.random_range(0..10) == 0 { "BC" } else { "GC" };
    let (limit_cents, discount) = (5_000_000, random.random_range(0..=5_000));
    field(out, format_args!("\t{LOADED_AT}\t{credit}\t{limit_cents}\t{discount}"));
    field(out, format_args!("-{FIRST_PAYMENT_CENTS}\t{FIRST_PAYMENT_CENTS}\t1\t0"));
    write_letters(300, 500, random, out);
    out.push(b'\n');
}

fn history(warehouse: u32, district: u32, customer: u32, random: &mut Random, out: &mut Vec<u8>) {
    field(out, format_args!("{customer}\t{district}\t{warehouse}\t{district}\t{warehouse}"));
    field(out, format_args!("{LOADED_AT}\t{FIRST_PAYMENT_CENTS}"));
    write_letters(12, 24, random, out);
    out.push(b'\n');
}

fn stock(warehouse: u32, item: u32, random: &mut Random, out: &mut Vec<u8>) {
    field(out, format_args!("{item}\t{warehouse}\t{}", random.random_range(10..=100)));
    for _ in 0..DISTRICTS {
        text(24, 24, random, out);
    }
    field(out, "0\t0\t0");
    write_data(random, out);
    out.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn all(scale: &Tpcc, table: Table, seed: u64) -> Vec<Vec<String>> {
        let mut rows = Rows::new(scale, table, 1, seed);
        let mut out = Vec::new();
        // Small messages, because the rows must not depend on where they are split.
        while rows.write(out.len() + 100, &mut out) > 0 {}
        let text = String::from_utf8(out).unwrap();
        text.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect()
    }

    #[test]
    fn counts_match_the_specification() {
        let scale = Tpcc { warehouses: 1, ..Tpcc::default() };
        let counted = |table| Rows::new(&scale, table, 1, 1).count();
        assert_eq!(
            Table::ALL.map(counted),
            [100_000, 1, 10, 30_000, 30_000, 9_000, 30_000, 300_000, 100_000]
        );
    }

    #[test]
    fn orders_and_their_lines_agree_and_each_customer_has_one() {
        let scale = Tpcc { customers: 100, items: 50, ..Tpcc::default() };
        let (orders, lines) = (all(&scale, Table::Orders, 7), all(&scale, Table::OrderLine, 7));
        let mut counted: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        lines.iter().for_each(|line| *counted.entry((&line[1], &line[0])).or_default() += 1);
        assert_eq!(orders.len(), 1000);
        for order in &orders {
            assert_eq!(counted[&(order[1].as_str(), order[0].as_str())].to_string(), order[6]);
            assert_eq!(order[5] == "\\N", order[0].parse::<u32>().unwrap() > 70, "{order:?}");
        }
        for district in orders.chunks(100) {
            let mut customers: Vec<u32> = district.iter().map(|order| order[3].parse().unwrap()).collect();
            assert!(!customers.is_sorted());
            customers.sort_unstable();
            assert!(customers.into_iter().eq(1..=100));
        }
    }

    #[test]
    fn equal_seeds_make_equal_rows() {
        let scale = Tpcc { customers: 10, items: 10, ..Tpcc::default() };
        for table in Table::ALL {
            assert_eq!(all(&scale, table, 3), all(&scale, table, 3));
            let differs = all(&scale, table, 3) != all(&scale, table, 4);
            assert_eq!(differs, table != Table::NewOrder, "{table:?}");
        }
    }
}
