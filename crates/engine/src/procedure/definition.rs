//! Stored procedure definitions: format, lookup and caching.

use std::sync::Arc;

use fulmar_sqlite::{
    ColumnInfo, Error, ParameterInfo, Result, Row, RowSink, Run, Step, Value, ValueRef, sqlstate,
};

use super::loaded::{Loaded, chunk};
use crate::connection::Connection;

/// The table of a tenant's procedures: an ordinary table that its owner can read and copy.
pub const TABLE: &str = "fulmar_procedures";

/// Creates the table. Parameters and columns are stored as lines, each a name and a declared type.
pub const CREATE_TABLE: &str = "CREATE TABLE IF NOT EXISTS main.fulmar_procedures(\
    name TEXT PRIMARY KEY, parameters TEXT NOT NULL, returns TEXT NOT NULL, source TEXT NOT NULL) WITHOUT ROWID";

const FIND: (u64, &str) =
    (u64::MAX - 16, "SELECT parameters, returns, source FROM main.fulmar_procedures WHERE name = $1");

/// Maximum length of a procedure's source, and of the lists of its parameters and columns.
const MAX_TEXT_BYTES: usize = 256 << 10;

/// Maximum number of parameters, and of result columns; the same as for a table.
const MAX_COLUMNS: usize = 2000;

/// A procedure as specified by CREATE PROCEDURE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    /// In lower case, unless it was quoted.
    pub name: String,
    /// Names and declared types.
    pub parameters: Vec<(String, String)>,
    /// The result columns; empty if the procedure returns no rows.
    pub returns: Vec<(String, String)>,
    /// The Lua source.
    pub source: String,
}

impl Definition {
    /// Checks the names and the syntax. Errors contain the position.
    pub fn check(&self) -> Result<()> {
        for (name, _) in &self.parameters {
            if !is_lua_name(name) {
                let message = format!("invalid parameter name \"{name}\" for a Lua procedure");
                return Err(Error::new(sqlstate::SYNTAX_ERROR, message)
                    .hint("Use letters, digits and underscores, and no reserved word of Lua."));
            }
        }
        if self.source.len() > MAX_TEXT_BYTES {
            return Err(too_long(&self.name));
        }
        if let Some((name, _)) = self.returns.iter().find(|(name, _)| name.contains(char::is_whitespace)) {
            let message = format!("invalid result column name \"{name}\" for a procedure");
            return Err(Error::new(sqlstate::SYNTAX_ERROR, message).hint("Use a name without white space."));
        }
        super::check(&self.name, &self.chunk())
    }

    /// The procedure's row in [`TABLE`].
    pub fn values(&self) -> [Value; 4] {
        [
            Value::Text(self.name.clone()),
            Value::Text(lines(&self.parameters)),
            Value::Text(lines(&self.returns)),
            Value::Text(self.source.clone()),
        ]
    }

    fn chunk(&self) -> String {
        chunk(self.parameters.iter().map(|(name, _)| name.as_str()), &self.source)
    }
}

fn is_lua_name(name: &str) -> bool {
    const RESERVED: [&str; 23] = [
        "and", "break", "continue", "db", "do", "else", "elseif", "end", "false", "for", "function", "if",
        "in", "local", "nil", "not", "or", "repeat", "return", "then", "true", "until", "while",
    ];
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && name.len() <= 63
        && !RESERVED.contains(&name)
}

fn lines(columns: &[(String, String)]) -> String {
    columns.iter().map(|(name, declared)| format!("{name} {declared}")).collect::<Vec<_>>().join("\n")
}

/// Reads the definition of a name. Fails if the transaction cannot continue. If there is no
/// such definition the name in lower case is tried: old definitions were stored under
/// lower-case names, quoted or not, including non-ASCII letters.
pub(super) fn find(
    connection: &mut Connection,
    name: &str,
) -> std::result::Result<Option<Arc<Loaded>>, Step> {
    let found = find_exactly(connection, name)?;
    let lower = name.to_lowercase();
    if found.is_some() || lower == name {
        return Ok(found);
    }
    find_exactly(connection, &lower)
}

