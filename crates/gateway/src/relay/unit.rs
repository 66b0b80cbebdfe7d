//! A unit of a client's messages, which one ReadyForQuery answers.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hasher};
use std::rc::Rc;

use fulmar_engine::{CommandTag, TransactionStatus};
use fulmar_pgwire::protocol::backend;

use super::control::{Control, Portals};

/// Size of a message's kind and length.
pub(super) const HEADER_BYTES: usize = 5;
/// Maximum size of the requests of a unit with which a Parse message is kept. The statements of
/// later ones count as closed.
const MAX_PARSE_BYTES: usize = 1 << 20;
/// Maximum size of the requests and changes of a unit. Beyond it, all statements count as closed.
const MAX_REQUEST_BYTES: usize = MAX_PARSE_BYTES + (256 << 10);
/// Maximum number of executions of a unit whose order is known.
const MAX_EXECUTES: usize = 4096;
/// A Sync message.
const SYNC: [u8; 5] = [b'S', 0, 0, 0, 4];

/// A change of the prepared statements.
#[derive(Clone)]
pub(super) enum Change {
    /// A Parse message was executed.
    Parse(Rc<[u8]>),
    /// The statement with this name was closed.
    Close(Box<[u8]>),
    /// All statements were closed.
    CloseAll,
    /// A portal was closed: nothing changes.
    Portal,
}

impl Change {
    /// The size of a request and of its copy among the changes.
    fn size_bytes(&self) -> usize {
        let text_bytes = match self {
            Change::Parse(message) => message.len(),
            Change::Close(name) => 2 * name.len(),
            Change::CloseAll | Change::Portal => 0,
        };
        text_bytes + 2 * size_of::<Change>()
    }
}

/// A unit of messages.
pub(super) struct Unit {
    /// The id of its transaction, if it begins one.
    pub(super) id: u64,
    /// The id with which it was sent when the client got its first answer.
    pub(super) origin: u64,
    pub(super) is_query: bool,
    /// All of its messages have arrived.
    pub(super) is_complete: bool,
    /// The messages. Empty if the journal is too long.
    pub(super) bytes: Vec<u8>,
    /// The front sent it to restore a prepared statement.
    pub(super) is_silent: bool,
    /// The statement of a silent unit was prepared.
    pub(super) has_parsed: bool,
    /// It may contain the end of a transaction and other statements.
    pub(super) mixes_transactions: bool,
    /// It may begin a transaction and leave it open.
    pub(super) may_begin: bool,
    /// It may end a transaction.
    pub(super) ends_transaction: bool,
    /// It is a COMMIT and nothing else.
    pub(super) is_commit: bool,
    /// It is a ROLLBACK and nothing else.
    pub(super) is_rollback: bool,
    /// The client has got the complete answer: the unit is part of the open transaction.
    pub(super) is_answered: bool,
    /// It was answered with an error, and its messages up to Sync are dropped.
    pub(super) is_discarded: bool,
    /// The status after a discarded unit.
    pub(super) failed_status: TransactionStatus,
    /// It is sent when the answers of earlier units have been compared.
    pub(super) is_held: bool,
    /// How often it was sent again because its node had failed.
    pub(super) repeats: u32,
    /// The rest of the answer, if its transaction is committed ([`message::COMMITTED`]).
    ///
    /// [`message::COMMITTED`]: super::message::COMMITTED
    pub(super) committed_answer: Option<Vec<u8>>,
    /// The changes of prepared statements that have been answered.
    pub(super) changes: Vec<Change>,
    /// The Parse and Close messages, and the number of those that have been answered.
    requests: Vec<Change>,
    answered_requests: usize,
    /// The size of the requests and the changes.
    request_bytes: usize,
    /// They were too long: all statements count as closed.
    forgets_all: bool,
    portals: Portals,
    /// What its executed statements do to transactions.
    executes: Vec<Control>,
    is_copying: bool,
    /// The session has answered with the begin of a COPY, possibly an earlier session.
    has_begun_copy: bool,
    has_ended_copy: bool,
    hash: AnswerHash,
    /// The length and the hash of what the client has got.
    known: Option<(u64, u64)>,
}

impl Unit {
    /// The size of a unit without messages.
    pub(super) const OVERHEAD_BYTES: usize = size_of::<Unit>();

    /// The size of the messages of a unit, and of a unit without messages.
    pub(super) fn size_bytes(&self) -> usize {
        self.bytes.len() + Unit::OVERHEAD_BYTES
    }

