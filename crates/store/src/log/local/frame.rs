//! Log file format: a header followed by frames.
//!
//! ```text
//!   file    = header (48 bytes), frame*, then zeros or remains of an earlier use of the file
//!   header  = "FULMCLOG", format version u32, log id u128, sequence u64, start u64, crc u32
//!   frame   = length u32, back u32, body crc u32, head crc u32, body (`length` bytes: a record)
//! ```
//!
//! - `start` is the position of the file's first frame.
//! - `back` records how far the log was durable when the frame was written: up to the frame's
//!   position minus `back`.
//! - The head checksum also covers the log id and the frame's position. A frame is therefore valid
//!   at exactly one place of one log, and the remains of an earlier log in a reused file contain no
//!   valid frames. It also makes the search for frames in garbage cheap: 16 bytes are enough to
//!   reject a place.

use fulmar_pages::{LogId, record};

/// Bytes of a file's header.
pub(super) const HEADER_BYTES: usize = 48;
/// Bytes of a frame before its body.
pub(super) const FRAME_HEAD_BYTES: usize = 16;
/// Maximum length of a body. A larger commit is written as a segment that its record references.
pub(super) const MAX_BODY_BYTES: usize = 1 << 30;

const MAGIC: &[u8; 8] = b"FULMCLOG";
const FORMAT_VERSION: u32 = 1;
const HEADER_CHECKED: usize = 44;

/// Contents of a file's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub(super) log: LogId,
    /// Sequence number of the file in the directory. Equals the number in its name.
    pub(super) sequence: u64,
    /// Position of the file's first frame.
    pub(super) start: u64,
}

/// Result of decoding a header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HeaderState {
    /// A valid header.
    Present(Header),
    /// Zeros: the file was never started.
    Blank,
    /// A header of another format version.
    Unknown(u32),
    /// Anything else.
    Damaged,
}

impl Header {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..8].copy_from_slice(MAGIC);
        out[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        out[12..28].copy_from_slice(&self.log.0.to_le_bytes());
        out[28..36].copy_from_slice(&self.sequence.to_le_bytes());
        out[36..44].copy_from_slice(&self.start.to_le_bytes());
        let crc = crc32fast::hash(&out[..HEADER_CHECKED]);
        out[HEADER_CHECKED..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> HeaderState {
        if bytes.iter().all(|byte| *byte == 0) {
            return HeaderState::Blank;
        }
        if bytes[..8] != MAGIC[..]
            || u32_at(bytes, HEADER_CHECKED) != crc32fast::hash(&bytes[..HEADER_CHECKED])
        {
            return HeaderState::Damaged;
        }
        match u32_at(bytes, 8) {
            FORMAT_VERSION => HeaderState::Present(Header {
                log: LogId(u128::from(u64_at(bytes, 12)) | u128::from(u64_at(bytes, 20)) << 64),
                sequence: u64_at(bytes, 28),
                start: u64_at(bytes, 36),
            }),
            other => HeaderState::Unknown(other),
        }
    }
}

/// A valid frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame<'a> {
    pub(super) body: &'a [u8],
    /// Everything before this position was durable when the frame was written.
    pub(super) synced: u64,
}

impl Frame<'_> {
    /// Bytes of the frame in the file.
    pub(super) fn bytes(&self) -> usize {
        FRAME_HEAD_BYTES + self.body.len()
    }
}

/// Writes and validates the frames of one log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frames {
    /// Checksum of the log id, which is the initial value of each head's checksum.
    seed: u32,
}

impl Frames {
    pub(super) fn of(log: LogId) -> Self {
        Frames { seed: crc32fast::hash(&log.0.to_le_bytes()) }
    }

