//! Fuzz target: arbitrary bytes as objects of the store. Segments, manifests and lists of hot pages
//! are decoded or refused, without reading more into memory than exists. (`fulmar-pages` fuzzes the
//! decoders behind the checksums.)

use std::sync::Arc;

use bytes::Bytes;
use fulmar_fuzz::Target;
use fulmar_pages::{
    HotPages, Manifest, PartitionId, SegmentBuilder, SegmentId, SegmentRef, Version, ZERO_PAGE, segment,
};
use fulmar_store::{Backend, HotPagesName, ManifestName, PageStore, Store};

fn seeds() -> [Vec<u8>; 3] {
    let mut built = Vec::new();
    let mut builder = SegmentBuilder::new(&mut built);
    for no in 1..=3 {
        builder.push(PartitionId(7), no, &[no as u8; 4096], &mut built);
    }
    builder.finish(&mut built);
    let manifest = Manifest {
        partition: PartitionId(7),
        version: Version { lineage: 1, epoch: 1, number: 1 },
        page_count: 3,
        timestamp: 4,
        segments: vec![SegmentRef { id: SegmentId(1), partition: PartitionId(7) }],
        outcomes: Vec::new(),
        outcomes_horizon: 0,
    };
    let list = HotPages { partition: PartitionId(7), epoch: 1, timestamp: 1, pages: vec![2, 3] };
    [built, manifest.encode(), list.encode()]
}

/// Recomputes the checksum of the footer, which states how much of a segment to read.
fn sign_footer(bytes: &mut [u8]) {
    if let Some(footer) = bytes.len().checked_sub(segment::FOOTER_BYTES) {
        let crc = crc32fast::hash(&bytes[footer..footer + 32]);
        bytes[footer + 32..footer + 36].copy_from_slice(&crc.to_le_bytes());
    }
}

#[test]
fn fuzz_objects() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let target = Target::new("objects", env!("CARGO_MANIFEST_DIR")).seeds(seeds()).max_length(16 << 10);
    target.max_allocation(1 << 20, 64).run(|input| {
        let objects = Backend::memory();
        let store = PageStore::open(Arc::new(objects.clone()));
        let mut bytes = input.to_vec();
        sign_footer(&mut bytes);
        let name = ManifestName { partition: PartitionId(7), epoch: 1, number: 1 };
        runtime.block_on(async {
            let id = store.put_segment(Bytes::from(bytes)).await.unwrap();
            if let Ok(index) = store.segment_index(id).await {
                let mut page = ZERO_PAGE;
                for partition in index.partitions() {
                    for (_, frame) in index.frames(partition) {
                        let _ = store.read_page(id, frame, &mut page).await;
                    }
                }
            }
            let manifest = "manifests/0000000000000007/00000001/0000000000000001";
            objects.put(manifest, Bytes::copy_from_slice(input)).await.unwrap();
            if let Ok(manifest) = store.read_manifest(name).await {
                assert_eq!(manifest.encode(), input);
            }
            let _ = store.latest_manifest(PartitionId(7), u32::MAX, None).await;
            let hot = "manifests/0000000000000007/hot-00000001-0000000000000001";
            objects.put(hot, Bytes::copy_from_slice(input)).await.unwrap();
            let name = HotPagesName { partition: PartitionId(7), epoch: 1, timestamp: 1 };
            if let Ok(list) = store.read_hot_pages(name).await {
                assert_eq!(list.encode(), input);
            }
        });
    });
}
