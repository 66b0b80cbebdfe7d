//! Decodes the columns of a DataRow in place.

use super::error::Error;

/// The columns of a row that have not been read yet, in text format.
pub struct Row<'a> {
    rest: &'a [u8],
}

impl<'a> Row<'a> {
    /// Starts at the first column of a DataRow's body.
    pub(super) fn new(body: &'a [u8]) -> Result<Row<'a>, Error> {
        let (_, rest) = body.split_first_chunk::<2>().ok_or(TRUNCATED)?;
        Ok(Row { rest })
    }

    /// Returns the next column. NULL is an error.
    pub fn next_text(&mut self) -> Result<&'a [u8], Error> {
        let (length, rest) = self.rest.split_first_chunk::<4>().ok_or(TRUNCATED)?;
        let length = i32::from_be_bytes(*length);
        let length = usize::try_from(length).map_err(|_| Error::Protocol("unexpected NULL value"))?;
        let (value, rest) = rest.split_at_checked(length).ok_or(TRUNCATED)?;
        self.rest = rest;
        Ok(value)
    }

    /// Returns the next column as a 64-bit integer.
    pub fn next_i64(&mut self) -> Result<i64, Error> {
        let text = std::str::from_utf8(self.next_text()?).map_err(|_| NOT_AN_INTEGER)?;
        text.parse().map_err(|_| NOT_AN_INTEGER)
    }

    /// Returns the next column as a 32-bit integer.
    pub fn next_i32(&mut self) -> Result<i32, Error> {
        i32::try_from(self.next_i64()?).map_err(|_| NOT_AN_INTEGER)
    }
}

const TRUNCATED: Error = Error::Protocol("truncated data row");
const NOT_AN_INTEGER: Error = Error::Protocol("invalid integer value");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_read_in_order() {
        let body = b"\0\x04\0\0\0\x02hi\0\0\0\x03-12\0\0\0\x0b12345678901\xff\xff\xff\xff";
        let mut row = Row::new(body).unwrap();
        assert_eq!(row.next_text().unwrap(), b"hi");
        assert_eq!(row.next_i32().unwrap(), -12);
        assert_eq!(row.next_i64().unwrap(), 12_345_678_901);
        assert!(row.next_text().is_err(), "NULL must be an error");
    }

    #[test]
    fn malformed_rows_and_values_are_errors() {
        assert!(Row::new(b"\0").is_err());
        assert!(Row::new(b"\0\x01\0\0\0\x09hi").unwrap().next_text().is_err());
        assert!(Row::new(b"\0\x01\0\0\0\x02hi").unwrap().next_i64().is_err());
        assert!(Row::new(b"\0\x01\0\0\0\x0b12345678901").unwrap().next_i32().is_err());
        assert!(Row::new(b"\0\0").unwrap().next_text().is_err());
    }
}