    /// The size of all that the unit holds.
    pub(super) fn held_bytes(&self) -> usize {
        let answer_bytes = self.committed_answer.as_ref().map_or(0, Vec::len);
        let control_bytes = self.portals.bytes() + self.executes.len();
        self.size_bytes() + self.request_bytes + control_bytes + answer_bytes
    }

    /// The size of the messages that are kept.
    #[cfg(test)]
    pub(super) fn kept_bytes(&self) -> usize {
        let size = |request: &Change| if let Change::Parse(message) = request { message.len() } else { 0 };
        self.bytes.len() + self.requests.iter().map(size).sum::<usize>()
    }

    pub(super) fn new(id: u64, is_query: bool) -> Unit {
        Unit {
            id,
            origin: id,
            is_query,
            is_complete: false,
            bytes: Vec::new(),
            is_silent: false,
            has_parsed: false,
            mixes_transactions: false,
            may_begin: false,
            ends_transaction: false,
            is_commit: false,
            is_rollback: false,
            is_answered: false,
            is_held: false,
            is_discarded: false,
            failed_status: TransactionStatus::Idle,
            repeats: 0,
            committed_answer: None,
            changes: Vec::new(),
            requests: Vec::new(),
            answered_requests: 0,
            request_bytes: 0,
            forgets_all: false,
            portals: Portals::default(),
            executes: Vec::new(),
            is_copying: false,
            has_begun_copy: false,
            has_ended_copy: false,
            hash: AnswerHash::default(),
            known: None,
        }
    }

    /// Prepares a statement again.
    pub(super) fn silent(parse: &[u8]) -> Unit {
        let mut unit = Unit::new(0, false);
        unit.is_silent = true;
        unit.is_complete = true;
        unit.bytes = [parse, &SYNC].concat();
        unit
    }

    /// A message other than Bind and Sync has arrived.
    pub(super) fn message(&mut self, kind: u8, message: Vec<u8>) {
        if self.is_discarded {
            return;
        }
        let body = message.get(HEADER_BYTES..).unwrap_or_default();
        let is_cut = messages(&message).next().is_none();
        match kind {
            b'Q' => {
                self.is_complete = true;
                let control = match split_name(body).filter(|_| !is_cut) {
                    Some(sql) => Control::of_text(sql),
                    None => Control::Mixed,
                };
                self.set_control(control);
                self.mixes_transactions = control == Control::Mixed;
            }
            b'P' if is_cut || self.request_bytes + message.len() > MAX_PARSE_BYTES => {
                let name = split_name(body).unwrap_or_default();
                self.request(Change::Close(name.into()));
            }
            b'P' => self.request(Change::Parse(message.into())),
            b'C' if body.first() == Some(&b'S') => {
                let name = split_name(&body[1..]).unwrap_or_default();
                self.request(Change::Close(name.into()));
            }
            b'C' => self.request(Change::Portal),
            b'E' => {
                let portal = split_name(body).unwrap_or_default();
                self.executes.push(self.portals.execute(portal));
                if self.executes.len() > MAX_EXECUTES {
                    self.executes = vec![Control::Mixed; 2];
                }
            }
            _ => {}
        }
    }

    /// A Parse or Close message has arrived.
    fn request(&mut self, request: Change) {
        if self.add_change(&request) {
            self.requests.push(request);
        }
    }

    /// The session has closed statements by DEALLOCATE.
    pub(super) fn deallocated(&mut self, change: Change) {
        if self.add_change(&change) {
            self.changes.push(change);
        }
    }

    /// Counts a request or a change. Returns false if it cannot be kept.
    fn add_change(&mut self, change: &Change) -> bool {
        if self.forgets_all {
            return false;
        }
        self.request_bytes += change.size_bytes();
        if self.request_bytes > MAX_REQUEST_BYTES {
            self.forget_all();
        }
        !self.forgets_all
    }

    /// The requests are too long: all statements count as closed.
    fn forget_all(&mut self) {
        self.forgets_all = true;
        self.requests = vec![Change::CloseAll];
        self.changes = vec![Change::CloseAll];
        (self.answered_requests, self.request_bytes) = (0, 2 * Change::CloseAll.size_bytes());
    }

    /// A Bind message has arrived. `known` finds what a statement of earlier units does.
    pub(super) fn bind(&mut self, message: &[u8], known: impl Fn(&[u8]) -> Option<Control>) {
        let body = message.get(HEADER_BYTES..).unwrap_or_default();
        let Some(portal) = split_name(body) else { return };
        let Some(name) = body.get(portal.len() + 1..).and_then(split_name) else { return };
        let control = self.control_of(name).or_else(|| known(name));
        self.portals.bind(portal, control.unwrap_or(Control::Mixed));
    }

