//! Connects a stream between nodes to a pipe inside of this process.

use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use fulmar_pgwire::wire::{give_buffer, take_buffer};
use fulmar_transport::Stream;
use tokio::io::{AsyncRead, AsyncWriteExt, DuplexStream, ReadBuf};

/// Capacity of a pipe in each direction. An idle pipe holds no more than its largest burst.
pub(crate) const PIPE_BYTES: usize = 32 << 10;

/// Passes bytes in both directions until the peer's side ends. The pipe ends with the stream: an
/// error of the stream is the end of the pipe.
pub(crate) async fn pump(stream: Stream, pipe: DuplexStream) {
    let (mut sender, mut receiver) = stream.split();
    let (mut reader, mut writer) = tokio::io::split(pipe);
    let outward = async move {
        loop {
            let Some(bytes) = poll_fn(|cx| poll_pooled(cx, &mut reader)).await else {
                sender.finish();
                break;
            };
            let sent = sender.send(&bytes).await;
            give_buffer(bytes);
            if sent.is_err() {
                break;
            }
        }
        // What the peer has sent is still passed on.
        let _sender = sender;
        pending::<()>().await;
    };
    let inward = async {
        while let Ok(Some(bytes)) = receiver.receive().await {
            if writer.write_all(&bytes).await.is_err() {
                break;
            }
        }
    };
    let (outward, inward) = (pin!(outward), pin!(inward));
    futures::future::select(inward, outward).await;
}

/// Reads into a pooled buffer. `None` at the end. Holds no buffer while it waits.
pub(crate) fn poll_pooled(
    cx: &mut Context<'_>,
    reader: &mut (impl AsyncRead + Unpin),
) -> Poll<Option<Vec<u8>>> {
    let mut buffer = take_buffer();
    let capacity = buffer.capacity();
    buffer.resize(capacity, 0);
    let mut read = ReadBuf::new(&mut buffer);
    let polled = Pin::new(reader).poll_read(cx, &mut read);
    let count = read.filled().len();
    if count > 0 {
        buffer.truncate(count);
        return Poll::Ready(Some(buffer));
    }
    give_buffer(buffer);
    let _end_or_error = ready!(polled);
    Poll::Ready(None)
}
