//! The disk is full while the catalog is written: a change is refused, or the node reports that its outcome is not known. After a restart
//! with space every acknowledged change is there.
//!
//! The data directory is a tmpfs of some megabytes, in a mount namespace of its own: it takes no privileges where user namespaces are
//! permitted, and nothing remains of it if the test is killed.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::FallocateFlags;
use rustix::process::Signal;

use super::*;
use crate::common::client;

/// Enough for two log files, which the node makes ahead.
const DISK: &str = "160m";
const PAGE_BYTES: u64 = 4096;
/// Distance of the two slots of `meta.head`, and where the count of a slot's write is in it.
const SLOT_BYTES: u64 = 4096;
const COUNT_AT: u64 = 12;
/// Pages that are freed one after the other until a change succeeds, at most.
const MOST_PAGES: u64 = 200;

/// A small disk, mounted while this lives.
struct SmallDisk {
    directory: tempfile::TempDir,
    /// The process that the namespace belongs to. It ends with its standard input.
    holder: Child,
    _input: ChildStdin,
    _alone: MutexGuard<'static, ()>,
}

/// One disk at a time: what is on it is in memory.
static MEMORY: Mutex<()> = Mutex::new(());

impl SmallDisk {
    fn mount() -> SmallDisk {
        let alone = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        let script = format!(
            "mount -t tmpfs -o size={DISK},mode=700 small '{}' && echo mounted && exec cat",
            path.display()
        );
        let mut holder = Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare of util-linux");
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "mounted\n", "a tmpfs could not be mounted: permit user namespaces, or run as root");
        let input = holder.stdin.take().unwrap();
        SmallDisk { directory, holder, _input: input, _alone: alone }
    }

    /// A file on the disk, as this process sees it.
    fn file(&self, name: &str) -> PathBuf {
        let directory = self.directory.path().canonicalize().unwrap();
        let root = PathBuf::from(format!("/proc/{}/root", self.holder.id()));
        root.join(directory.strip_prefix("/").unwrap()).join(name)
    }

    fn start(&self) -> Result<Node, String> {
        let data = self.directory.path().canonicalize().unwrap().join("data");
        let command = Node::command(&data, &["--insecure", "--disk-reserve", "0"]);
        let mut entered = Command::new("nsenter");
        entered.args([
            "--user",
            "--mount",
            "--preserve-credentials",
            "--target",
            &self.holder.id().to_string(),
        ]);
        entered.arg(command.get_program()).args(command.get_args()).env_remove("RUST_LOG");
        // The log is on another disk.
        let log = tempfile::NamedTempFile::new().unwrap();
        start(entered, log.path())
    }

    /// Takes all space.
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

    /// Gives some space back.
    fn free_page(&self) {
        let filler = OpenOptions::new().write(true).open(self.file("filler")).unwrap();
        let pages = filler.metadata().unwrap().len() / PAGE_BYTES;
        filler.set_len((pages - 1) * PAGE_BYTES).unwrap();
    }

    /// Gives all space back.
    fn free(&self) {
        std::fs::remove_file(self.file("filler")).unwrap();
    }

    /// Makes the next write of `meta.head` need space: a slot of older contents becomes a hole, as on a file system that writes a changed
    /// block to another place.
    fn hollow_head(&self) {
        let head = OpenOptions::new().read(true).write(true).open(self.file("data/meta.head")).unwrap();
        let count = |slot: u64| {
            let mut count = [0; 8];
            head.read_exact_at(&mut count, slot * SLOT_BYTES + COUNT_AT).unwrap();
            u64::from_le_bytes(count)
        };
        let older = if count(0) < count(1) { 0 } else { SLOT_BYTES };
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&head, flags, older, SLOT_BYTES).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// What clients were told of the users that they have created.
#[derive(Default)]
struct Told {
    created: Vec<String>,
    refused: Vec<String>,
    unknown: Vec<String>,
}

impl Told {
    fn next(&self) -> String {
        format!("user{}", self.created.len() + self.refused.len() + self.unknown.len())
    }

    /// Creates a user; answers the error.
    async fn create(&mut self, system: &Client) -> Option<String> {
        let user = self.next();
        let Err(error) = system.batch_execute(&format!("CREATE USER {user} PASSWORD 'secret'")).await else {
            self.created.push(user);
            return None;
        };
        let error = error.as_db_error().unwrap_or_else(|| panic!("{user}: {error}"));
        let text =
            format!("{} {} {:?} {:?}", error.code().code(), error.message(), error.detail(), error.hint());
        if text.contains("made no change") {
            self.refused.push(user);
        } else {
            assert!(text.contains("not known"), "{text}");
            self.unknown.push(user);
        }
        Some(text)
    }

