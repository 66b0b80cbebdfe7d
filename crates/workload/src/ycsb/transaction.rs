//! A terminal that runs YCSB transactions.
//!
//! ```text
//! BEGIN                                     each line is a prepared statement and a round trip
//! SELECT field0, ... FROM t WHERE id = $1   nine of these
//! UPDATE t SET field3 = $1 WHERE id = $2    one of these, at a random position
//! COMMIT
//! ```
//!
//! - A transaction with one operation is that statement alone. With a procedure, the transaction is
//!   one call ([`super::procedure`]). Sorts and joins cover a range of keys.
//! - There are two random generators. Keys and the order of operations come from the seed, so that
//!   a run can be repeated. Written values come from the operating system's randomness: a second
//!   run with the same seed would otherwise write the existing values, and engines skip updates
//!   that change nothing.

use std::rc::Rc;

use rand::RngExt;
use rand::seq::SliceRandom;

use super::Ycsb;
use super::procedure::OPERATIONS;
use super::schema::{FIELD_BYTES, Field, Statements, TABLES, fill};
use crate::client::{Client, Error, Parameter};
use crate::keys::Keys;
use crate::workload::{AttemptError, Dialect, Random, Terminal, TerminalId, TransactionOutcome};

/// The action of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Read,
    Update,
    Sort,
    Join,
}

impl Action {
    pub(super) fn name(self) -> &'static str {
        match self {
            Action::Read => "read",
            Action::Update => "update",
            Action::Sort => "sort",
            Action::Join => "join",
        }
    }
}

struct Operation {
    action: Action,
    table: usize,
    key: i32,
}

/// A terminal: the random generators of a connection and its current transaction.
pub struct YcsbTerminal {
    workload: Rc<Ycsb>,
    keys: Keys,
    shares: Vec<(Action, f64)>,
    number: usize,
    choices: Random,
    values: Random,
    plan: Vec<Operation>,
    field: Field,
}

impl YcsbTerminal {
    pub(super) fn new(workload: Rc<Ycsb>, place: TerminalId) -> YcsbTerminal {
        YcsbTerminal {
            keys: Keys::new(workload.distribution, workload.records),
            shares: workload.shares(),
            workload,
            number: place.number,
            choices: place.random(),
            values: rand::make_rng(),
            plan: Vec::new(),
            field: [0; FIELD_BYTES],
        }
    }

    fn push(&mut self, action: Action) {
        let table = usize::from(self.choices.random_range(0..self.workload.tables));
        let key = i32::try_from(self.keys.draw(&mut self.choices)).unwrap_or(i32::MAX);
        self.plan.push(Operation { action, table, key });
    }

    async fn call(&self, client: &mut Client, statements: &Statements) -> Result<(), AttemptError> {
        let mut tables = [0; OPERATIONS as usize];
        let mut parameters = [Parameter::Int4(0); OPERATIONS as usize + 3];
        let mut place = 0;
        for (number, operation) in self.plan.iter().enumerate() {
            tables[number] = b'0' + operation.table as u8;
            parameters[number + 3] = Parameter::Int4(operation.key);
            if operation.action == Action::Update {
                place = number as i32 + 1;
            }
        }
        parameters[0] = Parameter::Text(&tables);
        parameters[1] = Parameter::Int4(place);
        parameters[2] = Parameter::Text(&self.field);
        client.execute(statements.call.as_ref().ok_or(Error::Closed)?, &parameters).await?;
        Ok(())
    }

    async fn operate(
        &mut self,
        client: &mut Client,
        statements: &Statements,
        number: usize,
    ) -> Result<(), AttemptError> {
        let Operation { action, table, key } = self.plan[number];
        let one = [Parameter::Int4(key)];
        let (first, several) = self.neighbours(key);
        let range = [first, first + several].map(Parameter::Int4);
        let (rows, expected) = match action {
            Action::Read => (client.execute(&statements.read[table], &one).await?, 1),
            Action::Update => {
                fill(&mut self.field, &mut self.values);
                let parameters = [Parameter::Text(&self.field), one[0]];
                (client.execute(&statements.update[table], &parameters).await?, 1)
            }
            Action::Sort => (client.execute(&statements.sort[table], &range).await?, several),
            Action::Join => (client.execute(&statements.join[table], &range).await?, several),
        };
        if rows == u64::from(expected.unsigned_abs()) {
            return Ok(());
        }
        let (table, action) = (TABLES[table], action.name());
        Err(AttemptError::Data(format!(
            "a {action} at id {key} of {table} affected {rows} rows instead of {expected}; \
             drop the ycsb_ tables and load them again"
        )))
    }

    /// The range of keys of a sort or a join for a drawn key: the first key, and the number of
    /// keys.
    fn neighbours(&self, key: i32) -> (i32, i32) {
        let number = |count: u32| i32::try_from(count).unwrap_or(i32::MAX);
        let records = number(self.workload.records);
        let several = number(self.workload.span).min(records);
        (key.min(records - several), several)
    }

