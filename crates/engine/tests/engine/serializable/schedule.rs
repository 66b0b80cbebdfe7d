//! Random schedules: what each session of one partition is going to do. The same seed gives the same schedule.

use crate::seeds::Random;

/// How a list is stored, so that lists share pages, have indexes, and split pages as they grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A text in a row; all of these rows lie on one page.
    Text,
    /// A text in a row, and in an index whose entry moves with each append.
    Indexed,
    /// One fat row for each value, so that a handful of them fills a page; a unique index guards their places.
    Rows,
}

/// The keys of a schedule, by form.
pub const KEYS: [Form; 7] =
    [Form::Text, Form::Text, Form::Text, Form::Indexed, Form::Indexed, Form::Rows, Form::Rows];

/// How a transaction begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One statement by itself.
    Auto,
    Begin,
    BeginReadOnly,
    BeginImmediate,
    /// The implicit transaction of a pipeline.
    Implicit,
}

/// One step of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Read(usize),
    /// All lists of one form in one statement.
    ReadAll(Form),
    ReadForUpdate(usize),
    /// Without having read: `SET v = v || ...`.
    AppendBlindly(usize),
    /// Read, then write the list anew from what was read.
    AppendToRead(usize),
    /// After a savepoint that is then rolled back to.
    AppendAndUndo(usize),
    /// Silent for longer than a turn is kept for a client.
    Pause,
}

/// One transaction of a session.
#[derive(Clone, Debug)]
pub struct Plan {
    pub kind: Kind,
    pub steps: Vec<Step>,
    /// It ends with ROLLBACK.
    pub gives_up: bool,
}

/// What the sessions do, each its transactions one after the other.
pub fn sessions(random: &mut Random) -> Vec<Vec<Plan>> {
    // Few keys of few forms make for many conflicts.
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
    Plan { kind, steps, gives_up: kind != Kind::Auto && kind != Kind::Implicit && random.once_in(12) }
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
