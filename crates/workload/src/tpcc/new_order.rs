//! New-order (clause 2.4.2), statement by statement.
//!
//! The first statement locks the district with FOR UPDATE: the rest depends on its next order
//! number, and nothing that could be outdated has been read before the lock is granted. Each line
//! updates its stock with one statement, with the arithmetic of the specification: if fewer than 10
//! would remain, 91 are added.

use super::inputs::{Line, NewOrder};
use super::options::DISTRICTS;
use super::statements::{at_most_one, change_one, integers, missing, one};
use crate::client::{Client, Error, Parameter, Row, Statement, Type};
use crate::workload::{AttemptError, TransactionOutcome};

pub(super) struct NewOrderSteps {
    district: Statement,
    next_number: Statement,
    customer: Statement,
    order: Statement,
    open: Statement,
    item: Statement,
    stock: Statement,
    line: Statement,
}

const DISTRICT: &str = "SELECT d_next_o_id, d_tax FROM district WHERE d_w_id = $1 AND d_id = $2 FOR UPDATE";
const NEXT_NUMBER: &str = "UPDATE district SET d_next_o_id = d_next_o_id + 1 WHERE d_w_id = $1 AND d_id = $2";
const CUSTOMER: &str = "SELECT c_discount, c_last, c_credit, w_tax FROM warehouse, customer \
     WHERE w_id = $1 AND c_w_id = $1 AND c_d_id = $2 AND c_id = $3";
const ORDER: &str = "INSERT INTO orders (o_w_id, o_d_id, o_id, o_c_id, o_entry_d, o_ol_cnt, o_all_local) \
     VALUES ($1, $2, $3, $4, CURRENT_TIMESTAMP, $5, $6)";
const OPEN: &str = "INSERT INTO new_order (no_w_id, no_d_id, no_o_id) VALUES ($1, $2, $3)";
const ITEM: &str = "SELECT i_price, i_name, i_data FROM item WHERE i_id = $1";
const LINE: &str = "INSERT INTO order_line (ol_w_id, ol_d_id, ol_o_id, ol_number, ol_i_id, ol_supply_w_id, \
     ol_quantity, ol_amount, ol_dist_info) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)";

/// The statement that takes from the stock. Its parameters are the quantity, 1 if the supplier is
/// another warehouse and 0 otherwise, the supplier, the item, and the district for which a text is
/// returned.
fn stock() -> String {
    let texts: Vec<String> =
        (1..=DISTRICTS).map(|district| format!("WHEN {district} THEN s_dist_{district:02}")).collect();
    format!(
        "UPDATE stock SET \
         s_quantity = CASE WHEN s_quantity >= $1 + 10 THEN s_quantity - $1 ELSE s_quantity - $1 + 91 END, \
         s_ytd = s_ytd + $1, s_order_cnt = s_order_cnt + 1, s_remote_cnt = s_remote_cnt + $2 \
         WHERE s_w_id = $3 AND s_i_id = $4 \
         RETURNING CASE $5 {} END AS dist_info, s_quantity, s_data",
        texts.join(" ")
    )
}

impl NewOrderSteps {
    pub(super) async fn prepare(client: &mut Client) -> Result<NewOrderSteps, Error> {
        let mut line = [Type::Int4; 9];
        (line[7], line[8]) = (Type::Int8, Type::Varchar);
        Ok(NewOrderSteps {
            district: client.prepare(DISTRICT, &[Type::Int4; 2]).await?,
            next_number: client.prepare(NEXT_NUMBER, &[Type::Int4; 2]).await?,
            customer: client.prepare(CUSTOMER, &[Type::Int4; 3]).await?,
            order: client.prepare(ORDER, &[Type::Int4; 6]).await?,
            open: client.prepare(OPEN, &[Type::Int4; 3]).await?,
            item: client.prepare(ITEM, &[Type::Int4]).await?,
            stock: client.prepare(&stock(), &[Type::Int4; 5]).await?,
            line: client.prepare(LINE, &line).await?,
        })
    }

    pub(super) async fn run(
        &self,
        client: &mut Client,
        input: &NewOrder,
    ) -> Result<TransactionOutcome, AttemptError> {
        let NewOrder { warehouse, district, customer, ref lines, .. } = *input;
        let place = integers([warehouse, district]);
        let order = one(client, &self.district, &place, "district", |row| row.next_i32()).await?;
        change_one(client, &self.next_number, &place, "district").await?;
        let buyer = integers([warehouse, district, customer]);
        one(client, &self.customer, &buyer, "customer", |_| Ok(())).await?;
        let (count, local) = (lines.len() as i32, i32::from(input.is_local()));
        let row = integers([warehouse, district, order, customer, count, local]);
        client.execute(&self.order, &row).await?;
        client.execute(&self.open, &integers([warehouse, district, order])).await?;
        for (number, line) in (1..).zip(lines) {
            let item = integers([line.item]);
            match at_most_one(client, &self.item, &item, |row| row.next_i32()).await? {
                Some(price_cents) => self.line(client, input, [order, number, price_cents], line).await?,
                None if input.unknown_item && number == count => return Ok(TransactionOutcome::RolledBack),
                None => return Err(missing("item", &item)),
            }
        }
        Ok(TransactionOutcome::Committed)
    }

    async fn line(
        &self,
        client: &mut Client,
        input: &NewOrder,
        [order, number, price_cents]: [i32; 3],
        &Line { supplier, item, quantity }: &Line,
    ) -> Result<(), AttemptError> {
        let &NewOrder { warehouse, district, .. } = input;
        let remote = i32::from(supplier != warehouse);
        let taken = integers([quantity, remote, supplier, item, district]);
        let text = |row: &mut Row<'_>| row.next_text().map(<[u8]>::to_vec);
        let dist_info = one(client, &self.stock, &taken, "stock", text).await?;
        let amount_cents = i64::from(quantity) * i64::from(price_cents);
        let [w, d, o, n, i, s, q] = integers([warehouse, district, order, number, item, supplier, quantity]);
        let row = [w, d, o, n, i, s, q, Parameter::Int8(amount_cents), Parameter::Text(&dist_info)];
        client.execute(&self.line, &row).await?;
        Ok(())
    }
}
