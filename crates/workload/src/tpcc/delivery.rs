//! Delivery (clause 2.7.4), statement by statement: delivers the oldest open order of each district
//! of a warehouse.

use super::inputs::Delivery;
use super::options::DISTRICTS;
use super::statements::{at_most_one, change_one, integers, one};
use crate::client::{Client, Error, Parameter, Statement, Type};
use crate::workload::{AttemptError, TransactionOutcome};

pub(super) struct DeliverySteps {
    oldest: Statement,
    close: Statement,
    order: Statement,
    lines: Statement,
    customer: Statement,
}

const OLDEST: &str =
    "SELECT no_o_id FROM new_order WHERE no_w_id = $1 AND no_d_id = $2 ORDER BY no_o_id LIMIT 1";
const CLOSE: &str = "DELETE FROM new_order WHERE no_w_id = $1 AND no_d_id = $2 AND no_o_id = $3";
const ORDER: &str = "UPDATE orders SET o_carrier_id = $4 WHERE o_w_id = $1 AND o_d_id = $2 AND o_id = $3 \
     RETURNING o_c_id";
const LINES: &str = "UPDATE order_line SET ol_delivery_d = CURRENT_TIMESTAMP \
     WHERE ol_w_id = $1 AND ol_d_id = $2 AND ol_o_id = $3 RETURNING ol_amount";
const CUSTOMER: &str = "UPDATE customer SET c_balance = c_balance + $4, c_delivery_cnt = c_delivery_cnt + 1 \
     WHERE c_w_id = $1 AND c_d_id = $2 AND c_id = $3";

impl DeliverySteps {
    pub(super) async fn prepare(client: &mut Client) -> Result<DeliverySteps, Error> {
        use Type::{Int4, Int8};
        Ok(DeliverySteps {
            oldest: client.prepare(OLDEST, &[Int4; 2]).await?,
            close: client.prepare(CLOSE, &[Int4; 3]).await?,
            order: client.prepare(ORDER, &[Int4; 4]).await?,
            lines: client.prepare(LINES, &[Int4; 3]).await?,
            customer: client.prepare(CUSTOMER, &[Int4, Int4, Int4, Int8]).await?,
        })
    }

    pub(super) async fn run(
        &self,
        client: &mut Client,
        input: &Delivery,
    ) -> Result<TransactionOutcome, AttemptError> {
        let &Delivery { warehouse, carrier } = input;
        for district in 1..=DISTRICTS as i32 {
            // A district without open orders is skipped.
            let Some(order) = self.take_oldest(client, warehouse, district).await? else { continue };
            let [w, d, o] = integers([warehouse, district, order]);
            let row = [w, d, o, Parameter::Int4(carrier)];
            let customer = one(client, &self.order, &row, "order", |row| row.next_i32()).await?;
            let mut amount_cents = 0;
            client
                .fetch(&self.lines, &[w, d, o], |row| {
                    amount_cents += row.next_i64()?;
                    Ok(())
                })
                .await?;
            let row = [w, d, Parameter::Int4(customer), Parameter::Int8(amount_cents)];
            change_one(client, &self.customer, &row, "customer").await?;
        }
        Ok(TransactionOutcome::Committed)
    }

    /// Takes the oldest open order. With an isolation level at which statements see later commits
    /// of others (PostgreSQL's READ COMMITTED), another delivery may have taken that order
    /// meanwhile. Then the next order is the oldest.
    async fn take_oldest(
        &self,
        client: &mut Client,
        warehouse: i32,
        district: i32,
    ) -> Result<Option<i32>, AttemptError> {
        loop {
            let place = integers([warehouse, district]);
            let oldest = at_most_one(client, &self.oldest, &place, |row| row.next_i32()).await?;
            let Some(order) = oldest else { return Ok(None) };
            if client.execute(&self.close, &integers([warehouse, district, order])).await? == 1 {
                return Ok(Some(order));
            }
        }
    }
}
