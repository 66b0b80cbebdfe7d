//! The transactions statement by statement: common code.

use super::delivery::DeliverySteps;
use super::inputs::Input;
use super::new_order::NewOrderSteps;
use super::payment::PaymentSteps;
use super::queries::{OrderStatusSteps, StockLevelSteps};
use crate::client::{Client, Error, Statement};
use crate::workload::{AttemptError, TransactionOutcome};

/// The prepared statements of a connection.
pub struct Steps {
    begin: Statement,
    commit: Statement,
    rollback: Statement,
    new_order: NewOrderSteps,
    payment: PaymentSteps,
    order_status: OrderStatusSteps,
    delivery: DeliverySteps,
    stock_level: StockLevelSteps,
}

impl Steps {
    pub(super) async fn prepare(client: &mut Client) -> Result<Steps, Error> {
        Ok(Steps {
            begin: client.prepare("BEGIN", &[]).await?,
            commit: client.prepare("COMMIT", &[]).await?,
            rollback: client.prepare("ROLLBACK", &[]).await?,
            new_order: NewOrderSteps::prepare(client).await?,
            payment: PaymentSteps::prepare(client).await?,
            order_status: OrderStatusSteps::prepare(client).await?,
            delivery: DeliverySteps::prepare(client).await?,
            stock_level: StockLevelSteps::prepare(client).await?,
        })
    }

    pub(super) async fn run(
        &self,
        client: &mut Client,
        input: &Input,
    ) -> Result<TransactionOutcome, AttemptError> {
        client.execute(&self.begin, &[]).await?;
        let done = match input {
            Input::NewOrder(order) => self.new_order.run(client, order).await?,
            Input::Payment(payment) => self.payment.run(client, payment).await?,
            Input::OrderStatus(question) => self.order_status.run(client, question).await?,
            Input::Delivery(delivery) => self.delivery.run(client, delivery).await?,
            Input::StockLevel(question) => self.stock_level.run(client, question).await?,
        };
        let end = if done == TransactionOutcome::Committed { &self.commit } else { &self.rollback };
        client.execute(end, &[]).await?;
        Ok(done)
    }
}
