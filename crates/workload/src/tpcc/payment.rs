//! Payment (clause 2.5.2), statement by statement.
//!
//! The customer is locked first, with FOR UPDATE. The totals of the warehouse and the district,
//! which many payments write, are updated last.

use super::inputs::Payment;
use super::statements::{change_one, integers, number_of, one, prepare_by_name};
use crate::client::{Client, Error, Parameter, Row, Statement, Type};
use crate::workload::{AttemptError, TransactionOutcome};

pub(super) struct PaymentSteps {
    by_name: Statement,
    customer: Statement,
    data: Statement,
    pay: Statement,
    pay_with_data: Statement,
    district: Statement,
    warehouse: Statement,
    history: Statement,
}

const CUSTOMER: &str = "SELECT c_credit, c_first, c_middle, c_last, c_street_1, c_street_2, c_city, c_state, c_zip, \
     c_phone, c_since, c_credit_lim, c_discount, c_balance FROM customer \
     WHERE c_w_id = $1 AND c_d_id = $2 AND c_id = $3 FOR UPDATE";
const DATA: &str = "SELECT c_data FROM customer WHERE c_w_id = $1 AND c_d_id = $2 AND c_id = $3";
const PAY: &str = "UPDATE customer SET c_balance = c_balance - $4, c_ytd_payment = c_ytd_payment + $4, \
     c_payment_cnt = c_payment_cnt + 1 WHERE c_w_id = $1 AND c_d_id = $2 AND c_id = $3";
const PAY_WITH_DATA: &str = "UPDATE customer SET c_balance = c_balance - $4, \
     c_ytd_payment = c_ytd_payment + $4, c_payment_cnt = c_payment_cnt + 1, c_data = $5 \
     WHERE c_w_id = $1 AND c_d_id = $2 AND c_id = $3";
const DISTRICT: &str = "UPDATE district SET d_ytd = d_ytd + $3 WHERE d_w_id = $1 AND d_id = $2 \
     RETURNING d_name, d_street_1, d_street_2, d_city, d_state, d_zip";
const WAREHOUSE: &str = "UPDATE warehouse SET w_ytd = w_ytd + $2 WHERE w_id = $1 \
     RETURNING w_name, w_street_1, w_street_2, w_city, w_state, w_zip";
const HISTORY: &str = "INSERT INTO history (h_c_id, h_c_d_id, h_c_w_id, h_d_id, h_w_id, h_date, h_amount, h_data) \
     VALUES ($1, $2, $3, $4, $5, CURRENT_TIMESTAMP, $6, $7)";

/// The maximum length of `c_data`.
const DATA_BYTES: usize = 500;

impl PaymentSteps {
    pub(super) async fn prepare(client: &mut Client) -> Result<PaymentSteps, Error> {
        use Type::{Int4, Int8, Varchar};
        Ok(PaymentSteps {
            by_name: prepare_by_name(client).await?,
            customer: client.prepare(CUSTOMER, &[Int4; 3]).await?,
            data: client.prepare(DATA, &[Int4; 3]).await?,
            pay: client.prepare(PAY, &[Int4, Int4, Int4, Int8]).await?,
            pay_with_data: client.prepare(PAY_WITH_DATA, &[Int4, Int4, Int4, Int8, Varchar]).await?,
            district: client.prepare(DISTRICT, &[Int4, Int4, Int8]).await?,
            warehouse: client.prepare(WAREHOUSE, &[Int4, Int8]).await?,
            history: client.prepare(HISTORY, &[Int4, Int4, Int4, Int4, Int4, Int8, Varchar]).await?,
        })
    }

    pub(super) async fn run(
        &self,
        client: &mut Client,
        input: &Payment,
    ) -> Result<TransactionOutcome, AttemptError> {
        let &Payment { warehouse, district, customer_warehouse, customer_district, amount_cents, .. } = input;
        let place = [customer_warehouse, customer_district];
        let customer = number_of(client, &self.by_name, place, &input.customer).await?;
        self.pay(client, input, customer).await?;

        let [w, d, amount] =
            [Parameter::Int4(warehouse), Parameter::Int4(district), Parameter::Int8(amount_cents)];
        let name = |row: &mut Row<'_>| row.next_text().map(<[u8]>::to_vec);
        let district_name = one(client, &self.district, &[w, d, amount], "district", name).await?;
        let mut text = one(client, &self.warehouse, &[w, amount], "warehouse", name).await?;
        text.extend(b"    ");
        text.extend(district_name);
        let [c, cd, cw] = integers([customer, customer_district, customer_warehouse]);
        client.execute(&self.history, &[c, cd, cw, d, w, amount, Parameter::Text(&text)]).await?;
        Ok(TransactionOutcome::Committed)
    }

    /// Updates the row of the customer. For a customer with bad credit, the payment is prepended to
    /// `c_data`.
    async fn pay(&self, client: &mut Client, input: &Payment, customer: i32) -> Result<(), AttemptError> {
        let &Payment { warehouse, district, customer_warehouse, customer_district, amount_cents, .. } = input;
        let key = integers([customer_warehouse, customer_district, customer]);
        let [cw, cd, c] = key;
        let amount = Parameter::Int8(amount_cents);
        let bad = |row: &mut Row<'_>| Ok(row.next_text()? == b"BC");
        if !one(client, &self.customer, &key, "customer", bad).await? {
            return change_one(client, &self.pay, &[cw, cd, c, amount], "customer").await;
        }
        let note = format!(
            "{customer} {customer_district} {customer_warehouse} {district} {warehouse} {amount_cents} | "
        );
        let mut data = note.into_bytes();
        let noted = |row: &mut Row<'_>| row.next_text().map(<[u8]>::to_vec);
        data.extend(one(client, &self.data, &key, "customer", noted).await?);
        data.truncate(DATA_BYTES);
        let row = [cw, cd, c, amount, Parameter::Text(&data)];
        change_one(client, &self.pay_with_data, &row, "customer").await
    }
}
