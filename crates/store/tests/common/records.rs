//! Records for tests of logs.

use fulmar_pages::{PartitionId, RecordBuilder, RecordHeader, RecordKind, Version};

/// A commit record with this transaction id, about `bytes` long.
pub fn commit(transaction: u64, bytes: usize) -> Vec<u8> {
    let mut builder = RecordBuilder::default();
    builder.begin(&RecordHeader {
        kind: RecordKind::Commit,
        partition: PartitionId(1),
        version: Version { lineage: 1, epoch: 1, number: transaction },
        transaction,
        timestamp: transaction,
        page_count: 1,
        previous: None,
    });
    builder.push_diff(1, &vec![transaction as u8; bytes]);
    builder.finish().to_vec()
}
