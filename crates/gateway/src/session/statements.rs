//! Prepared statements, and the names of statements and portals ([`super::portals`]).
//!
//! ```text
//! Parse  text, types --> Prepared (named, or the unnamed one; a small cache behind both)
//! Bind   values      --> Portal   (named, or the unnamed one)
//! Execute            --> rows, all of them or a few at a time
//! ```
//!
//! Portals end with their transaction, statements with the session. Their number is bounded, and what they hold all
//! together ([`super::held`]).

use std::path::Path;
use std::sync::Arc;

use fulmar_engine::{ColumnInfo, Error, ParameterInfo, Statement, StatementKind, TemporarySpace, sqlstate};
use hashbrown::HashMap;
use smallvec::SmallVec;

use super::held::{Account, Share};
use super::portals::Portal;
use super::rows::Spills;
use crate::Result;
use crate::dialect::Command;
use crate::dialect::admin::Admin;
use crate::dialect::copy::Copy;
use crate::protocol::frontend::Oids;
use crate::protocol::{Format, Formats, backend};
use crate::tenants::Use;
use crate::types::{self, Column, Type};

/// What is meant where a client names no formats.
pub(crate) const TEXT: Formats = Formats::All(Format::Text);
/// Statements and portals that a session may name.
const NAMES: usize = 10_000;
/// Bytes of one of these names.
const NAME_BYTES: usize = 1024;
/// Names for which a map keeps room that it does not use.
const KEPT_NAMES: usize = 64;
/// Statements whose descriptions are kept beyond their names,
const CACHED: usize = 16;
/// if they are not larger than that: nobody can close them.
const CACHED_BYTES: u64 = 64 * 1024;

/// How a statement is run.
#[derive(Clone, Debug)]
pub(crate) enum Plan {
    Engine(Arc<Statement>),
    Command {
        command: Arc<Command>,
        /// Its text, as it may be logged.
        shown: Arc<str>,
    },
}

impl Plan {
    /// What it does with the tenant's data, for those who count.
    pub(crate) fn uses(&self) -> Use {
        match self {
            Plan::Engine(statement) => match statement.kind {
                StatementKind::Query if statement.read_only => Use::Read,
                StatementKind::Query
                | StatementKind::Insert
                | StatementKind::Update
                | StatementKind::Delete
                | StatementKind::Call
                | StatementKind::Utility(_) => Use::Write,
                _ => Use::None,
            },
            Plan::Command { command, .. } => match &**command {
                Command::Copy(Copy::TableOut { .. } | Copy::Out { .. } | Copy::DatabaseOut) => Use::Read,
                Command::Copy(Copy::In { .. }) | Command::Batch { .. } | Command::Procedure(_) => Use::Write,
                _ => Use::None,
            },
        }
    }
}

/// A parameter of a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameter {
    /// The number of its type, as the client or we said.
    pub(crate) oid: u32,
    /// `None`: a type that Fulmar does not speak, which can come as text only.
    pub(crate) kind: Option<Type>,
}

/// A statement that has been parsed.
pub(crate) struct Prepared {
    pub(crate) plan: Plan,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) columns: Vec<Column>,
    /// The message that describes the columns, as text: most clients ask for it each time.
    description: Box<[u8]>,
    share: Share,
}

impl Prepared {
    /// Describes a plan with these columns; `oids` are the types that the client gave its parameters.
    pub(crate) fn new(plan: Plan, oids: Oids<'_>, columns: Vec<Column>) -> Prepared {
        let parameters = match &plan {
            Plan::Engine(statement) => parameters(statement, oids),
            Plan::Command { .. } => Vec::new(),
        };
        let mut description = Vec::new();
        describe_columns(&mut description, &columns, &TEXT);
        Prepared { plan, parameters, columns, description: description.into(), share: Share::default() }
    }

