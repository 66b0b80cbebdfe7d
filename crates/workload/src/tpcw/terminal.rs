//! A terminal: a browser that follows the shopping path.

use std::time::Duration;

use rand::RngExt;

use super::schema::Statements;
use super::{MAX_CART_ITEMS, Tpcw};
use crate::client::{Client, Error, Parameter, Statement};
use crate::keys::Keys;
use crate::workload::{AttemptError, Dialect, Kind, Random, Terminal, TerminalId, TransactionOutcome};

/// The steps of the path, and how often each occurs in it.
pub(super) const KINDS: [Kind; 4] = [
    Kind { name: "create-cart", weight: 1.0 },
    Kind { name: "add-item", weight: (1 + MAX_CART_ITEMS) as f64 / 2.0 },
    Kind { name: "purchase", weight: 1.0 },
    Kind { name: "latest-order", weight: 1.0 },
];

const CREATE_CART: usize = 0;
const ADD_ITEM: usize = 1;
const PURCHASE: usize = 2;
const LATEST_ORDER: usize = 3;

/// CloudTPS's mean think time; and the maximum as a multiple of it (TPC-W: 7 s and 70 s).
const MEAN_THINK_TIME: Duration = Duration::from_millis(500);
const MAX_THINK_TIME_MEANS: f64 = 10.0;

/// A terminal: the random generators of a connection, and the state of its browser.
pub struct TpcwTerminal {
    keys: Keys,
    random: Random,
    customers: u32,
    pauses: f64,
    /// The next step, and whether it has been started but not completed.
    step: usize,
    in_progress: bool,
    customer: i32,
    cart: i32,
    /// The items to be added to the cart, and how many of them have been added.
    items: Vec<i32>,
    added: usize,
}

/// A line of the cart.
struct Line {
    item: i32,
    quantity: i32,
    cost: i32,
}

impl TpcwTerminal {
    pub(super) fn new(workload: &Tpcw, place: TerminalId) -> TpcwTerminal {
        TpcwTerminal {
            keys: Keys::new(workload.distribution, workload.items),
            random: place.random(),
            customers: workload.customers,
            pauses: workload.pauses,
            step: CREATE_CART,
            in_progress: false,
            customer: 1,
            cart: 0,
            items: Vec::new(),
            added: 0,
        }
    }

    /// Starts the path with a new customer and a new set of different items.
    fn enter(&mut self) {
        self.customer = self.random.random_range(1..=self.customers) as i32;
        let count = self.random.random_range(1..=MAX_CART_ITEMS) as usize;
        self.items.clear();
        self.added = 0;
        // With a skewed distribution, different items may be rare. `20 * count` draws suffice for
        // any cart that can be filled.
        for _ in 0..count * 20 {
            let item = i32::try_from(self.keys.draw(&mut self.random)).map_or(i32::MAX, |key| key + 1);
            if self.items.len() < count && !self.items.contains(&item) {
                self.items.push(item);
            }
        }
    }

    fn next_step(&self) -> usize {
        match self.step {
            CREATE_CART | ADD_ITEM if self.added < self.items.len() => ADD_ITEM,
            CREATE_CART | ADD_ITEM => PURCHASE,
            PURCHASE => LATEST_ORDER,
            _ => CREATE_CART,
        }
    }

    async fn take_step(&mut self, client: &mut Client, statements: &Statements) -> Result<(), AttemptError> {
        match self.step {
            CREATE_CART => {
                self.cart = number(client, &statements.create_cart, &[], "a new cart").await?;
                Ok(())
            }
            ADD_ITEM => {
                let line = [self.cart, self.items[self.added], 1].map(Parameter::Int4);
                client.execute(&statements.add_item, &line).await?;
                self.added += 1;
                Ok(())
            }
            PURCHASE => self.purchase(client, statements).await,
            _ => {
                let customer = [Parameter::Int4(self.customer)];
                let rows = client.execute(&statements.latest_order, &customer).await?;
                at_least_one(rows, "the latest order")
            }
        }
    }

    /// Processes the items in the order of their keys, so that purchases cannot deadlock.
    async fn purchase(&self, client: &mut Client, statements: &Statements) -> Result<(), AttemptError> {
        let cart = [Parameter::Int4(self.cart)];
        client.execute(&statements.begin, &[]).await?;
        let mut lines = Vec::with_capacity(self.items.len());
        let line = |item, quantity, cost| Line { item, quantity, cost };
        client
            .fetch(&statements.cart, &cart, |row| {
                lines.push(line(row.next_i32()?, row.next_i32()?, row.next_i32()?));
                Ok(())
            })
            .await?;
        if lines.len() != self.items.len() {
            let (wanted, found) = (self.items.len(), lines.len());
            return Err(AttemptError::Data(format!(
                "a cart has {found} items instead of {wanted}; drop the TPC-W tables"
            )));
        }
        let total: i32 = lines.iter().map(|line| line.quantity * line.cost).sum();
        let order = [self.customer, total].map(Parameter::Int4);
        let order = number(client, &statements.order, &order, "a new order").await?;
        for (number, line) in (1..).zip(&lines) {
            let row = [order, number, line.item, line.quantity, line.cost].map(Parameter::Int4);
            client.execute(&statements.order_line, &row).await?;
        }
        let payment = [Parameter::Int4(order), Parameter::Text(b"4929000000000006"), Parameter::Int4(total)];
        client.execute(&statements.payment, &payment).await?;
        client.execute(&statements.clear_cart, &cart).await?;
        for line in &lines {
            let taken = [line.quantity, line.item].map(Parameter::Int4);
            at_least_one(client.execute(&statements.take, &taken).await?, "an item of the cart")?;
        }
        client.execute(&statements.commit, &[]).await?;
        Ok(())
    }
}

