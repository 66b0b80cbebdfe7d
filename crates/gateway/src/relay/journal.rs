//! What a front remembers of its client's session: the messages that have no complete answer, those
//! of the open transaction, and the prepared statements.
//!
//! The client's messages form *units*: a Query, or messages of the extended protocol up to Sync. A
//! ReadyForQuery answers a unit. A unit stays in the journal until its transaction has ended, with
//! the length and a hash of its answer. When the session continues at another node, the journal
//! yields the messages to repeat, suppresses as much of the new answers as the client has got
//! already, and compares it with what the client got.
//!
//! The journal keeps at most [`MAX_BYTES`]. A transaction that is longer cannot be repeated. What
//! else it holds for unanswered units is limited by [`MAX_HELD_BYTES`]: the client's further
//! messages wait.

use std::collections::VecDeque;

use fulmar_engine::TransactionStatus;
use fulmar_pgwire::protocol::backend;

use super::message::{self, Values};
use super::scanner::Scanner;
use super::statements::Statements;
use super::unit::{Change, HEADER_BYTES, Transaction, Unit, split_name};

/// Maximum size of the messages in a journal.
const MAX_BYTES: usize = 1 << 20;
/// Maximum number of units without an answer. The client's further messages wait.
const MAX_UNANSWERED_UNITS: usize = 256;
/// The size of all that the units without an answer hold from which on the client's further
/// messages wait. Those of a single unit do not: it may get no answer before they have arrived.
const MAX_HELD_BYTES: usize = 2 << 20;

/// The session has answered something else than before.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mismatch;

/// A message of the session to the front.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// Another node owns the partition.
    Moved {
        /// A part of the unfinished unit was committed.
        in_part: bool,
    },
    /// The session has ended, and the client has the reason.
    End,
}

/// The state of a session that can continue at another node.
pub(super) struct Journal {
    next_id: Box<dyn Fn() -> u64>,
    from_client: Scanner,
    /// The rest of the client's current message is dropped.
    skips_message: bool,
    /// The message of the client that is incomplete, if it must be known when it is complete.
    partial: Vec<u8>,
    pub(super) from_session: Scanner,
    /// The session's message that is incomplete, if it is not passed on as it arrives.
    captured: Vec<u8>,
    /// For the session, not sent yet.
    pub(super) unsent: Vec<u8>,
    /// Answers that the client has got are being compared. Units without an answer, such as a
    /// COMMIT, are sent when all are the same: they must have no effect otherwise.
    pub(super) is_holding: bool,
    /// For the client, not sent yet.
    pub(super) output: Vec<u8>,
    /// Units of the open transaction that have been answered.
    transaction: Transaction,
    /// Units that have not been answered, oldest first.
    pub(super) units: VecDeque<Unit>,
    /// Size of the messages of all units.
    bytes: usize,
    /// The journal is too long: the open transaction and the unanswered units cannot be repeated.
    pub(super) is_lost: bool,
    /// The open transaction cannot be repeated, because a unit contained the end of another one.
    pub(super) is_unrepeatable: bool,
    /// The status that the client knows.
    pub(super) status: TransactionStatus,
    /// The status that the session has reported last. Differs while units are repeated.
    session_status: TransactionStatus,
    /// The id of the open transaction.
    transaction_id: u64,
    /// The session begins in a failed transaction.
    pub(super) has_failed: bool,
    /// The prepared statements.
    statements: Statements,
    /// The parameters, as the session reported them.
    pub(super) values: Values,
    /// The parameters after a COMMIT of the open transaction, if that has changed them.
    pending_values: Option<Values>,
    /// The session has temporary tables.
    pub(super) has_tables: bool,
    /// The client has sent Terminate.
    pub(super) is_terminated: bool,
    /// The client has got a part of a message.
    is_inside_answer: bool,
}

