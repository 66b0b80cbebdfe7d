//! The slots of shared logs, as the ownership protocol sees them (`fulmar_cluster`).

use fulmar_pages::LogId;

use super::LogPosition;
use super::object_format::Head;
use super::objects::Objects;
use super::recovery::encode_seal;
use super::slot::Slot;
use crate::log::LogError;
use crate::store::Reliable;

/// The slots of all shared logs in a store.
#[derive(Clone)]
pub struct LogSlots {
    store: Reliable,
}

/// Contents of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogSlot {
    /// Records, or none.
    Records {
        /// Before this position, all records of partitions that the node owned are in manifests.
        needed: LogPosition,
    },
    /// The log ends here, or before.
    Seal,
}

impl LogSlots {
    /// The slots of the logs in a store.
    pub fn new(store: Reliable) -> Self {
        LogSlots { store }
    }

    fn objects(&self, node: u128) -> Objects {
        Objects::new(self.store.clone(), node)
    }

    /// The slots of an incarnation's log that have an object, ascending.
    pub async fn list(&self, node: u128, incarnation: u64) -> Result<Vec<u64>, LogError> {
        let slots = self.objects(node).list_incarnation(incarnation).await?;
        Ok(slots.into_iter().map(|slot| slot.sequence).collect())
    }

    /// Reads a slot, and makes it durable. Returns None if it has no object.
    pub async fn read(&self, node: u128, incarnation: u64, slot: u64) -> Result<Option<LogSlot>, LogError> {
        let (objects, slot) = (self.objects(node), Slot { incarnation, sequence: slot });
        let Some(object) = objects.get(slot).await? else { return Ok(None) };
        // A seal confirms what is before it, although the object's writer may have got no answer.
        objects.sync(slot).await?;
        Ok(Some(match object.is_seal {
            true => LogSlot::Seal,
            false => LogSlot::Records { needed: LogPosition(object.head.needed) },
        }))
    }

    /// Puts a seal into a slot. Returns false if the slot has another object. After an error the
    /// seal may still appear.
    pub async fn create_seal(&self, node: u128, incarnation: u64, slot: u64) -> Result<bool, LogError> {
        self.create(node, Slot { incarnation, sequence: slot }, Slot::default()).await
    }

    /// As [`LogSlots::create_seal`]; the seal states that nothing of the log is needed. A writer of
    /// the log that lost a slot then reports an unknown outcome (rule 3 of [`super`]).
    pub async fn create_end_mark(&self, node: u128, incarnation: u64, slot: u64) -> Result<bool, LogError> {
        let needed = Slot { incarnation: incarnation + 1, sequence: 0 };
        self.create(node, Slot { incarnation, sequence: slot }, needed).await
    }

    async fn create(&self, node: u128, slot: Slot, needed: Slot) -> Result<bool, LogError> {
        let writer = LogId(rand::random());
        // The position is unknown and unused: readers of a sealed log go by slots.
        let head = Head { writer, slot, start: 0, needed, durable: 0 };
        self.objects(node).put_once(slot, encode_seal(head)).await
    }

    /// Deletes a slot's object. Succeeds if there is none.
    pub async fn delete(&self, node: u128, incarnation: u64, slot: u64) -> Result<(), LogError> {
        let (objects, slot) = (self.objects(node), Slot { incarnation, sequence: slot });
        let deleted = objects.delete(slot).await;
        deleted.map_err(|cause| LogError::Store { operation: "delete", object: objects.name(slot), cause })
    }
}
