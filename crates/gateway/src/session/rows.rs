//! Encodes result rows into the send buffer, and spills large results to temporary files.
//!
//! A row is encoded directly behind the earlier responses in the send buffer. The rows of a
//! statement are discarded if it fails or if the engine replays it, so nothing is sent before the
//! statement has ended. Rows that do not fit in memory go to an unlinked temporary file:
//!
//! ```text
//! send buffer:  [ earlier responses | RowDescription? | DataRow DataRow DataRow ... ]
//!                                   ^ mark: reset truncates here     > 8 MiB: spilled, in order
//! ```
//!
//! The buffer is charged to the tenant before it grows ([`super::memory_quota`]). If the charge is
//! rejected, the rows spill earlier. A single row that does not fit fails the statement.

use std::fs::File;
use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use fulmar_engine::{
    Completion, Error, Row, RowSink, STALE_PLAN, TemporaryCharge, TemporarySpace, ValueRef, sqlstate,
};
use fulmar_pgwire::protocol::{Format, Formats, backend};
use fulmar_pgwire::types::{Column, Type, encode};
use smallvec::SmallVec;

use super::link::EarlyMessages;
use super::memory_quota::{Quota, Reservation};
use crate::Result;
use crate::relay::message;

/// Maximum size of a result in memory. Larger results spill.
const MEMORY_BYTES: usize = 8 * 1024 * 1024;
/// The responses of a pipeline are sent before its end once they exceed this size.
pub(crate) const FLUSH_THRESHOLD_BYTES: usize = 64 * 1024;
/// Size of one read from a temporary file.
const READ_BYTES: usize = 64 * 1024;
/// An output up to this size needs no charge.
const FREE_OUTPUT_BYTES: usize = 16 * 1024;
/// The charge of an output is a multiple of this.
const OUTPUT_STEP_BYTES: usize = 64 * 1024;
/// Values longer than this are charged before they are encoded.
const LARGE_VALUE_BYTES: usize = 4 * 1024;

/// Bytes to send to the client, with their memory charge.
#[derive(Default)]
pub(crate) struct Output {
    bytes: Vec<u8>,
    reservation: Reservation,
}

impl Deref for Output {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.bytes
    }
}

impl DerefMut for Output {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

impl From<Vec<u8>> for Output {
    fn from(bytes: Vec<u8>) -> Output {
        Output { bytes, reservation: Reservation::default() }
    }
}

impl Output {
    /// Clears the bytes after they were sent, and releases the charge.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        if self.reservation.bytes() > 0 {
            self.bytes.shrink_to(OUTPUT_STEP_BYTES);
            self.reservation.release();
        }
    }

    pub(crate) fn into_parts(self) -> (Vec<u8>, Reservation) {
        (self.bytes, self.reservation)
    }

    /// Returns true if `more` bytes fit without another charge.
    fn has_room(&self, more: usize) -> bool {
        self.bytes.len() + more <= FREE_OUTPUT_BYTES.max(self.reservation.bytes() as usize)
    }

    /// Charges and reserves room for `more` bytes, if possible twice the current charge, so that
    /// a large output grows in few steps. Returns false if the charge is rejected.
    pub(crate) fn grow(&mut self, more: usize, memory: &Arc<Quota>) -> bool {
        if self.has_room(more) {
            return true;
        }
        let wanted = (self.bytes.len() + more).next_multiple_of(OUTPUT_STEP_BYTES) as u64;
        // Above this size the rows spill.
        let doubled = (2 * self.reservation.bytes()).min((MEMORY_BYTES + OUTPUT_STEP_BYTES) as u64);
        let grown = self.reservation.try_grow_to(memory, wanted.max(doubled))
            || self.reservation.try_grow_to(memory, wanted);
        if grown {
            self.bytes.reserve_exact(self.reservation.bytes() as usize - self.bytes.len());
        }
        grown
    }

    /// Like [`Output::grow`], but fails if the charge is rejected.
    pub(crate) fn must_grow(&mut self, more: usize, memory: &Arc<Quota>) -> Result<()> {
        if self.grow(more, memory) {
            return Ok(());
        }
        self.reservation.grow_to(memory, (self.bytes.len() + more) as u64)?;
        self.bytes.reserve_exact(more);
        Ok(())
    }
}

