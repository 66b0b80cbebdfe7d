//! Portals: the values bound to a statement, and the rest of its result if the client fetches it in
//! several parts (Execute with a row limit).
//!
//! A result is complete before any of it is sent. The unsent rest is kept in memory, or in a
//! temporary file if the result is large ([`super::rows`]). It is sent in whole messages.

use std::sync::Arc;

use fulmar_engine::{CommandTag, Value};
use fulmar_pgwire::protocol::{Formats, frontend};

use super::memory_quota::{Quota, Reservation};
use super::rows::{FLUSH_THRESHOLD_BYTES, Output, Spill};
use super::statements::{ALL_TEXT, Prepared};
use crate::Result;

/// Capacity of the value list that a portal retains for reuse.
const RETAINED_VALUES: usize = 64;

/// Values bound to a statement, and the progress of its execution.
#[derive(Default)]
pub(crate) struct Portal {
    /// `None` if the portal does not exist. The unnamed portal keeps its entry and its memory.
    pub(crate) prepared: Option<Arc<Prepared>>,
    pub(crate) values: Vec<Value>,
    pub(crate) formats: Option<Formats>,
    /// Describe was received. RowDescription is sent with the first row.
    pub(crate) describe: bool,
    pub(crate) progress: Progress,
    /// Memory charged while the portal exists: its name, its map entry, and formats on the heap.
    pub(super) entry_bytes: usize,
    reservation: Reservation,
}

/// The progress of a portal's execution.
#[derive(Default)]
pub(crate) enum Progress {
    /// Not executed yet.
    #[default]
    Bound,
    /// Executed, with unsent rows.
    Suspended(Box<SuspendedResult>),
    /// Executed, and all rows are sent.
    Done,
}

impl Portal {
    /// The formats of the result columns.
    pub(crate) fn formats(&self) -> &Formats {
        self.formats.as_ref().unwrap_or(&ALL_TEXT)
    }

    /// Sets the formats of the result columns. The next [`Portal::reserve_values`] charges them.
    pub(crate) fn set_formats(&mut self, formats: Formats) {
        self.entry_bytes += formats.heap_bytes();
        self.formats = Some(formats);
    }

    /// Charges `count` values, encoded in `bytes` bytes, before they are decoded.
    pub(crate) fn reserve_values(&mut self, count: usize, bytes: usize, quota: &Arc<Quota>) -> Result<()> {
        self.reservation.resize(quota, (self.entry_bytes + count * size_of::<Value>() + bytes) as u64)
    }

    /// Adjusts the charge to the decoded values.
    pub(crate) fn hold_values(&mut self, quota: &Arc<Quota>) -> Result<()> {
        let lists = self.values.capacity() * size_of::<Value>();
        let values = self.values.iter().map(|value| match value {
            Value::Text(text) => text.capacity(),
            Value::Blob(bytes) => bytes.capacity(),
            _ => 0,
        });
        self.reservation.resize(quota, (self.entry_bytes + lists + values.sum::<usize>()) as u64)
    }

    /// Frees the values after execution.
    pub(crate) fn forget_values(&mut self) {
        self.values.clear();
        self.values.shrink_to(RETAINED_VALUES);
        self.reservation.shrink(self.entry_bytes as u64);
    }

    /// Keeps the rest of the result for the next Execute. Fails if its memory charge is rejected.
    pub(crate) fn suspend(&mut self, mut answer: Box<SuspendedResult>, quota: &Arc<Quota>) -> Result<()> {
        let bytes = answer.loaded.capacity() + answer.tail.capacity();
        answer.reservation.resize(quota, bytes as u64)?;
        self.progress = Progress::Suspended(answer);
        Ok(())
    }

    /// Clears the portal. Retains a small allocation for reuse.
    pub(super) fn clear(&mut self) {
        self.prepared = None;
        self.formats = None;
        self.entry_bytes = 0;
        self.forget_values();
        self.describe = false;
        self.progress = Progress::Bound;
    }
}

