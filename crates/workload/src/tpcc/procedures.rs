//! The transactions as one call each: procedures in Lua at Fulmar, functions in PL/pgSQL at PostgreSQL.
//!
//! Both are given the same, read and change the same in the same order, and answer the same; they stand beside each other
//! in `procedures/`. What differs is how a row is read and changed, each in the form that costs less there: PostgreSQL changes
//! it and has it returned; Fulmar reads it and then changes it by its row number, since SQLite makes a table for what a statement
//! returns. The lines of an order come as three texts of numbers with commas between. An unknown item ends the
//! call with an error of the procedure's own (P0001), and so takes the order back.

use super::inputs::{Customer, Delivery, Input, NewOrder, OrderStatus, Payment, StockLevel};
use crate::client::{Client, Error, Parameter, Statement, Type};
use crate::workload::{Dialect, Done, Failure};

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

/// Makes the procedures, or replaces them.
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

/// The calls that a connection has prepared.
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

    pub(super) async fn run(&self, client: &mut Client, input: &Input) -> Result<Done, Failure> {
        let rows = match input {
            Input::NewOrder(order) => return self.new_order(client, order).await,
            Input::Payment(payment) => self.payment(client, payment).await?,
            Input::OrderStatus(question) => self.order_status(client, question).await?,
            Input::Delivery(Delivery { warehouse, carrier }) => {
                rows(client, &self.delivery, &[Parameter::Int4(*warehouse), Parameter::Int4(*carrier)])
                    .await?
            }
            Input::StockLevel(StockLevel { warehouse, district, threshold }) => {
                let question = [*warehouse, *district, *threshold].map(Parameter::Int4);
                rows(client, &self.stock_level, &question).await?
            }
        };
        answered(rows, input)
    }

    async fn new_order(&self, client: &mut Client, order: &NewOrder) -> Result<Done, Failure> {
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
                Err(Failure::Data(format!("an order of an unknown item was taken: {rows} rows")))
            }
            Ok(rows) => answered(rows, order),
            Err(error) if order.unknown_item && error.sqlstate() == Some(RAISED) => Ok(Done::RolledBack),
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

/// Number 0 is nobody's: then the name counts.
fn number_and_name(customer: &Customer) -> (Parameter<'static>, Parameter<'_>) {
    match customer {
        Customer::Number(number) => (Parameter::Int4(*number), Parameter::Text(b"")),
        Customer::LastName(name) => (Parameter::Int4(0), Parameter::Text(name)),
    }
}

/// How many rows a call answers (a CALL's tag does not say).
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

fn answered(rows: u64, input: &impl std::fmt::Debug) -> Result<Done, Failure> {
    match rows {
        0 => Err(Failure::Data(format!("no answer to {input:?}: drop the tables of TPC-C and load again"))),
        _ => Ok(Done::Committed),
    }
}
