//! Finds the messages in a stream of bytes.

use fulmar_pgwire::protocol::MAX_MESSAGE_BYTES;

/// Size of a message's kind and length.
const HEADER_BYTES: usize = 5;

/// Splits a stream of bytes into messages.
#[derive(Default)]
pub(super) struct Scanner {
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// Bytes of the message that have not arrived yet.
    left_bytes: usize,
}

impl Scanner {
    /// Returns true in the middle of a message.
    pub(super) fn is_inside(&self) -> bool {
        self.header_bytes > 0
    }

    /// The kind of the message.
    pub(super) fn kind(&self) -> u8 {
        self.header[0]
    }

    /// Takes bytes up to the end of the header or of the body. Returns the number of bytes, and
    /// whether they complete the message. `None` if the length is invalid.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Option<(usize, bool)> {
        let count = if self.header_bytes < HEADER_BYTES {
            let count = bytes.len().min(HEADER_BYTES - self.header_bytes);
            self.header[self.header_bytes..][..count].copy_from_slice(&bytes[..count]);
            self.header_bytes += count;
            if self.header_bytes == HEADER_BYTES {
                let [_, length @ ..] = self.header;
                let length = u32::from_be_bytes(length) as usize;
                self.left_bytes = length.checked_sub(4).filter(|_| length <= MAX_MESSAGE_BYTES + 4)?;
            }
            count
        } else {
            let count = bytes.len().min(self.left_bytes);
            self.left_bytes -= count;
            count
        };
        let is_complete = self.header_bytes == HEADER_BYTES && self.left_bytes == 0;
        if is_complete {
            self.header_bytes = 0;
        }
        Some((count, is_complete))
    }
}
