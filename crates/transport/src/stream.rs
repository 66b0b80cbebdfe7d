//! One stream of a connection: messages in both directions, with flow control.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;

use bytes::{Bytes, BytesMut};
use futures::task::AtomicWaker;
use parking_lot::Mutex;

use crate::connection::Shared;
use crate::frame::{HEADER_BYTES, Kind, MAX_PAYLOAD_BYTES};
use crate::{Error, MAX_BULK_OUTPUT_BYTES, MAX_OUTPUT_BYTES, MAX_WINDOW_BYTES, WINDOW_BYTES};

/// Default of [`Stream::set_max_message_bytes`].
const DEFAULT_MAX_MESSAGE_BYTES: usize = 1 << 20;

/// The part of a stream that the connection's driver changes.
#[derive(Debug)]
pub(crate) struct StreamState {
    inner: Mutex<Inner>,
    readable: AtomicWaker,
    writable: AtomicWaker,
}

#[derive(Debug)]
struct Inner {
    /// Received and not read yet: payloads, and whether a message ends with each.
    chunks: VecDeque<(Bytes, bool)>,
    /// Bytes of `chunks`, with headers.
    buffered_bytes: u32,
    /// Bytes that were read since the last Window frame was sent.
    unreported_bytes: u32,
    /// Bytes, with headers, that the peer may have in flight.
    receive_window_bytes: u32,
    /// Bytes, with headers, that may still be sent.
    send_window_bytes: u32,
    /// The peer has widened its window.
    is_bulk: bool,
    peer_has_finished: bool,
    ended: Option<Error>,
}

impl StreamState {
    pub(crate) fn new() -> Self {
        let inner = Inner {
            chunks: VecDeque::new(),
            buffered_bytes: 0,
            unreported_bytes: 0,
            receive_window_bytes: WINDOW_BYTES,
            send_window_bytes: WINDOW_BYTES,
            is_bulk: false,
            peer_has_finished: false,
            ended: None,
        };
        StreamState { inner: Mutex::new(inner), readable: AtomicWaker::new(), writable: AtomicWaker::new() }
    }

    /// A data frame has arrived.
    pub(crate) fn received(&self, payload: Bytes, is_last: bool) -> Result<(), Error> {
        let mut inner = self.inner.lock();
        if inner.peer_has_finished {
            return Err(Error::Protocol("data after the end of a stream"));
        }
        let in_flight_bytes = inner.buffered_bytes + inner.unreported_bytes;
        let bytes = frame_bytes(payload.len());
        if in_flight_bytes + bytes > inner.receive_window_bytes {
            return Err(Error::Protocol("a stream exceeds its window"));
        }
        inner.buffered_bytes += bytes;
        inner.chunks.push_back((payload, is_last));
        drop(inner);
        self.readable.wake();
        Ok(())
    }

    /// The peer has read this many bytes, or has widened its window by them.
    pub(crate) fn window_opened(&self, bytes: u32) -> Result<(), Error> {
        let mut inner = self.inner.lock();
        match inner.send_window_bytes.checked_add(bytes).filter(|window| *window <= MAX_WINDOW_BYTES) {
            Some(window) => {
                inner.send_window_bytes = window;
                inner.is_bulk |= window > WINDOW_BYTES;
            }
            None => return Err(Error::Protocol("a window is larger than it may be")),
        }
        drop(inner);
        self.writable.wake();
        Ok(())
    }

    /// Bytes of the connection's output buffer from which on the sender waits.
    fn output_limit_bytes(&self) -> usize {
        if self.inner.lock().is_bulk { MAX_BULK_OUTPUT_BYTES } else { MAX_OUTPUT_BYTES }
    }

    /// The peer sends no more data.
    pub(crate) fn peer_finished(&self) {
        self.inner.lock().peer_has_finished = true;
        self.readable.wake();
    }

    /// The stream ends with an error, after the data that has arrived.
    pub(crate) fn end(&self, error: &Error) {
        self.inner.lock().ended.get_or_insert_with(|| error.clone());
        self.readable.wake();
        self.writable.wake();
    }
}

/// A stream of messages in both directions. Dropping it before both sides have finished asks
/// the peer to abandon it.
#[derive(Debug)]
pub struct Stream {
    sender: Sender,
    receiver: Receiver,
}

/// The sending side of a stream that was [split](Stream::split).
#[derive(Debug)]
pub struct Sender {
    shared: Arc<StreamEnd>,
    /// A message was sent in part: [`Sender::send`] was dropped.
    is_torn: bool,
}

