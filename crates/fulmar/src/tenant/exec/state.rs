//! The state file: an append-only file of JSON lines that records in which tenants a script has
//! run. The last line of a tenant is valid.
//!
//! ```text
//! {"script":"8a3f… 127.0.0.1:5433","tenant":"shop","transaction":17,"done":false}    synced
//!                                                                                    COMMIT
//! {"script":"8a3f… 127.0.0.1:5433","tenant":"shop","transaction":17,"done":true}
//! ```
//!
//! A script is identified by the hash of its text and the address of the server, so a changed
//! script counts as a new one. A line torn by a crash is the last line of its run, and is ignored.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use tokio_postgres::Config;
use tokio_postgres::config::Host;

use crate::cli::ServerArgs;

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Note {
    script: String,
    tenant: String,
    /// The transaction of the script. `None` if each statement runs in its own transaction.
    transaction: Option<u64>,
    done: bool,
}

/// The state file, and the notes of one script in it.
pub(super) struct StateFile {
    path: PathBuf,
    script: String,
    inner: Mutex<Inner>,
}

struct Inner {
    file: File,
    notes: HashMap<String, Note>,
}

/// Returns the identifier of a script on a server.
pub(super) fn key(server: &ServerArgs, script: &str) -> anyhow::Result<String> {
    let config: Config = server.config()?;
    let hosts = config.get_hosts().iter().map(|host| match host {
        Host::Tcp(name) => name.clone(),
        Host::Unix(path) => path.display().to_string(),
    });
    let hosts: Vec<String> = hosts.collect();
    let ports: Vec<String> = config.get_ports().iter().map(u16::to_string).collect();
    let hash = xxhash_rust::xxh3::xxh3_128(script.as_bytes());
    Ok(format!("{hash:032x} {}:{}", hosts.join(","), ports.join(",")))
}

impl StateFile {
    /// Opens and locks the file, and reads the notes of the script.
    pub(super) fn open(path: &Path, script: &str) -> anyhow::Result<StateFile> {
        let cannot = |verb: &str| format!("cannot {verb} the state file {}", path.display());
        let opened = File::options().read(true).append(true).create(true).open(path);
        let mut file = opened.with_context(|| cannot("open"))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            bail!("the state file {} is in use by another `fulmar tenant exec`; wait for it", path.display());
        }
        let mut text = String::new();
        file.read_to_string(&mut text).with_context(|| cannot("read"))?;
        if !text.is_empty() && !text.ends_with('\n') {
            file.write_all(b"\n").with_context(|| cannot("write"))?;
        }
        let mut notes = HashMap::new();
        for line in text.lines() {
            match serde_json::from_str::<Note>(line) {
                Ok(note) if note.script == script => drop(notes.insert(note.tenant.clone(), note)),
                Ok(_) => {}
                Err(error) if error.is_eof() => {} // torn
                Err(error) => {
                    bail!("{} is not a state file: {error}; use another one with --state", path.display())
                }
            }
        }
        let inner = Mutex::new(Inner { file, notes });
        Ok(StateFile { path: path.to_owned(), script: script.to_owned(), inner })
    }

    pub(super) fn is_done(&self, tenant: &str) -> bool {
        self.note_of(tenant).is_some_and(|note| note.done)
    }

    /// Returns the transaction of which the outcome in the tenant is unknown.
    pub(super) fn pending_transaction(&self, tenant: &str) -> Option<u64> {
        self.note_of(tenant).filter(|note| !note.done)?.transaction
    }

    /// Records a transaction before its COMMIT, durably.
    pub(super) fn record_begun(&self, tenant: &str, transaction: u64) -> anyhow::Result<()> {
        self.note(tenant, Some(transaction), false)
    }

    /// Records that the script has committed. Not synced: if a crash loses the note, the next run
    /// asks the server for the outcome of the transaction.
    pub(super) fn record_done(&self, tenant: &str) -> anyhow::Result<()> {
        self.note(tenant, self.pending_transaction(tenant), true)
    }

    fn note_of(&self, tenant: &str) -> Option<Note> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).notes.get(tenant).cloned()
    }

    fn note(&self, tenant: &str, transaction: Option<u64>, done: bool) -> anyhow::Result<()> {
        let (script, tenant) = (self.script.clone(), tenant.to_owned());
        let note = Note { script, tenant: tenant.clone(), transaction, done };
        let mut line = serde_json::to_string(&note)?;
        line.push('\n');
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let written = inner.file.write_all(line.as_bytes());
        let synced = written.and_then(|()| if done { Ok(()) } else { inner.file.sync_data() });
        synced.with_context(|| format!("cannot write to the state file {}", self.path.display()))?;
        inner.notes.insert(tenant, note);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_persistent_and_torn_lines_are_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("state");
        let state = StateFile::open(&file, "a").unwrap();
        assert!(StateFile::open(&file, "a").is_err(), "a state file must be locked while open");
        state.record_begun("shop", 7).unwrap();
        state.record_begun("store", 8).unwrap();
        state.record_done("store").unwrap();
        drop(state);
        let mut text = std::fs::read_to_string(&file).unwrap();
        text.push_str("{\"script\":\"a\",\"tenant\":\"shop\",\"tr");
        std::fs::write(&file, &text).unwrap();
        for _ in 0..2 {
            let state = StateFile::open(&file, "a").unwrap();
            assert_eq!((state.pending_transaction("shop"), state.is_done("shop")), (Some(7), false));
            assert_eq!((state.pending_transaction("store"), state.is_done("store")), (None, true));
        }
        assert!(!StateFile::open(&file, "b").unwrap().is_done("store"));
        std::fs::write(&file, "something else\n").unwrap();
        assert!(StateFile::open(&file, "a").is_err());
    }
}
