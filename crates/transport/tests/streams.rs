//! Connections over in-memory pipes, on a runtime whose time is paused: a timeout elapses exactly
//! when no task can make progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use fulmar_transport::frame::{self, Kind};
use fulmar_transport::{
    Connection, Dial, Error, Identity, Incoming, MAX_BULK_OUTPUT_BYTES, MAX_UNACCEPTED_STREAMS,
    MAX_WINDOW_BYTES, Peers, Stream, WINDOW_BYTES,
};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::timeout;

const PIPE_BYTES: usize = 4096;
/// Elapses when nothing can make progress.
const STUCK: Duration = Duration::from_secs(3600);

fn node(node: u32) -> Identity {
    Identity { cluster: 1, node, incarnation: 1, versions: 1..=1 }
}

/// Connects node 1 to node 2. The drivers run until the connection ends.
async fn connected(pipe_bytes: usize) -> (Connection, Incoming) {
    let (near, far) = tokio::io::duplex(pipe_bytes);
    let (reader, writer) = tokio::io::split(near);
    let (far_reader, far_writer) = tokio::io::split(far);
    let (first, second) = (node(1), node(2));
    let (dialed, accepted) = tokio::join!(
        fulmar_transport::connect(reader, writer, &first, Some(2)),
        fulmar_transport::accept(far_reader, far_writer, &second)
    );
    let (connection, driver) = dialed.unwrap();
    let (incoming, far_driver) = accepted.unwrap();
    tokio::spawn(driver.run());
    tokio::spawn(far_driver.run());
    assert_eq!((connection.peer().node, incoming.peer().node), (2, 1));
    (connection, incoming)
}

/// A pipe to a peer that speaks the protocol only as far as the test does.
async fn with_raw_peer() -> (Incoming, DuplexStream) {
    let (mut near, far) = tokio::io::duplex(1 << 20);
    let (reader, writer) = tokio::io::split(far);
    let identity = node(2);
    // Node 1 of cluster 1, protocol version 1, expects any node.
    let mut hello = b"fulmar-n".to_vec();
    hello.extend([1, 0, 1, 0]);
    hello.extend(1_u128.to_le_bytes());
    hello.extend(1_u32.to_le_bytes());
    hello.extend(1_u64.to_le_bytes());
    hello.extend(0_u32.to_le_bytes());
    send_frame(&mut near, Kind::Hello, 0, &hello).await;
    let (incoming, driver) = fulmar_transport::accept(reader, writer, &identity).await.unwrap();
    tokio::spawn(driver.run());
    (incoming, near)
}

async fn send_frame(pipe: &mut DuplexStream, kind: Kind, stream: u64, payload: &[u8]) {
    let mut bytes = BytesMut::new();
    frame::encode(kind, true, stream, payload, &mut bytes);
    pipe.write_all(&bytes).await.unwrap();
}

/// Answers each message of each stream with the same message.
fn echo(mut incoming: Incoming) {
    tokio::spawn(async move {
        while let Some(mut stream) = incoming.accept().await {
            stream.set_max_message_bytes(16 << 20);
            tokio::spawn(async move {
                while let Ok(Some(message)) = stream.receive().await {
                    if stream.send(&message).await.is_err() {
                        return;
                    }
                }
                stream.finish();
            });
        }
    });
}

#[tokio::test(start_paused = true)]
async fn concurrent_calls_get_their_own_answers() {
    let (connection, incoming) = connected(PIPE_BYTES).await;
    echo(incoming);
    let calls = (0..500_u32).map(|number| {
        let connection = connection.clone();
        async move { (number, connection.call(&number.to_le_bytes()).await.unwrap()) }
    });
    for (number, answer) in futures::future::join_all(calls).await {
        assert_eq!(answer, Bytes::copy_from_slice(&number.to_le_bytes()));
    }
}

/// Messages of random lengths, zero among them, on many streams over a pipe of random size.
#[tokio::test(start_paused = true)]
async fn messages_arrive_whole_and_in_order() {
    for seed in 0..50 {
        let mut random = StdRng::seed_from_u64(seed);
        let (connection, incoming) = connected(random.random_range(1..100_000)).await;
        echo(incoming);
        let conversations = (0..random.random_range(1..20)).map(|_| {
            let messages: Vec<Vec<u8>> = (0..random.random_range(0..20))
                .map(|_| {
                    let longest = [1, 100, 10_000, 300_000][random.random_range(0..4)];
                    let mut message = vec![0; random.random_range(0..longest)];
                    random.fill_bytes(&mut message);
                    message
                })
                .collect();
            converse(connection.open().unwrap(), messages)
        });
        let all = futures::future::join_all(conversations.collect::<Vec<_>>());
        timeout(STUCK, all).await.unwrap_or_else(|_| panic!("seed {seed}: streams block each other"));
    }
}

