//! A node with one partition, and SQL for it, for tests of this crate.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use fulmar_pages::{PartitionId, Timeline};
use fulmar_sqlite::{
    Connection, DEFAULT_TIME_SLICE, Heap, MAX_STATEMENT_BYTES, NodeSpace, Quota, Settings, SpillArea,
    TemporaryFiles, TenantSpace,
};
use fulmar_store::{CommitLog, LogOptions, PageStore, StdFiles};

use crate::{
    Buffers, Cache, Clock, Contents, Disk, MemoryBudget, Node, Partition, PartitionPages, SystemTime,
};

/// Temporary files of a tenant with a quota of `limit_bytes`.
pub(crate) fn files(directory: &Path, threshold_bytes: usize, limit_bytes: u64) -> TemporaryFiles {
    let space = TenantSpace::new(&NodeSpace::new());
    TemporaryFiles { area: SpillArea::new(directory, threshold_bytes), quota: Quota::new(space, limit_bytes) }
}

/// Waits until all dropped files are closed. Panics after two minutes.
pub(crate) async fn all_released(files: &TemporaryFiles) {
    let closed = async {
        while files.quota.used_bytes() > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), closed)
        .await
        .expect("dropped files must be closed within 120 s");
}

/// A partition in a temporary directory, and a connection on it.
pub(crate) struct Database {
    pub partition: Arc<Partition>,
    pages: Rc<PartitionPages>,
    connection: Connection,
    _directory: tempfile::TempDir,
}

fn node(directory: &Path) -> Arc<Node> {
    let [log, store, temporary] = ["log", "store", "tmp"].map(|name| directory.join(name));
    std::fs::create_dir_all(&store).unwrap();
    std::fs::create_dir_all(&temporary).unwrap();
    let files = Arc::new(StdFiles::open(&log).unwrap());
    let log = CommitLog::open(LogOptions::default(), files, &mut |_, _| Ok(())).unwrap();
    Arc::new(Node {
        log,
        shared_log: Default::default(),
        store: Arc::new(PageStore::open_directory(&store).unwrap()),
        spill: SpillArea::new(&temporary, 4 << 20),
        temporary: NodeSpace::new(),
        memory: MemoryBudget::new(64 << 20),
        whole_process: false,
        heap: Heap::of_node(64 << 20),
        cache: Cache::new(false),
        disk: Disk::new(crate::space_of(directory.to_owned()), None),
        clock: Clock::new(Arc::new(SystemTime::default())),
        buffers: Buffers::default(),
        stats: Default::default(),
        publication: Default::default(),
        old_manifests: Default::default(),
        ownership: None,
        is_member: false,
        has_common_store: false,
        is_replica: false,
        exported: Default::default(),
    })
}

impl Database {
    pub(crate) async fn new() -> Database {
        let directory = tempfile::tempdir().unwrap();
        let node = node(directory.path());
        let (log, id) = (node.log.clone(), PartitionId(7));
        let opening =
            Partition::open(node, log, Arc::default(), id, Timeline::first(id), Contents::default());
        let partition = opening.await.unwrap();
        let files = partition.temporary_files();
        let settings = Settings {
            database: id.0,
            heap: partition.heap().clone(),
            files: files.clone(),
            time_slice: DEFAULT_TIME_SLICE,
            max_statement_bytes: MAX_STATEMENT_BYTES,
        };
        let pages = Rc::new(PartitionPages::new(partition.clone(), files));
        let mut connection = Connection::new(pages.clone(), settings);
        connection.open().await.unwrap();
        Database { partition, pages, connection, _directory: directory }
    }

    /// Runs statements, and waits until their commits are durable.
    pub(crate) async fn run(&mut self, sql: &str) {
        let sql = std::ffi::CString::new(sql).unwrap();
        self.pages.transaction().borrow_mut().reset();
        self.connection.link.trusted.set(true);
        let running = self.connection.run(|connection| connection.execute_here(&sql));
        running.unwrap().await.unwrap();
        let log = &self.partition.log;
        log.wait_durable(log.appended()).await.unwrap();
    }
}