/// The receiving side of a stream that was [split](Stream::split).
#[derive(Debug)]
pub struct Receiver {
    shared: Arc<StreamEnd>,
    max_message_bytes: usize,
    /// The beginning of the message that is being received.
    partial: BytesMut,
}

/// This side of a stream. Dropping it abandons the stream.
#[derive(Debug)]
struct StreamEnd {
    connection: Arc<Shared>,
    /// Assigned by the first frame.
    id: AtomicU64,
    state: Arc<StreamState>,
    /// Whether the peer knows the stream.
    is_open: AtomicBool,
    has_finished: AtomicBool,
}

impl Stream {
    pub(crate) fn new(connection: Arc<Shared>, id: u64, state: Arc<StreamState>, is_open: bool) -> Self {
        let shared = Arc::new(StreamEnd {
            connection,
            id: AtomicU64::new(id),
            state,
            is_open: AtomicBool::new(is_open),
            has_finished: AtomicBool::new(false),
        });
        Stream {
            sender: Sender { shared: shared.clone(), is_torn: false },
            receiver: Receiver {
                shared,
                max_message_bytes: DEFAULT_MAX_MESSAGE_BYTES,
                partial: BytesMut::new(),
            },
        }
    }

    /// Separates the two directions, which can then be used at the same time. The stream is
    /// abandoned when both sides have been dropped.
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }

    /// Sets the maximum length of a received message (default: 1 MiB). A longer one is an error.
    pub fn set_max_message_bytes(&mut self, bytes: usize) {
        self.receiver.max_message_bytes = bytes;
    }

    /// Allows the peer to have [`MAX_WINDOW_BYTES`] in flight, for bulk data. Otherwise a transfer waits
    /// for both sides at every [`WINDOW_BYTES`]. To be called once the peer knows the stream: after a
    /// message was sent or received.
    pub fn widen(&mut self) {
        let end = &self.receiver.shared;
        let before = {
            let mut inner = end.state.inner.lock();
            std::mem::replace(&mut inner.receive_window_bytes, MAX_WINDOW_BYTES)
        };
        if before < MAX_WINDOW_BYTES {
            let bytes = MAX_WINDOW_BYTES - before;
            end.connection.write(Kind::Window, false, end.id(), &bytes.to_le_bytes());
        }
    }

    /// Sends a message, as [`Sender::send`].
    pub async fn send(&mut self, message: &[u8]) -> Result<(), Error> {
        self.sender.send(message).await
    }

    /// Sends no more messages. The peer receives the end after all messages.
    pub fn finish(&mut self) {
        self.sender.finish();
    }

    /// Receives the next message, as [`Receiver::receive`].
    pub async fn receive(&mut self) -> Result<Option<Bytes>, Error> {
        self.receiver.receive().await
    }

    /// Ends the stream in both directions. The peer gets `reason` as an error.
    pub fn reset(self, reason: &str) {
        self.sender.reset(reason);
    }
}

impl Sender {
    /// Sends a message. Waits while the peer does not read, or the connection's output buffer is
    /// full. If the future is dropped, a part of the message may have been sent: the stream can
    /// then only be dropped.
    pub async fn send(&mut self, message: &[u8]) -> Result<(), Error> {
        let end = &*self.shared;
        if end.has_finished.load(Ordering::Acquire) || self.is_torn {
            return Err(Error::Closed);
        }
        self.is_torn = true;
        let mut rest = message;
        loop {
            end.connection.output_space(end.state.output_limit_bytes()).await?;
            let window_bytes = end.window().await?;
            let sent_bytes = rest.len().min(window_bytes - HEADER_BYTES).min(MAX_PAYLOAD_BYTES);
            let (chunk, after) = rest.split_at(sent_bytes);
            rest = after;
            end.state.inner.lock().send_window_bytes -= frame_bytes(chunk.len());
            if end.is_open.load(Ordering::Acquire) {
                end.connection.write(Kind::Data, rest.is_empty(), end.id(), chunk);
            } else {
                let id = end.connection.write_first(end.id(), rest.is_empty(), chunk)?;
                end.id.store(id, Ordering::Release);
                end.is_open.store(true, Ordering::Release);
            }
            if rest.is_empty() {
                self.is_torn = false;
                return Ok(());
            }
        }
    }

