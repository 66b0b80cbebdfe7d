//! The receive progress of a message whose client may have stopped sending in the middle of it.

use std::time::Duration;

use fulmar_engine::{Error, sqlstate};
use tokio::time::Instant;

/// While sessions wait for the node's memory, a client must send at least [`MIN_PROGRESS_BYTES`] of
/// an incomplete message within this time. It is less than
/// [`MAX_WAIT`](super::memory_quota::MAX_WAIT), so that a waiting message can be admitted before it
/// times out.
const STALL_TIMEOUT: Duration = Duration::from_secs(3);
/// See [`STALL_TIMEOUT`].
const MIN_PROGRESS_BYTES: usize = 64 << 10;

/// The receive progress of a message.
#[derive(Default)]
pub(super) struct Progress {
    /// The time by which `goal_bytes` must have arrived. `None` before the first wait.
    deadline: Option<Instant>,
    goal_bytes: usize,
}

impl Progress {
    /// The current deadline, given that `received_bytes` of the message have arrived by `now`.
    pub(super) fn deadline(&mut self, received_bytes: usize, now: Instant) -> Instant {
        match self.deadline {
            Some(deadline) if received_bytes < self.goal_bytes => deadline,
            _ => {
                self.goal_bytes = received_bytes + MIN_PROGRESS_BYTES;
                *self.deadline.insert(now + STALL_TIMEOUT)
            }
        }
    }
}

/// The error for a client that stopped sending in the middle of a message.
pub(super) fn stalled() -> Error {
    Error::new(
        sqlstate::CONNECTION_FAILURE,
        "terminating connection due to an incomplete message while session memory is short",
    )
    .detail(format!(
        "Less than {} KiB of the message arrived within {} s, and other sessions are waiting for memory.",
        MIN_PROGRESS_BYTES >> 10,
        STALL_TIMEOUT.as_secs()
    ))
}

/// A message whose charge was rejected and that has not fully arrived.
pub(super) struct Rejected {
    pub(super) kind: u8,
    pub(super) left_bytes: usize,
    pub(super) error: Error,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_amounts_do_not_extend_the_deadline() {
        let (began, second) = (Instant::now(), Duration::from_secs(1));
        let mut progress = Progress::default();
        let first = progress.deadline(5, began);
        assert_eq!(first, began + STALL_TIMEOUT);
        assert_eq!(progress.deadline(6, began + second), first);
        assert_eq!(progress.deadline(4 + MIN_PROGRESS_BYTES, began + second), first);
        let next = progress.deadline(5 + MIN_PROGRESS_BYTES, began + second);
        assert_eq!(next, began + second + STALL_TIMEOUT);
        assert_eq!(progress.deadline(6 + MIN_PROGRESS_BYTES, began + 2 * second), next);
    }
}
