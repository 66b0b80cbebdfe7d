//! Parses client messages: splits the receive buffer into frames, and decodes frames into messages.
//!
//! Nothing is allocated or copied except lists of formats: a message borrows from the buffer. Every
//! length and count is checked against the available bytes before use. Malformed input results in
//! [`Malformed`], which closes the connection with 08P01.

use super::{Format, Formats};

/// A protocol violation, with its description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// A complete message, not yet decoded.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// The kind of the message.
    pub kind: u8,
    /// The bytes after the length field.
    pub body: &'a [u8],
    /// Size of the whole message in bytes.
    pub size: usize,
}

/// The first frame of `input`. `None` if it is not complete yet.
pub fn frame(input: &[u8], limit_bytes: usize) -> Result<Option<Frame<'_>>, Malformed> {
    let Some((&kind, rest)) = input.split_first() else { return Ok(None) };
    let Some(length) = rest.first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_be_bytes(*length) as usize;
    if length < 4 {
        return Err(Malformed("invalid message length"));
    }
    if length > limit_bytes {
        return Err(Malformed("message exceeds the maximum length"));
    }
    Ok(rest.get(4..length).map(|body| Frame { kind, body, size: length + 1 }))
}

/// The kind and the size in bytes of the first message in `input`, once its header has been
/// received.
pub fn header(input: &[u8]) -> Option<(u8, usize)> {
    let (&kind, rest) = input.split_first()?;
    let length = u32::from_be_bytes(*rest.first_chunk::<4>()?);
    Some((kind, length as usize + 1))
}

/// The object of a Describe or Close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A prepared statement.
    Statement,
    /// A portal.
    Portal,
}

/// A message from a client, after startup.
#[derive(Debug, PartialEq)]
pub enum Message<'a> {
    /// Runs statements (simple protocol).
    Query {
        /// The text of the statements.
        sql: &'a [u8],
    },
    /// Prepares a statement.
    Parse {
        /// The statement's name; empty for the unnamed one.
        name: &'a str,
        /// The text of the statement.
        sql: &'a [u8],
        /// The parameter types that the client declares.
        types: Oids<'a>,
    },
    /// Binds parameters to a statement.
    Bind(Bind<'a>),
    /// Requests the description of a statement or portal.
    Describe {
        /// The kind of the object.
        target: Target,
        /// Its name.
        name: &'a str,
    },
    /// Executes a portal.
    Execute {
        /// The portal's name.
        portal: &'a str,
        /// The maximum number of rows; 0 for all.
        limit_rows: u32,
    },
    /// Closes a statement or portal.
    Close {
        /// The kind of the object.
        target: Target,
        /// Its name.
        name: &'a str,
    },
    /// Requests that all responses are sent.
    Flush,
    /// Ends a sequence of messages of the extended protocol.
    Sync,
    /// Ends the session.
    Terminate,
    /// COPY data. A message boundary has no meaning.
    CopyData(&'a [u8]),
    /// The end of the COPY data.
    CopyDone,
    /// The client aborts the COPY.
    CopyFail {
        /// The client's error message.
        reason: &'a [u8],
    },
}

/// Binds parameters to a statement, which creates a portal.
#[derive(Debug, PartialEq)]
pub struct Bind<'a> {
    /// The name of the portal.
    pub portal: &'a str,
    /// The name of the statement.
    pub statement: &'a str,
    /// The formats of the values.
    pub formats: Formats,
    /// The values of the parameters.
    pub values: Values<'a>,
    /// The formats of the result columns.
    pub result_formats: Formats,
}

/// The parameter types in a Parse.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Oids<'a>(&'a [u8]);

impl<'a> Oids<'a> {
    /// The types in order. 0 means that the server chooses the type.
    pub fn iter(self) -> impl ExactSizeIterator<Item = u32> + 'a {
        self.0.chunks_exact(4).map(|oid| u32::from_be_bytes([oid[0], oid[1], oid[2], oid[3]]))
    }

    /// The undecoded bytes, for comparing two lists.
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }
}

/// The parameter values of a Bind. Their lengths have been checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Values<'a> {
    count: usize,
    bytes: &'a [u8],
}

impl<'a> Values<'a> {
    /// The number of values.
    pub fn count(self) -> usize {
        self.count
    }

    /// Size of the values in bytes, including their length fields.
    pub fn bytes(self) -> usize {
        self.bytes.len()
    }

    /// The values in order. `None` is NULL.
    pub fn iter(self) -> impl Iterator<Item = Option<&'a [u8]>> {
        let mut reader = Reader(self.bytes);
        (0..self.count).map_while(move |_| reader.value().ok())
    }
}