    /// What it holds, with a text of so many bytes.
    fn bytes(&self, text: usize) -> u64 {
        let columns =
            self.columns.iter().map(|column| size_of::<Column>() + column.name.len()).sum::<usize>();
        // The engine describes them too, and may keep the row that the text names.
        let parameters = self.parameters.len() * (size_of::<Parameter>() + size_of::<ParameterInfo>());
        (size_of::<Prepared>() + 2 * text + parameters + 2 * columns + self.description.len()) as u64
    }

    /// Bytes of the messages that describe its parameters and columns.
    pub(crate) fn description_bytes(&self) -> usize {
        /// Kind, length and number of parameters of a ParameterDescription.
        const HEAD_BYTES: usize = 7;
        HEAD_BYTES + self.parameters.len() * size_of::<u32>() + self.description.len()
    }

    /// Whether a column has no type before its first value.
    pub(crate) fn is_open(&self) -> bool {
        is_open(&self.columns)
    }

    /// Describes the columns with the types that are known before the first row.
    pub(crate) fn describe(&self, out: &mut Vec<u8>, formats: &Formats) {
        match formats {
            Formats::All(Format::Text) => out.extend_from_slice(&self.description),
            formats => describe_columns(out, &self.columns, formats),
        }
    }
}

/// Whether a column has no type before its first value.
pub(crate) fn is_open(columns: &[Column]) -> bool {
    columns.iter().any(|column| column.kind.is_none())
}

fn describe_columns(out: &mut Vec<u8>, columns: &[Column], formats: &Formats) {
    if columns.is_empty() {
        return backend::no_data(out);
    }
    let types: SmallVec<[Type; 16]> =
        columns.iter().map(|column| column.kind.unwrap_or(Type::Text)).collect();
    backend::row_description(out, columns, &types, formats);
}

/// The columns that a plan answers.
pub(crate) fn columns(plan: &Plan) -> Vec<Column> {
    match plan {
        Plan::Engine(statement) => statement.columns.iter().map(column).collect(),
        Plan::Command { command, .. } => match &**command {
            Command::Show(name) => vec![Column::new(name.as_str(), Type::Text)],
            Command::Admin(Admin::CreateToken { .. }) => vec![Column::new("token", Type::Text)],
            Command::ShowAll => {
                ["name", "setting", "description"].map(|name| Column::new(name, Type::Text)).to_vec()
            }
            Command::Verify => vec![
                Column::new("file", Type::Text),
                Column::new("byte", Type::Int8),
                Column::new("problem", Type::Text),
                Column::new("databases", Type::Text),
            ],
            _ => Vec::new(),
        },
    }
}

fn column(info: &ColumnInfo) -> Column {
    let declared = info.declared_type.as_deref().and_then(types::declared);
    Column {
        name: info.name.clone(),
        kind: declared.map(|declared| declared.kind),
        modifier: declared.map_or(-1, |declared| declared.modifier),
    }
}

/// The client's type, else that of the column it belongs to, else text.
fn parameters(statement: &Statement, oids: Oids<'_>) -> Vec<Parameter> {
    let mut given = oids.iter();
    let count = statement.parameters.len().max(given.len());
    (0..count)
        .map(|index| match given.next() {
            Some(oid) if oid != 0 && oid != Type::Unknown.oid() => {
                Parameter { oid, kind: Type::from_oid(oid) }
            }
            _ => {
                let info = statement.parameters.get(index);
                let declared = info.and_then(|info| info.declared_type.as_deref()).and_then(types::declared);
                let kind = declared.map_or(Type::Text, |declared| declared.kind);
                Parameter { oid: kind.oid(), kind: Some(kind) }
            }
        })
        .collect()
}

/// The prepared statements that have names, and the charge for each name.
type Named = HashMap<Box<str>, (Arc<Prepared>, Share)>;

/// A session's statements and portals.
pub(crate) struct Statements {
    named: Named,
    unnamed: Option<Arc<Prepared>>,
    portals: HashMap<Box<str>, Portal>,
    unnamed_portal: Portal,
    cache: Cache,
    memory: Arc<Account>,
    files: Arc<Account>,
}

