//! A terminal that casts votes.

use rand::RngExt;

use super::Voter;
use super::schema::{Phone, Statements, phone};
use crate::client::{Client, Error, Parameter};
use crate::keys::Keys;
use crate::workload::{AttemptError, Dialect, Random, Terminal, TerminalId, TransactionOutcome};

/// A terminal: the random generators of a connection and its current vote.
pub struct VoterTerminal {
    keys: Keys,
    contestants: u32,
    votes: u64,
    procedure: bool,
    random: Random,
    phone: Phone,
    contestant: i32,
}

impl VoterTerminal {
    pub(super) fn new(workload: &Voter, place: TerminalId) -> VoterTerminal {
        VoterTerminal {
            keys: Keys::new(workload.distribution, workload.phones),
            contestants: workload.contestants,
            votes: u64::from(workload.votes),
            procedure: workload.procedure,
            random: place.random(),
            phone: phone(0),
            contestant: 1,
        }
    }
}

impl Terminal for VoterTerminal {
    type Statements = Statements;

    async fn prepare(&self, client: &mut Client, dialect: Dialect) -> Result<Statements, Error> {
        Statements::prepare(client, self.procedure.then_some(dialect)).await
    }

    fn draw(&mut self, _kind: usize) {
        self.phone = phone(self.keys.draw(&mut self.random));
        self.contestant = self.random.random_range(1..=self.contestants) as i32;
    }

    async fn attempt(
        &mut self,
        client: &mut Client,
        statements: &Statements,
    ) -> Result<TransactionOutcome, AttemptError> {
        let (phone, code) = (Parameter::Text(&self.phone), Parameter::Text(&self.phone[..3]));
        let contestant = Parameter::Int4(self.contestant);
        if let Some(call) = &statements.call {
            let counted = client.execute(call, &[phone, code, contestant]).await?;
            return Ok(if counted == 1 {
                TransactionOutcome::Committed
            } else {
                TransactionOutcome::RolledBack
            });
        }
        client.execute(&statements.begin, &[]).await?;
        expect_one(client.execute(&statements.contestant, &[contestant]).await?, "contestants")?;
        let left = client.execute(&statements.votes, &[phone]).await? < self.votes;
        if left {
            let counted = client.execute(&statements.vote, &[phone, contestant, code]).await?;
            expect_one(counted, "area_code_state")?;
        }
        client.execute(&statements.commit, &[]).await?;
        Ok(if left { TransactionOutcome::Committed } else { TransactionOutcome::RolledBack })
    }
}

fn expect_one(rows: u64, table: &str) -> Result<(), AttemptError> {
    match rows {
        1 => Ok(()),
        _ => Err(AttemptError::Data(format!(
            "{rows} rows of {table} instead of one; drop the table and load it again"
        ))),
    }
}
