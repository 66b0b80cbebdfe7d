//! A connection: its handshake, its streams, and the driver that reads and writes frames.
//!
//! Senders append frames to one output buffer; the driver writes all of it with one system call, so
//! that many small messages of concurrent streams share it. The reader never waits for the output
//! buffer: two nodes whose readers wait for their writers would wait for each other forever. Its
//! own frames are few: it answers only streams that it refuses, and closes a connection whose peer
//! opens more of them than it reads answers.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::future::{Either, select};
use futures::pin_mut;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, mpsc};

use crate::frame::{self, Frame, Kind};
use crate::hello::{self, Identity};
use crate::stream::{Stream, StreamState};
use crate::tls::ALL_OR_NONE;
use crate::{Error, MAX_OUTPUT_BYTES, MAX_STREAMS, MAX_UNACCEPTED_STREAMS};

/// Capacity of a read, and of an output buffer that is kept.
const BUFFER_BYTES: usize = 64 << 10;

/// Marks the number of a stream that the peer does not know yet.
const UNSENT: u64 = 1 << 63;

/// First bytes of a TLS connection in the direction to the server: a handshake record.
const TLS_HANDSHAKE: [u8; 2] = [22, 3];
/// First bytes of a TLS server's answer to bytes that are not TLS: an alert record.
const TLS_ALERT: [u8; 2] = [21, 3];

/// The part of a connection that its streams and its driver share.
#[derive(Debug)]
pub(crate) struct Shared {
    peer: Identity,
    version: u16,
    output: Mutex<Output>,
    /// There is output, or the connection is being closed.
    has_output: Notify,
    /// The output buffer has been taken.
    has_space: Notify,
    streams: Mutex<Streams>,
}

#[derive(Debug, Default)]
struct Output {
    bytes: BytesMut,
    is_closing: bool,
}

#[derive(Debug, Default)]
struct Streams {
    open: HashMap<u64, Arc<StreamState>>,
    /// Number of the newest stream that the peer knows.
    newest: u64,
    /// Number of streams that were opened on this side. Until its first frame, a stream is registered
    /// under [`UNSENT`] and such a number.
    opened: u64,
    ended: Option<Error>,
}

impl Shared {
    fn new(peer: Identity, version: u16) -> Arc<Self> {
        Arc::new(Shared {
            peer,
            version,
            output: Mutex::default(),
            has_output: Notify::new(),
            has_space: Notify::new(),
            streams: Mutex::default(),
        })
    }

    /// Appends a frame to the output.
    pub(crate) fn write(&self, kind: Kind, is_last: bool, stream: u64, payload: &[u8]) {
        let mut output = self.output.lock();
        if output.is_closing {
            return;
        }
        let was_empty = output.bytes.is_empty();
        frame::encode(kind, is_last, stream, payload, &mut output.bytes);
        drop(output);
        if was_empty {
            self.has_output.notify_one();
        }
    }

    /// Appends the first frame of a stream. Returns the number of the stream. Numbers are assigned in
    /// the order of the output: the peer refuses a number below one that it knows.
    pub(crate) fn write_first(&self, unsent: u64, is_last: bool, payload: &[u8]) -> Result<u64, Error> {
        let mut streams = self.streams.lock();
        let Some(state) = streams.open.remove(&unsent) else {
            return Err(streams.ended.clone().unwrap_or(Error::Closed));
        };
        streams.newest += 1;
        let id = streams.newest;
        streams.open.insert(id, state);
        self.write(Kind::Open, is_last, id, payload);
        Ok(id)
    }

    /// Waits until the output buffer has less than `limit_bytes`.
    pub(crate) async fn output_space(&self, limit_bytes: usize) -> Result<(), Error> {
        loop {
            let space = self.has_space.notified();
            if let Some(error) = &self.streams.lock().ended {
                return Err(error.clone());
            }
            if self.output.lock().bytes.len() < limit_bytes {
                return Ok(());
            }
            space.await;
        }
    }

    pub(crate) fn forget(&self, id: u64) {
        self.streams.lock().open.remove(&id);
    }

