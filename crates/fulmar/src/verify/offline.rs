//! A data directory that no node uses, and its store.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use fulmar_meta::{Catalog, Embedded};
use fulmar_pages::PartitionId;

use super::{Damage, Report};
use crate::output;
use crate::start::{DataDirectory, METADATA_FILE, open_store_to_read};

/// Reads all of it. The directory is locked meanwhile, so that no node starts.
pub(super) async fn verify(data: &Path) -> anyhow::Result<Report> {
    let shown = data.display();
    ensure!(
        data.join(METADATA_FILE).is_file(),
        "{shown} is no data directory: there is no {METADATA_FILE} in it"
    );
    let data = DataDirectory::lock(data)?;
    let mut report = Report::default();
    let live = match catalog(data.path()).await? {
        Ok(live) => Some(live),
        Err(problem) => {
            let place = data.path().join(METADATA_FILE).display().to_string();
            report.damage.push(Damage { place, byte: None, problem });
            None
        }
    };
    let (store, node_id, store_place) = open_store_to_read(data.path())?;
    let bar = output::progress("verifying", 0);
    let found = fulmar_engine::verify_directory(data.path(), store, node_id, live.as_ref(), |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    let found = found.await?;
    bar.finish_and_clear();
    report.checked = [
        ("catalog", 1),
        ("log records", found.records),
        ("manifests", found.manifests),
        ("segments", found.segments),
        ("pages", found.pages),
    ]
    .into();
    report.damage.extend(found.damage.into_iter().map(|damage| Damage {
        place: match damage.file.strip_prefix("store/") {
            Some(object) => format!("{store_place}/{object}"),
            None => data.path().join(damage.file).display().to_string(),
        },
        byte: damage.offset,
        problem: damage.problem,
    }));
    Ok(report)
}

/// The partitions that the catalog knows, or what is wrong with it. It is read in a copy: opening it would write.
async fn catalog(data: &Path) -> anyhow::Result<Result<HashSet<PartitionId>, String>> {
    let directory = tempfile::tempdir().context("cannot make a temporary directory; set TMPDIR")?;
    for suffix in ["", "-wal"] {
        let name = format!("{METADATA_FILE}{suffix}");
        match std::fs::copy(data.join(&name), directory.path().join(&name)) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !suffix.is_empty() => {}
            Err(error) => return Err(error).with_context(|| format!("cannot copy {name}")),
        }
    }
    let copy = directory.path().join(METADATA_FILE);
    if let Err(problem) = integrity(&copy) {
        return Ok(Err(problem));
    }
    let opened = match Embedded::open(&copy) {
        Ok(store) => Catalog::open(Arc::new(store)).await,
        Err(error) => Err(error),
    };
    Ok(match opened {
        Ok(catalog) => Ok(catalog.partitions().iter().map(|partition| partition.id).collect()),
        Err(error) => Err(error.to_string()),
    })
}

/// What SQLite says of the file.
fn integrity(file: &Path) -> Result<(), String> {
    let check = || {
        let connection = rusqlite::Connection::open(file)?;
        let mut statement = connection.prepare("PRAGMA integrity_check(5)")?;
        let findings = statement.query_map([], |row| row.get::<_, String>(0))?;
        findings.collect::<rusqlite::Result<Vec<String>>>()
    };
    match check() {
        Ok(findings) if findings == ["ok"] => Ok(()),
        Ok(findings) => Err(findings.join("; ")),
        Err(error) => Err(error.to_string()),
    }
}
