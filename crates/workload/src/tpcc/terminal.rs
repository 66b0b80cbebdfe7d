//! A terminal: draws transactions of the mix and runs them, statement by statement or as procedure
//! calls.

use std::rc::Rc;
use std::time::Duration;

use rand::RngExt;

use super::inputs::{Input, Inputs};
use super::options::Tpcc;
use super::procedures::Calls;
use super::steps::Steps;
use crate::client::{Client, Error};
use crate::workload::{AttemptError, Dialect, Kind, Terminal, TerminalId, TransactionOutcome};

/// A kind of transaction, with the pauses of the specification (clause 5.2.5.7).
pub(super) struct TpccKind {
    pub(super) kind: Kind,
    draw: fn(&mut Inputs) -> Input,
    keying_seconds: f64,
    /// The mean think time.
    think_seconds: f64,
}

const fn kind(
    name: &'static str,
    weight: f64,
    draw: fn(&mut Inputs) -> Input,
    keying_seconds: f64,
    think_seconds: f64,
) -> TpccKind {
    TpccKind { kind: Kind { name, weight }, draw, keying_seconds, think_seconds }
}

/// The mix (clause 5.2.3): the minimum shares of the other four kinds, and the rest for new-order.
pub(super) const KINDS: [TpccKind; 5] = [
    kind("new-order", 45.0, |inputs| Input::NewOrder(inputs.new_order()), 18.0, 12.0),
    kind("payment", 43.0, |inputs| Input::Payment(inputs.payment()), 3.0, 12.0),
    kind("order-status", 4.0, |inputs| Input::OrderStatus(inputs.order_status()), 2.0, 10.0),
    kind("delivery", 4.0, |inputs| Input::Delivery(inputs.delivery()), 2.0, 5.0),
    kind("stock-level", 4.0, |inputs| Input::StockLevel(inputs.stock_level()), 2.0, 5.0),
];

/// Think times have a negative exponential distribution, truncated at ten means (clause 5.2.5.4).
const MAX_THINK_TIME_MEANS: f64 = 10.0;

/// A terminal.
pub struct TpccTerminal {
    scale: Rc<Tpcc>,
    inputs: Inputs,
    kind: usize,
    input: Option<Input>,
}

impl TpccTerminal {
    pub(super) fn new(scale: Rc<Tpcc>, place: TerminalId) -> TpccTerminal {
        let inputs = Inputs::new(&scale, place);
        TpccTerminal { scale, inputs, kind: 0, input: None }
    }
}

/// The prepared statements of a connection.
pub enum Statements {
    #[doc(hidden)]
    Steps(Box<Steps>),
    #[doc(hidden)]
    Calls(Box<Calls>),
}

impl Terminal for TpccTerminal {
    type Statements = Statements;

    async fn prepare(&self, client: &mut Client, dialect: Dialect) -> Result<Statements, Error> {
        Ok(match self.scale.procedure {
            true => Statements::Calls(Box::new(Calls::prepare(client, dialect).await?)),
            false => Statements::Steps(Box::new(Steps::prepare(client).await?)),
        })
    }

    fn draw(&mut self, kind: usize) {
        (self.kind, self.input) = (kind, KINDS.get(kind).map(|kind| (kind.draw)(&mut self.inputs)));
    }

    async fn attempt(
        &mut self,
        client: &mut Client,
        statements: &Statements,
    ) -> Result<TransactionOutcome, AttemptError> {
        let Some(input) = &self.input else { return Ok(TransactionOutcome::RolledBack) };
        match statements {
            Statements::Steps(steps) => steps.run(client, input).await,
            Statements::Calls(calls) => calls.run(client, input).await,
        }
    }

    fn keying_time(&mut self) -> Duration {
        Duration::from_secs_f64(KINDS[self.kind].keying_seconds * self.scale.pauses)
    }

    fn think_time(&mut self) -> Duration {
        let means = -(1.0 - self.inputs.random.random::<f64>()).ln();
        let seconds = KINDS[self.kind].think_seconds * means.min(MAX_THINK_TIME_MEANS);
        Duration::from_secs_f64(seconds * self.scale.pauses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_match_the_specification() {
        let place = TerminalId { tenant: 0, number: 0, of: 1, seed: 1 };
        let mut terminal = TpccTerminal::new(Rc::new(Tpcc { pauses: 1.0, ..Tpcc::default() }), place);
        for (number, kind) in KINDS.iter().enumerate() {
            terminal.draw(number);
            assert_eq!(terminal.keying_time().as_secs_f64(), kind.keying_seconds);
            let thinks: Vec<f64> = (0..20_000).map(|_| terminal.think_time().as_secs_f64()).collect();
            let mean = thinks.iter().sum::<f64>() / thinks.len() as f64;
            assert!((mean / kind.think_seconds - 1.0).abs() < 0.05, "{mean}");
            assert!(thinks.iter().all(|think| *think <= kind.think_seconds * MAX_THINK_TIME_MEANS));
        }
        let mut without_pauses = TpccTerminal::new(Rc::new(Tpcc::default()), place);
        without_pauses.draw(0);
        assert_eq!(without_pauses.keying_time(), Duration::ZERO);
        assert_eq!(without_pauses.think_time(), Duration::ZERO);
    }
}
