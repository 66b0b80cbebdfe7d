//! Messages that do not arrive with one read: charged before they are buffered, discarded if the charge is rejected.
//!
//! ```text
//! head of a message --> charge its size, wait up to 5 s --ok--> buffer the body, handle it, return the charge
//!                                          `-- rejected --> discard the body as it arrives, then answer with the error
//! ```
//!
//! A client that stops in the middle of a message keeps its charge. While other sessions wait for memory of the node, such a
//! client is disconnected: it must send 64 KiB within 3 s ([`Progress`]).
//!
//! The rest of the protocol sees a rejected message as one that failed: a Query ends with ReadyForQuery, the extended
//! protocol skips to Sync, a COPY fails.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use fulmar_engine::{Error, sqlstate};
use tokio::time::{Instant, sleep_until};

use super::held::{FREE_BYTES, MAX_WAIT};
use super::link::Stall;
use super::{End, Fault, Session};
use crate::protocol::frontend;
use crate::wire::{KEEP_BYTES, READ_ROOM_BYTES, give_buffer, take_buffer};

/// While sessions wait for memory of the node, the client of a partly received message has this time
const STALL_TIMEOUT: Duration = Duration::from_secs(3);
/// to send this much more of it. The time is less than [`MAX_WAIT`], so a waiting message can be admitted.
const MIN_PROGRESS_BYTES: usize = 64 << 10;

/// How fast a message is received.
#[derive(Default)]
pub(super) struct Progress {
    /// When `goal_bytes` of it are to have arrived; `None` if no part of it was waited for yet.
    deadline: Option<Instant>,
    goal_bytes: usize,
}

impl Progress {
    /// When the next part is to have arrived, if `received_bytes` of the message have arrived by `now`.
    fn deadline(&mut self, received_bytes: usize, now: Instant) -> Instant {
        match self.deadline {
            Some(deadline) if received_bytes < self.goal_bytes => deadline,
            _ => {
                self.goal_bytes = received_bytes + MIN_PROGRESS_BYTES;
                *self.deadline.insert(now + STALL_TIMEOUT)
            }
        }
    }
}

/// The error for a client that has stopped in the middle of a message.
pub(super) fn stalled() -> Error {
    Error::new(
        sqlstate::CONNECTION_FAILURE,
        "terminating connection due to an incomplete message while session memory is short",
    )
    .detail(format!(
        "Less than {} KiB of the message arrived within {} s, and other sessions wait for its memory.",
        MIN_PROGRESS_BYTES >> 10,
        STALL_TIMEOUT.as_secs()
    ))
}

/// A message that does not fit, of which a part has not arrived.
pub(super) struct Rejected {
    kind: u8,
    left_bytes: usize,
    error: Error,
}

impl Session {
    /// Charges the message that `input` begins with, and makes room for it.
    pub(super) async fn admit(&mut self, input: &mut Vec<u8>) -> Result<(), End> {
        let Some((kind, bytes)) = frontend::head(input) else { return Ok(()) };
        if self.received.bytes() >= bytes as u64 {
            return Ok(());
        }
        let memory = self.statements.memory().clone();
        let charged = {
            let handle = &self.link.handle;
            let mut charge = pin!(self.received.cover_or_wait(&memory, bytes as u64, MAX_WAIT));
            poll_fn(|cx| {
                handle.register(cx.waker());
                match handle.is_closing() {
                    true => Poll::Ready(Err(End::Server)),
                    false => charge.as_mut().poll(cx).map(Ok),
                }
            })
            .await?
        };
        self.progress = Progress::default();
        match charged {
            // Behind the message there is room for one more read, so the buffer is not moved.
            Ok(()) if bytes as u64 > FREE_BYTES => {
                input.reserve_exact(bytes + READ_ROOM_BYTES - input.len());
            }
            Ok(()) => {}
            Err(error) => {
                let left_bytes = bytes - input.len();
                self.rejected = Some(Box::new(Rejected { kind, left_bytes, error }));
                input.clear();
            }
        }
        Ok(())
    }

    /// Resolves once the client is to be disconnected because it has stopped in the middle of a message. `None` if no message is
    /// received that is charged to the tenant.
    pub(super) fn stall(&mut self) -> Option<Stall> {
        if self.received.bytes() <= FREE_BYTES {
            return None;
        }
        let deadline = self.progress.deadline(self.link.wire.input.len(), Instant::now());
        let memory = self.statements.memory().clone();
        Some(Box::pin(async move {
            sleep_until(deadline).await;
            memory.node_shortage().await;
        }))
    }

    /// Discards the bytes of a rejected message in `input`, which start at `used`. The client gets the error once the whole message
    /// has arrived.
    pub(super) async fn discard(&mut self, input: &[u8], used: &mut usize) -> Result<(), End> {
        let Some(mut rejected) = self.rejected.take() else { return Ok(()) };
        let discarded = rejected.left_bytes.min(input.len() - *used);
        *used += discarded;
        rejected.left_bytes -= discarded;
        if rejected.left_bytes > 0 {
            self.rejected = Some(rejected);
            return Ok(());
        }
        let Rejected { kind, error, .. } = *rejected;
        let outcome = match kind {
            b'd' | b'f' => self.copy_rejected(error).await,
            _ if self.copy.is_some() => self.copy_interrupted().await,
            _ if self.skipping => Ok(()),
            b'Q' => self.end_of_text(Err(error.into())).await,
            _ => {
                self.extended_failed(&error);
                Ok(())
            }
        };
        match outcome {
            Ok(()) => Ok(()),
            Err(Fault::End(end)) => Err(end),
            Err(Fault::Statement(error)) => {
                self.report(&error);
                Ok(())
            }
        }
    }
}

/// Frees the capacity that a long message needed.
pub(super) fn shrink(input: &mut Vec<u8>) {
    if input.capacity() > KEEP_BYTES && input.len() < KEEP_BYTES {
        let mut short = take_buffer();
        short.extend_from_slice(input);
        give_buffer(std::mem::replace(input, short));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_bytes_are_no_progress() {
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
