//! A partition of the model: a list. A transaction appends one value, so version `n` is the first
//! `n` values.

use fulmar_pages::PartitionId;

/// The cluster-unique id of a transaction: the gateway, and its number there.
pub type Transaction = (u32, u64);

/// The contents of a partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    entries: Vec<(Transaction, u64)>,
}

impl State {
    pub fn version(&self) -> u64 {
        self.entries.len() as u64
    }

    pub fn append(&mut self, transaction: Transaction, value: u64) {
        self.entries.push((transaction, value));
    }

    /// The version that a transaction created, if it was executed.
    pub fn outcome(&self, transaction: Transaction) -> Option<u64> {
        let place = self.entries.iter().rposition(|(other, _)| *other == transaction)?;
        Some(place as u64 + 1)
    }

    /// The values of an earlier version.
    pub fn values_at(&self, version: u64) -> Vec<u64> {
        self.entries[..version as usize].iter().map(|(_, value)| *value).collect()
    }

    /// As of an earlier version.
    pub fn at(&self, version: u64) -> State {
        State { entries: self.entries[..version as usize].to_vec() }
    }

    /// The changes after version `from` up to version `to`.
    pub fn segment(&self, from: u64, to: u64) -> Segment {
        Segment { from, entries: self.entries[from as usize..to as usize].to_vec() }
    }

    /// Adds the changes of a segment. Returns false if they do not follow this version.
    pub fn apply(&mut self, segment: &Segment) -> bool {
        let follows = segment.from == self.version();
        self.entries.extend(&segment.entries);
        follows
    }

    /// Applies a record of the log, unless it is included already. Returns false if it does not
    /// follow this version.
    pub fn replay(&mut self, record: &Record) -> bool {
        if record.version <= self.version() {
            return true;
        }
        let follows = record.version == self.version() + 1;
        self.append(record.transaction, record.value);
        follows
    }
}

/// The contents of a segment: the changes after a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    from: u64,
    entries: Vec<(Transaction, u64)>,
}

/// A record of the log: a commit or a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub partition: PartitionId,
    pub epoch: u32,
    pub version: u64,
    pub transaction: Transaction,
    pub value: u64,
    pub is_release: bool,
}

const WORD_BYTES: usize = 8;

impl Record {
    /// The release of a partition at a version.
    pub fn release(partition: PartitionId, epoch: u32, version: u64) -> Record {
        Record { partition, epoch, version, transaction: (0, 0), value: 0, is_release: true }
    }

    pub fn encode(&self) -> Vec<u8> {
        let Record { partition, epoch, version, transaction: (gateway, number), value, is_release } = *self;
        let words =
            [partition.0, epoch.into(), version, gateway.into(), number, value, u64::from(is_release)];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    pub fn decode(body: &[u8]) -> Record {
        let word = |place: usize| {
            let bytes = body[place * WORD_BYTES..(place + 1) * WORD_BYTES].try_into();
            u64::from_le_bytes(bytes.unwrap())
        };
        Record {
            partition: PartitionId(word(0)),
            epoch: word(1) as u32,
            version: word(2),
            transaction: (word(3) as u32, word(4)),
            value: word(5),
            is_release: word(6) == 1,
        }
    }

    /// Returns true if it is a commit of this epoch of the partition.
    pub fn is_commit_of(&self, partition: PartitionId, epoch: u32) -> bool {
        self.partition == partition && self.epoch == epoch && !self.is_release
    }
}
