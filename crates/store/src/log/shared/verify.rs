//! Verification: reads all objects of a node's logs and reports those that are damaged or missing.
//!
//! | damage | evidence |
//! | --- | --- |
//! | an object is damaged | its checksum; also for objects that a start skips |
//! | an object within a log is missing | a later object states that it was durable |
//! | the end of a log is missing | a later log was started, and all earlier logs are ended before that |
//! | a whole log is missing | logs are numbered without gaps, and the object that ends a log is never deleted |
//!
//! A missing object before the needed slot is no damage: it may be deleted at any time. The loss of
//! the last object of the last log cannot be detected. Gaps are checked only if all objects are
//! readable, because the statements of a damaged object are not known. Verification writes nothing.

use futures::stream::{self, StreamExt};

use super::objects::Objects;
use super::options::{RecoveryProgress, Replay};
use super::recovery::{
    CONCURRENT_READS, LogState, MAX_ROUNDS, Survey, partition_objects, replay_all, survey_log,
};
use crate::log::LogError;

/// Result of verifying a node's logs in a store.
#[derive(Debug, Default)]
pub struct SharedLogCheck {
    /// Number of existing objects.
    pub objects: u64,
    /// Damaged and missing objects in slot order. Each error is a [`LogError::Corrupt`].
    pub damage: Vec<LogError>,
}

/// Reads all objects. If none is damaged, passes the valid records to `replay`.
pub(super) async fn check(objects: &Objects, replay: &mut Replay<'_>) -> Result<SharedLogCheck, LogError> {
    for _ in 0..MAX_ROUNDS {
        let (mut survey, damage) = read_all(objects).await?;
        let count = (survey.known.len() + damage.len()) as u64;
        if !damage.is_empty() {
            return Ok(SharedLogCheck { objects: count, damage });
        }
        match survey_log(objects, &mut survey, &RecoveryProgress::default()).await {
            Ok(Some(log_state)) => {
                let damage = missing_logs(objects, &survey, &log_state);
                replay_all(&partition_objects(survey, &log_state.ends).0, replay)?;
                return Ok(SharedLogCheck { objects: count, damage });
            }
            // Objects were created or deleted in the meantime.
            Ok(None) => {}
            Err(gap @ LogError::Corrupt { .. }) => {
                return Ok(SharedLogCheck { objects: count, damage: vec![gap] });
            }
            Err(error) => return Err(error),
        }
    }
    Err(LogError::Contended { directory: objects.directory().to_owned() })
}

/// Reads all objects. Returns the readable ones, and the errors of the others.
async fn read_all(objects: &Objects) -> Result<(Survey, Vec<LogError>), LogError> {
    let reads = stream::iter(objects.list().await?).map(async |slot| (slot, objects.get(slot).await));
    let (mut survey, mut damage) = (Survey::default(), Vec::new());
    for (slot, read) in reads.buffered(CONCURRENT_READS).collect::<Vec<_>>().await {
        match read {
            // An object that was deleted in the meantime is not needed. If it is, the check for
            // gaps reports it.
            Ok(object) => survey.known.extend(object.map(|object| (slot, object))),
            Err(error @ LogError::Corrupt { .. }) => damage.push(error),
            Err(error) => return Err(error),
        }
    }
    Ok((survey, damage))
}

/// Returns errors for logs before the last one that have no end, or of which no object exists.
fn missing_logs(objects: &Objects, survey: &Survey, log_state: &LogState) -> Vec<LogError> {
    let open =
        log_state.ends.iter().filter(|end| !end.closed && end.slot.incarnation < log_state.last.incarnation);
    let mut missing: Vec<_> = open
        .map(|end| {
            let problem = "the object is missing, but a later log was started after it".to_owned();
            objects.corrupt(end.slot, 0, problem)
        })
        .collect();
    let mut before = 0;
    for slot in survey.known.keys() {
        if slot.incarnation > before + 1 {
            let problem = "the log is missing: the object that ends a log is never deleted".to_owned();
            missing.push(objects.corrupt_log(before + 1, problem));
        }
        before = slot.incarnation;
    }
    missing
}
