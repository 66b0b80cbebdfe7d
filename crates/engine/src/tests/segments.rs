//! Segments that open partitions read.

use fulmar_pages::PartitionId;

use crate::{Config, Engine};

/// Frames move with compaction, so segments whose pages have all been rewritten are not needed
/// any more, although the partition stays open and keeps reading its pages.
#[tokio::test(flavor = "multi_thread")]
async fn open_partition_releases_segments_it_no_longer_reads() {
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(directory.path(), 4 << 20)).await.unwrap();
    let mut session = engine.session(PartitionId(1));
    let partition = engine.partitions().partition(PartitionId(1)).await.unwrap();
    let mut before = Vec::new();
    for rows in [400, 500, 600] {
        let rows = format!(
            "INSERT INTO t WITH RECURSIVE i(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM i WHERE k < {rows}) \
             SELECT k, randomblob(3000) FROM i"
        );
        for sql in ["CREATE TABLE IF NOT EXISTS t(k, v)", "DELETE FROM t", &rows, "SELECT sum(k) FROM t"] {
            session.run(sql).await;
            engine.flush().await.unwrap();
        }
        partition.sweep();
        let now = partition.frame_segments();
        assert!(!now.is_empty() && now.iter().all(|segment| !before.contains(segment)), "{now:?}");
        before = now;
    }
    session.close().await;
}
