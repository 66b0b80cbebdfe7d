//! Decodes the framing of backend messages without copying.
//!
//! ```text
//! +-----+----------------+------------------+
//! | tag | length (4, BE) | body (length - 4)|
//! +-----+----------------+------------------+
//! ```
//!
//! A frame borrows from the input buffer, because the driver reads few messages and keeps none.

use super::Error;

/// The maximum message length. Bounds the memory that a broken server can consume.
const MAX_FRAME_BYTES: usize = 64 << 20;

const HEADER_BYTES: usize = 5;

/// A backend message.
pub(super) struct Frame<'a> {
    pub(super) tag: u8,
    pub(super) body: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Returns the first message in `bytes` and its total length, or `None` if it is incomplete.
    pub(super) fn first(bytes: &'a [u8]) -> Result<Option<(Frame<'a>, usize)>, Error> {
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let [tag, length @ ..] = *header;
        let length = u32::from_be_bytes(length) as usize;
        if !(4..=MAX_FRAME_BYTES).contains(&length) {
            return Err(Error::Protocol("invalid message length"));
        }
        let body = rest.get(..length - 4).map(|body| (Frame { tag, body }, length + 1));
        Ok(body)
    }

    /// Decodes an ErrorResponse.
    pub(super) fn server_error(&self) -> Error {
        let (mut sqlstate, mut message) = ("XX000", String::new());
        for field in self.body.split(|byte| *byte == 0) {
            match field.split_first() {
                Some((b'C', code)) => sqlstate = std::str::from_utf8(code).unwrap_or(sqlstate),
                Some((b'M', text)) => message = String::from_utf8_lossy(text).into_owned(),
                // The detail and the hint follow the message, in this order.
                Some((b'D', text)) => message.extend([" (", &String::from_utf8_lossy(text), ")"]),
                Some((b'H', text)) => message.extend(["; ", &String::from_utf8_lossy(text)]),
                _ => {}
            }
        }
        Error::Server { sqlstate: sqlstate.to_owned(), message }
    }

    /// The row count of a CommandComplete tag (`INSERT 0 3`, `SELECT 1`), or 0 if it has none.
    pub(super) fn row_count(&self) -> u64 {
        let digits = self.body.strip_suffix(&[0]).unwrap_or(self.body);
        let digits = digits.rsplit(|byte| *byte == b' ').next().unwrap_or_default();
        std::str::from_utf8(digits).ok().and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// Decodes the values of a DataRow in text format.
    pub(super) fn values(&self) -> Result<Vec<Option<String>>, Error> {
        const SHORT: Error = Error::Protocol("truncated data row");
        let (count, mut rest) = self.body.split_first_chunk::<2>().ok_or(SHORT)?;
        let mut values = Vec::new();
        for _ in 0..u16::from_be_bytes(*count) {
            let (length, after) = rest.split_first_chunk::<4>().ok_or(SHORT)?;
            rest = after;
            let Ok(length) = usize::try_from(i32::from_be_bytes(*length)) else {
                values.push(None);
                continue;
            };
            let (value, after) = rest.split_at_checked(length).ok_or(SHORT)?;
            rest = after;
            values.push(Some(String::from_utf8_lossy(value).into_owned()));
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_frame_is_not_returned() {
        let bytes = b"C\0\0\0\x0dSELECT 7\0Z";
        for cut in 0..bytes.len() - 1 {
            assert!(Frame::first(&bytes[..cut]).unwrap().is_none());
        }
        let (frame, length) = Frame::first(bytes).unwrap().unwrap();
        assert_eq!((frame.tag, length, frame.row_count()), (b'C', bytes.len() - 1, 7));
    }

    #[test]
    fn invalid_lengths_are_rejected() {
        assert!(Frame::first(b"Z\0\0\0\x03...").is_err());
        assert!(Frame::first(b"Z\xff\xff\xff\xff...").is_err());
    }

    #[test]
    fn errors_and_rows_are_decoded() {
        let error = Frame { tag: b'E', body: b"SERROR\0C40001\0Mtoo late\0Dby a bit\0HTry again.\0\0" }
            .server_error();
        assert!(error.is_retryable());
        assert_eq!(error.to_string(), "server error 40001: too late (by a bit); Try again.");

        let row = Frame { tag: b'D', body: b"\0\x02\0\0\0\x02hi\xff\xff\xff\xff" };
        assert_eq!(row.values().unwrap(), [Some("hi".to_owned()), None]);
        assert!(Frame { tag: b'D', body: b"\0\x01\0\0\0\x09hi" }.values().is_err());
        assert_eq!(Frame { tag: b'C', body: b"BEGIN\0" }.row_count(), 0);
    }
}
