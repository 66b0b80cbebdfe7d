//! The nine tables, with the same columns at both servers.
//!
//! Money is stored in cents, and taxes and discounts in hundredths of a per cent, as integers. The
//! specification requires exact numbers (clause 1.3.1), and integers are exact and cheap at both
//! servers.
//!
//! The storage is what users of each server would choose. Neither declares foreign keys. PostgreSQL
//! uses heap tables with indexes. At Fulmar:
//!
//! - Small rows that are added in key order (orders, order lines, new orders, history) are
//!   clustered by their key (`WITHOUT ROWID`), so that each district appends at a different place.
//!   For this the history has an additional number, which distinguishes payments within one second.
//! - Rows of warehouses and districts, which all transactions write, have a page each. Transactions
//!   conflict if they write the same pages, and ten warehouses would fit into one page. An unused
//!   column pads the rows, which is common for servers that lock pages.

use super::options::DISTRICTS;
use crate::workload::Dialect;

/// Padding with which no two rows fit into one page.
const PADDING_BYTES: u32 = 3000;

/// A table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Table {
    Item,
    Warehouse,
    District,
    Customer,
    History,
    NewOrder,
    Orders,
    OrderLine,
    Stock,
}

impl Table {
    pub(super) const ALL: [Table; 9] = [
        Table::Item,
        Table::Warehouse,
        Table::District,
        Table::Customer,
        Table::History,
        Table::NewOrder,
        Table::Orders,
        Table::OrderLine,
        Table::Stock,
    ];