impl Journal {
    pub(super) fn new(values: Values, next_id: Box<dyn Fn() -> u64>) -> Journal {
        Journal {
            next_id,
            from_client: Scanner::default(),
            skips_message: false,
            partial: Vec::new(),
            from_session: Scanner::default(),
            captured: Vec::new(),
            unsent: Vec::new(),
            is_holding: false,
            output: Vec::new(),
            transaction: Transaction::default(),
            units: VecDeque::new(),
            bytes: 0,
            is_lost: false,
            is_unrepeatable: false,
            status: TransactionStatus::Idle,
            session_status: TransactionStatus::Idle,
            transaction_id: 0,
            has_failed: false,
            statements: Statements::default(),
            values,
            pending_values: None,
            has_tables: false,
            is_terminated: false,
            is_inside_answer: false,
        }
    }

    /// Returns true if the session is in no transaction and owes no answer.
    pub(super) fn is_idle(&self) -> bool {
        self.units.is_empty() && self.status == TransactionStatus::Idle
    }

    /// Returns true if the client is in the middle of a message from the session.
    pub(super) fn is_inside_answer(&self) -> bool {
        self.is_inside_answer
    }

    /// Takes bytes of the client, until the journal is full. Returns their number. `Err` if they are
    /// not messages that can be passed on.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<usize, &'static str> {
        let mut left = bytes;
        while !left.is_empty() && !self.is_terminated {
            let begins = !self.from_client.is_inside();
            if begins && self.is_full() {
                break;
            }
            if begins {
                self.check_kind(left[0])?;
                self.begin_message(left[0]);
            }
            let (count, is_complete) = self.from_client.take(left).ok_or("invalid message length")?;
            let (piece, rest) = left.split_at(count);
            left = rest;
            if !self.skips_message {
                self.record(piece);
            }
            if is_complete {
                self.end_message();
            }
        }
        Ok(bytes.len() - left.len())
    }

    fn check_kind(&self, kind: u8) -> Result<(), &'static str> {
        if message::is_internal(kind) {
            return Err("invalid message type");
        }
        // How many ReadyForQuery would answer it depends on errors of the messages before it.
        if kind == b'Q' && !self.is_between_units() && !self.has_discarded_unit() {
            return Err("a Query message must not follow extended query messages without a Sync");
        }
        Ok(())
    }

    /// Returns true if the client is not in the middle of a unit.
    fn is_between_units(&self) -> bool {
        self.units.back().is_none_or(|unit| unit.is_complete)
    }

    /// Returns true if messages are dropped up to Sync.
    fn has_discarded_unit(&self) -> bool {
        self.units.back().is_some_and(|unit| unit.is_discarded)
    }

    fn begin_message(&mut self, kind: u8) {
        match kind {
            b'd' | b'c' | b'f' => {
                if matches!(kind, b'c' | b'f')
                    && let Some(unit) = self.units.back_mut()
                {
                    unit.end_copy();
                }
            }
            b'Q' if self.has_discarded_unit() => {}
            b'Q' => self.begin_unit(true),
            // A Flush has no answer.
            b'H' if self.is_between_units() => {}
            _ if self.units.back().is_some_and(|unit| !unit.is_complete) => {}
            _ => self.begin_unit(false),
        }
        // The data of a COPY that has failed is dropped, as the session would.
        let stray = matches!(kind, b'd' | b'c' | b'f') && self.units.is_empty();
        self.skips_message = stray || self.units.back().is_some_and(|unit| unit.is_discarded);
    }

    fn begin_unit(&mut self, is_query: bool) {
        let unit = Unit::new((self.next_id)(), is_query);
        put_id(&mut self.unsent, unit.id);
        self.units.push_back(unit);
        self.add_bytes(Unit::OVERHEAD_BYTES);
    }

    /// Counts bytes of a unit. Returns false if the journal is too long.
    fn add_bytes(&mut self, bytes: usize) -> bool {
        if self.is_lost {
            return false;
        }
        self.bytes += bytes;
        if self.bytes > MAX_BYTES || self.transaction.bytes() > MAX_HELD_BYTES {
            self.give_up();
        }
        !self.is_lost
    }

    /// Drops the messages that are kept only to repeat them.
    pub(super) fn give_up(&mut self) {
        (self.is_lost, self.bytes) = (true, 0);
        for unit in self.transaction.take() {
            self.statements.apply(unit.changes);
        }
        for unit in self.units.iter_mut().filter(|unit| !unit.is_silent) {
            unit.bytes = Vec::new();
        }
    }

    /// Returns true if no more messages of the client are accepted before some are answered.
    pub(super) fn is_full(&self) -> bool {
        match self.units.len() {
            0 | 1 => false,
            MAX_UNANSWERED_UNITS.. => true,
            _ => self.unit_bytes() >= MAX_HELD_BYTES,
        }
    }

    /// The size of all that the units without an answer hold.
    fn unit_bytes(&self) -> usize {
        self.units.iter().map(Unit::held_bytes).sum()
    }

    /// The size of all that the journal holds.
    pub(super) fn held_bytes(&self) -> usize {
        let buffers = [&self.partial, &self.captured, &self.unsent, &self.output];
        let buffer_bytes: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        let values = self.values.iter().chain(self.pending_values.iter().flatten());
        let value_bytes: usize = values.map(|(name, value)| name.len() + value.len()).sum();
        self.transaction.bytes() + self.unit_bytes() + self.statements.bytes() + buffer_bytes + value_bytes
    }

    /// The size of what [`Journal::begin_again`] adds: units for the statements, and all messages to
    /// be sent.
    pub(super) fn repetition_bytes(&self) -> usize {
        2 * self.statements.bytes() + self.bytes
    }

    /// The size of the client's messages that are kept.
    #[cfg(test)]
    pub(super) fn kept_bytes(&self) -> usize {
        self.units.iter().map(Unit::kept_bytes).sum::<usize>() + self.partial.len()
    }

    fn record(&mut self, piece: &[u8]) {
        self.unsent.extend_from_slice(piece);
        if matches!(self.from_client.kind(), b'P' | b'C' | b'Q' | b'B' | b'E')
            && self.partial.len() < MAX_BYTES
        {
            self.partial.extend_from_slice(piece);
        }
        if self.add_bytes(piece.len())
            && let Some(unit) = self.units.back_mut()
        {
            unit.bytes.extend_from_slice(piece);
        }
    }

    fn end_message(&mut self) {
        let kind = self.from_client.kind();
        let message = std::mem::take(&mut self.partial);
        let Some(unit) = self.units.back_mut() else { return };
        match kind {
            b'X' => self.is_terminated = true,
            b'S' if unit.is_discarded => {
                let status = unit.failed_status;
                self.units.pop_back();
                self.set_ready(status);
            }
            b'S' => unit.sync(),
            b'B' => {
                let known = |name: &[u8]| {
                    self.transaction.control_of(name).or_else(|| self.statements.control_of(name))
                };
                unit.bind(&message, known);
            }
            _ => unit.message(kind, message),
        }
    }

    /// Takes bytes of the session: appends what is for the client to the output.
    pub(super) fn answer(&mut self, mut bytes: &[u8]) -> Result<Option<Told>, Mismatch> {
        while !bytes.is_empty() {
            let begins = !self.from_session.is_inside();
            let kind = if begins { bytes[0] } else { self.from_session.kind() };
            let captures = message::is_internal(kind) || kind == b'Z';
            let (count, is_complete) = self.from_session.take(bytes).ok_or(Mismatch)?;
            let (piece, rest) = bytes.split_at(count);
            bytes = rest;
            match captures {
                true => self.captured.extend_from_slice(piece),
                false => {
                    if self.pass(piece)? {
                        self.is_inside_answer = !is_complete;
                    }
                    self.send_held();
                }
            }
            if !is_complete {
                continue;
            }
            if !captures {
                if let Some(unit) = self.units.front_mut() {
                    let follows = unit.answered(kind);
                    if kind == b'G' && follows {
                        self.join_after_copy();
                    }
                }
                continue;
            }
            let captured = std::mem::take(&mut self.captured);
            let body = &captured[HEADER_BYTES..];
            match kind {
                b'Z' => self.ready(&captured)?,
                message::MOVED => return Ok(Some(Told::Moved { in_part: body == [1] })),
                message::END => return Ok(Some(Told::End)),
                message::SETTINGS => {
                    if let Ok(values) = serde_json::from_slice(body) {
                        self.values = values;
                    }
                }
                message::PENDING_SETTINGS => self.pending_values = serde_json::from_slice(body).ok(),
                message::HAS_TABLES => self.has_tables = body == [1],
                message::DEALLOCATED => {
                    let change = match body {
                        [] => Change::CloseAll,
                        name => Change::Close(name.into()),
                    };
                    if let Some(unit) = self.units.front_mut() {
                        unit.deallocated(change);
                    }
                }
                message::COMMITTED => {
                    if let Some(unit) = self.units.front_mut().filter(|unit| !unit.is_silent) {
                        unit.committed_answer = Some(body.to_vec());
                    }
                }
                _ => {}
            }
        }
        Ok(None)
    }

    /// Answers the oldest unit, whose transaction was committed, if the lost session has sent the
    /// answer before. Returns false if it has not.
    pub(super) fn answer_committed(&mut self) -> Result<bool, Mismatch> {
        if self.is_inside_answer {
            return Ok(false);
        }
        let Some(unit) = self.units.front_mut().filter(|unit| unit.is_complete) else { return Ok(false) };
        let Some(mut answer) = unit.committed_answer.take() else { return Ok(false) };
        backend::ready(&mut answer, TransactionStatus::Idle);
        self.from_session = Scanner::default();
        self.captured.clear();
        self.answer(&answer)?;
        Ok(true)
    }

    /// The session ignores the Sync that the client sent before the data of a COPY. If the client
    /// has sent the data and another Sync already, they belong to the same unit.
    fn join_after_copy(&mut self) {
        let Some(next) = self.units.remove(1) else { return };
        if let Some(unit) = self.units.front_mut() {
            unit.join(next);
        }
    }

    /// Passes a part of an answer to the client, unless it got that part before. Returns false if
    /// it got all of it.
    fn pass(&mut self, mut piece: &[u8]) -> Result<bool, Mismatch> {
        if let Some(unit) = self.units.front_mut() {
            if unit.is_silent {
                return Ok(false);
            }
            if let Some(answer) = unit.committed_answer.take() {
                unit.committed_answer = answer.strip_prefix(piece).map(<[u8]>::to_vec);
            }
            let known = unit.absorb_known(piece).ok_or(Mismatch)?;
            piece = &piece[known..];
            unit.hash(piece);
        }
        self.output.extend_from_slice(piece);
        Ok(!piece.is_empty())
    }

    /// The first unit has been answered.
    fn ready(&mut self, message: &[u8]) -> Result<(), Mismatch> {
        self.pass(message)?;
        self.unit_ready(message)?;
        self.send_held();
        Ok(())
    }

    /// Sends the units that were held back, when all known answers have been compared.
    fn send_held(&mut self) {
        if self.is_holding && !self.units.iter().any(Unit::is_compared) {
            self.is_holding = false;
            message::put(&mut self.unsent, message::REPETITION_ENDED, &[]);
            self.send(true);
        }
    }

    fn unit_ready(&mut self, message: &[u8]) -> Result<(), Mismatch> {
        // The unit stays: it is the one with the other answer.
        if self.units.front().is_some_and(|unit| !unit.is_silent && unit.expects_more()) {
            return Err(Mismatch);
        }
        let Some(mut unit) = self.units.pop_front() else { return Ok(()) };
        if unit.is_silent {
            if unit.has_parsed {
                return Ok(());
            }
            // The table of the statement was dropped, for example: the client must prepare it again.
            if let Some(name) = unit.bytes.get(HEADER_BYTES..).and_then(split_name) {
                self.statements.forget(name);
            }
            return Ok(());
        }
        let before = self.session_status;
        self.session_status = match message[HEADER_BYTES] {
            b'T' => TransactionStatus::InTransaction,
            b'E' => TransactionStatus::Failed,
            _ => TransactionStatus::Idle,
        };
        if !unit.is_answered {
            self.status = self.session_status;
        }
        if before == TransactionStatus::Idle {
            self.transaction_id = unit.id;
        }
        if self.session_status != TransactionStatus::Idle {
            if unit.mixes_transactions {
                // The session gave the open transaction its id.
                (self.is_unrepeatable, self.transaction_id) = (true, 0);
            }
            if self.is_lost {
                self.statements.apply(std::mem::take(&mut unit.changes));
            } else {
                unit.is_answered = true;
                self.transaction.push(unit);
            }
            return Ok(());
        }
        let ended = self.transaction.take();
        for unit in ended.into_iter().chain([unit]) {
            self.bytes = self.bytes.saturating_sub(unit.size_bytes());
            self.statements.apply(unit.changes);
        }
        (self.has_failed, self.is_unrepeatable, self.pending_values) = (false, false, None);
        if self.units.is_empty() {
            (self.is_lost, self.bytes) = (false, 0);
        }
        Ok(())
    }

    /// The unit that ends the transaction which an unanswered unit has begun or belongs to.
    pub(super) fn end_of_transaction(&self, index: usize) -> usize {
        let is_open = index == 0 && self.status == TransactionStatus::InTransaction;
        let first = match (is_open, self.units[index].may_begin) {
            (true, _) => index,
            (false, true) => index + 1,
            (false, false) => return index,
        };
        let ends = (first..self.units.len()).find(|other| self.units[*other].ends_transaction);
        ends.unwrap_or(self.units.len() - 1)
    }

    /// The ids of the transactions that unanswered units may have committed, one for each unit. 0:
    /// unknown.
    pub(super) fn transactions_in_doubt(&self) -> Vec<u64> {
        let id = |(index, unit): (usize, &Unit)| match (index, self.status) {
            _ if unit.mixes_transactions => 0,
            (0, TransactionStatus::InTransaction) => self.transaction_id,
            _ => unit.id,
        };
        self.units.iter().enumerate().map(id).collect()
    }

    /// Answers the oldest unit with `error` and the status after it. Returns false if the client is
    /// in the middle of a message.
    pub(super) fn fail(&mut self, error: &[u8], status: TransactionStatus) -> bool {
        if self.is_inside_answer() {
            return false;
        }
        let Some(unit) = self.units.front_mut() else { return true };
        self.output.extend_from_slice(error);
        if unit.is_complete || unit.is_query {
            let is_last = self.units.len() == 1;
            self.units.pop_front();
            // The rest of a COPY is dropped.
            self.skips_message |= is_last && self.from_client.is_inside();
            self.set_ready(status);
        } else {
            unit.discard(status);
            self.skips_message |= self.from_client.is_inside();
        }
        true
    }

    /// Answers the oldest units that only close statements, as a session in a failed transaction
    /// would. The error of the transaction is for the unit after them.
    pub(super) fn answer_closes(&mut self) {
        while !self.is_inside_answer
            && let Some(unit) = self.units.pop_front_if(|unit| unit.only_closes())
        {
            self.bytes = self.bytes.saturating_sub(unit.size_bytes());
            let changes = unit.answer_closes(&mut self.output);
            self.statements.apply(changes);
            self.set_ready(TransactionStatus::Failed);
        }
    }

    /// Returns true if statements of the client are being prepared again.
    pub(super) fn is_restoring(&self) -> bool {
        self.units.iter().any(|unit| unit.is_silent)
    }

    /// Answers the oldest unit, a COMMIT, as a session would.
    pub(super) fn answer_commit(&mut self) {
        let Some(mut unit) = self.units.pop_front() else { return };
        unit.answer_commit(&mut self.output);
        self.bytes = self.bytes.saturating_sub(unit.size_bytes());
        let changes = unit.take_requests();
        self.statements.apply(changes);
        self.keep_pending_values();
        self.set_ready(TransactionStatus::Idle);
    }

    /// The open transaction was committed: its parameters are those of the session.
    pub(super) fn keep_pending_values(&mut self) {
        if let Some(values) = self.pending_values.take() {
            self.values = values;
        }
    }

    /// Returns true if units have no answer. Those that wait for their Sync have one.
    pub(super) fn has_unanswered(&self) -> bool {
        self.units.iter().any(|unit| !unit.is_discarded)
    }

    /// Returns true if the units without an answer may commit.
    pub(super) fn may_commit(&self) -> bool {
        let mut units = self.units.iter().filter(|unit| !unit.is_discarded);
        units.any(|unit| unit.ends_transaction || self.status == TransactionStatus::Idle)
    }

    fn set_ready(&mut self, status: TransactionStatus) {
        backend::ready(&mut self.output, status);
        (self.status, self.session_status) = (status, status);
        if status == TransactionStatus::Idle {
            self.transaction_ended();
        }
    }

    /// Forgets the open transaction, which cannot be repeated.
    pub(super) fn transaction_ended(&mut self) {
        for unit in self.transaction.take() {
            self.bytes = self.bytes.saturating_sub(unit.size_bytes());
            self.statements.apply(unit.changes);
        }
        (self.has_failed, self.is_unrepeatable, self.pending_values) = (false, false, None);
    }

    /// The open transaction was committed, or aborted at its COMMIT. Its last unit is not answered
    /// yet.
    pub(super) fn transaction_over(&mut self) {
        self.transaction_ended();
        (self.status, self.session_status) = (TransactionStatus::Idle, TransactionStatus::Idle);
    }

    /// The open transaction has failed: another session begins with a failed transaction.
    pub(super) fn transaction_failed(&mut self) {
        self.transaction_ended();
        self.has_failed = true;
    }

    /// The session has ended: units that the client knows the answers of, and that were being
    /// repeated, belong to the open transaction again.
    pub(super) fn reset(&mut self) {
        self.units.retain(|unit| !unit.is_silent);
        while let Some(unit) = self.units.pop_front_if(|unit| unit.is_answered) {
            self.transaction.push(unit);
        }
    }

    /// Prepares to continue with another session: everything that is not answered, and the open
    /// transaction, is sent again, after the prepared statements.
    pub(super) fn begin_again(&mut self) {
        self.reset();
        self.from_session = Scanner::default();
        self.captured.clear();
        // The session tells them again.
        self.pending_values = None;
        for unit in self.transaction.take().into_iter().rev() {
            self.units.push_front(unit);
        }
        for message in self.statements.messages().rev() {
            self.units.push_front(Unit::silent(message));
        }
        self.session_status = match self.has_failed {
            true => TransactionStatus::Failed,
            false => TransactionStatus::Idle,
        };
        self.units.iter_mut().for_each(Unit::begin_again);
        self.send_all();
        if let Some(first) = self.units.iter().find(|unit| unit.is_answered) {
            self.transaction_id = first.id;
        }
    }

    /// Sends the messages of all units again, at first only those up to the last one with an answer
    /// to compare.
    pub(super) fn send_all(&mut self) {
        self.unsent.clear();
        let compared = self.units.iter().rposition(Unit::is_compared);
        self.is_holding = compared.is_some();
        let count = compared.map_or(self.units.len(), |last| last + 1);
        for (index, unit) in self.units.iter_mut().enumerate() {
            unit.is_held = index >= count;
        }
        self.send(false);
    }

    /// Tells the session, before anything else, that its failed transaction has ended.
    pub(super) fn send_failed_ended(&mut self) {
        let mut unsent = Vec::new();
        message::put(&mut unsent, message::FAILED_ENDED, &[]);
        unsent.append(&mut self.unsent);
        self.unsent = unsent;
    }

    /// Sends the messages of the units that are held back, or of the others.
    fn send(&mut self, held: bool) {
        // Statements cannot be prepared in a failed transaction.
        let mut fails = self.has_failed && !held;
        for unit in self.units.iter_mut().filter(|unit| !unit.is_discarded && unit.is_held == held) {
            unit.is_held = false;
            if !unit.is_silent {
                if std::mem::take(&mut fails) {
                    message::put(&mut self.unsent, message::FAILED, &[]);
                }
                unit.id = (self.next_id)();
                put_id(&mut self.unsent, unit.id);
                match unit.is_compared() {
                    true => message::put(&mut self.unsent, message::REPEATED, &unit.origin.to_be_bytes()),
                    false => {
                        message::put(&mut self.unsent, message::ABANDONED, &unit.origin.to_be_bytes());
                        unit.origin = unit.id;
                    }
                }
            }
            self.unsent.extend_from_slice(&unit.bytes);
        }
        if fails {
            message::put(&mut self.unsent, message::FAILED, &[]);
        }
    }
}

fn put_id(out: &mut Vec<u8>, id: u64) {
    message::put(out, message::TRANSACTION, &id.to_be_bytes());
}
