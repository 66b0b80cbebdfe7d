//! A client's connection: bytes in, bytes out, with or without TLS.
//!
//! Buffers belong to the worker, not to the connection. A session takes one when there is something to read or to
//! say and gives it back when it waits, so that a thousand idle sessions hold none and the busy ones share a few
//! that are warm in the cache:
//!
//! ```text
//! wait for bytes ----> take buffer, one recv ----> run statements, fill output ----> one send, give back
//! ```
//!
//! While a statement runs, [`Wire::watch`] keeps an eye on the connection: bytes that come early are kept (up to a
//! bound), and a client that goes away is noticed.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use crate::registry::Handle;
use crate::rhythm::Rhythm;

/// Bytes of a fresh buffer.
const BUFFER_BYTES: usize = 16 * 1024;
/// A read gets at least this much room.
pub(crate) const READ_ROOM_BYTES: usize = BUFFER_BYTES / 4;
/// A buffer that has grown beyond this is not kept.
pub(crate) const KEEP_BYTES: usize = 64 * 1024;
/// Buffers that a worker keeps at most.
const KEEP_BUFFERS: usize = 16;
/// Bytes that are read ahead while a statement runs; the rest waits in the kernel. They are not charged to the tenant, so they are no
/// more than a fresh buffer.
const AHEAD_BYTES: usize = BUFFER_BYTES;

/// How often a socket is asked that is polled, before the runtime is.
const PROBES: u32 = 8;

thread_local! {
    static BUFFERS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// An empty buffer of this worker.
pub(crate) fn take_buffer() -> Vec<u8> {
    BUFFERS.with_borrow_mut(Vec::pop).unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES))
}

/// Gives a buffer back; its content is forgotten.
pub(crate) fn give_buffer(mut buffer: Vec<u8>) {
    buffer.clear();
    BUFFERS.with_borrow_mut(|buffers| {
        if (BUFFER_BYTES / 2..=KEEP_BYTES).contains(&buffer.capacity()) && buffers.len() < KEEP_BUFFERS {
            buffers.push(buffer);
        }
    });
}

/// Why nothing more can be read or written.
#[derive(Debug)]
pub(crate) enum Closed {
    /// The client has gone, or the network between.
    Client,
    /// The server closes the session.
    Server,
    /// The client has been silent for too long.
    Idle,
    /// The client has stopped sending within a message, and other sessions need its memory.
    Stalled,
}

/// The bytes' way to the client.
pub(crate) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    /// The session is on its way to another worker.
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
            Stream::Detached => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
            Stream::Detached => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(_) | Stream::Detached => Poll::Ready(Ok(())),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
            Stream::Detached => Poll::Ready(Ok(())),
        }
    }
}

/// A connection with what has been received and not yet used.
pub(crate) struct Wire {
    stream: Stream,
    /// Received and not yet used.
    pub(crate) input: Vec<u8>,
    gone: bool,
    rhythm: Rhythm,
}

impl Wire {
    /// A connection, of which `input` has been read already.
    pub(crate) fn new(stream: Stream, input: Vec<u8>) -> Wire {
        Wire { stream, input, gone: false, rhythm: Rhythm::new() }
    }

    /// Whether it can be detached: nothing is received, and all that is known of the connection is its socket.
    pub(crate) fn is_at_rest(&self) -> bool {
        matches!(self.stream, Stream::Plain(_)) && self.input.is_empty() && !self.gone
    }

    /// Takes the socket out of this thread's runtime.
    pub(crate) fn detach(&mut self) -> Option<std::net::TcpStream> {
        match std::mem::replace(&mut self.stream, Stream::Detached) {
            Stream::Plain(stream) => stream.into_std().ok(),
            _ => None,
        }
    }

    /// Goes on with the socket, registered with this thread's runtime.
    pub(crate) fn attach(&mut self, stream: Option<TcpStream>) {
        self.stream = stream.map_or(Stream::Detached, Stream::Plain);
    }

    /// Waits for more bytes in `input`. Holds no buffer while it waits, unless part of a message is there.
    pub(crate) async fn read(&mut self, handle: &Handle) -> Result<usize, Closed> {
        let answered = Instant::now();
        let read = self.next(handle).await;
        self.rhythm.heard(answered.elapsed());
        read
    }