/// Sends one message after the other, and expects each of them back.
async fn converse(mut stream: Stream, messages: Vec<Vec<u8>>) {
    for message in &messages {
        stream.send(message).await.unwrap();
        assert_eq!(stream.receive().await.unwrap().as_deref(), Some(&message[..]));
    }
    stream.finish();
    if !messages.is_empty() {
        assert_eq!(stream.receive().await.unwrap(), None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_receiver_that_does_not_read_stops_only_its_own_sender() {
    let (connection, mut incoming) = connected(PIPE_BYTES).await;
    let mut blocked = connection.open().unwrap();
    let message = vec![1; 10 * WINDOW_BYTES as usize];
    let mut sending = Box::pin(blocked.send(&message));
    assert!(timeout(STUCK, &mut sending).await.is_err(), "the window must stop the sender");

    let mut unread = incoming.accept().await.unwrap();
    let mut other = connection.open().unwrap();
    other.send(b"hello").await.unwrap();
    let mut accepted = incoming.accept().await.unwrap();
    assert_eq!(accepted.receive().await.unwrap(), Some(Bytes::from_static(b"hello")));

    unread.set_max_message_bytes(message.len());
    let (sent, received) = tokio::join!(sending, unread.receive());
    sent.unwrap();
    assert_eq!(received.unwrap().as_deref(), Some(&message[..]));
}

#[tokio::test(start_paused = true)]
async fn a_widened_window_lets_the_sender_run_ahead() {
    let (connection, mut incoming) = connected(PIPE_BYTES).await;
    let mut stream = connection.open().unwrap();
    stream.send(b"first").await.unwrap();
    let mut accepted = incoming.accept().await.unwrap();
    accepted.widen();
    accepted.widen();
    let message = vec![1; MAX_WINDOW_BYTES as usize * 3 / 4];
    timeout(STUCK, stream.send(&message)).await.expect("the window has space").unwrap();
    assert!(timeout(STUCK, stream.send(&message)).await.is_err(), "the wider window is a limit too");

    accepted.set_max_message_bytes(message.len());
    assert_eq!(accepted.receive().await.unwrap(), Some(Bytes::from_static(b"first")));
    assert_eq!(accepted.receive().await.unwrap().as_deref(), Some(&message[..]));
}

#[tokio::test(start_paused = true)]
async fn bulk_data_leaves_space_in_the_output_buffer() {
    let (mut incoming, mut raw) = with_raw_peer().await;
    let widening = MAX_WINDOW_BYTES - WINDOW_BYTES;
    for stream in [1, 2] {
        send_frame(&mut raw, Kind::Open, stream, b"hello").await;
    }
    send_frame(&mut raw, Kind::Window, 1, &widening.to_le_bytes()).await;
    let mut bulk = incoming.accept().await.unwrap();
    let mut other = incoming.accept().await.unwrap();
    let message = vec![1; MAX_WINDOW_BYTES as usize / 2];
    let sending = tokio::spawn(async move { bulk.send(&message).await });
    // The pipe and the buffers are full.
    assert!(timeout(STUCK, other.receive()).await.is_ok());
    assert!(timeout(STUCK, other.receive()).await.is_err(), "nothing makes progress");
    other.send(b"heartbeat").await.unwrap();
    let mut before = 0;
    let mut received = vec![0; 64 << 10];
    while !received.windows(9).any(|bytes| bytes == b"heartbeat") {
        before += raw.read(&mut received).await.unwrap();
    }
    assert!(before < (1 << 20) + 3 * MAX_BULK_OUTPUT_BYTES, "{before} bytes came before the heartbeat");
    drop(sending);
}

#[tokio::test(start_paused = true)]
async fn a_message_beyond_the_receivers_limit_is_an_error() {
    let (connection, mut incoming) = connected(PIPE_BYTES).await;
    let mut stream = connection.open().unwrap();
    let sending = tokio::spawn(async move { stream.send(&vec![0; 1_000_000]).await });
    let mut accepted = incoming.accept().await.unwrap();
    accepted.set_max_message_bytes(100_000);
    let refused = accepted.receive().await;
    assert!(matches!(refused, Err(Error::TooLong { limit_bytes: 100_000 })), "{refused:?}");
    drop(accepted);
    assert!(matches!(sending.await.unwrap(), Err(Error::Reset(_))));
}

#[tokio::test(start_paused = true)]
async fn a_dropped_stream_is_reset_at_the_peer() {
    let (connection, mut incoming) = connected(PIPE_BYTES).await;
    let mut stream = connection.open().unwrap();
    stream.send(b"request").await.unwrap();
    let mut accepted = incoming.accept().await.unwrap();
    assert!(accepted.receive().await.unwrap().is_some());
    drop(stream);
    assert!(matches!(accepted.receive().await, Err(Error::Reset(_))));
    assert!(matches!(accepted.send(b"late").await, Err(Error::Reset(_))));

    // Frames that were on their way to it are ignored; the connection continues.
    let mut stream = connection.open().unwrap();
    stream.send(b"again").await.unwrap();
    let accepted = incoming.accept().await.unwrap();
    accepted.reset("not here");
    match stream.receive().await {
        Err(Error::Reset(reason)) => assert_eq!(reason, "not here"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_connection_ends_all_streams() {
    let (connection, mut incoming) = connected(PIPE_BYTES).await;
    let mut stream = connection.open().unwrap();
    stream.send(b"request").await.unwrap();
    let mut accepted = incoming.accept().await.unwrap();
    drop(incoming);
    assert!(matches!(stream.receive().await, Err(Error::Lost(_))));
    // What had arrived before is delivered.
    assert!(accepted.receive().await.unwrap().is_some());
    assert!(accepted.receive().await.is_err());
    assert!(connection.open().is_err());
    assert!(connection.ended().is_some());
}

#[tokio::test(start_paused = true)]
async fn unanswered_requests_beyond_the_limit_are_reset() {
    let (connection, mut incoming) = connected(PIPE_BYTES).await;
    let mut streams = Vec::new();
    for _ in 0..=MAX_UNACCEPTED_STREAMS {
        let mut stream = connection.open().unwrap();
        stream.send(b"request").await.unwrap();
        streams.push(stream);
    }
    let mut last = streams.pop().unwrap();
    match last.receive().await {
        Err(Error::Reset(reason)) => assert!(reason.contains("too many"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert!(incoming.accept().await.is_some(), "earlier requests are still waiting");
}

#[tokio::test(start_paused = true)]
async fn refused_peers_learn_the_reason() {
    let other_cluster = Identity { cluster: 2, ..node(2) };
    for (accepting, expected, text) in [(other_cluster, None, "cluster"), (node(3), Some(2), "not to node 2")]
    {
        let (near, far) = tokio::io::duplex(PIPE_BYTES);
        let (reader, writer) = tokio::io::split(near);
        let (far_reader, far_writer) = tokio::io::split(far);
        let first = node(1);
        let (dialed, accepted) = tokio::join!(
            fulmar_transport::connect(reader, writer, &first, expected),
            fulmar_transport::accept(far_reader, far_writer, &accepting)
        );
        for error in [dialed.err(), accepted.err()] {
            match error {
                Some(Error::Refused(reason)) => assert!(reason.contains(text), "{reason}"),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn violations_of_the_protocol_end_the_connection() {
    type Violation = &'static [(Kind, u64, usize)];
    let violations: [Violation; 6] = [
        // More than the window.
        &[(Kind::Open, 1, 60_000), (Kind::Data, 1, 60_000)],
        &[(Kind::Open, 2, 1), (Kind::Open, 1, 1)],
        &[(Kind::Data, 1, 1)],
        &[(Kind::Open, 1, 1), (Kind::Window, 1, 4)],
        &[(Kind::Open, 1, 1), (Kind::Finish, 1, 0), (Kind::Data, 1, 1)],
        &[(Kind::Hello, 0, 44)],
    ];
    for violation in violations {
        let (mut incoming, mut raw) = with_raw_peer().await;
        for (kind, stream, length) in violation {
            send_frame(&mut raw, *kind, *stream, &vec![1; *length]).await;
        }
        let mut rest = Vec::new();
        let closed = timeout(STUCK, raw.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "{violation:?} must close the connection");
        while let Some(stream) = incoming.accept().await {
            drop(stream);
        }
    }
}

/// Dials node 2, in memory.
struct MemoryDial {
    dialed: Arc<AtomicUsize>,
    failures: AtomicUsize,
}

#[async_trait]
impl Dial for MemoryDial {
    async fn dial(&self, _: u32, _: &str) -> Result<Connection, Error> {
        self.dialed.fetch_add(1, Ordering::Relaxed);
        tokio::task::yield_now().await;
        let fails =
            self.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if fails.is_ok() {
            return Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into());
        }
        let (connection, incoming) = connected(PIPE_BYTES).await;
        echo(incoming);
        Ok(connection)
    }
}

#[tokio::test(start_paused = true)]
async fn callers_share_one_connection_and_one_attempt() {
    let dialed = Arc::new(AtomicUsize::new(0));
    let peers = Peers::new(MemoryDial { dialed: dialed.clone(), failures: AtomicUsize::new(1) });
    let both = tokio::join!(peers.connection(2, "a"), peers.connection(2, "a"));
    assert!(both.0.is_err() && both.1.is_err());
    assert_eq!(dialed.load(Ordering::Relaxed), 1, "concurrent callers share the attempt");

    let connection = peers.connection(2, "a").await.unwrap();
    assert_eq!(peers.connection(2, "a").await.unwrap().call(b"x").await.unwrap(), Bytes::from_static(b"x"));
    assert_eq!(dialed.load(Ordering::Relaxed), 2, "a failure is not kept, a connection is");

    peers.disconnect(2);
    assert!(connection.call(b"x").await.is_err());
    peers.connection(2, "a").await.unwrap().call(b"x").await.unwrap();
    assert_eq!(dialed.load(Ordering::Relaxed), 3, "an ended connection is replaced");
}