fn find_exactly(connection: &mut Connection, name: &str) -> std::result::Result<Option<Arc<Loaded>>, Step> {
    let known = connection.procedures.get(name);
    let mut found = Found { name, known, loaded: None };
    let parameters = [Value::Text(name.to_owned())];
    let run = Run { id: FIND.0, sql: FIND.1, columns: None, parameters: &parameters };
    match connection.run_here(&run, &mut found) {
        Step::Done(_) => {}
        // No procedure has been created yet.
        Step::Failed(error) if error.state() == sqlstate::UNDEFINED_TABLE => return Ok(None),
        other => return Err(other),
    }
    if let (None, Some(loaded)) = (&found.known, &found.loaded) {
        connection.procedures.keep(name, loaded);
    }
    Ok(found.loaded)
}

struct Found<'a> {
    name: &'a str,
    /// The cached definition; None if the texts have changed.
    known: Option<Arc<Loaded>>,
    loaded: Option<Arc<Loaded>>,
}

impl RowSink for Found<'_> {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        // The table is an ordinary one, so its contents are untrusted.
        let text = |column| match row.get(column) {
            ValueRef::Text(text) if text.len() > MAX_TEXT_BYTES => Err(too_long(self.name)),
            ValueRef::Text(text) => Ok(text),
            _ => Ok(&[][..]),
        };
        let texts = [text(0)?, text(1)?, text(2)?];
        if texts[..2].iter().any(|lines| memchr::memchr_iter(b'\n', lines).count() >= MAX_COLUMNS) {
            let message =
                format!("procedure \"{}\" has more than {MAX_COLUMNS} parameters or columns", self.name);
            return Err(Error::new(sqlstate::PROGRAM_LIMIT, message));
        }
        self.known.take_if(|known| !known.is_of(texts));
        self.loaded = Some(self.known.clone().unwrap_or_else(|| Arc::new(Loaded::new(texts))));
        Ok(())
    }

    fn reset(&mut self) {
        self.loaded = None;
    }
}

/// Describes a CALL before it runs: the types of the procedure's parameters in order, and its
/// result columns.
pub(crate) fn describe_here(
    connection: &mut Connection,
    name: &str,
) -> Result<(Vec<ParameterInfo>, Vec<ColumnInfo>)> {
    match find(connection, name) {
        Ok(Some(loaded)) => {
            let typed = |declared: &String| (!declared.is_empty()).then(|| declared.clone());
            let parameters = loaded.parameters().iter();
            let parameters =
                parameters.map(|(_, declared)| ParameterInfo { declared_type: typed(declared) }).collect();
            let returns = loaded.returns().iter();
            let returns = returns
                .map(|(name, declared)| ColumnInfo { name: name.clone(), declared_type: typed(declared) })
                .collect();
            Ok((parameters, returns))
        }
        Ok(None) => Err(unknown(name)),
        Err(Step::Failed(error)) => Err(error),
        Err(_) => Err(Error::new(
            sqlstate::SERIALIZATION_FAILURE,
            "could not serialize access due to a concurrent change of the procedure",
        )),
    }
}

fn too_long(name: &str) -> Error {
    let message = format!("procedure \"{name}\" exceeds the size limit of {} KiB", MAX_TEXT_BYTES >> 10);
    Error::new(sqlstate::PROGRAM_LIMIT, message).hint("Store data in tables.")
}

pub(super) fn unknown(name: &str) -> Error {
    Error::new(sqlstate::UNDEFINED_FUNCTION, format!("procedure \"{name}\" does not exist"))
        .hint("SELECT name FROM fulmar_procedures lists the existing ones.")
}

pub(super) fn check_count(name: &str, wanted: usize, given: usize) -> Result<()> {
    if wanted == given {
        return Ok(());
    }
    let message = format!("procedure \"{name}\" takes {wanted} arguments but {given} were given");
    Err(Error::new(sqlstate::UNDEFINED_FUNCTION, message))
}