    /// The tables with rows per warehouse: all except the items.
    pub(super) fn of_warehouse() -> impl Iterator<Item = Table> {
        Table::ALL.into_iter().filter(|table| *table != Table::Item)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Table::Item => "item",
            Table::Warehouse => "warehouse",
            Table::District => "district",
            Table::Customer => "customer",
            Table::History => "history",
            Table::NewOrder => "new_order",
            Table::Orders => "orders",
            Table::OrderLine => "order_line",
            Table::Stock => "stock",
        }
    }

    /// The columns of the specification, in its order, as `NAME TYPE`.
    fn columns(self) -> Vec<String> {
        const ADDRESS: [&str; 5] = [
            "street_1 VARCHAR(20) NOT NULL",
            "street_2 VARCHAR(20) NOT NULL",
            "city VARCHAR(20) NOT NULL",
            "state CHAR(2) NOT NULL",
            "zip CHAR(9) NOT NULL",
        ];
        let address = |prefix: &str| ADDRESS.map(|column| format!("{prefix}{column}")).join(", ");
        let columns = match self {
            Table::Item => "i_id INTEGER NOT NULL, i_im_id INTEGER NOT NULL, i_name VARCHAR(24) NOT NULL, \
                 i_price BIGINT NOT NULL, i_data VARCHAR(50) NOT NULL"
                .to_owned(),
            Table::Warehouse => format!(
                "w_id INTEGER NOT NULL, w_name VARCHAR(10) NOT NULL, {}, w_tax INTEGER NOT NULL, \
                 w_ytd BIGINT NOT NULL",
                address("w_")
            ),
            Table::District => format!(
                "d_id INTEGER NOT NULL, d_w_id INTEGER NOT NULL, d_name VARCHAR(10) NOT NULL, {}, \
                 d_tax INTEGER NOT NULL, d_ytd BIGINT NOT NULL, d_next_o_id INTEGER NOT NULL",
                address("d_")
            ),
            Table::Customer => format!(
                "c_id INTEGER NOT NULL, c_d_id INTEGER NOT NULL, c_w_id INTEGER NOT NULL, \
                 c_first VARCHAR(16) NOT NULL, c_middle CHAR(2) NOT NULL, c_last VARCHAR(16) NOT NULL, {}, \
                 c_phone CHAR(16) NOT NULL, c_since TIMESTAMP NOT NULL, c_credit CHAR(2) NOT NULL, \
                 c_credit_lim BIGINT NOT NULL, c_discount INTEGER NOT NULL, c_balance BIGINT NOT NULL, \
                 c_ytd_payment BIGINT NOT NULL, c_payment_cnt INTEGER NOT NULL, \
                 c_delivery_cnt INTEGER NOT NULL, c_data VARCHAR(500) NOT NULL",
                address("c_")
            ),
            Table::History => {
                "h_c_id INTEGER NOT NULL, h_c_d_id INTEGER NOT NULL, h_c_w_id INTEGER NOT NULL, \
                 h_d_id INTEGER NOT NULL, h_w_id INTEGER NOT NULL, h_date TIMESTAMP NOT NULL, \
                 h_amount BIGINT NOT NULL, h_data VARCHAR(24) NOT NULL"
                    .to_owned()
            }
            Table::NewOrder => {
                "no_o_id INTEGER NOT NULL, no_d_id INTEGER NOT NULL, no_w_id INTEGER NOT NULL".to_owned()
            }
            Table::Orders => "o_id INTEGER NOT NULL, o_d_id INTEGER NOT NULL, o_w_id INTEGER NOT NULL, \
                 o_c_id INTEGER NOT NULL, o_entry_d TIMESTAMP NOT NULL, o_carrier_id INTEGER, \
                 o_ol_cnt INTEGER NOT NULL, o_all_local INTEGER NOT NULL"
                .to_owned(),
            Table::OrderLine => {
                "ol_o_id INTEGER NOT NULL, ol_d_id INTEGER NOT NULL, ol_w_id INTEGER NOT NULL, \
                 ol_number INTEGER NOT NULL, ol_i_id INTEGER NOT NULL, ol_supply_w_id INTEGER NOT NULL, \
                 ol_delivery_d TIMESTAMP, ol_quantity INTEGER NOT NULL, ol_amount BIGINT NOT NULL, \
                 ol_dist_info CHAR(24) NOT NULL"
                    .to_owned()
            }
            Table::Stock => format!(
                "s_i_id INTEGER NOT NULL, s_w_id INTEGER NOT NULL, s_quantity INTEGER NOT NULL, {}, \
                 s_ytd INTEGER NOT NULL, s_order_cnt INTEGER NOT NULL, s_remote_cnt INTEGER NOT NULL, \
                 s_data VARCHAR(50) NOT NULL",
                (1..=DISTRICTS)
                    .map(|district| format!("s_dist_{district:02} CHAR(24) NOT NULL"))
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        };
        columns.split(", ").map(str::to_owned).collect()
    }

    /// The column names, in the order in which [`super::population`] writes them.
    pub(super) fn names(self) -> String {
        let names = self.columns().into_iter().map(|column| column.split(' ').take(1).collect::<String>());
        names.collect::<Vec<_>>().join(", ")
    }

    /// The primary key. The specification requires none for the history.
    fn key(self) -> Option<&'static str> {
        match self {
            Table::Item => Some("i_id"),
            Table::Warehouse => Some("w_id"),
            Table::District => Some("d_w_id, d_id"),
            Table::Customer => Some("c_w_id, c_d_id, c_id"),
            Table::History => None,
            Table::NewOrder => Some("no_w_id, no_d_id, no_o_id"),
            Table::Orders => Some("o_w_id, o_d_id, o_id"),
            Table::OrderLine => Some("ol_w_id, ol_d_id, ol_o_id, ol_number"),
            Table::Stock => Some("s_w_id, s_i_id"),
        }
    }

    fn create_for_postgres(self) -> String {
        let key = self.key().map(|key| format!("PRIMARY KEY ({key})"));
        self.create(key.into_iter().collect(), "")
    }

    fn create_for_fulmar(self) -> String {
        let keyed = |key: &str| format!("PRIMARY KEY ({key})");
        let room = |prefix: &str| format!("{prefix}room BLOB NOT NULL DEFAULT (zeroblob({PADDING_BYTES}))");
        let key = self.key().map(keyed);
        match self {
            Table::NewOrder | Table::Orders | Table::OrderLine => {
                self.create(key.into_iter().collect(), " WITHOUT ROWID")
            }
            Table::History => {
                let number = "h_number INTEGER NOT NULL DEFAULT (random())".to_owned();
                self.create(vec![number, keyed("h_w_id, h_d_id, h_date, h_number")], " WITHOUT ROWID")
            }
            Table::Warehouse => self.create([room("w_")].into_iter().chain(key).collect(), ""),
            Table::District => self.create([room("d_")].into_iter().chain(key).collect(), ""),
            Table::Item | Table::Customer | Table::Stock => self.create(key.into_iter().collect(), ""),
        }
    }

    fn create(self, more: Vec<String>, form: &str) -> String {
        let columns: Vec<_> = self.columns().into_iter().chain(more).collect();
        format!("CREATE TABLE IF NOT EXISTS {} ({}){form}", self.name(), columns.join(", "))
    }
}

/// The statements that create the tables and indexes if they do not exist.
pub(super) fn statements(dialect: Dialect) -> Vec<String> {
    let table = |table: Table| match dialect {
        Dialect::Fulmar => table.create_for_fulmar(),
        Dialect::Postgres => table.create_for_postgres(),
    };
    let indexes = [
        "CREATE INDEX IF NOT EXISTS customer_by_name ON customer (c_w_id, c_d_id, c_last, c_first, c_id)",
        "CREATE INDEX IF NOT EXISTS orders_by_customer ON orders (o_w_id, o_d_id, o_c_id, o_id)",
    ];
    Table::ALL.into_iter().map(table).chain(indexes.map(str::to_owned)).collect()
}