impl Statements {
    /// Those of a session, which charges its memory to a tenant.
    pub(crate) fn new(memory: Arc<Account>) -> Statements {
        Statements {
            named: HashMap::default(),
            unnamed: None,
            portals: HashMap::default(),
            unnamed_portal: Portal::default(),
            cache: Cache::default(),
            memory,
            files: Account::of_files(),
        }
    }

    /// The session's memory.
    pub(crate) fn memory(&self) -> &Arc<Account> {
        &self.memory
    }

    /// How an answer spills into `directory`, charged to the tenant by `space`.
    pub(crate) fn spills<'a>(&'a self, directory: &'a Path, space: &'a TemporarySpace) -> Spills<'a> {
        Spills { directory, account: &self.files, memory: &self.memory, space }
    }

    /// Counts what a statement with a text of so many bytes holds, for as long as it is known by a name, a portal or here.
    pub(crate) fn hold(&self, mut prepared: Prepared, text: usize) -> Result<Arc<Prepared>> {
        let bytes = prepared.bytes(text);
        prepared.share.set(&self.memory, bytes)?;
        Ok(Arc::new(prepared))
    }

    /// The statement of that name.
    pub(crate) fn statement(&self, name: &str) -> Result<&Arc<Prepared>> {
        let found = match name {
            "" => self.unnamed.as_ref(),
            name => self.named.get(name).map(|(prepared, _)| prepared),
        };
        found.ok_or_else(|| {
            let message = match name {
                "" => "unnamed prepared statement does not exist".to_owned(),
                name => format!("prepared statement \"{name}\" does not exist"),
            };
            Error::new(sqlstate::INVALID_STATEMENT_NAME, message)
        })
    }

    /// Checks that a new statement can have that name. The unnamed one is replaced.
    pub(crate) fn check_free(&mut self, name: &str) -> Result<()> {
        if name.is_empty() {
            self.unnamed = None;
            return Ok(());
        }
        if self.named.contains_key(name) {
            let message = format!("prepared statement \"{name}\" already exists");
            return Err(Error::new(sqlstate::DUPLICATE_PREPARED, message));
        }
        room(self.named.len(), name, "prepared statements")
    }

    /// Names a statement, and charges the name.
    pub(crate) fn insert(&mut self, name: &str, prepared: Arc<Prepared>) -> Result<()> {
        if name.is_empty() {
            self.unnamed = Some(prepared);
            return Ok(());
        }
        let mut share = Share::default();
        share.set(&self.memory, entry_bytes::<(Arc<Prepared>, Share)>(name) as u64)?;
        self.named.insert(name.into(), (prepared, share));
        Ok(())
    }

    /// Forgets a statement; it is no error if there is none.
    pub(crate) fn close_statement(&mut self, name: &str) -> bool {
        match name {
            "" => self.unnamed.take().is_some(),
            name => {
                let known = self.named.remove(name).is_some();
                shrink_room(&mut self.named);
                known
            }
        }
    }

    /// Forgets all statements.
    pub(crate) fn close_statements(&mut self) {
        self.named.clear();
        shrink_room(&mut self.named);
        self.unnamed = None;
    }

    /// The description of a statement that the engine answered before.
    pub(crate) fn described(&mut self, statement: &Arc<Statement>, oids: Oids<'_>) -> Option<Arc<Prepared>> {
        self.cache.get(statement, oids)
    }

    /// Keeps a description, if it is not large.
    pub(crate) fn remember(&mut self, prepared: Arc<Prepared>, oids: Oids<'_>) {
        if prepared.share.bytes() <= CACHED_BYTES {
            self.cache.put(prepared, oids);
        }
    }

    /// Takes a portal out, to be run. It must be put back.
    pub(crate) fn take_portal(&mut self, name: &str) -> Result<Portal> {
        let portal = if name.is_empty() {
            Some(std::mem::take(&mut self.unnamed_portal))
        } else {
            self.portals.get_mut(name).map(std::mem::take)
        };
        portal.filter(|portal| portal.prepared.is_some()).ok_or_else(|| {
            Error::new(sqlstate::INVALID_CURSOR_NAME, format!("portal \"{name}\" does not exist"))
        })
    }

    /// Puts back what was taken.
    pub(crate) fn put_portal(&mut self, name: &str, portal: Portal) {
        if name.is_empty() {
            self.unnamed_portal = portal;
        } else if let Some(place) = self.portals.get_mut(name) {
            *place = portal;
        }
    }

    /// An empty portal to bind, of that name.
    pub(crate) fn new_portal(&mut self, name: &str) -> Result<&mut Portal> {
        if name.is_empty() {
            self.unnamed_portal.clear();
            return Ok(&mut self.unnamed_portal);
        }
        if self.portals.contains_key(name) {
            const DUPLICATE_CURSOR: &str = "42P03";
            return Err(Error::new(DUPLICATE_CURSOR, format!("portal \"{name}\" already exists")));
        }
        room(self.portals.len(), name, "portals")?;
        let portal = self.portals.entry(name.into()).or_default();
        portal.entry_bytes = entry_bytes::<Portal>(name);
        Ok(portal)
    }

    /// Forgets a portal; it is no error if there is none.
    pub(crate) fn close_portal(&mut self, name: &str) {
        if name.is_empty() {
            self.unnamed_portal.clear();
        } else {
            self.portals.remove(name);
            shrink_room(&mut self.portals);
        }
    }

    /// Forgets all portals: their transaction has ended.
    pub(crate) fn close_portals(&mut self) {
        self.unnamed_portal.clear();
        if !self.portals.is_empty() {
            self.portals.clear();
            shrink_room(&mut self.portals);
        }
    }
}

