//! Checks a history for strict serializability: it must be possible with one list per partition
//! that is changed by one client at a time.

use std::collections::BTreeMap;
use std::time::Duration;

use fulmar_pages::PartitionId;

use crate::gateway::{Operation, OperationKind};
use crate::violation::{Kind, Violation};

/// Returns the violations in the history of a partition whose final contents are `last`.
pub fn check(partition: PartitionId, last: &[u64], history: &[Operation]) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut report =
        |kind, text| violations.push(Violation { kind, text: format!("partition {partition}: {text}") });
    let mut places = BTreeMap::new();
    for (place, value) in last.iter().enumerate() {
        if places.insert(*value, place as u64 + 1).is_some() {
            report(Kind::Duplicated, format!("value {value:x} is duplicated"));
        }
    }
    // The times at which a list of a given length was first known to a client.
    let mut known: Vec<(Duration, u64)> = Vec::new();
    let of_partition = history.iter().filter(|operation| operation.partition == partition);
    for Operation { ended, kind, .. } in of_partition.clone() {
        let Some(ended) = ended else { continue };
        match kind {
            OperationKind::Append(value) => match places.get(value) {
                Some(length) => known.push((*ended, *length)),
                None => report(Kind::Lost, format!("acknowledged value {value:x} is lost")),
            },
            OperationKind::Read(list) if !last.starts_with(list) => {
                report(Kind::Forked, format!("a read returned {list:x?}, not a prefix of the contents"));
            }
            OperationKind::Read(list) => known.push((*ended, list.len() as u64)),
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
            OperationKind::Read(list) if ended.is_some() && (list.len() as u64) < least => {
                let version = list.len();
                let text = format!(
                    "a read begun at {begun:?} returned version {version}, though version {least} was known"
                );
                report(Kind::StaleRead, text);
            }
            OperationKind::Append(value) if places.get(value).is_some_and(|place| *place <= least) => {
                let text = format!("value {value:x}, begun at {begun:?}, precedes known version {least}");
                report(Kind::Reordered, text);
            }
            _ => {}
        }
    }
    violations
}
