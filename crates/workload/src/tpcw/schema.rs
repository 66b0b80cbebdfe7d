//! The tables of TPC-W, their consistency conditions, and the prepared statements of a connection.
//!
//! ```text
//! item                 i_id | i_title | i_cost | i_stock | i_loaded (the initial stock)
//! shopping_cart        sc_id | sc_time
//!   shopping_cart_line   scl_sc_id, scl_i_id | scl_qty
//! orders               o_id | o_c_id (the customer) | o_date | o_total | o_status
//!   order_line           ol_o_id, ol_number | ol_i_id | ol_qty | ol_cost
//!   cc_xacts             cx_o_id | cx_type | cx_num | cx_amount
//! ```
//!
//! Money is stored in cents. The server generates the numbers of carts and orders. Initial orders
//! are `SHIPPED`, and those of a run are `PENDING`.

use crate::client::{Client, Error, Statement, Type};
use crate::conditions::Condition;
use crate::workload::Dialect;

pub(super) const CONDITIONS: [Condition; 3] = [
    Condition {
        what: "1 (o_total is the sum of the order's lines)",
        violations: "SELECT o_id, o_total, total FROM orders LEFT JOIN \
             (SELECT ol_o_id, sum(ol_qty * ol_cost) AS total FROM order_line GROUP BY ol_o_id) AS sums \
             ON ol_o_id = o_id WHERE total IS NULL OR total <> o_total LIMIT 5",
    },
    Condition {
        what: "2 (every order is paid)",
        violations: "SELECT o_id, o_total, cx_amount FROM orders LEFT JOIN cc_xacts ON cx_o_id = o_id \
             WHERE cx_amount IS NULL OR cx_amount <> o_total LIMIT 5",
    },
    // Stock is refilled by 21, so a lost update changes the remainder.
    Condition {
        what: "3 (i_stock is i_loaded minus the sold items plus refills of 21)",
        violations: "SELECT i_id, i_loaded, i_stock, sold FROM item LEFT JOIN \
             (SELECT ol_i_id, sum(ol_qty) AS sold FROM order_line JOIN orders ON o_id = ol_o_id \
             WHERE o_status = 'PENDING' GROUP BY ol_i_id) AS sums ON ol_i_id = i_id \
             WHERE i_stock < 10 OR (i_loaded - coalesce(sold, 0) - i_stock) % 21 <> 0 LIMIT 5",
    },
];

/// Tables with a key that the server generates, and the key column.
const NUMBERED: [(&str, &str); 2] = [("shopping_cart", "sc_id"), ("orders", "o_id")];

pub(super) async fn create(client: &mut Client, dialect: Dialect) -> Result<(), Error> {
    let (number, clustered) = match dialect {
        Dialect::Fulmar => ("INTEGER", " WITHOUT ROWID"),
        Dialect::Postgres => ("SERIAL", ""),
    };
    let tables = [
        "item (i_id INTEGER PRIMARY KEY, i_title VARCHAR(60) NOT NULL, i_cost INTEGER NOT NULL, \
         i_stock INTEGER NOT NULL, i_loaded INTEGER NOT NULL)"
            .to_owned(),
        format!("shopping_cart (sc_id {number} PRIMARY KEY, sc_time TIMESTAMP NOT NULL)"),
        format!(
            "shopping_cart_line (scl_sc_id INTEGER NOT NULL, scl_i_id INTEGER NOT NULL, scl_qty INTEGER NOT NULL, \
             PRIMARY KEY (scl_sc_id, scl_i_id)){clustered}"
        ),
        format!(
            "orders (o_id {number} PRIMARY KEY, o_c_id INTEGER NOT NULL, o_date TIMESTAMP NOT NULL, \
             o_total INTEGER NOT NULL, o_status VARCHAR(16) NOT NULL)"
        ),
        format!(
            "order_line (ol_o_id INTEGER NOT NULL, ol_number INTEGER NOT NULL, ol_i_id INTEGER NOT NULL, \
             ol_qty INTEGER NOT NULL, ol_cost INTEGER NOT NULL, PRIMARY KEY (ol_o_id, ol_number)){clustered}"
        ),
        "cc_xacts (cx_o_id INTEGER PRIMARY KEY, cx_type VARCHAR(10) NOT NULL, cx_num VARCHAR(16) NOT NULL, \
         cx_amount INTEGER NOT NULL)"
            .to_owned(),
    ];
    for table in tables {
        client.query(&format!("CREATE TABLE IF NOT EXISTS {table}")).await?;
    }
    client.query("CREATE INDEX IF NOT EXISTS orders_of_customer ON orders (o_c_id, o_id)").await?;
    Ok(())
}