/// Returns the number that the server generated for a new row.
async fn number(
    client: &mut Client,
    statement: &Statement,
    parameters: &[Parameter<'_>],
    what: &str,
) -> Result<i32, AttemptError> {
    let mut number = None;
    client
        .fetch(statement, parameters, |row| {
            number = Some(row.next_i32()?);
            Ok(())
        })
        .await?;
    number.ok_or_else(|| AttemptError::Data(format!("the server returned no number for {what}")))
}

fn at_least_one(rows: u64, what: &str) -> Result<(), AttemptError> {
    match rows {
        0 => Err(AttemptError::Data(format!(
            "{what} does not exist; drop the TPC-W tables and load them again"
        ))),
        _ => Ok(()),
    }
}

impl Terminal for TpcwTerminal {
    type Statements = Statements;

    async fn prepare(&self, client: &mut Client, _dialect: Dialect) -> Result<Statements, Error> {
        Statements::prepare(client).await
    }

    /// After a lost connection the outcome of the step is unknown, so the browser starts again.
    fn next_kind(&mut self, _drawn: usize) -> usize {
        if self.in_progress {
            self.step = CREATE_CART;
        }
        self.step
    }

    fn draw(&mut self, kind: usize) {
        if kind == CREATE_CART {
            self.enter();
        }
        self.in_progress = true;
    }

    async fn attempt(
        &mut self,
        client: &mut Client,
        statements: &Statements,
    ) -> Result<TransactionOutcome, AttemptError> {
        self.take_step(client, statements).await?;
        self.step = self.next_step();
        self.in_progress = false;
        Ok(TransactionOutcome::Committed)
    }

    fn think_time(&mut self) -> Duration {
        let means = -(1.0 - self.random.random::<f64>()).ln();
        MEAN_THINK_TIME.mul_f64(means.min(MAX_THINK_TIME_MEANS) * self.pauses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Workload;
    use std::collections::HashSet;
    use std::rc::Rc;

    fn terminal(pauses: f64) -> TpcwTerminal {
        let workload = Tpcw { items: 10, pauses, ..Tpcw::default() };
        Rc::new(workload).terminal(TerminalId { tenant: 0, number: 0, of: 1, seed: 42 })
    }

    /// Simulates a step that completes.
    fn step(terminal: &mut TpcwTerminal) -> usize {
        let kind = terminal.next_kind(PURCHASE);
        terminal.draw(kind);
        terminal.added += usize::from(kind == ADD_ITEM);
        terminal.step = terminal.next_step();
        terminal.in_progress = false;
        kind
    }

    #[test]
    fn steps_follow_the_path() {
        let mut terminal = terminal(0.0);
        let (mut counts, mut sizes) = ([0_u32; 4], [0_u32; 11]);
        for _ in 0..20_000 {
            assert_eq!(step(&mut terminal), CREATE_CART);
            let size = terminal.items.len();
            let different = terminal.items.iter().collect::<HashSet<_>>().len();
            assert_eq!(different, size, "all items of a cart must differ");
            sizes[size] += 1;
            for wanted in std::iter::repeat_n(ADD_ITEM, size).chain([PURCHASE, LATEST_ORDER]) {
                assert_eq!(step(&mut terminal), wanted);
                counts[wanted] += 1;
            }
        }
        assert!(sizes[1..].iter().all(|count| (1_800..2_200).contains(count)), "{sizes:?}");
        let added = f64::from(counts[ADD_ITEM]) / f64::from(counts[PURCHASE]);
        assert!((added / KINDS[ADD_ITEM].weight - 1.0).abs() < 0.02, "{added}");
    }

    #[test]
    fn incomplete_step_restarts_the_path() {
        let mut terminal = terminal(0.0);
        step(&mut terminal);
        let kind = terminal.next_kind(0);
        terminal.draw(kind);
        assert_eq!((kind, terminal.next_kind(0)), (ADD_ITEM, CREATE_CART));
    }

    #[test]
    fn mean_think_time_is_half_a_second() {
        let mut terminal = terminal(1.0);
        let pauses: Vec<f64> = (0..50_000).map(|_| terminal.think_time().as_secs_f64()).collect();
        let mean = pauses.iter().sum::<f64>() / pauses.len() as f64;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }
}