/// A complete result, of which a part has been sent.
pub(crate) struct SuspendedResult {
    /// Messages in memory. The last one may be incomplete.
    loaded: Vec<u8>,
    /// Bytes of `loaded` that have been moved out.
    taken: usize,
    /// The spilled part that follows `loaded`, and the number of its bytes that have been read.
    spill: Option<(Spill, u64)>,
    /// The part in memory that follows the spilled part.
    tail: Vec<u8>,
    reservation: Reservation,
    pub(crate) tag: CommandTag,
}

impl SuspendedResult {
    /// Creates a result from the output and the spilled part, which precedes it.
    pub(crate) fn new(output: Output, spill: Option<Spill>, tag: CommandTag) -> SuspendedResult {
        let (bytes, reservation) = output.into_parts();
        let (loaded, tail) = if spill.is_some() { (Vec::new(), bytes) } else { (bytes, Vec::new()) };
        SuspendedResult { loaded, taken: 0, spill: spill.map(|spill| (spill, 0)), tail, reservation, tag }
    }

    /// Moves at most `limit` rows to `out`, and fewer if `out` reaches [`FLUSH_THRESHOLD_BYTES`].
    /// Returns the number of rows, and true if those were the last.
    pub(crate) fn take_rows(&mut self, limit: u32, out: &mut Vec<u8>) -> Result<(u64, bool)> {
        let mut rows = 0;
        loop {
            let moved = self.take_loaded(limit, &mut rows, out);
            if rows == u64::from(limit) || out.len() > FLUSH_THRESHOLD_BYTES {
                return Ok((rows, false));
            }
            if !moved && !self.load()? {
                return Ok((rows, true));
            }
        }
    }

    /// Moves complete messages that are in memory to `out`. Returns false if there are none.
    fn take_loaded(&mut self, limit: u32, rows: &mut u64, out: &mut Vec<u8>) -> bool {
        let begin = self.taken;
        while *rows < u64::from(limit) && out.len() + self.taken - begin <= FLUSH_THRESHOLD_BYTES {
            let Ok(Some(frame)) = frontend::frame(&self.loaded[self.taken..], usize::MAX) else { break };
            *rows += u64::from(frame.kind == b'D');
            self.taken += frame.size;
        }
        out.extend_from_slice(&self.loaded[begin..self.taken]);
        self.taken > begin
    }

    /// Reads more of the result into memory. Returns false if there is no more.
    fn load(&mut self) -> Result<bool> {
        let Some((spill, read)) = &mut self.spill else { return Ok(false) };
        self.loaded.drain(..std::mem::take(&mut self.taken)); // the rest is an incomplete message
        let count = spill.read_at(*read, &mut self.loaded)?;
        *read += count as u64;
        if count == 0 {
            self.loaded.append(&mut self.tail);
            self.spill = None;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(letter: u8) -> Vec<u8> {
        vec![b'D', 0, 0, 0, 11, 0, 1, 0, 0, 0, 1, letter]
    }

    #[test]
    fn take_rows_splits_a_result_at_the_row_limit() {
        let bytes: Vec<u8> = [b"T\0\0\0\x04".to_vec(), row(b'a'), row(b'b'), row(b'c')].concat();
        let mut answer = SuspendedResult::new(bytes.clone().into(), None, CommandTag::Select(3));
        let mut out = Vec::new();
        assert_eq!(answer.take_rows(2, &mut out).unwrap(), (2, false));
        assert_eq!(out.len(), 5 + 24);
        assert_eq!(answer.take_rows(2, &mut out).unwrap(), (1, true));
        assert_eq!(answer.take_rows(2, &mut out).unwrap(), (0, true));
        assert_eq!(&out[..], bytes);
    }

    #[test]
    fn take_rows_stops_when_the_output_is_large() {
        let wide = [
            b"D".to_vec(),
            (FLUSH_THRESHOLD_BYTES as u32 - 1).to_be_bytes().to_vec(),
            vec![0; FLUSH_THRESHOLD_BYTES - 5],
        ];
        let mut answer = SuspendedResult::new(wide.concat().repeat(5).into(), None, CommandTag::Select(5));
        let mut out = Vec::new();
        let mut portions = Vec::new();
        loop {
            out.clear();
            let (rows, end) = answer.take_rows(1000, &mut out).unwrap();
            portions.push(rows);
            if end {
                break;
            }
        }
        assert_eq!(portions, [2, 2, 1]);
    }
}
