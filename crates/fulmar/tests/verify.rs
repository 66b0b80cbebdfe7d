//! `fulmar verify` against every object of a store, damaged in every way, one at a time: each is named, with whose it is and what
//! to do, and whoever needs none of it goes on.

mod common;

use std::path::{Path, PathBuf};

use common::{Node, client, number, run, stdout};
use rustix::process::Signal;
use serde_json::Value;

const TENANTS: [&str; 3] = ["harmed", "other", "shared"];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Harm {
    Flipped,
    Truncated,
    Missing,
}

impl Harm {
    const ALL: [Harm; 3] = [Harm::Flipped, Harm::Truncated, Harm::Missing];

    fn do_to(self, file: &Path, bytes: &[u8]) {
        match self {
            Harm::Flipped => {
                let mut bytes = bytes.to_vec();
                let middle = bytes.len() / 2;
                bytes[middle] ^= 4;
                std::fs::write(file, bytes).unwrap();
            }
            Harm::Truncated => std::fs::write(file, &bytes[..bytes.len() / 2]).unwrap(),
            Harm::Missing => std::fs::remove_file(file).unwrap(),
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

/// What is told of damage.
fn told(of: &[&str]) -> Vec<Value> {
    let output = run(&[&["verify", "--json"], of].concat());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let damage = report["damage"].as_array().unwrap().clone();
    assert_eq!(output.status.success(), damage.is_empty());
    damage
}

/// A data directory, and a store that is not in it: so it has terms.
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

    /// The names of all objects.
    fn objects(&self) -> Vec<String> {
        let name = |file: PathBuf| file.strip_prefix(self.store()).unwrap().to_str().unwrap().to_owned();
        files(&self.store()).into_iter().map(name).collect()
    }

    fn read(&self, object: &str) -> Vec<u8> {
        std::fs::read(self.store().join(object)).unwrap()
    }

    /// What is told of the directory, and of the store alone.
    fn verify(&self) -> [Vec<Value>; 2] {
        [told(&["--data", self.data().to_str().unwrap()]), told(&["--store", &self.url()])]
    }

    fn is_sound(&self) {
        assert_eq!(self.verify(), [const { Vec::<Value>::new() }; 2]);
    }

    /// Where damage is, as an object's name.
    fn place(&self, damage: &Value) -> String {
        let place = damage["place"].as_str().unwrap();
        let file = place.strip_prefix("file://").unwrap_or(place);
        Path::new(file).strip_prefix(self.store()).unwrap().to_str().unwrap().to_owned()
    }

    /// Damages an object in all ways, and looks whether it is named; then it is as it was.
    fn harm(&self, object: &str) {
        let (file, bytes) = (self.store().join(object), self.read(object));
        let (no_trace, missing_place) = (self.missing_leaves_no_trace(object), self.place_if_missing(object));
        // An anchor is a name without contents.
        for harm in Harm::ALL.into_iter().filter(|harm| *harm == Harm::Missing || !bytes.is_empty()) {
            harm.do_to(&file, &bytes);
            let [with_data, alone] = self.verify();
            std::fs::write(&file, &bytes).unwrap();
            if harm == Harm::Missing && no_trace {
                assert!(with_data.is_empty() && alone.is_empty(), "{object}: {with_data:?} {alone:?}");
                continue;
            }
            let place = if harm == Harm::Missing { missing_place.as_str() } else { object };
            assert_eq!(with_data.len(), 1, "{harm:?} {object}: {with_data:?}");
            assert_eq!(self.place(&with_data[0]), place, "{harm:?}");
            is_complete(object, harm, &with_data[0]);
            // The number in it is random, and stands elsewhere in the data directory only: another number is one, too.
            if object == "stopped" && harm != Harm::Truncated {
                continue;
            }
            assert_eq!(alone.len(), 1, "{harm:?} {object}: {alone:?}");
            assert_eq!(self.place(&alone[0]), place, "{harm:?}");
            for same in ["problem", "byte", "tenants"] {
                assert_eq!(alone[0][same], with_data[0][same], "{harm:?} {object}");
            }
        }
    }

    /// What nobody can know to be missing.
    fn missing_leaves_no_trace(&self, object: &str) -> bool {
        let (kind, name) = object.rsplit_once('/').unwrap_or(("", object));
        let all = self.objects();
        let beside = |prefix: &str| all.iter().filter(|other| other.starts_with(prefix)).count() - 1;
        match object.split('/').next().unwrap() {
            // A list of hot pages is a hint; a fate may be over; of an older manifest the time may have come; and what tells that one was
            // the newest is its anchor.
            "manifests" => {
                let anchor = kind
                    .rsplit_once('/')
                    .map(|(partition, epoch)| format!("{partition}/anchor-{epoch}-{name}"));
                !anchor.is_some_and(|anchor| all.contains(&anchor))
            }
            // As after a kill.
            "terms" => name.ends_with("-ended"),
            // Another one is the newest then.
            "catalog" => beside("catalog/") > 0,
            // Nothing was made after the last one; and what nobody needs is deleted at any time, but for the end of a log.
            "logs" => {
                let is_last = all.iter().rfind(|other| other.starts_with("logs/")).unwrap() == object;
                is_last || (slot(object) < self.needed() && beside(&format!("{kind}/")) > 0)
            }
            _ => false,
        }
    }

    /// What is said to be missing then.
    fn place_if_missing(&self, object: &str) -> String {
        match object.split('/').next().unwrap() {
            "catalog" => "catalog".to_owned(),
            // Of a log that is over nobody knows where it ended.
            "logs" if slot(object) < self.needed() => object.rsplit_once('/').unwrap().0.to_owned(),
            _ => object.to_owned(),
        }
    }

    /// From where on the log is needed, as the heads of its objects say (docs/formats.md).
    fn needed(&self) -> (u64, u64) {
        let logs = self.objects().into_iter().filter(|object| object.starts_with("logs/"));
        let needed = logs.map(|object| {
            let bytes = self.read(&object);
            let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            (number(56), number(64))
        });
        needed.max().unwrap()
    }
}

/// The incarnation and the sequence in the name of a log object.
fn slot(object: &str) -> (u64, u64) {
    let mut parts = object.rsplit('/').map(|part| u64::from_str_radix(part, 16).unwrap());
    let sequence = parts.next().unwrap();
    (parts.next().unwrap(), sequence)
}

/// Damage is told with what to do, and with whose data it has.
fn is_complete(object: &str, harm: Harm, damage: &Value) {
    let problem = damage["problem"].as_str().unwrap();
    let kind = object.split('/').next().unwrap();
    let remedy = match kind {
        "owner" => "make it anew",
        "stopped" => "start and stop the node once more",
        "catalog" if harm == Harm::Missing => "the owner puts one there",
        _ => "restore it from a copy",
    };
    assert!(problem.contains(remedy), "{harm:?} {object}: {problem}");
    let tenants = damage["tenants"].as_str().unwrap();
    match kind {
        "segments" | "manifests" => {
            assert!(tenants.split(", ").all(|tenant| TENANTS.contains(&tenant)), "{object}: {tenants}");
        }
        _ => assert_eq!(tenants, "", "{object}"),
    }
}

/// Tenants with rows, each of a segment and a manifest of its own.
async fn rig() -> Rig {
    let rig = Rig { directory: tempfile::tempdir().unwrap() };
    let node = rig.start();
    stdout(&run(&["tenant", "--server", &node.url(), "create", "harmed", "other"]));
    let system = client(&node, "fulmar").await;
    system.batch_execute("CREATE DATABASE shared DURABILITY shared").await.unwrap();
    for (name, rows) in TENANTS.into_iter().zip([3, 2, 2]) {
        client(&node, name).await.batch_execute("CREATE TABLE t(x)").await.unwrap();
        if name == "other" {
            // So many pages that it is worth while to note which are hot.
            let many =
                "INSERT INTO t WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 60)
                SELECT hex(randomblob(2000)) FROM n";
            client(&node, name).await.batch_execute(many).await.unwrap();
        }
        for _ in 0..rows {
            insert_and_flush(&node, name).await;
        }
    }
    assert_eq!(node.end(Signal::TERM), Some(0));
    rig
}

async fn insert_and_flush(node: &Node, name: &str) {
    let client = client(node, name).await;
    client.batch_execute("INSERT INTO t VALUES (hex(randomblob(9000)))").await.unwrap();
    // A branch flushes what it is made of.
    let tenant =
        |arguments: &[&str]| stdout(&run(&[&["tenant", "--server", &node.url()], arguments].concat()));
    tenant(&["create", "copy", "--template", name]);
    tenant(&["drop", "copy"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_object_that_is_damaged_is_named() {
    let rig = rig().await;
    rig.is_sound();
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
        assert!(objects.iter().any(|object| object.contains(kind)), "{kind}: {objects:?}");
    }
    objects.iter().for_each(|object| rig.harm(object));
    rig.is_sound();

    // A log that is written, and a term that has not ended.
    let node = rig.start();
    insert_and_flush(&node, "shared").await;
    let shared = client(&node, "shared").await;
    for _ in 0..3 {
        shared.batch_execute("INSERT INTO t VALUES ('in the log')").await.unwrap();
    }
    assert_eq!(node.end(Signal::KILL), None);
    rig.is_sound();
    let objects = rig.objects();
    let of = |kind: &str| objects.iter().filter(|object| object.starts_with(kind)).collect::<Vec<_>>();
    let records = of("logs/").into_iter().filter(|object| slot(object) >= rig.needed()).count();
    assert!(records >= 3 && of("terms/").len() == 1, "{objects:?}");
    [of("logs/"), of("terms/")].concat().into_iter().for_each(|object| rig.harm(object));
    rig.is_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_that_only_the_log_names_is_missed() {
    let rig = rig().await;
    let before = rig.objects();
    let node = rig.start();
    // So much at once that the log only names the segment.
    let large = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000)
        INSERT INTO t SELECT randomblob(4000) FROM n";
    client(&node, "shared").await.batch_execute(large).await.unwrap();
    assert_eq!(node.end(Signal::KILL), None);
    rig.is_sound();
    let is_new = |object: &String| object.starts_with("segments/") && !before.contains(object);
    let segments: Vec<String> = rig.objects().into_iter().filter(is_new).collect();
    assert_eq!(segments.len(), 1, "{segments:?}");
    let (file, aside) = (rig.store().join(&segments[0]), rig.path("aside"));
    std::fs::rename(&file, &aside).unwrap();
    for found in rig.verify() {
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((rig.place(&found[0]), &found[0]["tenants"]), (segments[0].clone(), &"shared".into()));
    }
    std::fs::rename(&aside, &file).unwrap();
    rig.is_sound();
}

/// Of one tenant nothing can be read; the others neither lose nor wait for anything. Client and log are told which object it is, whose,
/// and what to do.
#[tokio::test(flavor = "multi_thread")]
async fn one_tenants_damage_is_told_and_others_go_on() {
    let rig = rig().await;
    // Whose objects are: flipped, they are named with their tenants.
    let is_of_harmed = |object: &String| {
        let (file, bytes) = (rig.store().join(object), rig.read(object));
        Harm::Flipped.do_to(&file, &bytes);
        let found = told(&["--store", &rig.url()]);
        std::fs::write(&file, &bytes).unwrap();
        found[0]["tenants"] == "harmed"
    };
    let of_harmed = |kind: &str| {
        let beside = ["/fate-", "/hot-", "/anchor-"];
        let is_one =
            |object: &String| object.starts_with(kind) && !beside.iter().any(|other| object.contains(other));
        rig.objects().into_iter().filter(is_one).filter(is_of_harmed).collect::<Vec<_>>()
    };
    let (segments, manifests) = (of_harmed("segments/"), of_harmed("manifests/"));
    assert!(segments.len() >= 3 && manifests.len() >= 3, "{segments:?} {manifests:?}");
    let newest = manifests.last().unwrap().clone();
    let partition = newest.split('/').nth(1).unwrap().to_owned();
    rig.is_sound();

    let of_segments = Harm::ALL.map(|harm| (harm, segments.clone()));
    let of_manifests = Harm::ALL.map(|harm| (harm, vec![newest.clone()]));
    for (harm, objects) in of_segments.into_iter().chain(of_manifests) {
        let sound: Vec<_> =
            objects.iter().map(|object| (rig.store().join(object), rig.read(object))).collect();
        sound.iter().for_each(|(file, bytes)| harm.do_to(file, bytes));
        let log = rig.path("log");
        let log_file = std::fs::File::create(&log).unwrap();
        let url = rig.url();
        let node = Node::start_with(&rig.data(), &["--insecure", "--store", &url], log_file.into());
        let error =
            match tokio_postgres::connect(&format!("{}/harmed", node.url()), tokio_postgres::NoTls).await {
                Ok((client, connection)) => {
                    tokio::spawn(connection);
                    client.query("SELECT max(x || '') FROM t", &[]).await.unwrap_err()
                }
                Err(error) => error,
            };
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code().code(), "58030", "{error:?}");
        let object = error.message().split(' ').next().unwrap();
        assert!(objects.iter().any(|harmed| harmed == object), "{harm:?}: {error:?}");
        assert_eq!(error.detail(), Some(&*format!("It belongs to partition {partition}.")), "{error:?}");
        assert!(error.hint().unwrap().contains("restore the object from a copy of the store"), "{error:?}");
        let store = rig.store().display().to_string();
        assert!(!format!("{error:?}").contains(&store), "where the store is nobody is told: {error:?}");
        let logged = std::fs::read_to_string(&log).unwrap();
        let whose = format!("partition={partition}");
        let parts = [object, whose.as_str(), "restore it from a copy", store.as_str()];
        let tells = |line: &str| parts.iter().all(|part| line.contains(part));
        assert!(logged.lines().any(tells), "{harm:?} {object}: {logged}");
        let other = client(&node, "other").await;
        other.batch_execute("INSERT INTO t VALUES ('more')").await.unwrap();
        assert!(number(&other, "SELECT count(*) FROM t").await > 2);
        assert_eq!(node.end(Signal::KILL), None);
        sound.iter().for_each(|(file, bytes)| std::fs::write(file, bytes).unwrap());
    }
}
