//! A session that runs YCSB transactions, one after the other.
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

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::schema::{FIELD_BYTES, Field, Statements, TABLES, fill};
use crate::Target;
use crate::client::{Client, Error, Parameter};
use crate::keys::Keys;
use crate::measure::Meter;

/// A transaction that the server keeps refusing is given up after this many tries.
const MAX_TRIES: u32 = 100;

/// Between two attempts to reach a server that is away.
const RECONNECT_PAUSE: Duration = Duration::from_millis(20);

/// What every session of a run does.
pub(super) struct Mix {
    pub(super) keys: Keys,
    pub(super) operations: u32,
    /// Updates per transaction; the fraction is the chance of one more.
    pub(super) updates: f64,
    /// A transaction is one call.
    pub(super) procedure: bool,
    /// How long a session tries to reach a server that is away; zero: losing the server ends the run.
    pub(super) patience: Duration,
}

struct Operation {
    table: usize,
    key: i32,
    update: bool,
}

/// One connection and its generators.
pub(super) struct Session {
    target: Target,
    mix: Rc<Mix>,
    meter: Rc<RefCell<Meter>>,
    number: usize,
    connection: Option<(Client, Statements)>,
    choices: Xoshiro256PlusPlus,
    values: Xoshiro256PlusPlus,
    plan: Vec<Operation>,
    field: Field,
}

/// Why a try came to nothing.
enum Failure {
    Client(Error),
    Rows { table: &'static str, key: i32, rows: u64 },
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Client(error)
    }
}

impl Session {
    pub(super) fn new(
        target: Target,
        mix: Rc<Mix>,
        meter: Rc<RefCell<Meter>>,
        seed: u64,
        number: usize,
    ) -> Session {
        Session {
            target,
            mix,
            meter,
            number,
            connection: None,
            choices: Xoshiro256PlusPlus::seed_from_u64(seed.wrapping_add((number as u64) << 32)),
            values: rand::make_rng(),
            plan: Vec::new(),
            field: [0; FIELD_BYTES],
        }
    }

    /// Connects, unless it is connected; waits within the run's patience for a server that is away.
    pub(super) async fn connect(&mut self) -> anyhow::Result<()> {
        let give_up = Instant::now() + self.mix.patience;
        while self.connection.is_none() {
            match self.try_connect().await {
                Ok(connection) => self.connection = Some(connection),
                Err(error) if error.ends_session() && Instant::now() < give_up => {
                    tokio::time::sleep(RECONNECT_PAUSE).await;
                }
                Err(error) => {
                    return Err(anyhow::Error::new(error).context(format!("cannot use {}", self.target)));
                }
            }
        }
        Ok(())
    }

    async fn try_connect(&self) -> Result<(Client, Statements), Error> {
        let mut client = Client::connect(&self.target).await?;
        let statements = Statements::prepare(&mut client, self.number, self.mix.procedure).await?;
        Ok((client, statements))
    }

    /// Runs one transaction, which was due at `due`, until it commits or is given up. An error ends the run.
    pub(super) async fn transaction(&mut self, due: Instant) -> anyhow::Result<()> {
        self.draw_plan();
        for _ in 0..MAX_TRIES {
            self.connect().await?;
            let error = match self.attempt().await {
                Ok(statements) => {
                    self.meter.borrow_mut().committed(due, Instant::now(), statements);
                    return Ok(());
                }
                Err(Failure::Client(error)) => error,
                Err(Failure::Rows { table, key, rows }) => {
                    anyhow::bail!(
                        "{rows} rows of {table} have id {key}, not one: drop the ycsb_ tables and load again"
                    )
                }
            };
            if !self.after(&error).await? {
                self.meter.borrow_mut().gave_up(&error);
                return Ok(());
            }
        }
        self.meter
            .borrow_mut()
            .gave_up(&Error::Protocol("a transaction was refused a hundred times in a row"));
        Ok(())
    }

    /// Counts an error and clears up behind it; answers whether another try makes sense.
    async fn after(&mut self, error: &Error) -> anyhow::Result<bool> {
        if let Some(sqlstate) = error.sqlstate() {
            self.meter.borrow_mut().refused(sqlstate);
        }
        if error.ends_session() {
            return self.lost(error);
        }
        match self.roll_back().await {
            Ok(()) => Ok(error.is_retryable()),
            Err(error) => self.lost(&error),
        }
    }

