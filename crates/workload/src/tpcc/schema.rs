//! The nine tables, the same at both servers.
//!
//! Money is kept in cents, taxes and discounts in hundredths of a per cent, as whole numbers: the specification wants
//! exact numbers (clause 1.3.1), and whole ones are exact, and cheap, everywhere.
//!
//! Keys begin with the warehouse. Where rows are small and come in the order of their key (orders, their lines, the
//! undelivered ones) Fulmar's tables are clustered by it (`WITHOUT ROWID`): the natural form there, as the heap with an
//! index is PostgreSQL's. No foreign keys are declared, at neither.

use super::DISTRICTS;
use crate::workload::Dialect;

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

    /// Those that have rows for each warehouse: all but the items.
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

    fn columns(self) -> String {
        const ADDRESS: [&str; 5] = [
            "street_1 VARCHAR(20) NOT NULL",
            "street_2 VARCHAR(20) NOT NULL",
            "city VARCHAR(20) NOT NULL",
            "state CHAR(2) NOT NULL",
            "zip CHAR(9) NOT NULL",
        ];
        let address = |prefix: &str| ADDRESS.map(|column| format!("{prefix}{column}")).join(", ");
        match self {
            Table::Item => "i_id INTEGER NOT NULL, i_im_id INTEGER NOT NULL, i_name VARCHAR(24) NOT NULL, \
                 i_price BIGINT NOT NULL, i_data VARCHAR(50) NOT NULL, PRIMARY KEY (i_id)"
                .to_owned(),
            Table::Warehouse => format!(
                "w_id INTEGER NOT NULL, w_name VARCHAR(10) NOT NULL, {}, w_tax INTEGER NOT NULL, \
                 w_ytd BIGINT NOT NULL, PRIMARY KEY (w_id)",
                address("w_")
            ),
            Table::District => format!(
                "d_id INTEGER NOT NULL, d_w_id INTEGER NOT NULL, d_name VARCHAR(10) NOT NULL, {}, \
                 d_tax INTEGER NOT NULL, d_ytd BIGINT NOT NULL, d_next_o_id INTEGER NOT NULL, \
                 PRIMARY KEY (d_w_id, d_id)",
                address("d_")
            ),
            Table::Customer => format!(
                "c_id INTEGER NOT NULL, c_d_id INTEGER NOT NULL, c_w_id INTEGER NOT NULL, \
                 c_first VARCHAR(16) NOT NULL, c_middle CHAR(2) NOT NULL, c_last VARCHAR(16) NOT NULL, {}, \
                 c_phone CHAR(16) NOT NULL, c_since TIMESTAMP NOT NULL, c_credit CHAR(2) NOT NULL, \
                 c_credit_lim BIGINT NOT NULL, c_discount INTEGER NOT NULL, c_balance BIGINT NOT NULL, \
                 c_ytd_payment BIGINT NOT NULL, c_payment_cnt INTEGER NOT NULL, \
                 c_delivery_cnt INTEGER NOT NULL, c_data VARCHAR(500) NOT NULL, \
                 PRIMARY KEY (c_w_id, c_d_id, c_id)",
                address("c_")
            ),
            Table::History => {
                "h_c_id INTEGER NOT NULL, h_c_d_id INTEGER NOT NULL, h_c_w_id INTEGER NOT NULL, \
                 h_d_id INTEGER NOT NULL, h_w_id INTEGER NOT NULL, h_date TIMESTAMP NOT NULL, \
                 h_amount BIGINT NOT NULL, h_data VARCHAR(24) NOT NULL"
                    .to_owned()
            }
            Table::NewOrder => {
                "no_o_id INTEGER NOT NULL, no_d_id INTEGER NOT NULL, no_w_id INTEGER NOT NULL, \
                 PRIMARY KEY (no_w_id, no_d_id, no_o_id)"
                    .to_owned()
            }
            Table::Orders => "o_id INTEGER NOT NULL, o_d_id INTEGER NOT NULL, o_w_id INTEGER NOT NULL, \
                 o_c_id INTEGER NOT NULL, o_entry_d TIMESTAMP NOT NULL, o_carrier_id INTEGER, \
                 o_ol_cnt INTEGER NOT NULL, o_all_local INTEGER NOT NULL, PRIMARY KEY (o_w_id, o_d_id, o_id)"
                .to_owned(),
            Table::OrderLine => {
                "ol_o_id INTEGER NOT NULL, ol_d_id INTEGER NOT NULL, ol_w_id INTEGER NOT NULL, \
                 ol_number INTEGER NOT NULL, ol_i_id INTEGER NOT NULL, ol_supply_w_id INTEGER NOT NULL, \
                 ol_delivery_d TIMESTAMP, ol_quantity INTEGER NOT NULL, ol_amount BIGINT NOT NULL, \
                 ol_dist_info CHAR(24) NOT NULL, PRIMARY KEY (ol_w_id, ol_d_id, ol_o_id, ol_number)"
                    .to_owned()
            }
            Table::Stock => format!(
                "s_i_id INTEGER NOT NULL, s_w_id INTEGER NOT NULL, s_quantity INTEGER NOT NULL, {}, \
                 s_ytd INTEGER NOT NULL, s_order_cnt INTEGER NOT NULL, s_remote_cnt INTEGER NOT NULL, \
                 s_data VARCHAR(50) NOT NULL, PRIMARY KEY (s_w_id, s_i_id)",
                (1..=DISTRICTS)
                    .map(|district| format!("s_dist_{district:02} CHAR(24) NOT NULL"))
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        }
    }

    fn is_clustered(self) -> bool {
        matches!(self, Table::NewOrder | Table::Orders | Table::OrderLine)
    }
}

/// What makes the tables and their indexes, where they are not there.
pub(super) fn statements(dialect: Dialect) -> Vec<String> {
    let table = |table: Table| {
        let clustered =
            if dialect == Dialect::Fulmar && table.is_clustered() { " WITHOUT ROWID" } else { "" };
        format!("CREATE TABLE IF NOT EXISTS {} ({}){clustered}", table.name(), table.columns())
    };
    let indexes = [
        "CREATE INDEX IF NOT EXISTS customer_by_name ON customer (c_w_id, c_d_id, c_last, c_first, c_id)",
        "CREATE INDEX IF NOT EXISTS orders_by_customer ON orders (o_w_id, o_d_id, o_c_id, o_id)",
    ];
    Table::ALL.into_iter().map(table).chain(indexes.map(str::to_owned)).collect()
}