/// The part of a result in a temporary file.
pub(crate) struct Spill {
    file: File,
    bytes: u64,
    reservation: Reservation,
    /// Declared after `file`: the file is closed before its charge is released.
    charge: TemporaryCharge,
}

/// Where a session's results spill to, and the quotas to charge.
#[derive(Clone, Copy)]
pub(crate) struct Spills<'a> {
    pub(crate) directory: &'a Path,
    /// Charged for the session's temporary files.
    pub(crate) quota: &'a Arc<Quota>,
    /// Charged for the part in memory.
    pub(crate) memory: &'a Arc<Quota>,
    /// Charges temporary files to the tenant.
    pub(crate) space: &'a TemporarySpace,
}

impl Spill {
    fn create(spills: Spills<'_>) -> Result<Spill> {
        let file = tempfile::tempfile_in(spills.directory).map_err(spill_error)?;
        Ok(Spill { file, bytes: 0, reservation: Reservation::default(), charge: spills.space.charge() })
    }

    /// Appends bytes. The write is synchronous, because the engine calls it from inside a statement
    /// and cannot wait. It is a copy into the kernel's page cache.
    fn append(&mut self, bytes: &[u8], quota: &Arc<Quota>) -> Result<()> {
        self.bytes += bytes.len() as u64;
        self.reservation.resize(quota, self.bytes)?;
        self.charge.grow_to(self.bytes)?;
        self.file.write_all(bytes).map_err(spill_error)
    }

    /// Reads up to [`READ_BYTES`] bytes at `from`. Returns the number of bytes, 0 at the end.
    pub(crate) fn read_at(&self, from: u64, out: &mut Vec<u8>) -> Result<usize> {
        let before = out.len();
        out.resize(before + READ_BYTES, 0);
        let count = self.file.read_at(&mut out[before..], from).map_err(spill_error)?;
        out.truncate(before + count);
        Ok(count)
    }
}

fn spill_error(cause: std::io::Error) -> Error {
    let full = matches!(cause.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded);
    let state = if full { sqlstate::DISK_FULL } else { sqlstate::IO_ERROR };
    Error::new(state, format!("could not access temporary file for a large result: {cause}"))
        .hint("Free space in the server's temporary directory, or query fewer rows at a time.")
}

/// How rows are sent.
pub(crate) struct Layout<'a> {
    pub(crate) columns: &'a [Column],
    pub(crate) formats: &'a Formats,
    /// If true, RowDescription precedes the first row, and a column without a declared type gets
    /// the type of its first value. If false, such columns have been described as text.
    pub(crate) describe: bool,
    /// If true, the rows are sent as they are, directly behind the output that precedes them.
    pub(crate) is_whole: bool,
}

/// Appends a result to `bytes`, and spills it if it is large.
pub(crate) struct Buffer<'a> {
    pub(crate) bytes: &'a mut Output,
    /// The start of the result in `bytes`.
    mark: usize,
    spill: Option<Spill>,
    spills: Spills<'a>,
}

impl<'a> Buffer<'a> {
    /// Creates a buffer that spills to `spills`.
    pub(crate) fn new(bytes: &'a mut Output, spills: Spills<'a>) -> Buffer<'a> {
        Buffer { mark: bytes.len(), bytes, spill: None, spills }
    }

    /// Spills the rows written so far if they exceed [`MEMORY_BYTES`] or their charge is rejected.
    pub(crate) fn spill_if_large(&mut self) -> Result<()> {
        let end = self.bytes.len();
        if end - self.mark <= MEMORY_BYTES && self.bytes.grow(0, self.spills.memory) {
            return Ok(());
        }
        self.spill(end)
    }

    /// Moves the bytes between the mark and `end` to the file.
    fn spill(&mut self, end: usize) -> Result<()> {
        let spill = match &mut self.spill {
            Some(spill) => spill,
            empty => empty.insert(Spill::create(self.spills)?),
        };
        spill.append(&self.bytes[self.mark..end], self.spills.quota)?;
        self.bytes.drain(self.mark..end);
        Ok(())
    }

    /// Reserves `more` bytes for the row that starts at `row`. The rows before it may spill.
    /// Returns the row's new start.
    pub(crate) fn make_room(&mut self, more: usize, row: usize) -> Result<usize> {
        if self.bytes.grow(more, self.spills.memory) {
            return Ok(row);
        }
        if row > self.mark {
            self.spill(row)?;
        }
        self.bytes.must_grow(more, self.spills.memory)?;
        Ok(self.mark.min(row))
    }

    /// Reserves room for a value of about `bytes` bytes of the row that starts at `row`. Returns
    /// the row's new start.
    pub(crate) fn make_room_for(&mut self, bytes: usize, row: usize) -> Result<usize> {
        if bytes <= LARGE_VALUE_BYTES && self.bytes.has_room(LARGE_VALUE_BYTES) {
            return Ok(row);
        }
        self.make_room(bytes + LARGE_VALUE_BYTES, row)
    }

    /// Discards the result.
    pub(crate) fn reset(&mut self) {
        self.bytes.truncate(self.mark);
        self.spill = None;
    }

    /// The spilled part, and its position in the output.
    pub(crate) fn finish(self) -> Option<(usize, Spill)> {
        self.spill.map(|spill| (self.mark, spill))
    }
}

