//! A terminal that runs YCSB transactions, one after the other.
//!
//! ```text
//! BEGIN                                     each line a prepared statement, each a round trip
//! SELECT field0, ... FROM t WHERE id = $1   nine of these
//! UPDATE t SET field3 = $1 WHERE id = $2    one of these, at a random place among them
//! COMMIT
//! ```
//! A transaction of one operation is that statement alone; with a procedure the whole of it is one call
//! ([`super::procedure`]).
//!
//! Two generators: keys and the order of operations come from a seed, so that a run can be repeated; what is written
//! comes from the operating system's randomness, since a second run with the same seed would otherwise write what is
//! already there, and engines skip updates that change nothing.

use rand::RngExt;
use rand::seq::SliceRandom;

use super::Ycsb;
use super::procedure::OPERATIONS;
use super::schema::{FIELD_BYTES, Field, Statements, TABLES, fill};
use crate::client::{Client, Error, Parameter};
use crate::keys::Keys;
use crate::workload::{Dialect, Done, Failure, Place, Random, Terminal};

struct Operation {
    table: usize,
    key: i32,
    update: bool,
}

/// The generators of one connection, and the transaction that it runs.
pub struct YcsbTerminal {
    keys: Keys,
    operations: u32,
    tables: u8,
    updates: f64,
    procedure: bool,
    number: usize,
    choices: Random,
    values: Random,
    plan: Vec<Operation>,
    field: Field,
}

impl YcsbTerminal {
    pub(super) fn new(workload: &Ycsb, place: Place) -> YcsbTerminal {
        YcsbTerminal {
            keys: Keys::new(workload.distribution, workload.records),
            operations: workload.operations,
            tables: workload.tables,
            updates: workload.updates(),
            procedure: workload.procedure,
            number: place.number,
            choices: place.random(),
            values: rand::make_rng(),
            plan: Vec::new(),
            field: [0; FIELD_BYTES],
        }
    }

    async fn call(&self, client: &mut Client, statements: &Statements) -> Result<(), Failure> {
        let mut tables = [0; OPERATIONS as usize];
        let mut parameters = [Parameter::Int4(0); OPERATIONS as usize + 3];
        let mut place = 0;
        for (number, operation) in self.plan.iter().enumerate() {
            tables[number] = b'0' + operation.table as u8;
            parameters[number + 3] = Parameter::Int4(operation.key);
            if operation.update {
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
    ) -> Result<(), Failure> {
        let Operation { table, key, update } = self.plan[number];
        let key_parameter = Parameter::Int4(key);
        let rows = if update {
            fill(&mut self.field, &mut self.values);
            client.execute(&statements.update[table], &[Parameter::Text(&self.field), key_parameter]).await?
        } else {
            client.execute(&statements.read[table], &[key_parameter]).await?
        };
        if rows == 1 {
            return Ok(());
        }
        let table = TABLES[table];
        Err(Failure::Data(format!(
            "{rows} rows of {table} have id {key}, not one: drop the ycsb_ tables and load again"
        )))
    }
}

impl Terminal for YcsbTerminal {
    type Statements = Statements;

    async fn prepare(&self, client: &mut Client, dialect: Dialect) -> Result<Statements, Error> {
        let procedure = self.procedure.then_some(dialect);
        Statements::prepare(client, self.number, self.tables, procedure).await
    }

    fn draw(&mut self, kind: usize) {
        let updates = match self.operations {
            // A read or an update.
            1 => kind as u32,
            _ => self.updates as u32 + u32::from(self.choices.random::<f64>() < self.updates.fract()),
        };
        self.plan.clear();
        for number in 0..self.operations {
            let table = usize::from(self.choices.random_range(0..self.tables));
            let key = i32::try_from(self.keys.draw(&mut self.choices)).unwrap_or(i32::MAX);
            self.plan.push(Operation { table, key, update: number < updates });
        }
        self.plan.shuffle(&mut self.choices);
    }

    async fn attempt(&mut self, client: &mut Client, statements: &Statements) -> Result<Done, Failure> {
        if self.procedure {
            fill(&mut self.field, &mut self.values);
            self.call(client, statements).await?;
            return Ok(Done::Committed);
        }
        let bracketed = self.plan.len() > 1;
        if bracketed {
            client.execute(&statements.begin, &[]).await?;
        }
        for number in 0..self.plan.len() {
            self.operate(client, statements, number).await?;
        }
        if bracketed {
            client.execute(&statements.commit, &[]).await?;
        }
        Ok(Done::Committed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Distribution;
    use crate::workload::Workload;
    use std::rc::Rc;

    fn terminal(operations: u32, reads: f64) -> YcsbTerminal {
        let workload =
            Ycsb { records: 100, distribution: Distribution::Uniform, operations, reads, ..Ycsb::default() };
        Rc::new(workload).terminal(Place { tenant: 0, number: 0, of: 1, seed: 42 })
    }

    #[test]
    fn the_papers_mix_has_one_update_at_a_random_place() {
        let mut terminal = terminal(10, 90.0);
        let mut places = [0; 10];
        for _ in 0..10_000 {
            terminal.draw(0);
            assert_eq!(terminal.plan.len(), 10);
            let updates: Vec<usize> = (0..10).filter(|place| terminal.plan[*place].update).collect();
            assert_eq!(updates.len(), 1);
            places[updates[0]] += 1;
        }
        assert!(places.iter().all(|count| (800..1200).contains(count)), "{places:?}");
    }

    #[test]
    fn a_fraction_of_an_update_is_a_chance() {
        let mut terminal = terminal(4, 80.0);
        let updates = (0..20_000).map(|_| {
            terminal.draw(0);
            terminal.plan.iter().filter(|operation| operation.update).count()
        });
        let count: usize = updates.sum();
        assert!((15_500..16_500).contains(&count), "0.8 of each: {count}");
    }

    #[test]
    fn a_single_operation_is_what_its_kind_says() {
        let mut terminal = terminal(1, 85.0);
        for kind in [0, 1, 0] {
            terminal.draw(kind);
            assert_eq!((terminal.plan.len(), terminal.plan[0].update), (1, kind == 1));
        }
    }
}
