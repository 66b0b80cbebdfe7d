//! Encoding of frames on their way between nodes.
//!
//! ```text
//!   page (4 bytes) | length (2 bytes) | frame | page | length | frame | ...
//! ```

use fulmar_pages::{PageNo, segment};
use fulmar_sqlite::{Error, Result, sqlstate};

const HEAD_BYTES: usize = 6;

/// Appends a page's frame.
pub(super) fn push(out: &mut Vec<u8>, page: PageNo, frame: &[u8]) {
    out.extend_from_slice(&page.to_le_bytes());
    // A frame has at most [`segment::MAX_FRAME_BYTES`].
    out.extend_from_slice(&(frame.len() as u16).to_le_bytes());
    out.extend_from_slice(frame);
}

/// The pages of a batch and their frames, with valid checksums.
pub(super) fn frames(mut batch: &[u8]) -> impl Iterator<Item = Result<(PageNo, &[u8])>> {
    std::iter::from_fn(move || {
        if batch.is_empty() {
            return None;
        }
        let split = split(batch);
        // Nothing follows an error.
        batch = split.as_ref().map_or(&[], |(_, rest)| rest);
        Some(split.map(|(frame, _)| frame))
    })
}

type Split<'a> = ((PageNo, &'a [u8]), &'a [u8]);

fn split(batch: &[u8]) -> Result<Split<'_>> {
    let damaged = || Error::new(sqlstate::DATA_CORRUPTED, "received damaged pages of a copy");
    let (head, rest) = batch.split_first_chunk::<HEAD_BYTES>().ok_or_else(damaged)?;
    let page = PageNo::from_le_bytes([head[0], head[1], head[2], head[3]]);
    let length = usize::from(u16::from_le_bytes([head[4], head[5]]));
    if page == 0 || length > segment::MAX_FRAME_BYTES {
        return Err(damaged());
    }
    let (frame, rest) = rest.split_at_checked(length).ok_or_else(damaged)?;
    segment::check_frame(frame).map_err(|cause| damaged().detail(cause.to_string()))?;
    Ok(((page, frame), rest))
}

#[cfg(test)]
mod tests {
    use fulmar_pages::PAGE_SIZE;
    use fulmar_pages::segment::FrameWriter;

    use super::*;

    fn example() -> (Vec<u8>, Vec<Vec<u8>>) {
        let mut writer = FrameWriter::new(&mut Vec::new());
        let (mut batch, mut encoded) = (Vec::new(), Vec::new());
        for page in 1..=3u8 {
            let mut frame = Vec::new();
            writer.push(&[page; PAGE_SIZE], &mut frame);
            push(&mut batch, page.into(), &frame);
            encoded.push(frame);
        }
        (batch, encoded)
    }

    #[test]
    fn frames_are_read_back() {
        let (batch, encoded) = example();
        let read: Vec<_> = frames(&batch).map(Result::unwrap).collect();
        let expected: Vec<_> = (1..).zip(encoded.iter().map(Vec::as_slice)).collect();
        assert_eq!(read, expected);
    }

    #[test]
    fn damaged_batches_are_refused() {
        let (batch, _) = example();
        for at in 0..batch.len() {
            let mut damaged = batch.clone();
            damaged[at] ^= 0x55;
            let read: Result<Vec<_>> = frames(&damaged).collect();
            // The page numbers have no checksum here; the stream between the nodes has one.
            assert!(read.is_err() || read.unwrap().iter().map(|(page, _)| *page).ne(1..=3), "byte {at}");
        }
        for length in (1..batch.len()).filter(|length| frames(&batch[..*length]).all(|frame| frame.is_ok())) {
            assert!(frames(&batch[..length]).count() < 3, "{length}");
        }
    }
}