/// Decodes a frame.
pub fn message<'a>(frame: &Frame<'a>) -> Result<Message<'a>, Malformed> {
    let mut reader = Reader(frame.body);
    let message = match frame.kind {
        b'Q' => Message::Query { sql: reader.string()? },
        b'P' => parse(&mut reader)?,
        b'B' => Message::Bind(bind(&mut reader)?),
        b'D' => Message::Describe { target: reader.target()?, name: reader.name()? },
        b'E' => Message::Execute { portal: reader.name()?, limit_rows: reader.u32()? },
        b'C' => Message::Close { target: reader.target()?, name: reader.name()? },
        b'H' => Message::Flush,
        b'S' => Message::Sync,
        b'X' => Message::Terminate,
        b'd' => Message::CopyData(std::mem::take(&mut reader.0)),
        b'c' => Message::CopyDone,
        b'f' => Message::CopyFail { reason: reader.string()? },
        b'F' => return Err(Malformed("function call messages are not supported")),
        _ => return Err(Malformed("invalid frontend message type")),
    };
    if !reader.0.is_empty() {
        return Err(Malformed("invalid message format"));
    }
    Ok(message)
}

fn parse<'a>(reader: &mut Reader<'a>) -> Result<Message<'a>, Malformed> {
    let name = reader.name()?;
    let sql = reader.string()?;
    let count = usize::from(reader.u16()?);
    Ok(Message::Parse { name, sql, types: Oids(reader.bytes(count * 4)?) })
}

fn bind<'a>(reader: &mut Reader<'a>) -> Result<Bind<'a>, Malformed> {
    let portal = reader.name()?;
    let statement = reader.name()?;
    let formats = reader.formats()?;
    let count = usize::from(reader.u16()?);
    let values = reader.0;
    for _ in 0..count {
        reader.value()?;
    }
    let values = Values { count, bytes: &values[..values.len() - reader.0.len()] };
    if !formats.fits(count) {
        return Err(Malformed("bind message has different numbers of parameter formats and parameters"));
    }
    Ok(Bind { portal, statement, formats, values, result_formats: reader.formats()? })
}

/// Reads fields from the front of a body.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (bytes, rest) =
            self.0.split_at_checked(count).ok_or(Malformed("insufficient data left in message"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn chunk<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (chunk, rest) =
            self.0.split_first_chunk().ok_or(Malformed("insufficient data left in message"))?;
        self.0 = rest;
        Ok(*chunk)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_be_bytes(self.chunk()?))
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_be_bytes(self.chunk()?))
    }

    fn string(&mut self) -> Result<&'a [u8], Malformed> {
        let end = self.0.iter().position(|&byte| byte == 0).ok_or(Malformed("invalid string in message"))?;
        let string = &self.0[..end];
        self.0 = &self.0[end + 1..];
        Ok(string)
    }

    fn name(&mut self) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.string()?)
            .map_err(|_| Malformed("invalid byte sequence for encoding \"UTF8\" in a name"))
    }

    fn target(&mut self) -> Result<Target, Malformed> {
        match self.chunk()? {
            [b'S'] => Ok(Target::Statement),
            [b'P'] => Ok(Target::Portal),
            _ => Err(Malformed("invalid message subtype")),
        }
    }

    /// A value, preceded by its length. The length -1 is NULL.
    fn value(&mut self) -> Result<Option<&'a [u8]>, Malformed> {
        match self.u32()? {
            u32::MAX => Ok(None),
            length => self.bytes(length as usize).map(Some),
        }
    }

    fn formats(&mut self) -> Result<Formats, Malformed> {
        let count = usize::from(self.u16()?);
        let codes = self.bytes(count * 2)?;
        let mut formats = codes.chunks_exact(2).map(|code| match code {
            [0, 0] => Ok(Format::Text),
            [0, 1] => Ok(Format::Binary),
            _ => Err(Malformed("unsupported format code")),
        });
        match count {
            0 => Ok(Formats::All(Format::Text)),
            1 => formats.next().unwrap_or(Ok(Format::Text)).map(Formats::All),
            _ => formats.collect::<Result<_, _>>().map(Formats::Each),
        }
    }
}

/// Returns true if the next message in `input` is a Sync, not counting Close messages before it.
/// Then an Execute before them is the only statement of its transaction.
pub fn sync_follows(mut input: &[u8]) -> bool {
    while let Ok(Some(frame)) = frame(input, usize::MAX) {
        match frame.kind {
            b'S' => return true,
            b'C' => input = &input[frame.size..],
            _ => return false,
        }
    }
    false
}

