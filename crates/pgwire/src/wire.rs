//! A client connection: reads and writes bytes, with or without TLS.
//!
//! Buffers belong to the worker, not to the connection. A session takes a buffer when there is
//! something to read or write, and returns it before it waits. Idle sessions therefore hold no
//! buffers, and active sessions share a few that are warm in the CPU cache:
//!
//! ```text
//! wait for bytes --> take buffer, one recv --> run statements, fill output --> one send,
//!                                                                              return buffer
//! ```
//!
//! While a statement runs, [`Wire::watch`] polls the connection. Bytes that arrive early are
//! buffered, up to a limit, and a disconnect is detected.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, DuplexStream, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use crate::busy_poll::BusyPoller;

/// Initial capacity of a buffer.
const BUFFER_BYTES: usize = 16 * 1024;
/// Minimum free space in the buffer before a read.
pub const READ_ROOM_BYTES: usize = BUFFER_BYTES / 4;
/// A buffer that has grown beyond this size is freed instead of returned to the pool.
pub const MAX_POOLED_BUFFER_BYTES: usize = 64 * 1024;
/// Maximum number of pooled buffers per worker.
const MAX_POOLED_BUFFERS: usize = 16;
/// Maximum number of bytes read ahead while a statement runs. The rest stays in the kernel's
/// buffer. Read-ahead is not charged to the tenant's memory, so it is limited to the size of a new
/// buffer.
const MAX_READ_AHEAD_BYTES: usize = BUFFER_BYTES;

/// The number of receive attempts on a polled socket before the runtime is polled.
const RECEIVE_ATTEMPTS: u32 = 8;

thread_local! {
    static BUFFERS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Takes an empty buffer from this worker's pool.
pub fn take_buffer() -> Vec<u8> {
    BUFFERS.with_borrow_mut(Vec::pop).unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES))
}

/// Clears a buffer and returns it to the pool.
pub fn give_buffer(mut buffer: Vec<u8>) {
    buffer.clear();
    BUFFERS.with_borrow_mut(|buffers| {
        if (BUFFER_BYTES / 2..=MAX_POOLED_BUFFER_BYTES).contains(&buffer.capacity())
            && buffers.len() < MAX_POOLED_BUFFERS
        {
            buffers.push(buffer);
        }
    });
}

/// The reason why a connection can no longer be used.
#[derive(Debug)]
pub enum Closed {
    /// The client has disconnected, or the network failed.
    Client,
    /// The server closes the session.
    Server,
    /// The server may not answer any more.
    Fenced,
    /// The idle timeout expired.
    Idle,
    /// The client stopped sending in the middle of a message, and other sessions need its memory.
    Stalled,
}

/// Requests of the server to end a connection. The owner of the connection implements it.
pub trait Interrupts {
    /// Registers the waker of the task that waits for the client. It is woken by each request.
    fn register(&self, waker: &Waker);
    /// Returns true if the connection must close instead of waiting for the client's next message.
    fn is_closing(&self) -> bool;
    /// Returns true if the connection must close even if the client has not received the responses.
    fn is_killed(&self) -> bool;
}

impl<I: Interrupts> Interrupts for Arc<I> {
    fn register(&self, waker: &Waker) {
        (**self).register(waker);
    }

    fn is_closing(&self) -> bool {
        (**self).is_closing()
    }

    fn is_killed(&self) -> bool {
        (**self).is_killed()
    }
}

/// The transport of a connection.
pub enum Stream {
    /// Without TLS.
    Plain(TcpStream),
    /// With TLS.
    Tls(Box<TlsStream<TcpStream>>),
    /// A pipe inside of this process: the client is connected to another part of the gateway.
    Pipe(DuplexStream),
    /// The session is being moved to another worker.
    Detached,
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, buffer),
            Stream::Pipe(stream) => Pin::new(stream).poll_read(cx, buffer),
            Stream::Detached => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
            Stream::Pipe(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Detached => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(_) | Stream::Pipe(_) | Stream::Detached => Poll::Ready(Ok(())),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
            Stream::Pipe(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Detached => Poll::Ready(Ok(())),
        }
    }
}

/// A connection, with the bytes that have been received and not yet processed.
pub struct Wire {
    stream: Stream,
    /// Received and not yet processed.
    pub input: Vec<u8>,
    disconnected: bool,
    busy_poller: BusyPoller,
}

impl Wire {
    /// A connection of which `input` has already been read.
    pub fn new(stream: Stream, input: Vec<u8>) -> Wire {
        Wire { stream, input, disconnected: false, busy_poller: BusyPoller::new() }
    }

    /// Returns true if the connection can be detached: its only state is the socket, and no input
    /// is buffered.
    pub fn can_detach(&self) -> bool {
        matches!(self.stream, Stream::Plain(_)) && self.input.is_empty() && !self.disconnected
    }

    /// Removes the socket from this thread's runtime.
    pub fn detach(&mut self) -> Option<std::net::TcpStream> {
        match std::mem::replace(&mut self.stream, Stream::Detached) {
            Stream::Plain(stream) => stream.into_std().ok(),
            _ => None,
        }
    }

    /// Attaches a socket that is registered with this thread's runtime.
    pub fn attach(&mut self, stream: Option<TcpStream>) {
        self.stream = stream.map_or(Stream::Detached, Stream::Plain);
    }

    /// Waits for more bytes in `input`. Holds no buffer while it waits, unless `input` contains
    /// part of a message.
    pub async fn read(&mut self, interrupts: &impl Interrupts) -> Result<usize, Closed> {
        let waiting_since = Instant::now();
        let read = self.next(interrupts).await;
        self.busy_poller.record_gap(waiting_since.elapsed());
        read
    }