/// The encoded size of a text or blob value. 0 for other values, which are short.
pub(crate) fn encoded_bytes(value: ValueRef<'_>, kind: Type) -> usize {
    match value {
        ValueRef::Text(bytes) if kind != Type::Bytea => bytes.len(),
        // Hexadecimal: two digits per byte.
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => 2 * bytes.len(),
        _ => 0,
    }
}

/// Appends a statement's rows to `output`.
pub(crate) struct RowWriter<'a> {
    output: Buffer<'a>,
    layout: Layout<'a>,
    types: SmallVec<[Type; 16]>,
    described: bool,
    rows: u64,
    /// Gets the answer when the statement is committed, but not durable yet.
    early: Option<EarlyMessages>,
}

impl<'a> RowWriter<'a> {
    /// Creates a writer that spills to `spills`.
    pub(crate) fn new(output: &'a mut Output, layout: Layout<'a>, spills: Spills<'a>) -> RowWriter<'a> {
        let types = layout.columns.iter().map(|column| column.kind.unwrap_or(Type::Text)).collect();
        RowWriter {
            output: Buffer::new(output, spills),
            layout,
            types,
            described: false,
            rows: 0,
            early: None,
        }
    }

    /// Lets the session's front know the answer before a committed statement is durable.
    pub(crate) fn tell_early(&mut self, early: Option<EarlyMessages>) {
        self.early = early.filter(|_| self.layout.is_whole);
    }

    /// Completes the result. Returns the number of rows, and the spilled part with its position.
    pub(crate) fn finish(mut self) -> (u64, Option<(usize, Spill)>) {
        self.describe();
        (self.rows, self.output.finish())
    }

    fn describe(&mut self) {
        if self.layout.describe && !self.described && !self.layout.columns.is_empty() {
            backend::row_description(
                self.output.bytes,
                self.layout.columns,
                &self.types,
                self.layout.formats,
            );
        }
        self.described = true;
    }

    fn first_row(&mut self, row: &dyn Row) {
        if self.layout.describe {
            for (index, column) in self.layout.columns.iter().enumerate() {
                if column.kind.is_none() {
                    self.types[index] = Type::of_value(row.get(index));
                }
            }
        }
        self.describe();
    }
}

impl RowSink for RowWriter<'_> {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        if row.len() != self.types.len() {
            return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, STALE_PLAN)
                .detail("The schema has changed.")
                .hint("Prepare the statement again."));
        }
        if !self.described {
            self.first_row(row);
        }
        let mut start = self.output.bytes.len();
        let head = backend::begin_row(self.output.bytes, self.types.len()) - start;
        for (index, kind) in self.types.iter().enumerate() {
            let format = self.layout.formats.get(index).unwrap_or(Format::Text);
            let value = row.get(index);
            start = self.output.make_room_for(encoded_bytes(value, *kind), start)?;
            encode::put_value(self.output.bytes, value, *kind, format)?;
        }
        backend::end_row(self.output.bytes, start + head);
        self.rows += 1;
        self.output.spill_if_large()
    }

    fn reset(&mut self) {
        self.output.reset();
        self.described = false;
        self.rows = 0;
        for (kind, column) in self.types.iter_mut().zip(self.layout.columns) {
            *kind = column.kind.unwrap_or(Type::Text);
        }
    }

    fn committed(&mut self, completion: &Completion) {
        let Some(early) = self.early.take() else { return };
        self.describe();
        if self.output.spill.is_some() || self.output.bytes.len() > message::MAX_COMMITTED_BYTES {
            return;
        }
        let mut answer = self.output.bytes.to_vec();
        for (state, text) in &completion.notices {
            backend::notice(&mut answer, state, text);
        }
        backend::command_complete(&mut answer, completion.tag);
        let mut bytes = Vec::with_capacity(answer.len() + 5);
        message::put(&mut bytes, message::COMMITTED, &answer);
        early.lock().put(bytes);
    }
}