    /// Appends a frame whose head is filled in later.
    pub(super) fn push(out: &mut Vec<u8>, body: &[u8]) {
        let mut head = [0; FRAME_HEAD_BYTES];
        head[..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
        out.extend_from_slice(&head);
        out.extend_from_slice(body);
    }

    /// Fills in the heads of consecutive frames, the first of which is at `position`, when the log
    /// is durable up to `synced`.
    pub(super) fn fill(&self, mut frames: &mut [u8], mut position: u64, synced: u64) {
        while frames.len() >= FRAME_HEAD_BYTES {
            let bytes = FRAME_HEAD_BYTES + u32_at(frames, 0) as usize;
            let (frame, rest) = frames.split_at_mut(bytes.min(frames.len()));
            let (head, body) = frame.split_at_mut(FRAME_HEAD_BYTES);
            // Bounded by the limits on pending bytes and record length, both of which fit into u32.
            head[4..8].copy_from_slice(&((position - synced) as u32).to_le_bytes());
            head[8..12].copy_from_slice(&crc32fast::hash(body).to_le_bytes());
            let crc = self.head_crc(position, head);
            head[12..].copy_from_slice(&crc.to_le_bytes());
            position += bytes as u64;
            frames = rest;
        }
    }

    /// Returns the frame that starts at `bytes[at..]`, if there is a valid one. `position` is its
    /// position.
    pub(super) fn at<'a>(&self, bytes: &'a [u8], at: usize, position: u64) -> Option<Frame<'a>> {
        let head = bytes.get(at..at + FRAME_HEAD_BYTES)?;
        let length = u32_at(head, 0) as usize;
        let back = u64::from(u32_at(head, 4));
        let fits =
            length >= record::MIN_BYTES && length <= bytes.len() - at - FRAME_HEAD_BYTES && back <= position;
        if !fits || u32_at(head, 12) != self.head_crc(position, head) {
            return None;
        }
        let body = &bytes[at + FRAME_HEAD_BYTES..at + FRAME_HEAD_BYTES + length];
        (u32_at(head, 8) == crc32fast::hash(body)).then_some(Frame { body, synced: position - back })
    }

    /// Returns the offset, from `at` on, of a frame that was written when everything up to a
    /// position beyond `bad` was durable. `position_of` maps an offset in `bytes` to its position.
    pub(super) fn find_proof(
        &self,
        bytes: &[u8],
        at: usize,
        bad: u64,
        position_of: impl Fn(usize) -> u64,
    ) -> Option<usize> {
        let mut at = at;
        while at + FRAME_HEAD_BYTES <= bytes.len() {
            if u64_at(bytes, at) == 0 {
                // A frame's length is never zero: skip the zeros of a preallocated file, eight at a
                // time.
                at += if u32_at(bytes, at + 8) == 0 { 8 } else { 1 };
                continue;
            }
            if self.at(bytes, at, position_of(at)).is_some_and(|frame| frame.synced > bad) {
                return Some(at);
            }
            at += 1;
        }
        None
    }

    /// Checksum of a head: covers the log, the position, and the fields before the checksum.
    fn head_crc(&self, position: u64, head: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new_with_initial(self.seed);
        hasher.update(&position.to_le_bytes());
        hasher.update(&head[..12]);
        hasher.finalize()
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut array = [0; 4];
    array.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(array)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut array = [0; 8];
    array.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(array)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: LogId = LogId(7 << 100 | 9);

    fn frames(bodies: &[&[u8]], position: u64, synced: u64) -> Vec<u8> {
        let mut out = Vec::new();
        for body in bodies {
            Frames::push(&mut out, body);
        }
        Frames::of(LOG).fill(&mut out, position, synced);
        out
    }

    #[test]
    fn header_round_trips_and_damage_is_detected() {
        let header = Header { log: LOG, sequence: 5, start: 1 << 40 };
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes), HeaderState::Present(header));
        assert_eq!(Header::decode(&[0; HEADER_BYTES]), HeaderState::Blank);
        for at in 0..HEADER_BYTES {
            let mut damaged = bytes;
            damaged[at] ^= 0x10;
            assert_eq!(Header::decode(&damaged), HeaderState::Damaged, "byte {at}");
        }
    }

    #[test]
    fn frame_is_valid_only_at_its_position_in_its_log() {
        let body = [3; 40];
        let bytes = frames(&[&body, &body], 100, 60);
        let first = Frames::of(LOG).at(&bytes, 0, 100).unwrap();
        assert_eq!((first.body, first.synced, first.bytes()), (&body[..], 60, 56));
        let second = Frames::of(LOG).at(&bytes, 56, 156).unwrap();
        assert_eq!(second.synced, 60);
        assert!(Frames::of(LOG).at(&bytes, 0, 101).is_none());
        assert!(Frames::of(LogId(1)).at(&bytes, 0, 100).is_none());
        for at in 0..56 {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(Frames::of(LOG).at(&damaged, 0, 100).is_none(), "byte {at}");
        }
        assert!(Frames::of(LOG).at(&bytes[..100], 56, 156).is_none(), "a truncated frame must be invalid");
    }

    #[test]
    fn proof_is_found_after_garbage_and_zeros() {
        let body = [3; 40];
        for gap in [5, 7, 8, 9, 100] {
            for filler in [0, 0xff] {
                let mut bytes = vec![filler; gap];
                bytes.extend(frames(&[&body], gap as u64, 5));
                let find = |bad| Frames::of(LOG).find_proof(&bytes, 0, bad, |at| at as u64);
                assert_eq!(find(4), Some(gap));
                assert_eq!(find(5), None, "the frame must not prove durability beyond position 5");
            }
        }
    }
}