    /// The number of operations of a transaction for a percentage. A fraction is the probability of
    /// one more.
    fn count(&mut self, percent: f64) -> usize {
        let expected = f64::from(self.workload.operations) * percent / 100.0;
        // Percentages are not exact in binary, but 10 x 10 % must be exactly one.
        let expected = (expected * 1e9).round() / 1e9;
        expected as usize + usize::from(self.choices.random::<f64>() < expected.fract())
    }
}

impl Terminal for YcsbTerminal {
    type Statements = Statements;

    async fn prepare(&self, client: &mut Client, dialect: Dialect) -> Result<Statements, Error> {
        Statements::prepare(client, self.number, &self.workload, dialect).await
    }

    fn draw(&mut self, kind: usize) {
        self.plan.clear();
        let operations = self.workload.operations as usize;
        if operations == 1 {
            self.push(self.shares[kind].0);
            return;
        }
        // The remaining operations are reads.
        for number in 1..self.shares.len() {
            let (action, percent) = self.shares[number];
            for _ in 0..self.count(percent).min(operations - self.plan.len()) {
                self.push(action);
            }
        }
        while self.plan.len() < operations {
            self.push(Action::Read);
        }
        self.plan.shuffle(&mut self.choices);
    }

    async fn attempt(
        &mut self,
        client: &mut Client,
        statements: &Statements,
    ) -> Result<TransactionOutcome, AttemptError> {
        if self.workload.procedure {
            fill(&mut self.field, &mut self.values);
            self.call(client, statements).await?;
            return Ok(TransactionOutcome::Committed);
        }
        let multiple = self.plan.len() > 1;
        if multiple {
            client.execute(&statements.begin, &[]).await?;
        }
        for number in 0..self.plan.len() {
            self.operate(client, statements, number).await?;
        }
        if multiple {
            client.execute(&statements.commit, &[]).await?;
        }
        Ok(TransactionOutcome::Committed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Distribution;
    use crate::workload::Workload;

    fn updates(terminal: &YcsbTerminal, place: usize) -> bool {
        terminal.plan[place].action == Action::Update
    }

    fn terminal(operations: u32, reads: f64) -> YcsbTerminal {
        let workload =
            Ycsb { records: 100, distribution: Distribution::Uniform, operations, reads, ..Ycsb::default() };
        Rc::new(workload).terminal(TerminalId { tenant: 0, number: 0, of: 1, seed: 42 })
    }

    #[test]
    fn default_mix_has_one_update_at_a_random_position() {
        let mut terminal = terminal(10, 90.0);
        let mut places = [0; 10];
        for _ in 0..10_000 {
            terminal.draw(0);
            assert_eq!(terminal.plan.len(), 10);
            let updates: Vec<usize> = (0..10).filter(|place| updates(&terminal, *place)).collect();
            assert_eq!(updates.len(), 1);
            places[updates[0]] += 1;
        }
        assert!(places.iter().all(|count| (800..1200).contains(count)), "{places:?}");
    }

    #[test]
    fn fractional_update_is_a_probability() {
        let mut terminal = terminal(4, 80.0);
        let updates = (0..20_000).map(|_| {
            terminal.draw(0);
            (0..4).filter(|place| updates(&terminal, *place)).count()
        });
        let count: usize = updates.sum();
        assert!((15_500..16_500).contains(&count), "expected 0.8 updates per transaction: {count}");
    }

    #[test]
    fn single_operation_has_the_action_of_its_kind() {
        let mut terminal = terminal(1, 85.0);
        for kind in [0, 1, 0] {
            terminal.draw(kind);
            assert_eq!((terminal.plan.len(), updates(&terminal, 0)), (1, kind == 1));
        }
    }

    #[test]
    fn sorts_and_joins_have_their_shares_and_a_full_range() {
        let workload = Ycsb { records: 150, reads: 60.0, sorts: 10.0, joins: 5.0, ..Ycsb::default() };
        let mut terminal = Rc::new(workload).terminal(TerminalId { tenant: 0, number: 0, of: 1, seed: 42 });
        let mut counts = [0; 4];
        for _ in 0..10_000 {
            terminal.draw(0);
            assert_eq!(terminal.plan.len(), 10);
            terminal.plan.iter().for_each(|operation| counts[operation.action as usize] += 1);
        }
        let [reads, updates, sorts, joins] = counts;
        assert_eq!((sorts, reads + updates + joins), (10_000, 90_000));
        assert!((4_800..5_200).contains(&joins) && (24_800..25_200).contains(&updates), "{counts:?}");
        assert_eq!(
            [0, 50, 51, 149].map(|key| terminal.neighbours(key)),
            [(0, 100), (50, 100), (50, 100), (50, 100)]
        );
    }
}
