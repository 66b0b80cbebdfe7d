//! The transactions as one call each: Lua procedures at Fulmar, PL/pgSQL functions at PostgreSQL.
//!
//! - Both get the same parameters, read and change the same rows in the same order, and return the
//!   same results. They are in `procedures/`, one file per transaction and language.
//! - They differ in how a row is read and changed, each in the way that is cheaper at its server.
//!   PostgreSQL updates the row and returns it. Fulmar reads the row and then updates it by its row
//!   number, because SQLite stores the rows of a RETURNING clause in a temporary table.
//! - The lines of an order are passed as three strings of comma-separated numbers.
//! - An unknown item ends the call with an error that the procedure raises (P0001), which rolls
//!   back the order.

use super::inputs::{Customer, Delivery, Input, NewOrder, OrderStatus, Payment, StockLevel};
use crate::client::{Client, Error, Parameter, Statement, Type};
use crate::workload::{AttemptError, Dialect, TransactionOutcome};

/// `raise_exception`
const RAISED: &str = "P0001";

const LUA: [&str; 5] = [
    include_str!("procedures/new_order.lua.sql"),
    include_str!("procedures/payment.lua.sql"),
    include_str!("procedures/order_status.lua.sql"),
    include_str!("procedures/delivery.lua.sql"),
    include_str!("procedures/stock_level.lua.sql"),
];
const PLPGSQL: [&str; 5] = [
    include_str!("procedures/new_order.plpgsql.sql"),
    include_str!("procedures/payment.plpgsql.sql"),
    include_str!("procedures/order_status.plpgsql.sql"),
    include_str!("procedures/delivery.plpgsql.sql"),
    include_str!("procedures/stock_level.plpgsql.sql"),
];

/// Creates or replaces the procedures.
pub(super) async fn create(client: &mut Client, dialect: Dialect) -> Result<(), Error> {
    let texts = match dialect {
        Dialect::Fulmar => LUA,
        Dialect::Postgres => PLPGSQL,
    };
    for text in texts {
        client.query(text).await?;
    }
    Ok(())
}

/// The prepared calls of a connection.
pub struct Calls {
    new_order: Statement,
    payment: Statement,
    order_status: Statement,
    delivery: Statement,
    stock_level: Statement,
}

impl Calls {
    pub(super) async fn prepare(client: &mut Client, dialect: Dialect) -> Result<Calls, Error> {
        use Type::{Int4, Int8, Varchar};
        let verb = dialect.call();
        let mut prepare = async |name: &str, types: &[Type]| {
            let parameters = (1..=types.len()).map(|number| format!("${number}"));
            let parameters = parameters.collect::<Vec<_>>().join(", ");
            client.prepare(&format!("{verb} tpcc_{name}({parameters})"), types).await
        };
        Ok(Calls {
            new_order: prepare("new_order", &[Int4, Int4, Int4, Varchar, Varchar, Varchar]).await?,
            payment: prepare("payment", &[Int4, Int4, Int4, Int4, Int4, Varchar, Int8]).await?,
            order_status: prepare("order_status", &[Int4, Int4, Int4, Varchar]).await?,
            delivery: prepare("delivery", &[Int4, Int4]).await?,
            stock_level: prepare("stock_level", &[Int4, Int4, Int4]).await?,
        })
    }

    pub(super) async fn run(
        &self,
        client: &mut Client,
        input: &Input,
    ) -> Result<TransactionOutcome, AttemptError> {
        let rows = match input {
            Input::NewOrder(order) => return self.new_order(client, order).await,
            Input::Payment(payment) => self.payment(client, payment).await?,
            Input::OrderStatus(question) => self.order_status(client, question).await?,
            Input::Delivery(Delivery { warehouse, carrier }) => {
                rows(client, &self.delivery, &[Parameter::Int4(*warehouse), Parameter::Int4(*carrier)])
                    .await?
            }
            Input::StockLevel(StockLevel { warehouse, district, threshold }) => {
                let parameters = [*warehouse, *district, *threshold].map(Parameter::Int4);
                rows(client, &self.stock_level, &parameters).await?
            }
        };
        check_rows(rows, input)
    }

    async fn new_order(
        &self,
        client: &mut Client,
        order: &NewOrder,
    ) -> Result<TransactionOutcome, AttemptError> {
        let list = |part: fn(&super::inputs::Line) -> i32| {
            order.lines.iter().map(|line| part(line).to_string()).collect::<Vec<_>>().join(",")
        };
        let [items, suppliers, quantities] =
            [list(|line| line.item), list(|line| line.supplier), list(|line| line.quantity)];
        let call = [
            Parameter::Int4(order.warehouse),
            Parameter::Int4(order.district),
            Parameter::Int4(order.customer),
            Parameter::Text(items.as_bytes()),
            Parameter::Text(suppliers.as_bytes()),
            Parameter::Text(quantities.as_bytes()),
        ];
        match rows(client, &self.new_order, &call).await {
            Ok(rows) if order.unknown_item => {
                let text = format!("an order with an unknown item was accepted: {rows} rows");
                Err(AttemptError::Data(text))
            }
            Ok(rows) => check_rows(rows, order),
            Err(error) if order.unknown_item && error.sqlstate() == Some(RAISED) => {
                Ok(TransactionOutcome::RolledBack)
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn payment(&self, client: &mut Client, payment: &Payment) -> Result<u64, Error> {
        let (number, name) = number_and_name(&payment.customer);
        let call = [
            Parameter::Int4(payment.warehouse),
            Parameter::Int4(payment.district),
            Parameter::Int4(payment.customer_warehouse),
            Parameter::Int4(payment.customer_district),
            number,
            name,
            Parameter::Int8(payment.amount_cents),
        ];
        rows(client, &self.payment, &call).await
    }

    async fn order_status(&self, client: &mut Client, question: &OrderStatus) -> Result<u64, Error> {
        let (number, name) = number_and_name(&question.customer);
        let place = [question.warehouse, question.district].map(Parameter::Int4);
        rows(client, &self.order_status, &[place[0], place[1], number, name]).await
    }
}

/// The number and the last name as parameters. With number 0 the procedure uses the name.
fn number_and_name(customer: &Customer) -> (Parameter<'static>, Parameter<'_>) {
    match customer {
        Customer::Number(number) => (Parameter::Int4(*number), Parameter::Text(b"")),
        Customer::LastName(name) => (Parameter::Int4(0), Parameter::Text(name)),
    }
}

/// Returns the number of rows that a call returned, which the tag of a CALL does not contain.
async fn rows(client: &mut Client, call: &Statement, parameters: &[Parameter<'_>]) -> Result<u64, Error> {
    let mut rows = 0;
    client
        .fetch(call, parameters, |_| {
            rows += 1;
            Ok(())
        })
        .await?;
    Ok(rows)
}

/// Fails if a call returned no rows.
fn check_rows(rows: u64, input: &impl std::fmt::Debug) -> Result<TransactionOutcome, AttemptError> {
    match rows {
        0 => Err(AttemptError::Data(format!(
            "no rows returned for {input:?}; drop the TPC-C tables and load them again"
        ))),
        _ => Ok(TransactionOutcome::Committed),
    }
}
