//! Admission of messages that do not arrive with one read: their memory is charged before they are
//! buffered, and they are discarded if the charge is rejected.
//!
//! ```text
//! message header --> charge the size, wait up to 5 s --ok--> buffer the body, handle the message,
//!                                     |                      release the charge
//!                                     `-- rejected --> discard the body while it arrives,
//!                                                      then respond with the error
//! ```
//!
//! A client that stops sending in the middle of a message keeps its charge. While other sessions
//! wait because the node's session memory is exhausted, such a client is disconnected unless it
//! sends 64 KiB within 3 s ([`Progress`]).
//!
//! A rejected message has the same effect as a message that failed: a Query ends with
//! ReadyForQuery, the extended protocol skips to Sync, and a COPY fails.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use fulmar_pgwire::protocol::frontend;
use fulmar_pgwire::wire::Interrupts;
use fulmar_pgwire::wire::{MAX_POOLED_BUFFER_BYTES, READ_ROOM_BYTES, give_buffer, take_buffer};
use tokio::time::{Instant, sleep_until};

use super::link::Stall;
use super::memory_quota::{FREE_BYTES, MAX_WAIT};
use super::outcome::{End, MessageError};
use super::stall::{Progress, Rejected};
use super::state::Session;

impl Session {
    /// Charges the incomplete message at the start of `input`, and reserves buffer capacity for it.
    pub(super) async fn admit(&mut self, input: &mut Vec<u8>) -> Result<(), End> {
        let Some((kind, bytes)) = frontend::header(input) else { return Ok(()) };
        if self.received.bytes() >= bytes as u64 {
            return Ok(());
        }
        let memory = self.statements.memory().clone();
        let charged = {
            let handle = &self.link.handle;
            let mut charge = pin!(self.received.grow_to_or_wait(&memory, bytes as u64, MAX_WAIT));
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
            // The capacity includes one more read after the message, so that the buffer is not
            // moved.
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

    /// Resolves once the client must be disconnected because it stopped sending in the middle of a
    /// message. `None` if no message that is charged to the tenant is being received.
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

    /// Discards the bytes of a rejected message in `input`, starting at `used`. The client gets the
    /// error once the whole message has arrived.
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
            Err(MessageError::End(end)) => Err(end),
            Err(MessageError::Statement(error)) => {
                self.report(&error);
                Ok(())
            }
        }
    }
}

/// Frees the buffer capacity of a long message after it has been handled.
pub(super) fn shrink(input: &mut Vec<u8>) {
    if input.capacity() > MAX_POOLED_BUFFER_BYTES && input.len() < MAX_POOLED_BUFFER_BYTES {
        let mut short = take_buffer();
        short.extend_from_slice(input);
        give_buffer(std::mem::replace(input, short));
    }
}