/// Returns true if the next message in `input` executes the portal `name`.
pub fn execute_follows(input: &[u8], name: &str) -> bool {
    match frame(input, usize::MAX) {
        Ok(Some(next)) => {
            matches!(message(&next), Ok(Message::Execute { portal, .. }) if portal == name)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use postgres_protocol::IsNull;
    use postgres_protocol::message::frontend as client;
    use proptest::prelude::*;

    use super::*;

    fn first(input: &[u8]) -> Message<'_> {
        message(&frame(input, 1 << 20).unwrap().unwrap()).unwrap()
    }

    #[test]
    fn decodes_messages_of_a_client_library() {
        let mut buffer = BytesMut::new();
        client::parse("s1", "SELECT $1", [23, 0], &mut buffer).unwrap();
        let Message::Parse { name, sql, types } = first(&buffer) else { panic!() };
        assert_eq!((name, sql), ("s1", &b"SELECT $1"[..]));
        assert_eq!(types.iter().collect::<Vec<_>>(), [23, 0]);

        buffer.clear();
        let values = [Some(&b"\0\0\0\x07"[..]), None, Some(&b"x"[..])];
        let write = |value: Option<&[u8]>, out: &mut BytesMut| match value {
            Some(bytes) => {
                out.extend_from_slice(bytes);
                Ok(IsNull::No)
            }
            None => Ok(IsNull::Yes),
        };
        if client::bind("p", "s1", [1, 0, 0], values, write, [1], &mut buffer).is_err() {
            panic!("the client library failed to write a Bind");
        }
        let Message::Bind(bind) = first(&buffer) else { panic!() };
        assert_eq!((bind.portal, bind.statement), ("p", "s1"));
        assert_eq!(bind.formats.get(0), Some(Format::Binary));
        assert_eq!(bind.formats.get(1), Some(Format::Text));
        assert_eq!(bind.values.iter().collect::<Vec<_>>(), values);
        assert_eq!(bind.result_formats, Formats::All(Format::Binary));

        buffer.clear();
        client::execute("p", 7, &mut buffer).unwrap();
        assert_eq!(first(&buffer), Message::Execute { portal: "p", limit_rows: 7 });
    }

    #[test]
    fn sync_follows_skips_only_close_messages() {
        let mut buffer = BytesMut::new();
        client::close(b'P', "p", &mut buffer).unwrap();
        assert!(!sync_follows(&buffer));
        client::sync(&mut buffer);
        assert!(sync_follows(&buffer));
        assert!(!sync_follows(&buffer[..buffer.len() - 1]));

        buffer.clear();
        client::flush(&mut buffer);
        client::sync(&mut buffer);
        assert!(!sync_follows(&buffer));
    }

    #[test]
    fn rejects_malformed_messages() {
        assert!(frame(&[b'Q', 0, 0, 0, 3], 100).is_err());
        assert!(frame(&[b'Q', 0xff, 0xff, 0xff, 0xff], 100).is_err());
        assert!(frame(&[b'Q', 0, 0, 0, 9, 0], 100).unwrap().is_none());
        let no_end = Frame { kind: b'Q', body: b"SELECT 1", size: 13 };
        assert_eq!(message(&no_end), Err(Malformed("invalid string in message")));
        let left_over = Frame { kind: b'S', body: b"x", size: 6 };
        assert_eq!(message(&left_over), Err(Malformed("invalid message format")));
        // One parameter of almost 2^31 bytes.
        let short = Frame { kind: b'B', body: b"\0\0\0\0\0\x01\x7f\xff\xff\xff\0\0", size: 17 };
        assert_eq!(message(&short), Err(Malformed("insufficient data left in message")));
    }

    proptest! {
        /// Decoding returns for any input, and the result borrows only from the input.
        #[test]
        fn arbitrary_input_decodes_or_is_rejected(
            kind in any::<u8>(),
            body in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let decoded = message(&Frame { kind, body: &body, size: body.len() + 5 });
            if let Ok(Message::Bind(bind)) = decoded {
                prop_assert_eq!(bind.values.iter().count(), bind.values.count());
            }
            let mut input = vec![kind];
            input.extend_from_slice(&body);
            if let Ok(Some(frame)) = frame(&input, 1000) {
                prop_assert!(frame.size <= input.len());
                prop_assert_eq!(frame.body.len() + 5, frame.size);
            }
            sync_follows(&input);
            execute_follows(&input, "");
        }
    }
}