/// Memory of a name in a map of `V`s. A map has up to twice as much room as it needs.
fn entry_bytes<V>(name: &str) -> usize {
    name.len() + 2 * size_of::<(Box<str>, V)>()
}

/// Frees room that a map used for names that have been removed.
fn shrink_room<V>(names: &mut HashMap<Box<str>, V>) {
    if names.capacity() > KEPT_NAMES.max(4 * names.len()) {
        names.shrink_to(2 * names.len());
    }
}

/// Whether one more of them can have that name.
fn room(count: usize, name: &str, what: &str) -> Result<()> {
    if name.len() > NAME_BYTES {
        let message = format!("the names of {what} can have {NAME_BYTES} bytes at most");
        return Err(Error::new(sqlstate::PROGRAM_LIMIT, message).hint("Use a shorter name."));
    }
    if count < NAMES {
        return Ok(());
    }
    Err(Error::new(sqlstate::PROGRAM_LIMIT, format!("a session can have {NAMES} {what} at most"))
        .hint("Close those that you no longer need."))
}

/// The statements that were parsed last: drivers parse the same ones again and again. The engine keeps statements by
/// their text and answers another one when the schema has changed, so the same statement has the same description.
#[derive(Default)]
struct Cache {
    /// The newest last.
    entries: Vec<(Box<[u8]>, Arc<Prepared>)>,
}

impl Cache {
    fn get(&mut self, statement: &Arc<Statement>, oids: Oids<'_>) -> Option<Arc<Prepared>> {
        let found = self.entries.iter().rposition(|(types, prepared)| {
            let same = matches!(&prepared.plan, Plan::Engine(known) if Arc::ptr_eq(known, statement));
            same && **types == *oids.bytes()
        })?;
        self.entries[found..].rotate_left(1);
        self.entries.last().map(|entry| entry.1.clone())
    }

