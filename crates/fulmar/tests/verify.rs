//! `fulmar verify` against every object of a store, damaged in every way, one at a time: each is named, with whose it is and what
//! to do, and whoever needs none of it goes on.

mod common;

use std::path::{Path, PathBuf};

use common::{Node, client, number, run, stdout};
use rustix::process::Signal;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Harm {
    Flipped,
    Truncated,
    Missing,
}

impl Harm {
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

#[tokio::test(flavor = "multi_thread")]
async fn every_object_that_is_damaged_is_named_and_others_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let node = Node::start(&data, &["--insecure"]);
    let tenant =
        |arguments: &[&str]| stdout(&run(&[&["tenant", "--server", &node.url()], arguments].concat()));
    tenant(&["create", "harmed", "other"]);
    for (name, rows) in [("harmed", 3), ("other", 2)] {
        let client = client(&node, name).await;
        client.batch_execute("CREATE TABLE t(x)").await.unwrap();
        for row in 0..rows {
            client.batch_execute("INSERT INTO t VALUES (hex(randomblob(9000)))").await.unwrap();
            // Flushes it: a segment and a manifest of its own.
            let copy = format!("{name}-{row}");
            tenant(&["create", &copy, "--template", name]);
            tenant(&["drop", &copy]);
        }
    }
    assert_eq!(node.end(Signal::TERM), Some(0));
    let verify = || {
        let output = run(&["verify", "--data", data.to_str().unwrap(), "--json"]);
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        report["damage"].as_array().unwrap().clone()
    };
    assert_eq!(verify(), Vec::<serde_json::Value>::new());

    let store = format!("file://{}", data.join("store").display());
    let objects = [files(&data.join("store/segments")), files(&data.join("store/manifests"))].concat();
    assert!(objects.len() >= 10, "{objects:?}");
    let mut segments_of_harmed = Vec::new();
    for file in &objects {
        let bytes = std::fs::read(file).unwrap();
        let is_segment = file.starts_with(data.join("store/segments"));
        for harm in [Harm::Flipped, Harm::Truncated, Harm::Missing] {
            // That a manifest was there nobody knows but itself.
            if harm == Harm::Missing && !is_segment {
                continue;
            }
            harm.do_to(file, &bytes);
            let found = verify();
            let alone = run(&["verify", "--store", &store, "--json"]);
            let alone: serde_json::Value = serde_json::from_slice(&alone.stdout).unwrap();
            assert_eq!(alone["damage"][0]["problem"], found[0]["problem"]);
            std::fs::write(file, &bytes).unwrap();
            assert_eq!(found.len(), 1, "{harm:?} {}: {found:?}", file.display());
            assert_eq!(Path::new(found[0]["place"].as_str().unwrap()), file);
            let tenants = found[0]["tenants"].as_str().unwrap();
            assert!(["harmed", "other"].contains(&tenants), "{harm:?} {}: {tenants}", file.display());
            let problem = found[0]["problem"].as_str().unwrap();
            let remedy =
                if harm == Harm::Missing { "if nobody has deleted it" } else { "restore it from a copy" };
            assert!(problem.contains(remedy), "{problem}");
            if is_segment && tenants == "harmed" && harm == Harm::Flipped {
                segments_of_harmed.push((file.clone(), bytes.clone()));
            }
        }
    }
    assert_eq!(verify(), Vec::<serde_json::Value>::new(), "all is as it was");

    // Of one tenant nothing can be read; the other neither loses nor waits for anything.
    for harm in [Harm::Flipped, Harm::Truncated, Harm::Missing] {
        segments_of_harmed.iter().for_each(|(file, bytes)| harm.do_to(file, bytes));
        let node = Node::start(&data, &["--insecure", "--log-level", "error"]);
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
        assert!(error.message().contains("segments/"), "{error:?}");
        let other = client(&node, "other").await;
        other.batch_execute("INSERT INTO t VALUES ('more')").await.unwrap();
        assert!(number(&other, "SELECT count(*) FROM t").await > 2);
        assert_eq!(node.end(Signal::KILL), None);
        segments_of_harmed.iter().for_each(|(file, bytes)| std::fs::write(file, bytes).unwrap());
    }
}
