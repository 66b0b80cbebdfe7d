//! Access to the objects of one node's logs by slot.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::object_format::Object;
use super::slot::Slot;
use crate::log::LogError;
use crate::store::{Failure, FailureKind, Reliable, Span, Store};

const LOGS: &str = "logs";

/// A node's log objects, stored at `logs/NODE/INCARNATION/SEQUENCE`.
#[derive(Clone)]
pub(super) struct Objects {
    store: Reliable,
    directory: String,
}

impl Objects {
    pub(super) fn new(store: Reliable, node: u128) -> Self {
        Objects { store, directory: format!("{LOGS}/{node:032x}") }
    }

    /// Lists the nodes that have logs in a store.
    pub(super) async fn nodes(store: &Reliable) -> Result<BTreeSet<u128>, LogError> {
        let names = store.list_all_after(LOGS, None).await;
        let names =
            names.map_err(|cause| LogError::Store { operation: "list", object: LOGS.to_owned(), cause })?;
        let node = |name: &String| {
            let digits = name.strip_prefix(LOGS)?.strip_prefix('/')?.split('/').next()?;
            u128::from_str_radix(digits, 16).ok()
        };
        Ok(names.iter().filter_map(node).collect())
    }

    pub(super) fn directory(&self) -> &str {
        &self.directory
    }

    /// Name of a slot's object.
    pub(super) fn name(&self, slot: Slot) -> String {
        format!("{}/{slot}", self.directory)
    }

    fn parse(&self, name: &str) -> Option<Slot> {
        let (incarnation, sequence) =
            name.strip_prefix(&self.directory)?.strip_prefix('/')?.split_once('/')?;
        let slot = Slot {
            incarnation: u64::from_str_radix(incarnation, 16).ok()?,
            sequence: u64::from_str_radix(sequence, 16).ok()?,
        };
        (self.name(slot) == name).then_some(slot)
    }

    /// Lists the slots that have an object. Names are listed in order, on which rule 4 of [`super`]
    /// relies.
    pub(super) async fn list(&self) -> Result<BTreeSet<Slot>, LogError> {
        self.list_after(None).await
    }

    /// Lists the slots of one incarnation that have an object.
    pub(super) async fn list_incarnation(&self, incarnation: u64) -> Result<BTreeSet<Slot>, LogError> {
        let directory = format!("{}/{incarnation:016x}", self.directory);
        let names = self.store.list_all(&directory).await;
        let names = names.map_err(|cause| LogError::Store { operation: "list", object: directory, cause })?;
        Ok(names.iter().filter_map(|name| self.parse(name)).collect())
    }

    /// Lists the slots with objects after `slot`, whether or not that has one.
    pub(super) async fn list_after(&self, slot: Option<Slot>) -> Result<BTreeSet<Slot>, LogError> {
        let after = slot.map(|slot| self.name(slot));
        let names = self.store.list_all_after(&self.directory, after).await;
        let names = names.map_err(|cause| LogError::Store {
            operation: "list",
            object: self.directory.clone(),
            cause,
        })?;
        let slots: BTreeSet<Slot> = names.iter().filter_map(|name| self.parse(name)).collect();
        // The next incarnation and the next object need numbers, too.
        match slots.iter().find(|slot| slot.incarnation == u64::MAX || slot.sequence == u64::MAX) {
            Some(last) => Err(self.corrupt(*last, 0, "the object's number is out of range".to_owned())),
            None => Ok(slots),
        }
    }

    /// Reads an object. Returns None if it does not exist.
    pub(super) async fn get(&self, slot: Slot) -> Result<Option<Object>, LogError> {
        match self.store.get(&self.name(slot), Span::Whole).await {
            Ok(found) => {
                let decoded = Object::decode(slot, found.bytes);
                decoded.map(Some).map_err(|damage| self.corrupt(slot, damage.offset, damage.problem))
            }
            Err(failure) if failure.kind() == FailureKind::Missing => Ok(None),
            Err(cause) => Err(LogError::Store { operation: "read", object: self.name(slot), cause }),
        }
    }

    /// Creates an object. Returns false if another object is known to stand in the slot. After an
    /// error the object may still appear.
    pub(super) async fn put(&self, slot: Slot, bytes: Bytes) -> Result<bool, Failure> {
        match self.store.put(&self.name(slot), bytes).await {
            Ok(()) => Ok(true),
            // The existing object was read, and differs from this one.
            Err(failure) if failure.kind() == FailureKind::Exists => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// As [`Objects::put`], for callers that do not retry.
    pub(super) async fn put_once(&self, slot: Slot, bytes: Bytes) -> Result<bool, LogError> {
        let put = self.put(slot, bytes).await;
        put.map_err(|cause| LogError::Store { operation: "write", object: self.name(slot), cause })
    }

    /// Makes an object that was read durable, since its writer may not have received an answer.
    /// Succeeds if the object has been deleted.
    pub(super) async fn sync(&self, slot: Slot) -> Result<(), LogError> {
        match self.store.sync(&self.name(slot)).await {
            Err(cause) if cause.kind() != FailureKind::Missing => {
                Err(LogError::Store { operation: "sync", object: self.name(slot), cause })
            }
            _ => Ok(()),
        }
    }

    pub(super) async fn delete(&self, slot: Slot) -> Result<(), Failure> {
        self.store.delete(&self.name(slot)).await
    }

    pub(super) fn corrupt(&self, slot: Slot, offset: u64, problem: String) -> LogError {
        LogError::Corrupt { file: format!("{}/{}", self.store, self.name(slot)), offset, problem }
    }

    /// Returns an error about a log of which no object exists.
    pub(super) fn corrupt_log(&self, incarnation: u64, problem: String) -> LogError {
        let file = format!("{}/{}/{incarnation:016x}", self.store, self.directory);
        LogError::Corrupt { file, offset: 0, problem }
    }
}