    /// Sends no more messages. The peer receives the end after all messages.
    pub fn finish(&mut self) {
        let end = &*self.shared;
        if end.is_open.load(Ordering::Acquire)
            && !self.is_torn
            && !end.has_finished.swap(true, Ordering::AcqRel)
        {
            end.connection.write(Kind::Finish, false, end.id(), &[]);
        }
    }

    /// Ends the stream in both directions. The peer gets `reason` as an error.
    pub fn reset(self, reason: &str) {
        self.shared.abandon(reason);
    }
}

impl Receiver {
    /// Receives the next message; `None` after the last one. If the future is dropped, nothing is
    /// lost.
    pub async fn receive(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            let Some((chunk, is_last)) = self.shared.chunk().await? else {
                return match self.partial.is_empty() {
                    true => Ok(None),
                    false => Err(Error::Protocol("a stream ends within a message")),
                };
            };
            if self.partial.len() + chunk.len() > self.max_message_bytes {
                return Err(Error::TooLong { limit_bytes: self.max_message_bytes });
            }
            match (is_last, self.partial.is_empty()) {
                (true, true) => return Ok(Some(chunk)),
                (false, _) => self.partial.extend_from_slice(&chunk),
                (true, false) => {
                    self.partial.extend_from_slice(&chunk);
                    return Ok(Some(std::mem::take(&mut self.partial).freeze()));
                }
            }
        }
    }
}

impl StreamEnd {
    fn id(&self) -> u64 {
        self.id.load(Ordering::Acquire)
    }

    /// Waits until a frame with at least one byte can be sent. Returns the window.
    async fn window(&self) -> Result<usize, Error> {
        poll_fn(|context| {
            let state = || {
                let inner = self.state.inner.lock();
                match &inner.ended {
                    Some(error) => Poll::Ready(Err(error.clone())),
                    None if inner.send_window_bytes as usize > HEADER_BYTES => {
                        Poll::Ready(Ok(inner.send_window_bytes as usize))
                    }
                    None => Poll::Pending,
                }
            };
            if let ready @ Poll::Ready(_) = state() {
                return ready;
            }
            self.state.writable.register(context.waker());
            state()
        })
        .await
    }

    /// Takes the next received payload.
    async fn chunk(&self) -> Result<Option<(Bytes, bool)>, Error> {
        poll_fn(|context| {
            if let ready @ Poll::Ready(_) = self.take_chunk() {
                return ready;
            }
            self.state.readable.register(context.waker());
            self.take_chunk()
        })
        .await
    }

    fn take_chunk(&self) -> Poll<Result<Option<(Bytes, bool)>, Error>> {
        let mut inner = self.state.inner.lock();
        let Some((payload, is_last)) = inner.chunks.pop_front() else {
            return match (&inner.ended, inner.peer_has_finished) {
                (_, true) => Poll::Ready(Ok(None)),
                (Some(error), false) => Poll::Ready(Err(error.clone())),
                (None, false) => Poll::Pending,
            };
        };
        let bytes = frame_bytes(payload.len());
        inner.buffered_bytes -= bytes;
        inner.unreported_bytes += bytes;
        // Reporting each frame would double their number.
        if inner.unreported_bytes >= inner.receive_window_bytes / 4 && !inner.peer_has_finished {
            let read_bytes = std::mem::take(&mut inner.unreported_bytes);
            drop(inner);
            self.connection.write(Kind::Window, false, self.id(), &read_bytes.to_le_bytes());
        }
        Poll::Ready(Ok(Some((payload, is_last))))
    }

    fn abandon(&self, reason: &str) {
        let is_complete = {
            let inner = self.state.inner.lock();
            let has_finished = self.has_finished.load(Ordering::Acquire);
            inner.ended.is_some() || (has_finished && inner.peer_has_finished)
        };
        if self.is_open.swap(false, Ordering::AcqRel) && !is_complete {
            let mut length = reason.len().min(MAX_REASON_BYTES);
            while !reason.is_char_boundary(length) {
                length -= 1;
            }
            self.connection.write(Kind::Reset, false, self.id(), &reason.as_bytes()[..length]);
        }
    }
}

/// Maximum length of the reason of a reset.
const MAX_REASON_BYTES: usize = 1000;

impl Drop for StreamEnd {
    fn drop(&mut self) {
        self.abandon("the caller no longer waits");
        self.connection.forget(self.id());
    }
}

/// Length of a frame, as counted by flow control.
fn frame_bytes(payload_bytes: usize) -> u32 {
    (payload_bytes + HEADER_BYTES) as u32
}
