//! The text formats of COPY: PostgreSQL's text format and CSV.
//!
//! | | text | CSV |
//! | --- | --- | --- |
//! | delimiter | tab | comma |
//! | NULL | `\N` | an empty field without quotes |
//! | special characters | escaped with a backslash | in quotes; quotes are doubled |
//! | line end in a value | `\n` | unchanged, in quotes |
//!
//! [`read`] parses the lines that a client sends, [`write`] formats rows as lines. Both are
//! independent of sessions.

#[cfg(test)]
mod fuzz;
pub mod read;
pub mod write;

use fulmar_sqlite::{Error, sqlstate};

use crate::Result;

/// The format of COPY data, with its options.
#[derive(Clone, Debug, PartialEq)]
pub struct Format {
    /// CSV instead of the text format.
    pub csv: bool,
    /// The byte between two columns.
    pub delimiter: u8,
    /// The text of NULL.
    pub null: String,
    /// CSV: the quote around a field.
    pub quote: u8,
    /// CSV: the escape before a quote inside quotes.
    pub escape: u8,
    /// The HEADER option.
    pub header: Header,
    /// CSV: columns whose values are always quoted, except NULL.
    pub force_quote: Columns,
    /// CSV: columns in which a quoted field can be NULL too.
    pub force_null: Columns,
    /// CSV: columns whose fields are never NULL.
    pub force_not_null: Columns,
}

impl Format {
    /// PostgreSQL's text format.
    pub fn text() -> Format {
        Format {
            csv: false,
            delimiter: b'\t',
            null: "\\N".into(),
            quote: b'"',
            escape: b'"',
            header: Header::None,
            force_quote: Columns::None,
            force_null: Columns::None,
            force_not_null: Columns::None,
        }
    }

    /// PostgreSQL's CSV format.
    pub fn csv() -> Format {
        Format { csv: true, delimiter: b',', null: String::new(), ..Format::text() }
    }
}

impl Format {
    /// Checks that the options name only columns of the COPY.
    pub fn check_columns(&self, columns: &[String]) -> Result<()> {
        for named in [&self.force_quote, &self.force_null, &self.force_not_null] {
            let Columns::Named(names) = named else { continue };
            if let Some(name) =
                names.iter().find(|name| !columns.iter().any(|column| column.eq_ignore_ascii_case(name)))
            {
                let message = format!("column \"{name}\" is not referenced by COPY");
                return Err(Error::new(sqlstate::UNDEFINED_COLUMN, message));
            }
        }
        Ok(())
    }
}

/// The HEADER option.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Header {
    /// There is no header line.
    None,
    /// The first line contains the column names.
    Names,
    /// The first line must contain exactly the names of the copied columns.
    Match,
}

/// A subset of the copied columns.
#[derive(Clone, Debug, PartialEq)]
pub enum Columns {
    /// No column.
    None,
    /// All columns.
    All,
    /// The columns with these names.
    Named(Vec<String>),
}

impl Columns {
    /// For each column, true if it is in the subset.
    fn of(&self, columns: &[String]) -> Vec<bool> {
        let named = |column: &String| match self {
            Columns::None => false,
            Columns::All => true,
            Columns::Named(names) => names.iter().any(|name| name.eq_ignore_ascii_case(column)),
        };
        columns.iter().map(named).collect()
    }
}
