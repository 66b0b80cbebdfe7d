//! The read-only transactions, statement by statement: order-status (clause 2.6.2) and stock-level
//! (clause 2.8.2).

use super::inputs::{OrderStatus, StockLevel};
use super::statements::{integers, missing, number_of, one, prepare_by_name};
use crate::client::{Client, Error, Statement, Type};
use crate::workload::{AttemptError, TransactionOutcome};

pub(super) struct OrderStatusSteps {
    by_name: Statement,
    customer: Statement,
    last_order: Statement,
    lines: Statement,
}

const CUSTOMER: &str = "SELECT c_balance, c_first, c_middle, c_last FROM customer \
     WHERE c_w_id = $1 AND c_d_id = $2 AND c_id = $3";
const LAST_ORDER: &str = "SELECT o_id, o_entry_d, o_carrier_id FROM orders \
     WHERE o_w_id = $1 AND o_d_id = $2 AND o_c_id = $3 ORDER BY o_id DESC LIMIT 1";
const LINES: &str = "SELECT ol_i_id, ol_supply_w_id, ol_quantity, ol_amount, ol_delivery_d FROM order_line \
     WHERE ol_w_id = $1 AND ol_d_id = $2 AND ol_o_id = $3";

impl OrderStatusSteps {
    pub(super) async fn prepare(client: &mut Client) -> Result<OrderStatusSteps, Error> {
        Ok(OrderStatusSteps {
            by_name: prepare_by_name(client).await?,
            customer: client.prepare(CUSTOMER, &[Type::Int4; 3]).await?,
            last_order: client.prepare(LAST_ORDER, &[Type::Int4; 3]).await?,
            lines: client.prepare(LINES, &[Type::Int4; 3]).await?,
        })
    }

    pub(super) async fn run(
        &self,
        client: &mut Client,
        input: &OrderStatus,
    ) -> Result<TransactionOutcome, AttemptError> {
        let &OrderStatus { warehouse, district, .. } = input;
        let customer = number_of(client, &self.by_name, [warehouse, district], &input.customer).await?;
        let key = integers([warehouse, district, customer]);
        one(client, &self.customer, &key, "customer", |_| Ok(())).await?;
        let order =
            one(client, &self.last_order, &key, "order of the customer", |row| row.next_i32()).await?;
        let key = integers([warehouse, district, order]);
        match client.execute(&self.lines, &key).await? {
            5..=15 => Ok(TransactionOutcome::Committed),
            _ => Err(missing("5 to 15 lines of the order", &key)),
        }
    }
}

pub(super) struct StockLevelSteps {
    next_number: Statement,
    low: Statement,
}

const NEXT_NUMBER: &str = "SELECT d_next_o_id FROM district WHERE d_w_id = $1 AND d_id = $2";
/// CROSS JOIN fixes the join order: first the lines of 20 orders, then their stock.
const LOW: &str = "SELECT count(DISTINCT s_i_id) FROM order_line CROSS JOIN stock \
     WHERE ol_w_id = $1 AND ol_d_id = $2 AND ol_o_id < $3 AND ol_o_id >= $3 - 20 \
     AND s_w_id = $1 AND s_i_id = ol_i_id AND s_quantity < $4";

impl StockLevelSteps {
    pub(super) async fn prepare(client: &mut Client) -> Result<StockLevelSteps, Error> {
        Ok(StockLevelSteps {
            next_number: client.prepare(NEXT_NUMBER, &[Type::Int4; 2]).await?,
            low: client.prepare(LOW, &[Type::Int4; 4]).await?,
        })
    }

    pub(super) async fn run(
        &self,
        client: &mut Client,
        input: &StockLevel,
    ) -> Result<TransactionOutcome, AttemptError> {
        let &StockLevel { warehouse, district, threshold } = input;
        let place = integers([warehouse, district]);
        let next = one(client, &self.next_number, &place, "district", |row| row.next_i32()).await?;
        let question = integers([warehouse, district, next, threshold]);
        one(client, &self.low, &question, "stock", |_| Ok(())).await?;
        Ok(TransactionOutcome::Committed)
    }
}
