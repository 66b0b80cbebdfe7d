//! The frames of a connection.
//!
//! ```text
//!   offset  bytes
//!        0      4  length of the payload, little-endian, at most 64 KiB
//!        4      1  kind
//!        5      1  flags: bit 0 is set in the last frame of a message
//!        6      8  stream, little-endian; 0 for the connection
//!       14    ...  payload
//! ```

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::Error;

/// Length of a frame's header.
pub const HEADER_BYTES: usize = 14;
/// Maximum length of a frame's payload.
pub const MAX_PAYLOAD_BYTES: usize = 64 << 10;

/// Payloads up to this length are copied out of the read buffer. A longer one shares it: a queued
/// payload of a few bytes must not keep a buffer of 64 KiB alive.
const MAX_COPIED_BYTES: usize = 4096;

const LAST_OF_MESSAGE: u8 = 1;

/// The kind of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// The identity of the sender: the first frame in each direction.
    Hello = 1,
    /// Why the sender closes the connection, as text.
    Goodbye = 2,
    /// Data that opens a stream.
    Open = 3,
    /// Data of an open stream.
    Data = 4,
    /// The receiver has read this many bytes (4 bytes, little-endian).
    Window = 5,
    /// The sender sends no more data on the stream.
    Finish = 6,
    /// The stream has ended in both directions; the payload is the reason as text.
    Reset = 7,
}

impl Kind {
    fn of(byte: u8) -> Option<Kind> {
        use Kind::{Data, Finish, Goodbye, Hello, Open, Reset, Window};
        [Hello, Goodbye, Open, Data, Window, Finish, Reset].into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// A frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Frame {
    /// Its kind.
    pub kind: Kind,
    /// Whether a message ends with it.
    pub is_last: bool,
    /// Its stream.
    pub stream: u64,
    /// Its payload.
    pub payload: Bytes,
}

/// Appends a frame. `payload` has at most [`MAX_PAYLOAD_BYTES`].
pub fn encode(kind: Kind, is_last: bool, stream: u64, payload: &[u8], out: &mut BytesMut) {
    debug_assert!(payload.len() <= MAX_PAYLOAD_BYTES);
    out.reserve(HEADER_BYTES + payload.len());
    out.put_u32_le(payload.len() as u32);
    out.put_u8(kind as u8);
    out.put_u8(if is_last { LAST_OF_MESSAGE } else { 0 });
    out.put_u64_le(stream);
    out.put_slice(payload);
}

/// Takes the next frame out of `input`. `None` if it is not complete yet.
pub fn decode(input: &mut BytesMut) -> Result<Option<Frame>, Error> {
    let Some(mut header) = input.get(..HEADER_BYTES) else { return Ok(None) };
    let length = header.get_u32_le() as usize;
    if length > MAX_PAYLOAD_BYTES {
        return Err(Error::Protocol("a frame is longer than 64 KiB"));
    }
    let kind = Kind::of(header.get_u8()).ok_or(Error::Protocol("unknown kind of frame"))?;
    let flags = header.get_u8();
    let stream = header.get_u64_le();
    if input.len() < HEADER_BYTES + length {
        return Ok(None);
    }
    input.advance(HEADER_BYTES);
    let payload = match length <= MAX_COPIED_BYTES {
        true => {
            let copied = Bytes::copy_from_slice(&input[..length]);
            input.advance(length);
            copied
        }
        false => input.split_to(length).freeze(),
    };
    Ok(Some(Frame { kind, is_last: flags & LAST_OF_MESSAGE != 0, stream, payload }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_fuzz::Target;

    #[test]
    fn frames_are_decoded_as_encoded_from_any_pieces() {
        let mut encoded = BytesMut::new();
        let long = vec![7; MAX_PAYLOAD_BYTES];
        encode(Kind::Open, false, 1, b"abc", &mut encoded);
        encode(Kind::Data, true, u64::MAX, &long, &mut encoded);
        encode(Kind::Finish, false, 1, b"", &mut encoded);
        let mut input = BytesMut::new();
        let mut frames = Vec::new();
        for piece in encoded.chunks(1000) {
            input.extend_from_slice(piece);
            while let Some(frame) = decode(&mut input).unwrap() {
                frames.push(frame);
            }
        }
        let expected = [
            Frame { kind: Kind::Open, is_last: false, stream: 1, payload: Bytes::from_static(b"abc") },
            Frame { kind: Kind::Data, is_last: true, stream: u64::MAX, payload: long.into() },
            Frame { kind: Kind::Finish, is_last: false, stream: 1, payload: Bytes::new() },
        ];
        assert_eq!(frames, expected);
        assert!(input.is_empty());
    }

    #[test]
    fn unknown_kinds_and_long_frames_are_refused() {
        let mut unknown = BytesMut::from(&[0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0][..]);
        assert!(matches!(decode(&mut unknown), Err(Error::Protocol(_))));
        let mut long = BytesMut::from(&[1, 0, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0][..]);
        assert!(matches!(decode(&mut long), Err(Error::Protocol(_))));
    }

    #[test]
    fn fuzz_node_frames() {
        let mut seed = BytesMut::new();
        encode(Kind::Data, true, 3, b"select", &mut seed);
        Target::new("node_frames", env!("CARGO_MANIFEST_DIR")).seeds([seed.to_vec()]).run(|bytes| {
            let mut input = BytesMut::from(bytes);
            let mut encoded = BytesMut::new();
            while let Ok(Some(frame)) = decode(&mut input) {
                encode(frame.kind, frame.is_last, frame.stream, &frame.payload, &mut encoded);
            }
            // Unknown flags are ignored and therefore not encoded again.
            assert!(encoded.len() <= bytes.len());
        });
    }
}
