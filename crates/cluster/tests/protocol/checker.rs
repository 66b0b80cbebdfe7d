//! Judges a history: is it what one list per partition, changed by one client at a time, could have
//! given (strict serializability)?

use std::collections::BTreeMap;
use std::time::Duration;

use fulmar_pages::PartitionId;

use crate::gateway::{Kind, Operation};

/// What is wrong with the history of a partition whose contents are `last` in the end; empty if
/// nothing is.
pub fn check(partition: PartitionId, last: &[u64], history: &[Operation]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut places = BTreeMap::new();
    for (place, value) in last.iter().enumerate() {
        if places.insert(*value, place as u64 + 1).is_some() {
            wrong.push(format!("partition {partition}: value {value:x} is there twice"));
        }
    }
    // When a list of this length was first known to a client.
    let mut known: Vec<(Duration, u64)> = Vec::new();
    let of_partition = history.iter().filter(|operation| operation.partition == partition);
    for Operation { ended, kind, .. } in of_partition.clone() {
        let Some(ended) = ended else { continue };
        match kind {
            Kind::Append(value) => match places.get(value) {
                Some(length) => known.push((*ended, *length)),
                None => wrong.push(format!("partition {partition}: acknowledged value {value:x} is lost")),
            },
            Kind::Read(list) if !last.starts_with(list) => {
                wrong.push(format!(
                    "partition {partition}: a read returned {list:x?}, not a prefix of the contents"
                ));
            }
            Kind::Read(list) => known.push((*ended, list.len() as u64)),
        }
    }
    known.sort();
    let mut longest = 0;
    for (_, length) in &mut known {
        longest = longest.max(*length);
        *length = longest;
    }
    for Operation { begun, ended, kind, .. } in of_partition {
        let before = known.partition_point(|(at, _)| at < begun);
        let least = before.checked_sub(1).map_or(0, |place| known[place].1);
        match kind {
            Kind::Read(list) if ended.is_some() && (list.len() as u64) < least => wrong.push(format!(
                "partition {partition}: a read begun at {begun:?} returned version {}, though version {least} was known",
                list.len()
            )),
            Kind::Append(value) if places.get(value).is_some_and(|place| *place <= least) => wrong.push(format!(
                "partition {partition}: value {value:x}, begun at {begun:?}, stands before version {least}, which was known"
            )),
            _ => {}
        }
    }
    wrong
}
