//! Random schedules: the planned operations of each session of a partition. A seed determines the
//! schedule.

use crate::seeds::Random;

/// How a list is stored. The forms make lists share pages, have indexes, and split pages as they
/// grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A text in a row. All of these rows are on one page.
    Text,
    /// A text in a row, with an index entry that moves with each append.
    Indexed,
    /// One large row per value, so that a few rows fill a page. A unique index enforces their
    /// positions.
    Rows,
}

/// The form of each key.
pub const KEYS: [Form; 7] =
    [Form::Text, Form::Text, Form::Text, Form::Indexed, Form::Indexed, Form::Rows, Form::Rows];

/// How a transaction begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A single statement in autocommit mode.
    Auto,
    Begin,
    BeginReadOnly,
    BeginImmediate,
    /// An implicit transaction, as of a pipeline.
    Implicit,
}

/// One step of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Read(usize),
    /// All lists of one form in one statement.
    ReadAll(Form),
    ReadForUpdate(usize),
    /// A blind update: `SET v = v || ...`.
    AppendBlindly(usize),
    /// Reads the list, then writes the extended list.
    AppendToRead(usize),
    /// Appends after a savepoint, then rolls back to it.
    AppendAndUndo(usize),
    /// An idle time after which the write turn is passed on.
    Pause,
}

/// One transaction of a session.
#[derive(Clone, Debug)]
pub struct Plan {
    pub kind: Kind,
    pub steps: Vec<Step>,
    /// Ends with ROLLBACK.
    pub rolls_back: bool,
}

/// The transactions of each session.
pub fn sessions(random: &mut Random) -> Vec<Vec<Plan>> {
    // Few keys of few forms cause many conflicts.
    let keys: Vec<usize> =
        (0..2 + random.below(2)).map(|_| random.below(KEYS.len() as u64) as usize).collect();
    let sessions = 2 + random.below(4);
    (0..sessions).map(|_| (0..1 + random.below(4)).map(|_| transaction(random, &keys)).collect()).collect()
}

fn transaction(random: &mut Random, keys: &[usize]) -> Plan {
    let kind = random.weighted(&[
        (6, Kind::Begin),
        (4, Kind::Auto),
        (2, Kind::BeginImmediate),
        (1, Kind::BeginReadOnly),
        (1, Kind::Implicit),
    ]);
    let count = if kind == Kind::Auto { 1 } else { 1 + random.below(4) };
    let steps = (0..count).map(|_| step(random, kind, keys)).collect();
    Plan { kind, steps, rolls_back: kind != Kind::Auto && kind != Kind::Implicit && random.once_in(12) }
}

fn step(random: &mut Random, kind: Kind, keys: &[usize]) -> Step {
    let key = *random.pick(keys);
    let reads = [(4, Step::Read(key)), (1, Step::ReadAll(KEYS[key]))];
    let writes = [
        (5, Step::Read(key)),
        (1, Step::ReadAll(KEYS[key])),
        (2, Step::ReadForUpdate(key)),
        (5, Step::AppendBlindly(key)),
        (4, Step::AppendToRead(key)),
    ];
    match kind {
        Kind::BeginReadOnly => random.weighted(&reads),
        Kind::Auto => random.weighted(&[(1, Step::Read(key)), (3, Step::AppendBlindly(key))]),
        _ if random.once_in(12) => Step::AppendAndUndo(key),
        _ if random.once_in(100) => Step::Pause,
        _ => random.weighted(&writes),
    }
}
