//! Writes server messages directly to the send buffer.
//!
//! Strings from outside (names, error texts) may contain zero bytes, which would terminate them
//! early and shift the rest of the message. They are written as blanks.

use bytes::BufMut;
use fulmar_sqlite::{CommandTag, Error, TransactionStatus};

use super::{Format, Formats};
use crate::types::{Column, Type};

/// The severity of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The statement failed.
    Error,
    /// The connection is closed.
    Fatal,
}

/// Starts a message. [`finish`] writes its length.
fn begin(out: &mut Vec<u8>, kind: u8) -> usize {
    out.put_u8(kind);
    out.put_u32(0);
    out.len() - 4
}

/// Ends the message whose length field is at `at`.
fn finish(out: &mut [u8], at: usize) {
    let length = (out.len() - at) as u32;
    out[at..at + 4].copy_from_slice(&length.to_be_bytes());
}

fn put_string(out: &mut Vec<u8>, string: &str) {
    if string.as_bytes().contains(&0) {
        out.extend(string.bytes().map(|byte| if byte == 0 { b' ' } else { byte }));
    } else {
        out.put_slice(string.as_bytes());
    }
    out.put_u8(0);
}

/// Writes ParseComplete.
pub fn parse_complete(out: &mut Vec<u8>) {
    out.put_slice(b"1\0\0\0\x04");
}

/// Writes BindComplete.
pub fn bind_complete(out: &mut Vec<u8>) {
    out.put_slice(b"2\0\0\0\x04");
}

/// Writes CloseComplete.
pub fn close_complete(out: &mut Vec<u8>) {
    out.put_slice(b"3\0\0\0\x04");
}

/// Writes NoData.
pub fn no_data(out: &mut Vec<u8>) {
    out.put_slice(b"n\0\0\0\x04");
}

/// Writes PortalSuspended.
pub fn portal_suspended(out: &mut Vec<u8>) {
    out.put_slice(b"s\0\0\0\x04");
}

/// Writes EmptyQueryResponse.
pub fn empty_query(out: &mut Vec<u8>) {
    out.put_slice(b"I\0\0\0\x04");
}

/// Writes ReadyForQuery.
pub fn ready(out: &mut Vec<u8>, status: TransactionStatus) {
    out.put_slice(b"Z\0\0\0\x05");
    out.put_u8(match status {
        TransactionStatus::Idle => b'I',
        TransactionStatus::InTransaction => b'T',
        TransactionStatus::Failed => b'E',
    });
}

/// CommandComplete, or EmptyQueryResponse for an empty query.
pub fn command_complete(out: &mut Vec<u8>, tag: CommandTag) {
    let (text, count) = match tag {
        CommandTag::Select(rows) => ("SELECT ", Some(rows)),
        CommandTag::Insert(rows) => ("INSERT 0 ", Some(rows)),
        CommandTag::Update(rows) => ("UPDATE ", Some(rows)),
        CommandTag::Delete(rows) => ("DELETE ", Some(rows)),
        CommandTag::Copy(rows) => ("COPY ", Some(rows)),
        CommandTag::Plain(tag) => (tag, None),
        CommandTag::Empty => return empty_query(out),
    };
    let at = begin(out, b'C');
    out.put_slice(text.as_bytes());
    if let Some(count) = count {
        crate::types::number::put_u64(out, count);
    }
    out.put_u8(0);
    finish(out, at);
}

/// CopyInResponse: the client may send text rows with this number of columns.
pub fn copy_in(out: &mut Vec<u8>, columns: usize) {
    copy_response(out, b'G', false, columns);
}

/// CopyOutResponse: text rows with this number of columns follow.
pub fn copy_out(out: &mut Vec<u8>, columns: usize) {
    copy_response(out, b'H', false, columns);
}

/// CopyInResponse: the client may send bytes that are not rows.
pub fn copy_in_bytes(out: &mut Vec<u8>) {
    copy_response(out, b'G', true, 0);
}

/// CopyOutResponse: bytes that are not rows follow.
pub fn copy_out_bytes(out: &mut Vec<u8>) {
    copy_response(out, b'H', true, 0);
}

/// CopyData: `write` writes the line of a row.
pub fn copy_data<R>(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
    let at = begin_copy_data(out);
    let written = write(out);
    finish(out, at);
    written
}

/// Starts a CopyData. [`end_row`] ends it.
pub fn begin_copy_data(out: &mut Vec<u8>) -> usize {
    begin(out, b'd')
}

/// CopyDone: all rows have been sent.
pub fn copy_done(out: &mut Vec<u8>) {
    let at = begin(out, b'c');
    finish(out, at);
}