    async fn next(&mut self, handle: &Handle) -> Result<usize, Closed> {
        let patience = self.rhythm.patience();
        let mut polls = patience.is_some();
        while polls {
            if let Poll::Ready(read) = poll_fn(|cx| Poll::Ready(self.poll_next(cx, handle))).await {
                return read;
            }
            if let Some(count) = self.probe() {
                return Ok(count);
            }
            // Lets the runtime look at all connections.
            tokio::task::yield_now().await;
            polls = patience.as_ref().is_some_and(|patience| !patience.is_over());
        }
        drop(patience);
        poll_fn(|cx| self.poll_next(cx, handle)).await
    }

    /// Asks the socket itself, a few times: the runtime takes some microseconds to look at all that it has. What is not simply
    /// bytes is left to [`Wire::poll_read`].
    fn probe(&mut self) -> Option<usize> {
        let Stream::Plain(stream) = &self.stream else { return None };
        if self.input.capacity() == 0 {
            self.input = take_buffer();
        }
        self.input.reserve(READ_ROOM_BYTES);
        let mut receive = || recv(stream, spare_capacity(&mut self.input), RecvFlags::DONTWAIT).ok();
        let (_, count) = (0..PROBES).find_map(|_| receive())?;
        (count > 0).then_some(count)
    }

    fn poll_next(&mut self, cx: &mut Context<'_>, handle: &Handle) -> Poll<Result<usize, Closed>> {
        handle.register(cx.waker());
        if handle.is_closing() {
            return Poll::Ready(Err(Closed::Server));
        }
        self.poll_read(cx)
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<usize, Closed>> {
        if self.gone {
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
                self.gone = true;
                Err(Closed::Client)
            }
            Ok(count) => Ok(count),
        })
    }

    /// To be polled while a statement runs: keeps what comes early, and is ready when the client has gone.
    pub(crate) fn watch(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.input.len() < AHEAD_BYTES {
            if ready!(self.poll_read(cx)).is_err() {
                return Poll::Ready(());
            }
        }
        Poll::Pending
    }

    /// Whether the client has said as much ahead as is kept; [`Wire::watch`] is not told of its end then.
    pub(crate) fn is_full(&self) -> bool {
        self.input.len() >= AHEAD_BYTES
    }

    /// Asks whether the client has gone, behind whatever it has said that nobody has read.
    pub(crate) fn look_for_end(&mut self) -> bool {
        let socket = match &self.stream {
            Stream::Plain(stream) => stream,
            Stream::Tls(stream) => stream.get_ref().0,
            Stream::Detached => return self.gone,
        };
        let mut asked = [PollFd::new(socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.gone |= poll(&mut asked, Some(&now)).is_ok_and(|told| told > 0);
        self.gone
    }

    /// Whether [`Wire::abort`] has closed the connection.
    pub(crate) fn is_aborted(&self) -> bool {
        self.gone && matches!(self.stream, Stream::Detached)
    }

    /// Sends a last message as far as the client takes it immediately, and closes the connection.
    pub(crate) fn abort(&mut self, cx: &mut Context<'_>, bytes: &[u8]) {
        self.gone = true;
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if matches!(written, Poll::Ready(Ok(_))) {
            let _ = Pin::new(&mut self.stream).poll_flush(cx); // the client may be gone
        }
        let _ = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.stream = Stream::Detached;
    }

    /// Sends `bytes`, waiting for the client to take them.
    pub(crate) async fn send(&mut self, bytes: &[u8], handle: &Handle) -> Result<(), Closed> {
        let mut sent = 0;
        poll_fn(|cx| {
            while sent < bytes.len() {
                let polled = Pin::new(&mut self.stream).poll_write(cx, &bytes[sent..]);
                if polled.is_pending() {
                    handle.register(cx.waker());
                    if handle.is_killed() {
                        return Poll::Ready(Err(Closed::Server));
                    }
                }
                match ready!(polled) {
                    Ok(0) | Err(_) => return Poll::Ready(Err(Closed::Client)),
                    Ok(count) => sent += count,
                }
            }
            Pin::new(&mut self.stream).poll_flush(cx).map_err(|_| Closed::Client)
        })
        .await
    }

    /// Says goodbye to the other side; nothing can be done if it does not hear.
    pub(crate) async fn shutdown(&mut self) {
        let _ = poll_fn(|cx| Pin::new(&mut self.stream).poll_shutdown(cx)).await;
    }
}