    async fn next(&mut self, interrupts: &impl Interrupts) -> Result<usize, Closed> {
        let poll_budget = self.busy_poller.poll_budget();
        let mut polls = poll_budget.is_some();
        while polls {
            if let Poll::Ready(read) = poll_fn(|cx| Poll::Ready(self.poll_next(cx, interrupts))).await {
                return read;
            }
            if let Some(count) = self.probe() {
                return Ok(count);
            }
            // Lets the runtime poll all other connections.
            tokio::task::yield_now().await;
            polls = poll_budget.as_ref().is_some_and(|budget| !budget.is_over());
        }
        drop(poll_budget);
        poll_fn(|cx| self.poll_next(cx, interrupts)).await
    }

    /// Receives directly from the socket, with a few attempts: a pass of the runtime over all its
    /// events takes several microseconds. Anything except data is left to [`Wire::poll_read`].
    fn probe(&mut self) -> Option<usize> {
        let Stream::Plain(stream) = &self.stream else { return None };
        if self.input.capacity() == 0 {
            self.input = take_buffer();
        }
        self.input.reserve(READ_ROOM_BYTES);
        let mut receive = || recv(stream, spare_capacity(&mut self.input), RecvFlags::DONTWAIT).ok();
        let (_, count) = (0..RECEIVE_ATTEMPTS).find_map(|_| receive())?;
        (count > 0).then_some(count)
    }

    fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
        interrupts: &impl Interrupts,
    ) -> Poll<Result<usize, Closed>> {
        interrupts.register(cx.waker());
        if interrupts.is_closing() {
            return Poll::Ready(Err(Closed::Server));
        }
        self.poll_read(cx)
    }

    /// Polls for more bytes in `input`. Holds no buffer while there are none.
    pub fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<usize, Closed>> {
        if self.disconnected {
            return Poll::Ready(Err(Closed::Client));
        }
        if self.input.capacity() == 0 {
            self.input = take_buffer();
        }
        self.input.reserve(READ_ROOM_BYTES);
        let polled = pin!(self.stream.read_buf(&mut self.input)).poll(cx);
        if polled.is_pending() && self.input.is_empty() {
            give_buffer(std::mem::take(&mut self.input));
        }
        Poll::Ready(match ready!(polled) {
            Ok(0) | Err(_) => {
                self.disconnected = true;
                Err(Closed::Client)
            }
            Ok(count) => Ok(count),
        })
    }

    /// Polled while a statement runs. Buffers early bytes. Ready when the client has disconnected.
    pub fn watch(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.input.len() < MAX_READ_AHEAD_BYTES {
            if ready!(self.poll_read(cx)).is_err() {
                return Poll::Ready(());
            }
        }
        Poll::Pending
    }

    /// Returns true if the read-ahead limit is reached. [`Wire::watch`] does not detect a
    /// disconnect then.
    pub fn is_full(&self) -> bool {
        self.input.len() >= MAX_READ_AHEAD_BYTES
    }

    /// Returns true if the client has disconnected, even if there is unread data before the end.
    pub fn detect_disconnect(&mut self) -> bool {
        let socket = match &self.stream {
            Stream::Plain(stream) => stream,
            Stream::Tls(stream) => stream.get_ref().0,
            Stream::Pipe(_) | Stream::Detached => return self.disconnected,
        };
        let mut events = [PollFd::new(socket, PollFlags::RDHUP)];
        let no_wait = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.disconnected |= poll(&mut events, Some(&no_wait)).is_ok_and(|count| count > 0);
        self.disconnected
    }

    /// Returns true if [`Wire::abort`] has closed the connection.
    pub fn is_aborted(&self) -> bool {
        self.disconnected && matches!(self.stream, Stream::Detached)
    }

    /// Sends a last message as far as the socket accepts it without waiting, and closes the
    /// connection.
    pub fn abort(&mut self, cx: &mut Context<'_>, bytes: &[u8]) {
        self.disconnected = true;
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if matches!(written, Poll::Ready(Ok(_))) {
            let _ = Pin::new(&mut self.stream).poll_flush(cx); // the client may be disconnected
        }
        let _ = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.stream = Stream::Detached;
    }

    /// Sends `bytes`, and waits until the socket has accepted them.
    pub async fn send(&mut self, bytes: &[u8], interrupts: &impl Interrupts) -> Result<(), Closed> {
        let mut sent = 0;
        poll_fn(|cx| self.poll_send(cx, bytes, &mut sent, interrupts)).await
    }

    /// Polls the sending of `bytes`, of which `sent` have been sent.
    pub fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[u8],
        sent: &mut usize,
        interrupts: &impl Interrupts,
    ) -> Poll<Result<(), Closed>> {
        while *sent < bytes.len() {
            let polled = Pin::new(&mut self.stream).poll_write(cx, &bytes[*sent..]);
            if polled.is_pending() {
                interrupts.register(cx.waker());
                if interrupts.is_killed() {
                    return Poll::Ready(Err(Closed::Server));
                }
            }
            match ready!(polled) {
                Ok(0) | Err(_) => return Poll::Ready(Err(Closed::Client)),
                Ok(count) => *sent += count,
            }
        }
        Pin::new(&mut self.stream).poll_flush(cx).map_err(|_| Closed::Client)
    }

    /// Shuts the connection down. Errors are ignored.
    pub async fn shutdown(&mut self) {
        let _ = poll_fn(|cx| Pin::new(&mut self.stream).poll_shutdown(cx)).await;
    }
}