    /// Ends the connection and all its streams.
    fn end(&self, error: &Error) {
        let mut streams = self.streams.lock();
        let error = streams.ended.get_or_insert_with(|| error.clone()).clone();
        let open: Vec<_> = streams.open.drain().map(|(_, state)| state).collect();
        drop(streams);
        for state in open {
            state.end(&error);
        }
        let mut output = self.output.lock();
        output.is_closing = true;
        output.bytes = BytesMut::new();
        drop(output);
        self.has_output.notify_one();
        self.has_space.notify_waiters();
    }
}

/// The dialing side of a connection. Clones share it.
#[derive(Clone, Debug)]
pub struct Connection {
    shared: Arc<Shared>,
}

impl Connection {
    /// The node at the other end.
    pub fn peer(&self) -> &Identity {
        &self.shared.peer
    }

    /// The protocol version in use.
    pub fn version(&self) -> u16 {
        self.shared.version
    }

    /// Opens a stream. The peer learns of it with its first message.
    pub fn open(&self) -> Result<Stream, Error> {
        let mut streams = self.shared.streams.lock();
        if let Some(error) = &streams.ended {
            return Err(error.clone());
        }
        if streams.open.len() >= MAX_STREAMS {
            return Err(Error::TooManyStreams);
        }
        streams.opened += 1;
        let (id, state) = (UNSENT | streams.opened, Arc::new(StreamState::new()));
        streams.open.insert(id, state.clone());
        drop(streams);
        Ok(Stream::new(self.shared.clone(), id, state, false))
    }

    /// Sends a request and receives its answer, on a stream of their own. If the future is dropped,
    /// the peer is asked to abandon the request.
    pub async fn call(&self, request: &[u8]) -> Result<Bytes, Error> {
        let mut stream = self.open()?;
        stream.send(request).await?;
        stream.finish();
        stream.receive().await?.ok_or(Error::Protocol("a request got no answer"))
    }

    /// Why the connection has ended, if it has.
    pub fn ended(&self) -> Option<Error> {
        self.shared.streams.lock().ended.clone()
    }

    /// Closes the connection. All its streams end with an error.
    pub fn close(&self) {
        self.shared.end(&Error::Closed);
    }
}

/// The accepting side of a connection: the streams that the peer opens.
#[derive(Debug)]
pub struct Incoming {
    shared: Arc<Shared>,
    streams: mpsc::Receiver<Stream>,
}

impl Incoming {
    /// The node at the other end.
    pub fn peer(&self) -> &Identity {
        &self.shared.peer
    }

    /// The protocol version in use.
    pub fn version(&self) -> u16 {
        self.shared.version
    }

    /// The next stream that the peer opens. `None` when the connection has ended.
    pub async fn accept(&mut self) -> Option<Stream> {
        self.streams.recv().await
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.shared.end(&Error::Closed);
    }
}

/// Reads and writes the frames of a connection.
#[must_use = "a connection does nothing unless its driver runs"]
pub struct Driver<R, W> {
    shared: Arc<Shared>,
    reader: R,
    writer: W,
    /// Received bytes that are not a complete frame yet.
    input: BytesMut,
    /// Where streams of the peer go, on the accepting side.
    accepted: Option<mpsc::Sender<Stream>>,
}

/// Opens a connection over a byte stream that this node dialed. `expected` is the node that it
/// wants to talk to.
pub async fn connect<R, W>(
    mut reader: R,
    mut writer: W,
    identity: &Identity,
    expected: Option<u32>,
) -> Result<(Connection, Driver<R, W>), Error>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut output = BytesMut::new();
    frame::encode(Kind::Hello, true, 0, &hello::encode(identity, expected), &mut output);
    writer.write_all(&output).await?;
    writer.flush().await?;
    let mut input = BytesMut::new();
    let (peer, _) = read_hello(&mut reader, &mut input).await?;
    if let Some(expected) = expected.filter(|expected| *expected != peer.node) {
        let text = format!("the address of node {expected} is answered by node {}", peer.node);
        return Err(Error::Refused(text));
    }
    let version = hello::check(identity, &peer, None).map_err(Error::Refused)?;
    let shared = Shared::new(peer, version);
    let driver = Driver { shared: shared.clone(), reader, writer, input, accepted: None };
    Ok((Connection { shared }, driver))
}

