//! A full disk while the catalog is written: a change is rejected, or the node reports that its
//! outcome is unknown. After a restart with free space, every acknowledged change exists.
//!
//! The data directory is a tmpfs of 160 MiB in a separate mount namespace. This needs no privileges
//! where user namespaces are permitted, and leaves nothing behind if the test is killed.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::FallocateFlags;
use rustix::process::Signal;

use super::*;
use crate::common::{client, first_line};

/// Enough for two log files, which the node preallocates.
const DISK_SIZE: &str = "160m";
const PAGE_BYTES: u64 = 4096;
/// Size of each of the two slots of `meta.head`.
const SLOT_BYTES: u64 = 4096;
/// Offset of the write counter in a slot.
const WRITE_COUNT_OFFSET: u64 = 12;
/// Maximum number of pages that a test frees one after the other until a change succeeds.
const MAX_FREED_PAGES: u64 = 200;

/// A small disk, unmounted on drop.
struct SmallDisk {
    directory: tempfile::TempDir,
    /// The process that keeps the namespace alive. It exits when its standard input is closed.
    holder: Child,
    _input: ChildStdin,
    _lock: MutexGuard<'static, ()>,
}

/// Limits the tests to one disk at a time, because its contents are in memory.
static DISK_LOCK: Mutex<()> = Mutex::new(());

impl SmallDisk {
    fn mount() -> SmallDisk {
        let lock = DISK_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        let script = format!(
            "mount -t tmpfs -o size={DISK_SIZE},mode=700 small '{}' && echo mounted && exec cat",
            path.display()
        );
        let mut holder = Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this test requires unshare of util-linux");
        let line = first_line(&mut holder);
        assert_eq!(line, "mounted\n", "cannot mount a tmpfs: permit user namespaces, or run as root");
        let input = holder.stdin.take().unwrap();
        SmallDisk { directory, holder, _input: input, _lock: lock }
    }

    /// Returns the path of a file on the disk as seen by this process.
    fn file(&self, name: &str) -> PathBuf {
        let directory = self.directory.path().canonicalize().unwrap();
        let root = PathBuf::from(format!("/proc/{}/root", self.holder.id()));
        root.join(directory.strip_prefix("/").unwrap()).join(name)
    }

    fn start(&self) -> Result<Node, String> {
        let data = self.directory.path().canonicalize().unwrap().join("data");
        let command = Node::command(&data, &["--insecure", "--disk-reserve", "0"]);
        let mut nsenter = Command::new("nsenter");
        nsenter.args([
            "--user",
            "--mount",
            "--preserve-credentials",
            "--target",
            &self.holder.id().to_string(),
        ]);
        nsenter.arg(command.get_program()).args(command.get_args()).env_remove("RUST_LOG");
        // The node's log is on another disk.
        let log = tempfile::NamedTempFile::new().unwrap();
        start(nsenter, log.path())
    }

