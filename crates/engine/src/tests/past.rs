//! Historical versions that sessions read.

use fulmar_pages::PartitionId;

use crate::{Config, Engine};

#[tokio::test(flavor = "multi_thread")]
async fn version_is_opened_once_and_stays_open_while_sessions_use_it() {
    const ID: PartitionId = PartitionId(7);
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(directory.path(), 64 << 20)).await.unwrap();
    let mut writer = engine.session(ID);
    writer.run("CREATE TABLE t(x)").await;
    engine.flush().await.unwrap();
    let now_ms = engine.node().clock.unix_ms();
    let mut readers = [engine.session(ID), engine.session(ID)];
    for session in &mut readers {
        session.set_as_of(Some(now_ms));
        session.run("SELECT * FROM t").await;
    }
    let close_unused = || engine.maintenance().historical_versions().close_unused(|_| true);
    close_unused();
    assert_eq!(engine.maintenance().historical_versions().open().len(), 1);
    let [mut first, mut second] = readers;
    first.close().await;
    close_unused();
    assert_eq!(engine.maintenance().historical_versions().open().len(), 1);
    second.set_as_of(None);
    engine.maintenance().historical_versions().close_unused(|_| false);
    assert_eq!(
        engine.maintenance().historical_versions().open().len(),
        1,
        "a recently used version must stay open"
    );
    close_unused();
    assert!(engine.maintenance().historical_versions().open().is_empty());
    second.run("SELECT * FROM t").await;
    for mut session in [second, writer] {
        session.close().await;
    }
}