/// Opens a connection over a byte stream that a peer has dialed.
pub async fn accept<R, W>(
    mut reader: R,
    mut writer: W,
    identity: &Identity,
) -> Result<(Incoming, Driver<R, W>), Error>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut input = BytesMut::new();
    let checked = match read_hello(&mut reader, &mut input).await {
        Ok((peer, expected)) => hello::check(identity, &peer, expected).map(|version| (peer, version)),
        Err(_) if input.starts_with(&TLS_HANDSHAKE) => {
            Err(format!("the dialing node uses TLS, and this node does not; {ALL_OR_NONE}"))
        }
        Err(error) => return Err(error),
    };
    let mut output = BytesMut::new();
    match &checked {
        Ok(_) => frame::encode(Kind::Hello, true, 0, &hello::encode(identity, None), &mut output),
        Err(reason) => frame::encode(Kind::Goodbye, true, 0, reason.as_bytes(), &mut output),
    }
    writer.write_all(&output).await?;
    writer.flush().await?;
    let (peer, version) = match checked {
        Ok(checked) => checked,
        Err(reason) => {
            writer.shutdown().await?;
            return Err(Error::Refused(reason));
        }
    };
    let shared = Shared::new(peer, version);
    let (accepted, streams) = mpsc::channel(MAX_UNACCEPTED_STREAMS);
    let driver = Driver { shared: shared.clone(), reader, writer, input, accepted: Some(accepted) };
    Ok((Incoming { shared, streams }, driver))
}

async fn read_hello<R>(reader: &mut R, input: &mut BytesMut) -> Result<(Identity, Option<u32>), Error>
where
    R: AsyncRead + Unpin,
{
    let frame = match next_frame(reader, input).await {
        Err(_) if input.starts_with(&TLS_ALERT) => {
            let reason = format!("the node uses TLS, and this node does not; {ALL_OR_NONE}");
            return Err(Error::Refused(reason));
        }
        frame => frame?,
    };
    match frame.kind {
        Kind::Hello => hello::decode(&frame.payload),
        Kind::Goodbye => Err(Error::Refused(String::from_utf8_lossy(&frame.payload).into_owned())),
        _ => Err(Error::Protocol("the peer did not introduce itself")),
    }
}

/// Reads until a frame is complete.
async fn next_frame<R>(reader: &mut R, input: &mut BytesMut) -> Result<Frame, Error>
where
    R: AsyncRead + Unpin,
{
    loop {
        if let Some(frame) = frame::decode(input)? {
            return Ok(frame);
        }
        input.reserve(BUFFER_BYTES);
        if reader.read_buf(input).await? == 0 {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
        }
    }
}

impl<R, W> Driver<R, W>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    /// Runs the connection until it ends. Returns the reason.
    pub async fn run(self) -> Error {
        let Driver { shared, reader, writer, input, accepted } = self;
        let ended = {
            let (reading, writing) = (read(&shared, reader, input, accepted), write(&shared, writer));
            pin_mut!(reading, writing);
            match select(reading, writing).await {
                Either::Left((error, _)) | Either::Right((error, _)) => error,
            }
        };
        shared.end(&ended);
        shared.streams.lock().ended.clone().unwrap_or(ended)
    }
}

/// Reads frames and passes them to their streams.
async fn read<R>(
    shared: &Arc<Shared>,
    mut reader: R,
    mut input: BytesMut,
    accepted: Option<mpsc::Sender<Stream>>,
) -> Error
where
    R: AsyncRead + Unpin,
{
    loop {
        let handled = match next_frame(&mut reader, &mut input).await {
            Ok(frame) => shared.handle(frame, accepted.as_ref()),
            Err(error) => Err(error),
        };
        if let Err(error) = handled {
            return error;
        }
    }
}

