//! Records that a log writes for its own use: cuts and seals.

use fulmar_pages::record::CutPoint;
use fulmar_pages::{PartitionId, RecordBuilder, RecordHeader, RecordKind, Version};

/// Returns the body of a record that the log writes for its own use.
pub(super) fn own_record(kind: RecordKind, cut: Option<CutPoint>) -> Vec<u8> {
    let mut builder = RecordBuilder::default();
    builder.begin(&RecordHeader {
        kind,
        partition: PartitionId(0),
        version: Version::default(),
        transaction: 0,
        timestamp: 0,
        page_count: 0,
        previous: None,
    });
    if let Some(cut) = cut {
        builder.push_cut(cut);
    }
    builder.finish().to_vec()
}