fn copy_response(out: &mut Vec<u8>, tag: u8, binary: bool, columns: usize) {
    let at = begin(out, tag);
    out.put_u8(binary.into());
    out.put_u16(columns as u16);
    out.put_bytes(0, columns * 2);
    finish(out, at);
}

/// ParameterDescription: the types of a statement's parameters.
pub fn parameter_description(out: &mut Vec<u8>, oids: impl ExactSizeIterator<Item = u32>) {
    let at = begin(out, b't');
    out.put_u16(oids.len() as u16);
    oids.for_each(|oid| out.put_u32(oid));
    finish(out, at);
}

/// RowDescription: the columns of a result. `types` are the types in which the values will be sent.
pub fn row_description(out: &mut Vec<u8>, columns: &[Column], types: &[Type], formats: &Formats) {
    let at = begin(out, b'T');
    out.put_u16(columns.len() as u16);
    for (index, (column, kind)) in columns.iter().zip(types).enumerate() {
        put_string(out, &column.name);
        out.put_u32(0); // OID of the table: none
        out.put_u16(0); // column number in the table: none
        out.put_u32(kind.oid());
        out.put_i16(kind.size());
        out.put_i32(column.modifier);
        out.put_u16(matches!(formats.get(index), Some(Format::Binary)).into());
    }
    finish(out, at);
}

/// Starts a DataRow. [`end_row`] ends it.
pub fn begin_row(out: &mut Vec<u8>, columns: usize) -> usize {
    let at = begin(out, b'D');
    out.put_u16(columns as u16);
    at
}

/// Ends the DataRow or CopyData at the position that `begin_row` or `begin_copy_data` returned.
pub fn end_row(out: &mut [u8], at: usize) {
    finish(out, at);
}

/// Writes ParameterStatus.
pub fn parameter_status(out: &mut Vec<u8>, name: &str, value: &str) {
    let at = begin(out, b'S');
    put_string(out, name);
    put_string(out, value);
    finish(out, at);
}

/// ErrorResponse.
pub fn error(out: &mut Vec<u8>, error: &Error, severity: Severity) {
    let at = begin(out, b'E');
    let severity = match severity {
        Severity::Error => "ERROR",
        Severity::Fatal => "FATAL",
    };
    put_fields(out, severity, error.state(), error.message());
    if let Some(detail) = error.get_detail() {
        put_field(out, b'D', detail);
    }
    if let Some(hint) = error.get_hint() {
        put_field(out, b'H', hint);
    }
    if error.message() == fulmar_sqlite::STALE_PLAN {
        // PostgreSQL raises this error in a routine of this name. Drivers recognize it and prepare
        // the statement again.
        put_field(out, b'R', "RevalidateCachedQuery");
    }
    if let Some(position) = error.get_position() {
        out.put_u8(b'P');
        crate::types::number::put_u64(out, position as u64);
        out.put_u8(0);
    }
    out.put_u8(0);
    finish(out, at);
}

/// NoticeResponse: a notice or a warning.
pub fn notice(out: &mut Vec<u8>, state: &str, message: &str) {
    let at = begin(out, b'N');
    put_fields(out, if state.starts_with("00") { "NOTICE" } else { "WARNING" }, state, message);
    out.put_u8(0);
    finish(out, at);
}

fn put_fields(out: &mut Vec<u8>, severity: &str, state: &str, message: &str) {
    put_field(out, b'S', severity);
    put_field(out, b'V', severity);
    put_field(out, b'C', state);
    put_field(out, b'M', message);
}

fn put_field(out: &mut Vec<u8>, field: u8, value: &str) {
    out.put_u8(field);
    put_string(out, value);
}

#[cfg(test)]
mod tests {
    use fulmar_sqlite::sqlstate;

    use super::*;

    #[test]
    fn command_tags_match_postgres() {
        let mut out = Vec::new();
        command_complete(&mut out, CommandTag::Insert(12));
        assert_eq!(&out[..], b"C\0\0\0\x10INSERT 0 12\0");
        out.clear();
        command_complete(&mut out, CommandTag::Empty);
        assert_eq!(&out[..], b"I\0\0\0\x04");
    }

    #[test]
    fn error_fields_contain_no_zero_bytes() {
        let mut out = Vec::new();
        let failure = Error::new(sqlstate::UNDEFINED_TABLE, "no\0table").hint("make one").position(8);
        error(&mut out, &failure, Severity::Error);
        let body = b"SERROR\0VERROR\0C42P01\0Mno table\0Hmake one\0P8\0\0";
        assert_eq!(out[0], b'E');
        assert_eq!(out[1..5], (body.len() as u32 + 4).to_be_bytes());
        assert_eq!(&out[5..], body);
    }
}
