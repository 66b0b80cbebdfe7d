//! `fulmar verify` on a store with one corrupted object at a time, for every object and every kind
//! of corruption. The report must name the object, its tenants and the remedy. Tenants that do not
//! need the object must stay available.

mod common;

use std::path::{Path, PathBuf};

use common::{Node, client, query_i64, run, stdout};
use rustix::process::Signal;
use serde_json::Value;

const TENANTS: [&str; 3] = ["damaged", "other", "shared"];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Corruption {
    Flipped,
    Truncated,
    Missing,
}

impl Corruption {
    const ALL: [Corruption; 3] = [Corruption::Flipped, Corruption::Truncated, Corruption::Missing];

    fn apply(self, file: &Path, bytes: &[u8]) {
        match self {
            Corruption::Flipped => {
                let mut bytes = bytes.to_vec();
                let middle = bytes.len() / 2;
                bytes[middle] ^= 4;
                std::fs::write(file, bytes).unwrap();
            }
            Corruption::Truncated => std::fs::write(file, &bytes[..bytes.len() / 2]).unwrap(),
            Corruption::Missing => std::fs::remove_file(file).unwrap(),
        }
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

/// Runs `fulmar verify` with these flags, and returns the reported damage.
fn verify(flags: &[&str]) -> Vec<Value> {
    let output = run(&[&["verify", "--json"], flags].concat());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let damage = report["damage"].as_array().unwrap().clone();
    assert_eq!(output.status.success(), damage.is_empty());
    damage
}

/// A data directory, and a store outside it. Only such a store has fencing terms.
struct Rig {
    directory: tempfile::TempDir,
}

impl Rig {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join(name)
    }

    fn data(&self) -> PathBuf {
        self.path("data")
    }

    fn store(&self) -> PathBuf {
        self.path("store")
    }

    fn url(&self) -> String {
        format!("file://{}", self.store().display())
    }

    fn start(&self) -> Node {
        Node::start(&self.data(), &["--insecure", "--store", &self.url()])
    }

    /// Returns the names of all objects.
    fn objects(&self) -> Vec<String> {
        let name = |file: PathBuf| file.strip_prefix(self.store()).unwrap().to_str().unwrap().to_owned();
        files(&self.store()).into_iter().map(name).collect()
    }

    fn read(&self, object: &str) -> Vec<u8> {
        std::fs::read(self.store().join(object)).unwrap()
    }

    /// Verifies the data directory, and the store alone.
    fn verify(&self) -> [Vec<Value>; 2] {
        [verify(&["--data", self.data().to_str().unwrap()]), verify(&["--store", &self.url()])]
    }

    fn assert_undamaged(&self) {
        assert_eq!(self.verify(), [const { Vec::<Value>::new() }; 2]);
    }

    /// Returns the name of the damaged object.
    fn place(&self, damage: &Value) -> String {
        let place = damage["place"].as_str().unwrap();
        let file = place.strip_prefix("file://").unwrap_or(place);
        Path::new(file).strip_prefix(self.store()).unwrap().to_str().unwrap().to_owned()
    }

    /// Corrupts an object in every way, checks the reports, and restores it.
    fn corrupt(&self, object: &str) {
        let (file, bytes) = (self.store().join(object), self.read(object));
        let (undetectable, missing_place) =
            (self.is_deletion_undetectable(object), self.place_if_missing(object));
        // An anchor has no contents, so it can only be deleted.
        for corruption in Corruption::ALL
            .into_iter()
            .filter(|corruption| *corruption == Corruption::Missing || !bytes.is_empty())
        {
            corruption.apply(&file, &bytes);
            let [with_data, alone] = self.verify();
            std::fs::write(&file, &bytes).unwrap();
            if corruption == Corruption::Missing && undetectable {
                assert!(with_data.is_empty() && alone.is_empty(), "{object}: {with_data:?} {alone:?}");
                continue;
            }
            let place = if corruption == Corruption::Missing { missing_place.as_str() } else { object };
            assert_eq!(with_data.len(), 1, "{corruption:?} {object}: {with_data:?}");
            assert_eq!(self.place(&with_data[0]), place, "{corruption:?}");
            check_report(object, corruption, &with_data[0]);
            // The store alone does not contain the expected number, so any number is valid there.
            if object == "stopped" && corruption != Corruption::Truncated {
                continue;
            }
            assert_eq!(alone.len(), 1, "{corruption:?} {object}: {alone:?}");
            assert_eq!(self.place(&alone[0]), place, "{corruption:?}");
            for field in ["problem", "byte", "tenants"] {
                assert_eq!(alone[0][field], with_data[0][field], "{corruption:?} {object}");
            }
        }
    }

    /// Returns true for objects that may be missing in an undamaged store.
    fn is_deletion_undetectable(&self, object: &str) -> bool {
        let (kind, name) = object.rsplit_once('/').unwrap_or(("", object));
        let all = self.objects();
        let others = |prefix: &str| all.iter().filter(|other| other.starts_with(prefix)).count() - 1;
        match object.split('/').next().unwrap() {
            // Only a manifest with an anchor must exist: the anchor records that it was the newest.
            // Older manifests may have been collected, garbage-collection holds may have expired,
            // and lists of hot pages are hints.
            "manifests" => {
                let anchor = kind
                    .rsplit_once('/')
                    .map(|(partition, epoch)| format!("{partition}/anchor-{epoch}-{name}"));
                !anchor.is_some_and(|anchor| all.contains(&anchor))
            }
            // Missing as after a kill.
            "terms" => name.ends_with("-ended"),
            // Then another catalog is the newest.
            "catalog" => others("catalog/") > 0,
            // Nothing refers to the last log object. Objects that are no longer needed may be
            // deleted at any time, except the last one of a log.
            "logs" => {
                let is_last = all.iter().rfind(|other| other.starts_with("logs/")).unwrap() == object;
                is_last || (slot(object) < self.first_needed_slot() && others(&format!("{kind}/")) > 0)
            }
            _ => false,
        }
    }

    /// Returns the place that is reported if the object is missing.
    fn place_if_missing(&self, object: &str) -> String {
        match object.split('/').next().unwrap() {
            "catalog" => "catalog".to_owned(),
            // The end of a log of an earlier incarnation is unknown, so its directory is reported.
            "logs" if slot(object) < self.first_needed_slot() => {
                object.rsplit_once('/').unwrap().0.to_owned()
            }
            _ => object.to_owned(),
        }
    }

    /// Returns the first slot of the log that recovery needs, from the headers of its objects
    /// (docs/formats.md).
    fn first_needed_slot(&self) -> (u64, u64) {
        let logs = self.objects().into_iter().filter(|object| object.starts_with("logs/"));
        let slots = logs.map(|object| {
            let bytes = self.read(&object);
            let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            (number(56), number(64))
        });
        slots.max().unwrap()
    }
}

/// Returns the incarnation and the sequence number in the name of a log object.
fn slot(object: &str) -> (u64, u64) {
    let mut parts = object.rsplit('/').map(|part| u64::from_str_radix(part, 16).unwrap());
    let sequence = parts.next().unwrap();
    (parts.next().unwrap(), sequence)
}

/// Checks that the report contains a remedy and the affected tenants.
fn check_report(object: &str, corruption: Corruption, damage: &Value) {
    let problem = damage["problem"].as_str().unwrap();
    let kind = object.split('/').next().unwrap();
    let remedy = match kind {
        "owner" => "recreate it",
        "stopped" => "start and stop the node once",
        "catalog" if corruption == Corruption::Missing => "the primary writes a catalog when it starts",
        _ => "restore it from a copy",
    };
    assert!(problem.contains(remedy), "{corruption:?} {object}: {problem}");
    let tenants = damage["tenants"].as_str().unwrap();
    match kind {
        "segments" | "manifests" => {
            assert!(tenants.split(", ").all(|tenant| TENANTS.contains(&tenant)), "{object}: {tenants}");
        }
        _ => assert_eq!(tenants, "", "{object}"),
    }
}

/// Creates tenants with several rows, each in its own segment with its own manifest.
async fn rig() -> Rig {
    let rig = Rig { directory: tempfile::tempdir().unwrap() };
    let node = rig.start();
    stdout(&run(&["tenant", "--server", &node.url(), "create", "damaged", "other"]));
    let system = client(&node, "fulmar").await;
    system.batch_execute("CREATE DATABASE shared DURABILITY shared").await.unwrap();
    for (name, rows) in TENANTS.into_iter().zip([3, 2, 2]) {
        client(&node, name).await.batch_execute("CREATE TABLE t(x)").await.unwrap();
        if name == "other" {
            // Enough pages for a list of hot pages.
            let many =
                "INSERT INTO t WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 60)
                SELECT hex(randomblob(2000)) FROM n";
            client(&node, name).await.batch_execute(many).await.unwrap();
        }
        for _ in 0..rows {
            insert_and_flush(&node, name).await;
        }
    }
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    rig
}

async fn insert_and_flush(node: &Node, name: &str) {
    let client = client(node, name).await;
    client.batch_execute("INSERT INTO t VALUES (hex(randomblob(9000)))").await.unwrap();
    // Creating a branch flushes its template.
    let tenant =
        |arguments: &[&str]| stdout(&run(&[&["tenant", "--server", &node.url()], arguments].concat()));
    tenant(&["create", "copy", "--template", name]);
    tenant(&["drop", "copy"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_corrupted_object_is_reported() {
    let rig = rig().await;
    rig.assert_undamaged();
    let objects = rig.objects();
    let kinds = [
        "owner",
        "stopped",
        "catalog/",
        "terms/",
        "logs/",
        "segments/",
        "manifests/",
        "/fate-",
        "/hot-",
        "/anchor-",
        "-ended",
    ];
    for kind in kinds {
        assert!(objects.iter().any(|object| object.contains(kind)), "no object {kind}: {objects:?}");
    }
    objects.iter().for_each(|object| rig.corrupt(object));
    rig.assert_undamaged();

    // A log with records, and a fencing term that has not ended.
    let node = rig.start();
    insert_and_flush(&node, "shared").await;
    let shared = client(&node, "shared").await;
    for _ in 0..3 {
        shared.batch_execute("INSERT INTO t VALUES ('in the log')").await.unwrap();
    }
    assert_eq!(node.stop_with(Signal::KILL), None);
    rig.assert_undamaged();
    let objects = rig.objects();
    let of = |kind: &str| objects.iter().filter(|object| object.starts_with(kind)).collect::<Vec<_>>();
    let records = of("logs/").into_iter().filter(|object| slot(object) >= rig.first_needed_slot()).count();
    assert!(records >= 3 && of("terms/").len() == 1, "{objects:?}");
    [of("logs/"), of("terms/")].concat().into_iter().for_each(|object| rig.corrupt(object));
    rig.assert_undamaged();
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_segment_referenced_only_by_the_log_is_reported() {
    let rig = rig().await;
    let before = rig.objects();
    let node = rig.start();
    // A commit so large that it is written as a segment, which the log only references.
    let large = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000)
        INSERT INTO t SELECT randomblob(4000) FROM n";
    client(&node, "shared").await.batch_execute(large).await.unwrap();
    assert_eq!(node.stop_with(Signal::KILL), None);
    rig.assert_undamaged();
    let is_new = |object: &String| object.starts_with("segments/") && !before.contains(object);
    let segments: Vec<String> = rig.objects().into_iter().filter(is_new).collect();
    assert_eq!(segments.len(), 1, "{segments:?}");
    let (file, moved) = (rig.store().join(&segments[0]), rig.path("moved"));
    std::fs::rename(&file, &moved).unwrap();
    for found in rig.verify() {
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((rig.place(&found[0]), &found[0]["tenants"]), (segments[0].clone(), &"shared".into()));
    }
    std::fs::rename(&moved, &file).unwrap();
    rig.assert_undamaged();
}

/// With all segments or the newest manifest of one tenant corrupted, that tenant is unreadable and
/// the others are unaffected. The error and the log message name the object, its partition and the
/// remedy.
#[tokio::test(flavor = "multi_thread")]
async fn damage_is_reported_to_its_tenant_and_does_not_affect_others() {
    let rig = rig().await;
    // Find the tenant's objects: `verify` reports a corrupted object with its tenants.
    let belongs_to_tenant = |object: &String| {
        let (file, bytes) = (rig.store().join(object), rig.read(object));
        Corruption::Flipped.apply(&file, &bytes);
        let found = verify(&["--store", &rig.url()]);
        std::fs::write(&file, &bytes).unwrap();
        found[0]["tenants"] == "damaged"
    };
    let objects_of_tenant = |kind: &str| {
        let other_objects = ["/fate-", "/hot-", "/anchor-"];
        let matches = |object: &String| {
            object.starts_with(kind) && !other_objects.iter().any(|other| object.contains(other))
        };
        rig.objects().into_iter().filter(matches).filter(belongs_to_tenant).collect::<Vec<_>>()
    };
    let (segments, manifests) = (objects_of_tenant("segments/"), objects_of_tenant("manifests/"));
    assert!(segments.len() >= 3 && manifests.len() >= 3, "{segments:?} {manifests:?}");
    let newest = manifests.last().unwrap().clone();
    let partition = newest.split('/').nth(1).unwrap().to_owned();
    rig.assert_undamaged();

    let of_segments = Corruption::ALL.map(|corruption| (corruption, segments.clone()));
    let of_manifests = Corruption::ALL.map(|corruption| (corruption, vec![newest.clone()]));
    for (corruption, objects) in of_segments.into_iter().chain(of_manifests) {
        let originals: Vec<_> =
            objects.iter().map(|object| (rig.store().join(object), rig.read(object))).collect();
        originals.iter().for_each(|(file, bytes)| corruption.apply(file, bytes));
        let log = rig.path("log");
        let log_file = std::fs::File::create(&log).unwrap();
        let url = rig.url();
        let node = Node::start_with(&rig.data(), &["--insecure", "--store", &url], log_file.into());
        let error =
            match tokio_postgres::connect(&format!("{}/damaged", node.url()), tokio_postgres::NoTls).await {
                Ok((client, connection)) => {
                    tokio::spawn(connection);
                    client.query("SELECT max(x || '') FROM t", &[]).await.unwrap_err()
                }
                Err(error) => error,
            };
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code().code(), "58030", "{error:?}");
        let object = error.message().split(' ').next().unwrap();
        assert!(objects.iter().any(|damaged| damaged == object), "{corruption:?}: {error:?}");
        assert_eq!(error.detail(), Some(&*format!("It belongs to partition {partition}.")), "{error:?}");
        assert!(error.hint().unwrap().contains("Restore the object from a copy of the store"), "{error:?}");
        let store = rig.store().display().to_string();
        assert!(!format!("{error:?}").contains(&store), "clients must not see the store's path: {error:?}");
        let logged = std::fs::read_to_string(&log).unwrap();
        let field = format!("partition={partition}");
        let parts = [object, field.as_str(), "restore it from a copy", store.as_str()];
        let is_complete = |line: &str| parts.iter().all(|part| line.contains(part));
        assert!(logged.lines().any(is_complete), "{corruption:?} {object}: {logged}");
        let other = client(&node, "other").await;
        other.batch_execute("INSERT INTO t VALUES ('more')").await.unwrap();
        assert!(query_i64(&other, "SELECT count(*) FROM t").await > 2);
        assert_eq!(node.stop_with(Signal::KILL), None);
        originals.iter().for_each(|(file, bytes)| std::fs::write(file, bytes).unwrap());
    }
}