/// Collects rows as values, for internal queries of the gateway.
#[derive(Default)]
pub(crate) struct Collector {
    pub(crate) rows: Vec<Vec<fulmar_engine::Value>>,
}

/// Maximum number of rows of an internal query.
const MAX_COLLECTED_ROWS: usize = 1_000_000;

impl RowSink for Collector {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        if self.rows.len() == MAX_COLLECTED_ROWS {
            let message = format!("schema has more than {MAX_COLLECTED_ROWS} entries");
            return Err(Error::new(sqlstate::PROGRAM_LIMIT, message));
        }
        self.rows.push((0..row.len()).map(|column| row.get(column).to_owned()).collect());
        Ok(())
    }

    fn reset(&mut self) {
        self.rows.clear();
    }
}

/// A row produced by the gateway.
pub(crate) struct ValueRow<'a>(pub(crate) &'a [fulmar_engine::Value]);

impl Row for ValueRow<'_> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, column: usize) -> fulmar_engine::ValueRef<'_> {
        self.0[column].as_ref()
    }
}

#[cfg(test)]
mod tests {
    use fulmar_engine::{Config, Engine, Value};
    use fulmar_pages::PartitionId;

    use super::*;
    use crate::memory::Budget;

    /// A spill directory with its quotas.
    struct SpillFixture {
        directory: tempfile::TempDir,
        quota: Arc<Quota>,
        memory: Arc<Quota>,
        space: TemporarySpace,
        _engine: Arc<Engine>,
    }

    impl SpillFixture {
        async fn new() -> SpillFixture {
            let directory = tempfile::tempdir().unwrap();
            let engine = Engine::start(Config::new(directory.path(), 64 << 20)).await.unwrap();
            let space = engine.session(PartitionId(1)).temporary_space();
            SpillFixture {
                directory,
                quota: Quota::of_files(),
                memory: Quota::unlimited(),
                space,
                _engine: engine,
            }
        }

