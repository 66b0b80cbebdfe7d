//! Connects a stream between nodes to a pipe inside of this process.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use fulmar_pgwire::wire::{give_buffer, take_buffer};
use fulmar_transport::Stream;
use tokio::io::{AsyncRead, AsyncWriteExt, DuplexStream, ReadBuf};

/// Capacity of a pipe in each direction. An idle pipe holds no more than its largest burst.
pub(crate) const PIPE_BYTES: usize = 32 << 10;

/// Passes bytes in both directions until both have ended. The end of one direction is passed on,
/// and the other one continues. An error of the stream or of the pipe ends both.
pub(crate) async fn pump(stream: Stream, pipe: DuplexStream) {
    let (mut sender, mut receiver) = stream.split();
    let (mut reader, mut writer) = tokio::io::split(pipe);
    let outward = async move {
        while let Some(bytes) = poll_fn(|cx| poll_pooled(cx, &mut reader)).await {
            let sent = sender.send(&bytes).await;
            give_buffer(bytes);
            sent.map_err(drop)?;
        }
        sender.finish();
        Ok::<(), ()>(())
    };
    let inward = async move {
        while let Some(bytes) = receiver.receive().await.map_err(drop)? {
            writer.write_all(&bytes).await.map_err(drop)?;
        }
        let _ = writer.shutdown().await; // the other end may have been dropped
        Ok::<(), ()>(())
    };
    let _ = futures::future::try_join(outward, inward).await;
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