    /// The connection is gone. Whether its transaction committed is not known: it is neither counted nor run again.
    fn lost(&mut self, error: &Error) -> anyhow::Result<bool> {
        self.connection = None;
        self.meter.borrow_mut().lost_connections += 1;
        anyhow::ensure!(!self.mix.patience.is_zero(), "lost {}: {error}", self.target);
        Ok(false)
    }

    async fn roll_back(&mut self) -> Result<(), Error> {
        match &mut self.connection {
            Some((client, statements)) if client.in_transaction() => {
                client.execute(&statements.rollback, &[]).await.map(drop)
            }
            _ => Ok(()),
        }
    }

    /// One try; answers how many statements it took.
    async fn attempt(&mut self) -> Result<u64, Failure> {
        let (client, statements) = self.connection.as_mut().ok_or(Error::Closed)?;
        if let Some(call) = &statements.call {
            fill(&mut self.field, &mut self.values);
            let tables: Vec<u8> = self.plan.iter().map(|operation| b'0' + operation.table as u8).collect();
            let place = self.plan.iter().position(|operation| operation.update).map_or(0, |at| at as i32 + 1);
            let mut parameters =
                vec![Parameter::Text(&tables), Parameter::Int4(place), Parameter::Text(&self.field)];
            parameters.extend(self.plan.iter().map(|operation| Parameter::Int4(operation.key)));
            client.execute(call, &parameters).await?;
            return Ok(1);
        }
        let bracketed = self.plan.len() > 1;
        if bracketed {
            client.execute(&statements.begin, &[]).await?;
        }
        for Operation { table, key, update } in &self.plan {
            let key_parameter = Parameter::Int4(*key);
            let rows = if *update {
                fill(&mut self.field, &mut self.values);
                client
                    .execute(&statements.update[*table], &[Parameter::Text(&self.field), key_parameter])
                    .await?
            } else {
                client.execute(&statements.read[*table], &[key_parameter]).await?
            };
            if rows != 1 {
                return Err(Failure::Rows { table: TABLES[*table], key: *key, rows });
            }
        }
        if bracketed {
            client.execute(&statements.commit, &[]).await?;
        }
        Ok(self.plan.len() as u64 + if bracketed { 2 } else { 0 })
    }

    fn draw_plan(&mut self) {
        let Mix { keys, operations, updates, .. } = &*self.mix;
        let extra = self.choices.random::<f64>() < updates.fract();
        let updates = *updates as u32 + u32::from(extra);
        self.plan.clear();
        for number in 0..*operations {
            let table = self.choices.random_range(0..TABLES.len());
            let key = i32::try_from(keys.draw(&mut self.choices)).unwrap_or(i32::MAX);
            self.plan.push(Operation { table, key, update: number < updates });
        }
        self.plan.shuffle(&mut self.choices);
    }

    /// Ends the connection politely.
    pub(super) async fn close(mut self) {
        if let Some((client, _)) = self.connection.take() {
            // The run is over; a server that is gone needs no good-bye.
            drop(client.close().await);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Distribution;
    use crate::measure::Window;

    fn session(operations: u32, updates: f64) -> Session {
        let now = Instant::now();
        let meter = Meter::new(Window { opens: now, closes: now });
        let keys = Keys::new(Distribution::Uniform, 100);
        let mix = Mix { keys, operations, updates, procedure: false, patience: Duration::ZERO };
        let target = "postgres://nobody@127.0.0.1:1/none".parse().unwrap();
        Session::new(target, Rc::new(mix), Rc::new(RefCell::new(meter)), 42, 0)
    }

    #[test]
    fn the_papers_mix_has_one_update_at_a_random_place() {
        let mut session = session(10, 1.0);
        let mut places = [0; 10];
        for _ in 0..10_000 {
            session.draw_plan();
            assert_eq!(session.plan.len(), 10);
            let updates: Vec<usize> = (0..10).filter(|place| session.plan[*place].update).collect();
            assert_eq!(updates.len(), 1);
            places[updates[0]] += 1;
        }
        assert!(places.iter().all(|count| (800..1200).contains(count)), "{places:?}");
    }

    #[test]
    fn a_fraction_of_an_update_is_a_chance() {
        let mut session = session(1, 0.1);
        let updates = (0..20_000).filter(|_| {
            session.draw_plan();
            session.plan[0].update
        });
        let count = updates.count();
        assert!((1_800..2_200).contains(&count), "{count}");
    }
}