        fn spills(&self) -> Spills<'_> {
            Spills {
                directory: self.directory.path(),
                quota: &self.quota,
                memory: &self.memory,
                space: &self.space,
            }
        }
    }

    fn columns(kind: Option<Type>) -> Vec<Column> {
        vec![Column { name: "a".into(), kind, modifier: -1 }]
    }

    fn layout<'a>(columns: &'a [Column], formats: &'a Formats, describe: bool) -> Layout<'a> {
        Layout { columns, formats, describe, is_whole: true }
    }

    #[tokio::test]
    async fn first_row_determines_column_types_until_reset() {
        let (columns, formats) = (columns(None), Formats::All(Format::Text));
        let mut output = Output::from(b"earlier".to_vec());
        let fixture = SpillFixture::new().await;
        let spills = fixture.spills();
        let mut writer = RowWriter::new(&mut output, layout(&columns, &formats, true), spills);
        writer.row(&ValueRow(&[Value::Integer(1)])).unwrap();
        writer.reset();
        writer.row(&ValueRow(&[Value::Text("x".into())])).unwrap();
        assert_eq!(writer.finish().0, 1);
        let mut expected = b"earlier".to_vec();
        backend::row_description(&mut expected, &columns, &[Type::Text], &formats);
        expected.extend_from_slice(b"D\0\0\0\x0b\0\x01\0\0\0\x01x");
        assert_eq!(*output, expected);
    }

    #[tokio::test]
    async fn empty_result_is_described() {
        let (columns, formats) = (columns(Some(Type::Int8)), Formats::All(Format::Text));
        let mut output = Output::default();
        let fixture = SpillFixture::new().await;
        let spills = fixture.spills();
        RowWriter::new(&mut output, layout(&columns, &formats, true), spills).finish();
        assert_eq!(output[0], b'T');
    }

    #[tokio::test]
    async fn large_result_spills_in_order() {
        let (columns, formats) = (columns(Some(Type::Text)), Formats::All(Format::Text));
        let mut output = Output::from(b"earlier".to_vec());
        let fixture = SpillFixture::new().await;
        let spills = fixture.spills();
        let mut writer = RowWriter::new(&mut output, layout(&columns, &formats, false), spills);
        for letter in ["a", "b", "c"] {
            writer.row(&ValueRow(&[Value::Text(letter.repeat(5 << 20))])).unwrap();
        }
        let (rows, spilled) = writer.finish();
        let (mark, spill) = spilled.unwrap();
        assert_eq!((rows, mark), (3, 7));
        let mut all = Vec::new();
        while spill.read_at(all.len() as u64, &mut all).unwrap() > 0 {}
        all.extend_from_slice(&output[mark..]);
        let starts: Vec<u8> = all.chunks(11 + (5 << 20)).map(|row| row[11]).collect();
        assert_eq!(starts, b"abc");
    }

    #[tokio::test]
    async fn rows_spill_when_memory_is_short() {
        let (columns, formats) = (columns(Some(Type::Text)), Formats::All(Format::Text));
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let fixture = SpillFixture::new().await;
        let (memory, others) = (Quota::of_memory(tenant.clone()), Quota::of_memory(tenant.clone()));
        let spills = Spills { memory: &memory, ..fixture.spills() };
        // Leaves 1 MiB of 32 MiB.
        let mut occupied = Reservation::default();
        occupied.resize(&others, 31 << 20).unwrap();
        let mut output = Output::from(b"earlier".to_vec());
        let mut writer = RowWriter::new(&mut output, layout(&columns, &formats, false), spills);
        let row = |bytes: usize| [Value::Text("x".repeat(bytes))];
        for _ in 0..20 {
            writer.row(&ValueRow(&row(200 << 10))).unwrap();
        }
        assert!(tenant.used_bytes() <= 32 << 20);
        let error = writer.row(&ValueRow(&row(2 << 20))).unwrap_err();
        assert_eq!(error.state(), sqlstate::OUT_OF_MEMORY, "a row cannot be split");
        let (rows, spilled) = writer.finish();
        assert_eq!(rows, 20);
        let (mark, spill) = spilled.unwrap();
        let row_bytes = 11 + (200 << 10);
        assert_eq!((mark, spill.bytes % row_bytes), (7, 0), "the file must contain only complete rows");
        output.clear();
        assert_eq!(tenant.used_bytes(), 31 << 20);
    }

    #[tokio::test]
    async fn row_with_wrong_column_count_is_rejected() {
        let (columns, formats) = (columns(None), Formats::All(Format::Text));
        let mut output = Output::default();
        let fixture = SpillFixture::new().await;
        let spills = fixture.spills();
        let mut writer = RowWriter::new(&mut output, layout(&columns, &formats, false), spills);
        let failure = writer.row(&ValueRow(&[Value::Null, Value::Null])).unwrap_err();
        assert_eq!(failure.message(), STALE_PLAN);
    }

    #[tokio::test]
    async fn results_are_charged_to_the_tenant_before_they_spill() {
        let (columns, formats) = (columns(Some(Type::Text)), Formats::All(Format::Text));
        let fixture = SpillFixture::new().await;
        fixture.space.set_limit(25 << 20);
        let row = [Value::Text("x".repeat(5 << 20))];
        let write = |output: &mut Output, rows: usize| {
            let mut writer = RowWriter::new(output, layout(&columns, &formats, false), fixture.spills());
            let written = (0..rows).try_for_each(|_| writer.row(&ValueRow(&row)));
            written.map(|()| writer.finish().1)
        };
        let (mut one, mut other) = (Output::default(), Output::default());
        let spilled = write(&mut one, 4).unwrap();
        assert!(spilled.is_some());
        let error = write(&mut other, 4).err().unwrap();
        assert_eq!(error.state(), sqlstate::CONFIGURATION_LIMIT);
        assert_eq!(error.message(), "temporary file size exceeds temp_file_limit (25600kB)");
        drop(spilled);
        assert!(write(&mut other, 4).unwrap().is_some());
    }
}