/// Advances PostgreSQL's sequences past the loaded rows, which do not move them. Fulmar continues
/// after the largest number by itself.
pub(super) async fn number_on(client: &mut Client, dialect: Dialect) -> anyhow::Result<()> {
    if dialect == Dialect::Postgres {
        for (table, column) in NUMBERED {
            let next = format!("SELECT coalesce(max({column}), 0) + 1 FROM {table}");
            let sequence = format!("pg_get_serial_sequence('{table}', '{column}')");
            client.query(&format!("SELECT setval({sequence}, ({next}), false)")).await?;
        }
    }
    Ok(())
}

/// The prepared statements of a connection.
pub struct Statements {
    pub(super) begin: Statement,
    pub(super) commit: Statement,
    pub(super) create_cart: Statement,
    pub(super) add_item: Statement,
    pub(super) cart: Statement,
    pub(super) clear_cart: Statement,
    pub(super) order: Statement,
    pub(super) order_line: Statement,
    pub(super) payment: Statement,
    pub(super) take: Statement,
    pub(super) latest_order: Statement,
}

impl Statements {
    pub(super) async fn prepare(client: &mut Client) -> Result<Statements, Error> {
        use Type::{Int4, Varchar};
        const CREATE_CART: &str =
            "INSERT INTO shopping_cart (sc_time) VALUES (CURRENT_TIMESTAMP) RETURNING sc_id";
        const ADD_ITEM: &str =
            "INSERT INTO shopping_cart_line (scl_sc_id, scl_i_id, scl_qty) VALUES ($1, $2, $3)";
        const CART: &str = "SELECT scl_i_id, scl_qty, i_cost FROM shopping_cart_line JOIN item ON i_id = scl_i_id \
                            WHERE scl_sc_id = $1 ORDER BY scl_i_id";
        const ORDER: &str = "INSERT INTO orders (o_c_id, o_date, o_total, o_status) \
                             VALUES ($1, CURRENT_TIMESTAMP, $2, 'PENDING') RETURNING o_id";
        const ORDER_LINE: &str = "INSERT INTO order_line (ol_o_id, ol_number, ol_i_id, ol_qty, ol_cost) \
                                  VALUES ($1, $2, $3, $4, $5)";
        const PAYMENT: &str =
            "INSERT INTO cc_xacts (cx_o_id, cx_type, cx_num, cx_amount) VALUES ($1, 'VISA', $2, $3)";
        const TAKE: &str = "UPDATE item SET i_stock = i_stock - $1 + \
                            CASE WHEN i_stock - $1 < 10 THEN 21 ELSE 0 END WHERE i_id = $2";
        const LATEST_ORDER: &str = "SELECT o_id, o_total, ol_i_id, ol_qty, ol_cost FROM orders \
             JOIN order_line ON ol_o_id = o_id WHERE o_id = (SELECT max(o_id) FROM orders WHERE o_c_id = $1)";
        const CLEAR_CART: &str = "DELETE FROM shopping_cart_line WHERE scl_sc_id = $1";
        Ok(Statements {
            begin: client.prepare("BEGIN", &[]).await?,
            commit: client.prepare("COMMIT", &[]).await?,
            create_cart: client.prepare(CREATE_CART, &[]).await?,
            add_item: client.prepare(ADD_ITEM, &[Int4; 3]).await?,
            cart: client.prepare(CART, &[Int4]).await?,
            clear_cart: client.prepare(CLEAR_CART, &[Int4]).await?,
            order: client.prepare(ORDER, &[Int4; 2]).await?,
            order_line: client.prepare(ORDER_LINE, &[Int4; 5]).await?,
            payment: client.prepare(PAYMENT, &[Int4, Varchar, Int4]).await?,
            take: client.prepare(TAKE, &[Int4; 2]).await?,
            latest_order: client.prepare(LATEST_ORDER, &[Int4]).await?,
        })
    }
}
