//! Reads all of a node's logs, what counts and what does not, and tells everything in them that is not as it was written.
//!
//! | what is wrong | how that is known |
//! | --- | --- |
//! | an object is damaged | its checksum; also where a start would pass over it |
//! | one is missing inside of a log | another was made when it was durable |
//! | a log's end is missing | a later log has begun, and nobody begins one before all earlier ones have an end |
//! | a log is missing as a whole | they are numbered without gaps, and what ends one is never deleted |
//!
//! What is missing before the slot from which on the log is needed is no damage: it may be deleted at any time. The last object of the last
//! log has no witness. Gaps are looked for where all objects can be read: what an object tells of others is not known of a damaged one.
//! Nothing is written.

use futures::stream::{self, StreamExt};

use super::objects::Objects;
use super::open::{CONCURRENT_READS, MOST_ROUNDS, Seen, Survey, give, look, sort};
use super::{LogError, RecoveryProgress, Replay};

/// What was found in a node's logs in a store.
#[derive(Debug, Default)]
pub struct SharedLogCheck {
    /// Objects that were there.
    pub objects: u64,
    /// What is damaged or missing, in the order of the slots: each is a [`LogError::Corrupt`].
    pub damage: Vec<LogError>,
}

/// Reads all objects, and gives the records that count to `replay`, if nothing is damaged.
pub(super) async fn check(objects: &Objects, replay: &mut Replay<'_>) -> Result<SharedLogCheck, LogError> {
    for _ in 0..MOST_ROUNDS {
        let (mut survey, damage) = read_all(objects).await?;
        let count = (survey.known.len() + damage.len()) as u64;
        if !damage.is_empty() {
            return Ok(SharedLogCheck { objects: count, damage });
        }
        match look(objects, &mut survey, &RecoveryProgress::default()).await {
            Ok(Some(seen)) => {
                let damage = missing_logs(objects, &survey, &seen);
                give(&sort(survey, &seen.ends).0, replay)?;
                return Ok(SharedLogCheck { objects: count, damage });
            }
            // Some have come or gone meanwhile.
            Ok(None) => {}
            Err(gap @ LogError::Corrupt { .. }) => {
                return Ok(SharedLogCheck { objects: count, damage: vec![gap] });
            }
            Err(error) => return Err(error),
        }
    }
    Err(LogError::Contended { directory: objects.directory().to_owned() })
}

/// All objects that can be read, and what is wrong with the others.
async fn read_all(objects: &Objects) -> Result<(Survey, Vec<LogError>), LogError> {
    let reads = stream::iter(objects.list().await?).map(async |slot| (slot, objects.get(slot).await));
    let (mut survey, mut damage) = (Survey::default(), Vec::new());
    for (slot, read) in reads.buffered(CONCURRENT_READS).collect::<Vec<_>>().await {
        match read {
            // One that has gone meanwhile is not needed; or it is, and the look at all of them says so.
            Ok(object) => survey.known.extend(object.map(|object| (slot, object))),
            Err(error @ LogError::Corrupt { .. }) => damage.push(error),
            Err(error) => return Err(error),
        }
    }
    Ok((survey, damage))
}

/// Logs before the last one that have no end, or of which nothing is there.
fn missing_logs(objects: &Objects, survey: &Survey, seen: &Seen) -> Vec<LogError> {
    let open = seen.ends.iter().filter(|end| !end.closed && end.slot.incarnation < seen.last.incarnation);
    let mut missing: Vec<_> = open
        .map(|end| {
            let problem = "it is missing, though a later log was begun after it".to_owned();
            objects.corrupt(end.slot, 0, problem)
        })
        .collect();
    let mut before = 0;
    for slot in survey.known.keys() {
        if slot.incarnation > before + 1 {
            let problem = "it is missing: how a log has ended is never deleted".to_owned();
            missing.push(objects.corrupt_log(before + 1, problem));
        }
        before = slot.incarnation;
    }
    missing
}
