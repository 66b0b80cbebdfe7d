//! What is kept of a procedure, and finding it.

use crate::connection::{Connection, Run, Step};
use crate::statement::{Row, RowSink};
use crate::value::ValueRef;
use crate::{ColumnInfo, Error, ParameterInfo, Result, Value, sqlstate};

/// The table of a tenant's procedures: an ordinary one, which its owner sees and may copy.
pub const TABLE: &str = "fulmar_procedures";

/// Makes it. Parameters and columns are lines, each a name and a declared type.
pub const CREATE_TABLE: &str = "CREATE TABLE IF NOT EXISTS main.fulmar_procedures(\
    name TEXT PRIMARY KEY, parameters TEXT NOT NULL, returns TEXT NOT NULL, source TEXT NOT NULL) WITHOUT ROWID";

const FIND: (u64, &str) =
    (u64::MAX - 16, "SELECT parameters, returns, source FROM main.fulmar_procedures WHERE name = $1");

/// Length of a procedure's source, and of the lists of its parameters and columns.
const LONGEST_BYTES: usize = 1 << 20;

/// A procedure as CREATE PROCEDURE says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    /// In lower case, unless it was quoted.
    pub name: String,
    /// Names and declared types.
    pub parameters: Vec<(String, String)>,
    /// The columns of its answer; empty if it answers no rows.
    pub returns: Vec<(String, String)>,
    /// Lua.
    pub source: String,
}

impl Definition {
    /// Checks that it can be run: its names and its syntax. The errors say where.
    pub fn check(&self) -> Result<()> {
        for (name, _) in &self.parameters {
            if !is_lua_name(name) {
                let message = format!("a parameter of a Lua procedure cannot be named \"{name}\"");
                return Err(Error::new(sqlstate::SYNTAX_ERROR, message)
                    .hint("letters, digits and underscores, and no word of Lua's own"));
            }
        }
        if self.source.len() > LONGEST_BYTES {
            return Err(too_long(&self.name));
        }
        if let Some((name, _)) = self.returns.iter().find(|(name, _)| name.contains(char::is_whitespace)) {
            let message = format!("a column of a procedure's answer cannot be named \"{name}\"");
            return Err(Error::new(sqlstate::SYNTAX_ERROR, message).hint("names without white space"));
        }
        super::check(&self.name, &self.chunk())
    }

    /// The row of [`TABLE`] for it.
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

/// What Lua is given: parameters are locals, on the line where the source begins, so that its lines keep their numbers.
fn chunk<'a>(parameters: impl Iterator<Item = &'a str>, source: &str) -> String {
    let mut chunk = String::from("local db");
    parameters.for_each(|name| chunk.extend([", ", name]));
    chunk.push_str(" = ...; ");
    chunk.push_str(source);
    chunk
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

/// Names and declared types out of lines.
fn columns(lines: &str) -> impl Iterator<Item = (&str, &str)> {
    lines.lines().map(|line| line.split_once(' ').unwrap_or((line, "")))
}

/// A definition that was read in a transaction.
#[derive(Default)]
pub(super) struct Loaded {
    parameters: String,
    returns: String,
    source: String,
}

impl Loaded {
    /// Reads the definition of that name; an error if the transaction cannot go on.
    pub(super) fn find(connection: &mut Connection, name: &str) -> std::result::Result<Option<Loaded>, Step> {
        let mut found = Found { name, loaded: None };
        let parameters = [Value::Text(name.to_owned())];
        let run = Run { id: FIND.0, sql: FIND.1, columns: None, parameters: &parameters };
        match connection.run_here(&run, &mut found) {
            Step::Done(_) => Ok(found.loaded),
            // Nobody has made a procedure yet.
            Step::Failed(error) if error.state() == sqlstate::UNDEFINED_TABLE => Ok(None),
            other => Err(other),
        }
    }

    pub(super) fn parameters(&self) -> Vec<&str> {
        columns(&self.parameters).map(|(name, _)| name).collect()
    }

    pub(super) fn returns(&self) -> Vec<&str> {
        columns(&self.returns).map(|(name, _)| name).collect()
    }

    pub(super) fn chunk(&self) -> String {
        chunk(columns(&self.parameters).map(|(name, _)| name), &self.source)
    }
}

struct Found<'a> {
    name: &'a str,
    loaded: Option<Loaded>,
}

impl RowSink for Found<'_> {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        // An ordinary table: anything may be in it.
        let text = |column| match row.get(column) {
            ValueRef::Text(text) if text.len() > LONGEST_BYTES => Err(too_long(self.name)),
            ValueRef::Text(text) => Ok(String::from_utf8_lossy(text).into_owned()),
            _ => Ok(String::new()),
        };
        self.loaded = Some(Loaded { parameters: text(0)?, returns: text(1)?, source: text(2)? });
        Ok(())
    }

    fn reset(&mut self) {
        self.loaded = None;
    }
}

/// What a client is told of a CALL before it runs: the types of the procedure's parameters in order, and its columns.
pub(crate) fn describe_here(
    connection: &mut Connection,
    name: &str,
) -> Result<(Vec<ParameterInfo>, Vec<ColumnInfo>)> {
    match Loaded::find(connection, name) {
        Ok(Some(loaded)) => {
            let typed = |declared: &str| (!declared.is_empty()).then(|| declared.to_owned());
            let parameters = columns(&loaded.parameters)
                .map(|(_, declared)| ParameterInfo { declared_type: typed(declared) })
                .collect();
            let returns = columns(&loaded.returns)
                .map(|(name, declared)| ColumnInfo { name: name.to_owned(), declared_type: typed(declared) })
                .collect();
            Ok((parameters, returns))
        }
        Ok(None) => Err(unknown(name)),
        Err(Step::Failed(error)) => Err(error),
        Err(_) => {
            Err(Error::new(sqlstate::SERIALIZATION_FAILURE, "the procedure changed while it was looked up"))
        }
    }
}

fn too_long(name: &str) -> Error {
    let message = format!("procedure \"{name}\" has more than {} KiB", LONGEST_BYTES >> 10);
    Error::new(sqlstate::PROGRAM_LIMIT, message).hint("data belongs into tables")
}

pub(super) fn unknown(name: &str) -> Error {
    Error::new(sqlstate::UNDEFINED_FUNCTION, format!("procedure \"{name}\" does not exist"))
        .hint("SELECT name FROM fulmar_procedures shows those that do")
}

pub(super) fn check_count(name: &str, wanted: usize, given: usize) -> Result<()> {
    if wanted == given {
        return Ok(());
    }
    let message = format!("procedure \"{name}\" takes {wanted} arguments, and {given} were given");
    Err(Error::new(sqlstate::UNDEFINED_FUNCTION, message))
}