/// Writes the output, as much as there is at a time.
async fn write<W>(shared: &Shared, mut writer: W) -> Error
where
    W: AsyncWrite + Unpin,
{
    let mut buffer = BytesMut::new();
    loop {
        let is_closing = {
            let mut output = shared.output.lock();
            std::mem::swap(&mut output.bytes, &mut buffer);
            output.is_closing
        };
        if is_closing {
            // The peer learns of the end either way.
            let _ = writer.shutdown().await;
            return Error::Closed;
        }
        if buffer.is_empty() {
            shared.has_output.notified().await;
            continue;
        }
        shared.has_space.notify_waiters();
        let written = async {
            writer.write_all(&buffer).await?;
            writer.flush().await
        };
        if let Err(error) = written.await {
            return error.into();
        }
        buffer.clear();
        if buffer.capacity() > BUFFER_BYTES {
            buffer = BytesMut::new();
        }
    }
}

impl Shared {
    fn handle(self: &Arc<Self>, frame: Frame, accepted: Option<&mpsc::Sender<Stream>>) -> Result<(), Error> {
        let Frame { kind, is_last, stream: id, payload } = frame;
        match kind {
            Kind::Open => {
                let accepted = accepted.ok_or(Error::Protocol("a stream from the accepting side"))?;
                self.handle_open(id, payload, is_last, accepted)
            }
            Kind::Data => self.with_stream(id, |state| state.received(payload, is_last)),
            Kind::Window => {
                let bytes = <[u8; 4]>::try_from(&payload[..])
                    .map_err(|_| Error::Protocol("a window has not 4 bytes"))?;
                self.with_stream(id, |state| state.window_opened(u32::from_le_bytes(bytes)))
            }
            Kind::Finish => self.with_stream(id, |state| {
                state.peer_finished();
                Ok(())
            }),
            Kind::Reset => self.with_stream(id, |state| {
                state.end(&Error::Reset(String::from_utf8_lossy(&payload).into_owned()));
                Ok(())
            }),
            Kind::Goodbye => Err(Error::Refused(String::from_utf8_lossy(&payload).into_owned())),
            Kind::Hello => Err(Error::Protocol("a second introduction")),
        }
    }

    /// Frames of streams that this side has dropped are ignored.
    fn with_stream(
        &self,
        id: u64,
        handle: impl FnOnce(&StreamState) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let streams = self.streams.lock();
        if id > streams.newest {
            return Err(Error::Protocol("a stream that was not opened"));
        }
        let state = streams.open.get(&id).cloned();
        drop(streams);
        state.map_or(Ok(()), |state| handle(&state))
    }

    fn handle_open(
        self: &Arc<Self>,
        id: u64,
        payload: Bytes,
        is_last: bool,
        accepted: &mpsc::Sender<Stream>,
    ) -> Result<(), Error> {
        let mut streams = self.streams.lock();
        if id <= streams.newest {
            return Err(Error::Protocol("a stream was opened twice"));
        }
        streams.newest = id;
        let is_full = streams.open.len() >= MAX_STREAMS;
        let state = Arc::new(StreamState::new());
        if !is_full {
            streams.open.insert(id, state.clone());
        }
        drop(streams);
        state.received(payload, is_last)?;
        if is_full {
            return self.refuse(id);
        }
        match accepted.try_send(Stream::new(self.clone(), id, state, true)) {
            Ok(()) => Ok(()),
            // The stream in the error is dropped, which resets it.
            Err(mpsc::error::TrySendError::Full(stream)) => {
                stream.reset("the node has too many unanswered requests");
                self.check_output()
            }
            Err(mpsc::error::TrySendError::Closed(_)) => Err(Error::Closed),
        }
    }

    fn refuse(&self, id: u64) -> Result<(), Error> {
        self.write(Kind::Reset, false, id, b"the connection has too many streams");
        self.check_output()
    }

    /// Ends a connection whose peer does not read the answers to streams that were refused.
    fn check_output(&self) -> Result<(), Error> {
        match self.output.lock().bytes.len() < 2 * MAX_OUTPUT_BYTES {
            true => Ok(()),
            false => Err(Error::Protocol("the peer does not read")),
        }
    }
}
