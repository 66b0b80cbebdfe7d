//! Messages that do not arrive with one read: charged before they are buffered, discarded if the charge is rejected.
//!
//! ```text
//! head of a message --> charge its size, wait up to 5 s --ok--> buffer the body, handle it, return the charge
//!                                          `-- rejected --> discard the body as it arrives, then answer with the error
//! ```
//!
//! The rest of the protocol sees a rejected message as one that failed: a Query ends with ReadyForQuery, the extended
//! protocol skips to Sync, a COPY fails.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use fulmar_engine::Error;

use super::held::{FREE_BYTES, MAX_WAIT};
use super::{End, Fault, Session};
use crate::protocol::frontend;
use crate::wire::{KEEP_BYTES, READ_ROOM_BYTES, give_buffer, take_buffer};

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