    /// What the statement does that the unit prepares with this name. `None` if the unit does not
    /// change that statement.
    pub(super) fn control_of(&self, name: &[u8]) -> Option<Control> {
        self.requests.iter().rev().find_map(|request| match request {
            Change::Parse(parse) => text_of(parse, name).map(Control::of_statement),
            // It may have been prepared with a text that is not kept.
            Change::Close(closed) => (**closed == *name).then_some(Control::Mixed),
            Change::CloseAll => Some(Control::Mixed),
            Change::Portal => None,
        })
    }

    /// A Sync has arrived. The session ignores it during a COPY.
    pub(super) fn sync(&mut self) {
        if self.is_copying && !self.has_ended_copy {
            return;
        }
        self.is_complete = true;
        let control = Control::of_sequence(self.executes.iter().copied());
        self.set_control(control);
        // A single statement that is not known may be anything, but only one thing.
        self.mixes_transactions = control == Control::Mixed && self.executes.len() > 1;
    }

    fn set_control(&mut self, control: Control) {
        self.is_commit = control == Control::Commit;
        self.is_rollback = control == Control::Rollback;
        self.ends_transaction = control.may_end();
        self.may_begin = matches!(control, Control::Begin | Control::Mixed);
    }

    /// The changes of prepared statements that the unit asks for.
    pub(super) fn take_requests(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.requests)
    }

    /// CopyDone or CopyFail has arrived.
    pub(super) fn end_copy(&mut self) {
        self.has_ended_copy = true;
    }

    /// The session has answered a message with one of this kind. Returns true if units may have to
    /// be joined ([`Unit::join`]).
    pub(super) fn answered(&mut self, kind: u8) -> bool {
        match kind {
            b'1' if self.is_silent => self.has_parsed = true,
            b'1' | b'3' => {
                if let Some(request) = self.requests.get(self.answered_requests) {
                    self.changes.push(request.clone());
                    self.answered_requests += 1;
                }
            }
            b'E' => self.is_copying = false,
            b'G' if !self.is_query => {
                self.is_copying = true;
                if !std::mem::replace(&mut self.has_begun_copy, true) {
                    // The session ignores the Sync that has arrived before the data.
                    let was_complete = std::mem::replace(&mut self.is_complete, false);
                    return was_complete && self.has_ended_copy;
                }
            }
            _ => {}
        }
        false
    }

    /// Appends the unit that follows.
    pub(super) fn join(&mut self, next: Unit) {
        self.bytes.extend_from_slice(&next.bytes);
        self.is_complete = next.is_complete;
        self.executes.extend(next.executes);
        self.requests.extend(next.requests);
        self.request_bytes += next.request_bytes;
        if self.forgets_all || next.forgets_all || self.request_bytes > MAX_REQUEST_BYTES {
            self.forget_all();
        }
    }

    /// Counts the part of `piece` that the client has got before. `None` if it differs.
    pub(super) fn absorb_known(&mut self, piece: &[u8]) -> Option<usize> {
        let Some(known) = self.known else { return Some(0) };
        let left = known.0 - self.hash.bytes;
        let count = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
        self.hash.add(&piece[..count]);
        if self.hash.bytes == known.0 {
            if self.hash.value() != known {
                return None;
            }
            self.known = None;
        }
        Some(count)
    }

    /// Adds to the hash of the answer.
    pub(super) fn hash(&mut self, piece: &[u8]) {
        self.hash.add(piece);
    }

    /// Returns true if the client has got a longer answer before.
    pub(super) fn expects_more(&self) -> bool {
        self.known.is_some()
    }

    /// Returns true if the unit is repeated, and the client has got its answer or a part of that.
    pub(super) fn is_compared(&self) -> bool {
        self.is_answered || self.known.is_some()
    }

    /// Returns true if it only closes statements and portals. Drivers ignore errors of such a unit,
    /// because it cannot fail.
    pub(super) fn only_closes(&self) -> bool {
        let closes = |message: &[u8]| matches!(message[0], b'C' | b'S');
        let is_whole = self.is_complete && !self.is_silent && !self.is_query && !self.bytes.is_empty();
        is_whole && !self.is_partly_answered() && messages(&self.bytes).all(closes)
    }

    /// Returns true if it is not known yet whether it only closes, or ends the transaction. With a
    /// Flush, the client waits for an answer now.
    pub(super) fn is_undecided(&self) -> bool {
        !self.is_complete && (self.is_query || messages(&self.bytes).all(|message| message[0] != b'H'))
    }

    /// Writes the answer to a unit that only closes, without its ReadyForQuery. Returns the changes
    /// of the prepared statements.
    pub(super) fn answer_closes(self, out: &mut Vec<u8>) -> Vec<Change> {
        let closes = messages(&self.bytes).filter(|message| message[0] == b'C');
        closes.for_each(|_| backend::close_complete(out));
        self.requests
    }

    /// Returns true if the client has got a part of the answer.
    pub(super) fn is_partly_answered(&self) -> bool {
        self.known.is_some() || self.hash.bytes > 0
    }

    /// The unit is sent again.
    pub(super) fn begin_again(&mut self) {
        // If the answer was interrupted while it was compared, the client has got the longer part.
        if self.known.is_none() && self.hash.bytes > 0 {
            self.known = Some(self.hash.value());
        }
        self.hash = AnswerHash::default();
        self.committed_answer = None;
        self.changes.clear();
        self.request_bytes = self.requests.iter().map(Change::size_bytes).sum();
        self.answered_requests = 0;
        self.has_parsed = false;
        self.is_copying = false;
    }

    /// Drops the messages up to Sync.
    pub(super) fn discard(&mut self, status: TransactionStatus) {
        self.is_discarded = true;
        self.failed_status = status;
        (self.bytes, self.requests, self.changes) = (Vec::new(), Vec::new(), Vec::new());
        self.request_bytes = 0;
        (self.known, self.hash) = (None, AnswerHash::default());
    }

    /// Returns true if it is a COMMIT that [`Unit::answer_commit`] can answer. That of the extended
    /// protocol needs the messages.
    pub(super) fn is_answerable_commit(&self) -> bool {
        self.is_commit && !self.is_partly_answered() && (self.is_query || !self.bytes.is_empty())
    }

    /// Writes the answer to a COMMIT without its ReadyForQuery.
    pub(super) fn answer_commit(&self, out: &mut Vec<u8>) {
        if self.is_query {
            return backend::command_complete(out, CommandTag::Plain("COMMIT"));
        }
        let mut rest: VecDeque<&[u8]> = messages(&self.bytes).collect();
        while let Some(message) = rest.pop_front() {
            match message[0] {
                b'P' => backend::parse_complete(out),
                b'B' => backend::bind_complete(out),
                b'C' => backend::close_complete(out),
                b'D' if message.get(HEADER_BYTES) == Some(&b'S') => {
                    backend::parameter_description(out, std::iter::empty());
                    backend::no_data(out);
                }
                b'D' => backend::no_data(out),
                b'E' => backend::command_complete(out, CommandTag::Plain("COMMIT")),
                _ => {}
            }
        }
    }
}

