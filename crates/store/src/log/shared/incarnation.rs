//! The log of one given incarnation of a cluster's node.
//!
//! In a cluster the metadata store assigns incarnations, and the ownership protocol seals the log
//! of an incarnation that has ended before its successor starts. A start therefore reads nothing.
//! It claims slot 0 of its incarnation, and is fenced if that exists.
//!
//! # What objects state
//!
//! The protocol moves the beginnings of log ranges to the *needed slot* that the last object of a
//! log states. An object must therefore not state a slot of its own incarnation before manifests
//! contain all records of earlier incarnations of partitions that the node still owns
//! ([`super::CommitLog::settle_inherited`]). Until then objects state slot 0 of incarnation 0, and
//! nothing is deleted. A clean stop in that state leaves all objects.
//!
//! # Deletions
//!
//! Only objects of this incarnation are deleted, below the needed slot of a durable object of this
//! incarnation. A failover reads from the needed slot that the last object states, so it needs none
//! of them. A handover needs none either: its range is closed after a flush, so every record before
//! its end is in a manifest. A sealer lists the slots in order. If an object was deleted before the
//! listing, the object that states this existed and has a greater name, so it is listed, and the
//! last object states at least as much. The seal of a clean stop states only what the last object
//! before it states, because sealers do not read statements of seals.

use std::collections::VecDeque;

use fulmar_pages::LogId;

use super::object_format::{self, HEAD_BYTES, Head};
use super::objects::Objects;
use super::slot::Slot;
use super::state::Live;
use super::writer::Start;
use crate::log::LogError;

/// Claims an incarnation. Fails with [`LogError::Fenced`] if its log exists.
pub(super) async fn claim(objects: &Objects, incarnation: u64) -> Result<Start, LogError> {
    let (claim, writer) = (Slot { incarnation, sequence: 0 }, LogId(rand::random()));
    let head = Head { writer, slot: claim, start: 0, needed: Slot::default(), durable: 0 };
    let bytes = object_format::finish(object_format::begin(), &head);
    if !objects.put_once(claim, bytes).await? {
        return Err(LogError::Fenced { object: objects.name(claim) });
    }
    tracing::info!(incarnation, "opened the shared log");
    let live = Live { slot: claim, start: 0, end: 0, bytes: HEAD_BYTES as u64 };
    Ok(Start {
        claim,
        writer,
        position: 0,
        live: VecDeque::from([live]),
        garbage: Vec::new(),
        unread: Vec::new(),
        is_of_cluster: true,
    })
}