    /// Fills the disk.
    fn fill(&self) {
        let mut filler = OpenOptions::new().create(true).append(true).open(self.file("filler")).unwrap();
        let page = [1; PAGE_BYTES as usize];
        loop {
            match filler.write_all(&page) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::StorageFull => return,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Frees one page.
    fn free_page(&self) {
        let filler = OpenOptions::new().write(true).open(self.file("filler")).unwrap();
        let pages = filler.metadata().unwrap().len() / PAGE_BYTES;
        filler.set_len((pages - 1) * PAGE_BYTES).unwrap();
    }

    /// Frees all space.
    fn free(&self) {
        std::fs::remove_file(self.file("filler")).unwrap();
    }

    /// Punches a hole at the older slot of `meta.head`, so that the next write of it needs space,
    /// as on a copy-on-write file system.
    fn punch_head(&self) {
        let head = OpenOptions::new().read(true).write(true).open(self.file("data/meta.head")).unwrap();
        let count = |slot: u64| {
            let mut count = [0; 8];
            head.read_exact_at(&mut count, slot * SLOT_BYTES + WRITE_COUNT_OFFSET).unwrap();
            u64::from_le_bytes(count)
        };
        let older = if count(0) < count(1) { 0 } else { SLOT_BYTES };
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&head, flags, older, SLOT_BYTES).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Fails if the process has already exited.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// The users created by the test, with the outcomes reported to the client.
#[derive(Default)]
struct Outcomes {
    created: Vec<String>,
    rejected: Vec<String>,
    unknown: Vec<String>,
}

impl Outcomes {
    fn next_user(&self) -> String {
        format!("user{}", self.created.len() + self.rejected.len() + self.unknown.len())
    }

    /// Creates a user. Returns the error, if any.
    async fn create(&mut self, system: &Client) -> Option<String> {
        let user = self.next_user();
        let Err(error) = system.batch_execute(&format!("CREATE USER {user} PASSWORD 'secret'")).await else {
            self.created.push(user);
            return None;
        };
        let error = error.as_db_error().unwrap_or_else(|| panic!("{user}: {error}"));
        let text =
            format!("{} {} {:?} {:?}", error.code().code(), error.message(), error.detail(), error.hint());
        if text.contains("made no change") {
            self.rejected.push(user);
        } else {
            assert!(text.contains("outcome of this change is not known"), "{text}");
            self.unknown.push(user);
        }
        Some(text)
    }

    /// Checks that acknowledged users exist and rejected users do not.
    async fn check(&self, node: &Node) {
        let system = client(node, "fulmar").await;
        let users = column(&system, "SELECT rolname FROM pg_roles").await;
        for user in &self.created {
            assert!(users.contains(user), "{user} was acknowledged and must exist: {users:?}");
        }
        for user in &self.rejected {
            assert!(!users.contains(user), "{user} was rejected and must not exist: {users:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_rejects_catalog_changes() {
    let disk = SmallDisk::mount();
    let mut outcomes = Outcomes::default();
    let node = disk.start().unwrap();
    let system = client(&node, "fulmar").await;
    for _ in 0..3 {
        assert_eq!(outcomes.create(&system).await, None);
    }
    disk.fill();
    let mut error = None;
    for _ in 0..MAX_FREED_PAGES {
        error = outcomes.create(&system).await;
        if error.is_some() {
            break;
        }
        disk.fill();
    }
    let error = error.expect("a full disk must reject changes");
    assert!(error.contains("Free some disk space"), "{error}");
    let database = system.batch_execute("CREATE DATABASE refused").await.unwrap_err();
    assert!(database.as_db_error().is_some(), "{database}");
    assert!(outcomes.create(&system).await.is_some(), "the next change must be rejected as well");
    outcomes.check(&node).await;

    // With free space the node accepts changes again.
    disk.free();
    assert_eq!(outcomes.create(&system).await, None);
    system.batch_execute("CREATE DATABASE later").await.unwrap();
    let later = client(&node, "later").await;
    later.batch_execute("CREATE TABLE t(x); INSERT INTO t VALUES (1)").await.unwrap();
    outcomes.check(&node).await;

    // Kill the node on a full disk, and restart it there.
    disk.fill();
    assert!(outcomes.create(&system).await.is_some());
    assert_eq!(node.stop_with(Signal::KILL), None);
    start_on_full_disk(&disk, &outcomes).await;
    disk.free();
    let node = disk.start().unwrap();
    outcomes.check(&node).await;
    let databases = column(&client(&node, "fulmar").await, "SELECT datname FROM pg_database").await;
    assert!(
        databases.contains(&"later".to_owned()) && !databases.contains(&"refused".to_owned()),
        "{databases:?}"
    );
    assert_eq!(column(&client(&node, "later").await, "SELECT CAST(x AS TEXT) FROM t").await, ["1"]);
    assert_eq!(outcomes.create(&client(&node, "fulmar").await).await, None);
}

/// Starts a node on a full disk. It must refuse to start and report the cause, or have all users.
async fn start_on_full_disk(disk: &SmallDisk, outcomes: &Outcomes) {
    match disk.start() {
        Ok(node) => {
            outcomes.check(&node).await;
            assert_eq!(node.stop_with(Signal::KILL), None);
        }
        Err(error) => assert!(is_lack_of_space(&error), "{error}"),
    }
}

fn is_lack_of_space(error: &str) -> bool {
    ["No space left on device", "disk is full", "full"].iter().any(|text| error.contains(text))
}

/// The write of `meta.head` fails after the commit in `meta.db`, so the commit is not acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn failed_write_of_the_catalog_head_loses_nothing() {
    let disk = SmallDisk::mount();
    let mut outcomes = Outcomes::default();
    let node = disk.start().unwrap();
    let system = client(&node, "fulmar").await;
    assert_eq!(outcomes.create(&system).await, None);
    disk.punch_head();
    disk.fill();
    // Free pages until the commit succeeds. Then the write of the head is the first to lack a page.
    let mut freed_pages = 0;
    let error = loop {
        match outcomes.create(&system).await {
            Some(error) if error.contains("meta.head") => break error,
            Some(_) => disk.free_page(),
            None => {
                disk.punch_head();
                disk.fill();
            }
        }
        freed_pages += 1;
        assert!(freed_pages < MAX_FREED_PAGES, "the write of meta.head has never failed");
    };
    assert!(
        error.contains("outcome of this change is not known") && error.contains("restart the node"),
        "{error}"
    );
    assert_eq!(outcomes.unknown.len(), 1);
    let later = system.batch_execute("CREATE USER later").await.unwrap_err();
    let later = later.as_db_error().unwrap_or_else(|| panic!("{later}")).message();
    assert!(later.contains("failed before"), "{later}");
    assert_eq!(node.stop_with(Signal::KILL), None);

    disk.fill();
    start_on_full_disk(&disk, &outcomes).await;
    disk.free();
    for _ in 0..2 {
        let node = disk.start().unwrap();
        outcomes.check(&node).await;
        assert_eq!(outcomes.create(&client(&node, "fulmar").await).await, None);
        assert_eq!(node.stop_with(Signal::KILL), None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn first_start_on_a_full_disk_is_refused_until_space_is_free() {
    let disk = SmallDisk::mount();
    disk.fill();
    let mut errors = Vec::new();
    let mut catalog_errors = 0;
    // Each start has one more page, so the files of the catalog are created partially.
    let node = loop {
        match disk.start() {
            Ok(node) => break node,
            Err(error) => {
                assert!(is_lack_of_space(&error), "{error}");
                catalog_errors += usize::from(error.contains("meta."));
                errors.push(error);
            }
        }
        match disk.file("data/meta.head").exists() {
            false => disk.free_page(),
            // The catalog is complete.
            true if disk.file("filler").exists() => disk.free(),
            true => panic!("the start was refused with free space: {errors:?}"),
        }
        assert!((errors.len() as u64) < MAX_FREED_PAGES, "{errors:?}");
    };
    assert!(catalog_errors > 3, "the catalog was never created partially: {errors:?}");
    let mut outcomes = Outcomes::default();
    assert_eq!(outcomes.create(&client(&node, "fulmar").await).await, None);
    assert_eq!(node.stop_with(Signal::KILL), None);
    outcomes.check(&disk.start().unwrap()).await;
}