/// The units of the open transaction that have been answered.
#[derive(Default)]
pub(super) struct Transaction {
    units: Vec<Unit>,
    bytes: usize,
}

impl Transaction {
    /// Adds a unit, which does not change any more.
    pub(super) fn push(&mut self, unit: Unit) {
        self.bytes += unit.held_bytes();
        self.units.push(unit);
    }

    /// Removes all units.
    pub(super) fn take(&mut self) -> Vec<Unit> {
        self.bytes = 0;
        std::mem::take(&mut self.units)
    }

    /// The size of all that the units hold.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// What the statement does that the newest unit prepares with this name.
    pub(super) fn control_of(&self, name: &[u8]) -> Option<Control> {
        self.units.iter().rev().find_map(|unit| unit.control_of(name))
    }
}

/// The hash of an answer.
#[derive(Clone, Default)]
struct AnswerHash {
    hasher: DefaultHasher,
    bytes: u64,
}

impl AnswerHash {
    fn add(&mut self, piece: &[u8]) {
        self.hasher.write(piece);
        self.bytes += piece.len() as u64;
    }

    fn value(&self) -> (u64, u64) {
        (self.bytes, self.hasher.finish())
    }
}

/// The complete messages in `bytes`.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = u32::from_be_bytes(*bytes.get(1..)?.first_chunk::<4>()?) as usize;
        let message = bytes.get(..length + 1)?;
        bytes = &bytes[length + 1..];
        Some(message)
    })
}

/// The name at the start of `bytes`, without the zero byte that ends it.
pub(super) fn split_name(bytes: &[u8]) -> Option<&[u8]> {
    bytes.iter().position(|byte| *byte == 0).map(|end| &bytes[..end])
}

/// The text of a Parse message, if it prepares the statement with this name.
pub(super) fn text_of<'a>(parse: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let body = parse.get(HEADER_BYTES..)?;
    match split_name(body)? {
        parsed if parsed == name => body.get(name.len() + 1..).and_then(split_name),
        _ => None,
    }
}