    fn put(&mut self, prepared: Arc<Prepared>, oids: Oids<'_>) {
        if self.entries.len() == CACHED {
            self.entries.remove(0);
        }
        self.entries.push((oids.bytes().into(), prepared));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Budget;

    #[test]
    fn a_statement_is_held_once_and_for_as_long_as_somebody_knows_it() {
        let mut statements = Statements::new(Account::unlimited());
        let hold = |statements: &Statements, text| {
            let plan = Plan::Command { command: Arc::new(Command::ShowAll), shown: "".into() };
            statements.hold(Prepared::new(plan, Oids::default(), Vec::new()), text)
        };
        let prepared = hold(&statements, 100 << 20).unwrap();
        for name in ["a", "b", "c"] {
            statements.check_free(name).unwrap();
            statements.insert(name, prepared.clone()).unwrap();
        }
        statements.new_portal("p").unwrap().prepared = Some(prepared);
        let state = |held: Result<Arc<Prepared>>| held.err().map(|error| error.state());
        let refused = Some(sqlstate::PROGRAM_LIMIT);
        assert_eq!(state(hold(&statements, 30 << 20)), refused);
        statements.close_statements();
        assert_eq!(state(hold(&statements, 30 << 20)), refused, "the portal has it");
        statements.close_portals();
        assert_eq!(state(hold(&statements, 125 << 20)), None);
    }

    #[test]
    fn names_of_statements_are_charged() {
        const COUNT: usize = 2000;
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let mut statements = Statements::new(Account::of_memory(tenant.clone()));
        let plan = Plan::Command { command: Arc::new(Command::ShowAll), shown: "".into() };
        let prepared = statements.hold(Prepared::new(plan, Oids::default(), Vec::new()), 0).unwrap();
        let name = |number: usize| format!("{number:0>NAME_BYTES$}");
        for number in 0..COUNT {
            statements.insert(&name(number), prepared.clone()).unwrap();
        }
        assert!(tenant.used_bytes() > (COUNT * NAME_BYTES) as u64, "{} bytes", tenant.used_bytes());
        for number in 0..COUNT - 1 {
            assert!(statements.close_statement(&name(number)));
        }
        assert_eq!(tenant.used_bytes(), 0);
        assert!(statements.named.capacity() <= KEPT_NAMES, "room for {}", statements.named.capacity());
        assert!(statements.statement(&name(COUNT - 1)).is_ok());
    }

    #[test]
    fn names_and_formats_of_portals_are_charged() {
        const COUNT: usize = 2000;
        const COLUMNS: usize = 2000;
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let memory = Account::of_memory(tenant.clone());
        let mut statements = Statements::new(memory.clone());
        for number in 0..COUNT {
            let portal = statements.new_portal(&format!("{number:0>NAME_BYTES$}")).unwrap();
            portal.set_formats(Formats::Each(SmallVec::from_elem(Format::Binary, COLUMNS)));
            portal.reserve_values(1, 10, &memory).unwrap();
            portal.hold_values(&memory).unwrap();
            portal.forget_values();
        }
        let least = COUNT * (NAME_BYTES + COLUMNS);
        assert!(tenant.used_bytes() > least as u64, "{} bytes", tenant.used_bytes());
        statements.close_portals();
        assert_eq!(tenant.used_bytes(), 0);
        assert_eq!(statements.portals.capacity(), 0);
    }

    #[test]
    fn an_unnamed_portal_with_many_formats_is_charged() {
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let memory = Account::of_memory(tenant.clone());
        let mut statements = Statements::new(memory.clone());
        let portal = statements.new_portal("").unwrap();
        portal.set_formats(Formats::Each(SmallVec::from_elem(Format::Text, 60_000)));
        portal.reserve_values(0, 0, &memory).unwrap();
        assert!(tenant.used_bytes() > 0);
        statements.new_portal("").unwrap();
        assert_eq!(tenant.used_bytes(), 0);
    }

    #[test]
    fn names_are_not_long() {
        let mut statements = Statements::new(Account::unlimited());
        let long = "x".repeat(NAME_BYTES + 1);
        for name in [&long, &long[1..]] {
            let refused = (name.len() > NAME_BYTES).then_some(sqlstate::PROGRAM_LIMIT);
            assert_eq!(statements.check_free(name).err().map(|error| error.state()), refused);
            assert_eq!(statements.new_portal(name).err().map(|error| error.state()), refused);
        }
    }
}