    /// What was acknowledged is there, what was refused is not.
    async fn check(&self, node: &Node) {
        let system = client(node, "fulmar").await;
        let users = column(&system, "SELECT rolname FROM pg_roles").await;
        for user in &self.created {
            assert!(users.contains(user), "{user} was acknowledged: {users:?}");
        }
        for user in &self.refused {
            assert!(!users.contains(user), "{user} was refused: {users:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn catalog_changes_on_a_full_disk_are_refused() {
    let disk = SmallDisk::mount();
    let mut told = Told::default();
    let node = disk.start().unwrap();
    let system = client(&node, "fulmar").await;
    for _ in 0..3 {
        assert_eq!(told.create(&system).await, None);
    }
    disk.fill();
    let mut refusal = None;
    for _ in 0..MOST_PAGES {
        refusal = told.create(&system).await;
        if refusal.is_some() {
            break;
        }
        disk.fill();
    }
    let refusal = refusal.expect("a full disk takes no changes");
    assert!(refusal.contains("free some space"), "{refusal}");
    let database = system.batch_execute("CREATE DATABASE refused").await.unwrap_err();
    assert!(database.as_db_error().is_some(), "{database}");
    assert!(told.create(&system).await.is_some(), "the next change is refused, too");
    told.check(&node).await;

    // With space the node takes changes again.
    disk.free();
    assert_eq!(told.create(&system).await, None);
    system.batch_execute("CREATE DATABASE later").await.unwrap();
    let later = client(&node, "later").await;
    later.batch_execute("CREATE TABLE t(x); INSERT INTO t VALUES (1)").await.unwrap();
    told.check(&node).await;

    // Killed on a full disk, and started on it.
    disk.fill();
    assert!(told.create(&system).await.is_some());
    assert_eq!(node.end(Signal::KILL), None);
    start_on_full_disk(&disk, &told).await;
    disk.free();
    let node = disk.start().unwrap();
    told.check(&node).await;
    let databases = column(&client(&node, "fulmar").await, "SELECT datname FROM pg_database").await;
    assert!(
        databases.contains(&"later".to_owned()) && !databases.contains(&"refused".to_owned()),
        "{databases:?}"
    );
    assert_eq!(column(&client(&node, "later").await, "SELECT CAST(x AS TEXT) FROM t").await, ["1"]);
    assert_eq!(told.create(&client(&node, "fulmar").await).await, None);
}

/// A start on a full disk is refused with the reason, or everything is there.
async fn start_on_full_disk(disk: &SmallDisk, told: &Told) {
    match disk.start() {
        Ok(node) => {
            told.check(&node).await;
            assert_eq!(node.end(Signal::KILL), None);
        }
        Err(refusal) => assert!(is_lack_of_space(&refusal), "{refusal}"),
    }
}

fn is_lack_of_space(refusal: &str) -> bool {
    ["No space left on device", "disk is full", "full"].iter().any(|words| refusal.contains(words))
}

/// The commit is in `meta.db` then, and was not acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn no_space_for_the_head_of_the_catalog_loses_nothing() {
    let disk = SmallDisk::mount();
    let mut told = Told::default();
    let node = disk.start().unwrap();
    let system = client(&node, "fulmar").await;
    assert_eq!(told.create(&system).await, None);
    disk.hollow_head();
    disk.fill();
    // The changes are refused until there is space for the commit; the head is then the first that lacks a page.
    let mut freed = 0;
    let error = loop {
        match told.create(&system).await {
            Some(error) if error.contains("meta.head") => break error,
            Some(_) => disk.free_page(),
            None => {
                disk.hollow_head();
                disk.fill();
            }
        }
        freed += 1;
        assert!(freed < MOST_PAGES, "the head was always written");
    };
    assert!(
        error.contains("outcome of this change is not known") && error.contains("restart the node"),
        "{error}"
    );
    assert_eq!(told.unknown.len(), 1);
    let later = system.batch_execute("CREATE USER later").await.unwrap_err();
    let later = later.as_db_error().unwrap_or_else(|| panic!("{later}")).message();
    assert!(later.contains("failed before"), "{later}");
    assert_eq!(node.end(Signal::KILL), None);

    disk.fill();
    start_on_full_disk(&disk, &told).await;
    disk.free();
    for _ in 0..2 {
        let node = disk.start().unwrap();
        told.check(&node).await;
        assert_eq!(told.create(&client(&node, "fulmar").await).await, None);
        assert_eq!(node.end(Signal::KILL), None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn first_start_on_a_full_disk_is_refused_until_there_is_space() {
    let disk = SmallDisk::mount();
    disk.fill();
    let mut refusals = Vec::new();
    let mut in_catalog = 0;
    // Each start has a page more: the files of the catalog are created in part.
    let node = loop {
        match disk.start() {
            Ok(node) => break node,
            Err(refusal) => {
                assert!(is_lack_of_space(&refusal), "{refusal}");
                in_catalog += usize::from(refusal.contains("meta."));
                refusals.push(refusal);
            }
        }
        match disk.file("data/meta.head").exists() {
            false => disk.free_page(),
            // The catalog is complete.
            true if disk.file("filler").exists() => disk.free(),
            true => panic!("refused with space: {refusals:?}"),
        }
        assert!((refusals.len() as u64) < MOST_PAGES, "{refusals:?}");
    };
    assert!(in_catalog > 3, "the catalog was not created in parts: {refusals:?}");
    let mut told = Told::default();
    assert_eq!(told.create(&client(&node, "fulmar").await).await, None);
    assert_eq!(node.end(Signal::KILL), None);
    told.check(&disk.start().unwrap()).await;
}
