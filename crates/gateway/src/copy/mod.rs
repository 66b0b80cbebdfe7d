//! The formats of COPY: rows as lines of text, in PostgreSQL's own format or as CSV.
//!
//! | | text | CSV |
//! | --- | --- | --- |
//! | between columns | tab | comma |
//! | NULL | `\N` | an empty field without quotes |
//! | what would be mistaken | escaped with a backslash | in quotes, which are doubled inside |
//! | end of line in a value | `\n` | as it is, in quotes |
//!
//! [`read`] cuts and reads what a client sends, [`write`] makes lines of rows. Both know nothing of sessions.

#[cfg(test)]
mod fuzz;
pub(crate) mod read;
pub(crate) mod write;

use fulmar_engine::{Error, sqlstate};

use crate::Result;

/// How rows are written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Format {
    pub(crate) csv: bool,
    /// What stands between two columns.
    pub(crate) delimiter: u8,
    /// How NULL is written.
    pub(crate) null: String,
    /// Around a field of CSV.
    pub(crate) quote: u8,
    /// Before a quote inside quotes.
    pub(crate) escape: u8,
    pub(crate) header: Header,
    /// Columns of CSV that are written in quotes whenever they are not NULL.
    pub(crate) force_quote: Columns,
    /// Columns of CSV in which a quoted field may be NULL as well.
    pub(crate) force_null: Columns,
    /// Columns of CSV that are never NULL.
    pub(crate) force_not_null: Columns,
}

impl Format {
    /// PostgreSQL's text format.
    pub(crate) fn text() -> Format {
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

    /// CSV as PostgreSQL has it.
    pub(crate) fn csv() -> Format {
        Format { csv: true, delimiter: b',', null: String::new(), ..Format::text() }
    }
}

impl Format {
    /// Checks that its options name only columns that are copied.
    pub(crate) fn check_columns(&self, columns: &[String]) -> Result<()> {
        for named in [&self.force_quote, &self.force_null, &self.force_not_null] {
            let Columns::Named(names) = named else { continue };
            if let Some(name) =
                names.iter().find(|name| !columns.iter().any(|column| column.eq_ignore_ascii_case(name)))
            {
                let message = format!("column \"{name}\" is none of those that are copied");
                return Err(Error::new(sqlstate::UNDEFINED_COLUMN, message));
            }
        }
        Ok(())
    }
}

/// Whether the first line names the columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Header {
    None,
    Names,
    /// And has to name those that are copied.
    Match,
}

/// Some columns of those that are copied.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Columns {
    None,
    All,
    Named(Vec<String>),
}

impl Columns {
    /// For each column whether it is one of them.
    fn of(&self, columns: &[String]) -> Vec<bool> {
        let named = |column: &String| match self {
            Columns::None => false,
            Columns::All => true,
            Columns::Named(names) => names.iter().any(|name| name.eq_ignore_ascii_case(column)),
        };
        columns.iter().map(named).collect()
    }
}
