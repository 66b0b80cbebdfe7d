//! A session's prepared statements, and the names of its statements and portals
//! ([`super::portals`]).
//!
//! ```text
//! Parse  text, types --> Prepared (named or unnamed; a small cache of descriptions serves both)
//! Bind   values      --> Portal   (named or unnamed)
//! Execute            --> rows, all of them or up to a limit
//! ```
//!
//! Portals end with their transaction, statements with the session. Their number and their total
//! memory ([`super::memory_quota`]) are bounded.

use std::path::Path;
use std::sync::Arc;

use fulmar_dialect::Command;
use fulmar_dialect::admin::AdminStatement;
use fulmar_dialect::copy::Copy;
use fulmar_engine::{
    AccessedKeys, ColumnInfo, Error, ParameterInfo, Statement, StatementKind, TemporarySpace, sqlstate,
};
use fulmar_pgwire::protocol::frontend::Oids;
use fulmar_pgwire::protocol::{Format, Formats, backend};
use fulmar_pgwire::types::{self, Column, Type};
use hashbrown::HashMap;
use smallvec::SmallVec;

use super::memory_quota::{Quota, Reservation};
use super::portals::Portal;
use super::rows::Spills;
use crate::Result;
use crate::tenant_stats::DataAccess;

/// The default formats if the client specifies none.
pub(crate) const ALL_TEXT: Formats = Formats::All(Format::Text);
/// Maximum number of named statements, and of named portals, of a session.
const MAX_NAMES: usize = 10_000;
/// Maximum size of a name.
const MAX_NAME_BYTES: usize = 1024;
/// Unused capacity that a map of names retains.
const RETAINED_NAMES: usize = 64;
/// Number of statements whose descriptions are cached.
const CACHE_CAPACITY: usize = 16;
/// Maximum memory of a cached statement. The client cannot close cached statements.
const MAX_CACHED_BYTES: u64 = 64 * 1024;

/// How a statement is executed.
#[derive(Clone, Debug)]
pub(crate) enum Plan {
    Engine(Arc<Statement>),
    Command {
        command: Arc<Command>,
        /// The redacted text for the slow query log.
        redacted: Arc<str>,
    },
}

impl Plan {
    /// The primary keys that the plan accesses, if it names them.
    pub(crate) fn keys(&self) -> Option<&AccessedKeys> {
        match self {
            Plan::Engine(statement) => statement.plan.keys.as_ref(),
            Plan::Command { .. } => None,
        }
    }

    /// How the plan uses the tenant's data, for statistics.
    pub(crate) fn uses(&self) -> DataAccess {
        match self {
            Plan::Engine(statement) => match statement.kind {
                StatementKind::Query if statement.read_only => DataAccess::Read,
                StatementKind::Query
                | StatementKind::Insert
                | StatementKind::Update
                | StatementKind::Delete
                | StatementKind::Call
                | StatementKind::Utility(_) => DataAccess::Write,
                _ => DataAccess::None,
            },
            Plan::Command { command, .. } => match &**command {
                Command::Copy(Copy::TableOut { .. } | Copy::Out { .. } | Copy::DatabaseOut) => {
                    DataAccess::Read
                }
                Command::Copy(Copy::In { .. }) | Command::Batch { .. } | Command::Procedure(_) => {
                    DataAccess::Write
                }
                _ => DataAccess::None,
            },
        }
    }
}

/// A parameter of a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameter {
    /// The OID of its type, as declared by the client or the server.
    pub(crate) oid: u32,
    /// `None` for an unsupported type, whose values are accepted in text format only.
    pub(crate) kind: Option<Type>,
}

/// A prepared statement.
pub(crate) struct Prepared {
    pub(crate) plan: Plan,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) columns: Vec<Column>,
    /// The encoded RowDescription for text format. Cached because most clients request it each
    /// time.
    description: Box<[u8]>,
    reservation: Reservation,
}

impl Prepared {
    /// Creates a prepared statement. `oids` are the parameter types that the client declared.
    pub(crate) fn new(plan: Plan, oids: Oids<'_>, columns: Vec<Column>) -> Prepared {
        let parameters = match &plan {
            Plan::Engine(statement) => parameters(statement, oids),
            Plan::Command { .. } => Vec::new(),
        };
        let mut description = Vec::new();
        describe_columns(&mut description, &columns, &ALL_TEXT);
        Prepared {
            plan,
            parameters,
            columns,
            description: description.into(),
            reservation: Reservation::default(),
        }
    }

    /// The memory of the statement, whose text has `text` bytes.
    fn bytes(&self, text: usize) -> u64 {
        let columns =
            self.columns.iter().map(|column| size_of::<Column>() + column.name.len()).sum::<usize>();
        // Columns and text count twice: the engine has its own column descriptions, and may keep
        // the row that the text identifies.
        let parameters = self.parameters.len() * (size_of::<Parameter>() + size_of::<ParameterInfo>());
        (size_of::<Prepared>() + 2 * text + parameters + 2 * columns + self.description.len()) as u64
    }

    /// The size of the messages that describe the parameters and columns.
    pub(crate) fn description_bytes(&self) -> usize {
        /// Type, length and parameter count of a ParameterDescription.
        const HEAD_BYTES: usize = 7;
        HEAD_BYTES + self.parameters.len() * size_of::<u32>() + self.description.len()
    }

    /// Returns true if the type of a column depends on its first value.
    pub(crate) fn has_untyped_columns(&self) -> bool {
        has_untyped_columns(&self.columns)
    }

    /// Writes the RowDescription with the types that are known before the first row.
    pub(crate) fn describe(&self, out: &mut Vec<u8>, formats: &Formats) {
        match formats {
            Formats::All(Format::Text) => out.extend_from_slice(&self.description),
            formats => describe_columns(out, &self.columns, formats),
        }
    }
}

/// Returns true if the type of a column depends on its first value.
pub(crate) fn has_untyped_columns(columns: &[Column]) -> bool {
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

/// The result columns of a plan.
pub(crate) fn columns(plan: &Plan) -> Vec<Column> {
    match plan {
        Plan::Engine(statement) => statement.columns.iter().map(column).collect(),
        Plan::Command { command, .. } => match &**command {
            Command::Show(name) => vec![Column::new(name.as_str(), Type::Text)],
            Command::Admin(AdminStatement::CreateToken { .. }) => vec![Column::new("token", Type::Text)],
            Command::Admin(AdminStatement::MoveNode { .. }) => vec![Column::new("report", Type::Text)],
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
    let declared = info.declared_type.as_deref().and_then(types::declared_type);
    Column {
        name: info.name.clone(),
        kind: declared.map(|declared| declared.kind),
        modifier: declared.map_or(-1, |declared| declared.modifier),
    }
}

/// The type of each parameter: declared by the client, otherwise declared by the column that the
/// parameter is compared with or assigned to, otherwise text.
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
                let declared =
                    info.and_then(|info| info.declared_type.as_deref()).and_then(types::declared_type);
                let kind = declared.map_or(Type::Text, |declared| declared.kind);
                Parameter { oid: kind.oid(), kind: Some(kind) }
            }
        })
        .collect()
}

/// The named prepared statements, with the charge for each name.
type Named = HashMap<Box<str>, (Arc<Prepared>, Reservation)>;

/// A session's statements and portals.
pub(crate) struct Statements {
    named: Named,
    unnamed: Option<Arc<Prepared>>,
    portals: HashMap<Box<str>, Portal>,
    unnamed_portal: Portal,
    cache: Cache,
    memory: Arc<Quota>,
    files: Arc<Quota>,
}

impl Statements {
    /// Creates the statements of a session, which charges its memory to `memory`.
    pub(crate) fn new(memory: Arc<Quota>) -> Statements {
        Statements {
            named: HashMap::default(),
            unnamed: None,
            portals: HashMap::default(),
            unnamed_portal: Portal::default(),
            cache: Cache::default(),
            memory,
            files: Quota::of_files(),
        }
    }

    /// The session's memory quota.
    pub(crate) fn memory(&self) -> &Arc<Quota> {
        &self.memory
    }

    /// Where results spill to: files in `directory`, charged to the tenant by `space`.
    pub(crate) fn spills<'a>(&'a self, directory: &'a Path, space: &'a TemporarySpace) -> Spills<'a> {
        Spills { directory, quota: &self.files, memory: &self.memory, space }
    }

    /// Charges a statement whose text has `text` bytes. The charge is released when the last
    /// reference (a name, a portal or the cache) is dropped.
    pub(crate) fn charge(&self, mut prepared: Prepared, text: usize) -> Result<Arc<Prepared>> {
        let bytes = prepared.bytes(text);
        prepared.reservation.resize(&self.memory, bytes)?;
        Ok(Arc::new(prepared))
    }

    /// The statement with this name.
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

    /// Checks that a new statement can have this name. Drops the unnamed statement, which is
    /// replaced.
    pub(crate) fn check_free(&mut self, name: &str) -> Result<()> {
        if name.is_empty() {
            self.unnamed = None;
            return Ok(());
        }
        if self.named.contains_key(name) {
            let message = format!("prepared statement \"{name}\" already exists");
            return Err(Error::new(sqlstate::DUPLICATE_PREPARED, message));
        }
        check_name(self.named.len(), name, "prepared statement")
    }

    /// Names a statement, and charges the name.
    pub(crate) fn insert(&mut self, name: &str, prepared: Arc<Prepared>) -> Result<()> {
        if name.is_empty() {
            self.unnamed = Some(prepared);
            return Ok(());
        }
        let mut reservation = Reservation::default();
        reservation.resize(&self.memory, entry_bytes::<(Arc<Prepared>, Reservation)>(name) as u64)?;
        self.named.insert(name.into(), (prepared, reservation));
        Ok(())
    }

    /// Closes a statement. Returns false if it does not exist.
    pub(crate) fn close_statement(&mut self, name: &str) -> bool {
        match name {
            "" => self.unnamed.take().is_some(),
            name => {
                let existed = self.named.remove(name).is_some();
                shrink_map(&mut self.named);
                existed
            }
        }
    }

    /// Closes all statements.
    pub(crate) fn close_statements(&mut self) {
        self.named.clear();
        shrink_map(&mut self.named);
        self.unnamed = None;
    }

    /// The cached description of a statement.
    pub(crate) fn described(&mut self, statement: &Arc<Statement>, oids: Oids<'_>) -> Option<Arc<Prepared>> {
        self.cache.get(statement, oids)
    }

    /// Caches a description unless it is large.
    pub(crate) fn remember(&mut self, prepared: Arc<Prepared>, oids: Oids<'_>) {
        if prepared.reservation.bytes() <= MAX_CACHED_BYTES {
            self.cache.put(prepared, oids);
        }
    }

    /// Takes a portal to execute or describe it. The caller must put it back.
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

    /// Puts back a portal that was taken.
    pub(crate) fn put_portal(&mut self, name: &str, portal: Portal) {
        if name.is_empty() {
            self.unnamed_portal = portal;
        } else if let Some(entry) = self.portals.get_mut(name) {
            *entry = portal;
        }
    }

    /// Creates an empty portal with this name.
    pub(crate) fn new_portal(&mut self, name: &str) -> Result<&mut Portal> {
        if name.is_empty() {
            self.unnamed_portal.clear();
            return Ok(&mut self.unnamed_portal);
        }
        if self.portals.contains_key(name) {
            const DUPLICATE_CURSOR: &str = "42P03";
            return Err(Error::new(DUPLICATE_CURSOR, format!("portal \"{name}\" already exists")));
        }
        check_name(self.portals.len(), name, "portal")?;
        let portal = self.portals.entry(name.into()).or_default();
        portal.entry_bytes = entry_bytes::<Portal>(name);
        Ok(portal)
    }

    /// Closes a portal, if it exists.
    pub(crate) fn close_portal(&mut self, name: &str) {
        if name.is_empty() {
            self.unnamed_portal.clear();
        } else {
            self.portals.remove(name);
            shrink_map(&mut self.portals);
        }
    }

    /// Closes all portals at the end of their transaction.
    pub(crate) fn close_portals(&mut self) {
        self.unnamed_portal.clear();
        if !self.portals.is_empty() {
            self.portals.clear();
            shrink_map(&mut self.portals);
        }
    }
}

/// Memory of a map entry with this name. A map has up to twice the capacity that it needs.
fn entry_bytes<V>(name: &str) -> usize {
    name.len() + 2 * size_of::<(Box<str>, V)>()
}

/// Frees map capacity after names were removed.
fn shrink_map<V>(names: &mut HashMap<Box<str>, V>) {
    if names.capacity() > RETAINED_NAMES.max(4 * names.len()) {
        names.shrink_to(2 * names.len());
    }
}

/// Checks that another object of this kind can be created with this name.
fn check_name(count: usize, name: &str, kind: &str) -> Result<()> {
    if name.len() > MAX_NAME_BYTES {
        return Err(Error::new(sqlstate::PROGRAM_LIMIT, format!("{kind} name is too long"))
            .detail(format!("The maximum is {MAX_NAME_BYTES} bytes.")));
    }
    if count < MAX_NAMES {
        return Ok(());
    }
    Err(Error::new(sqlstate::PROGRAM_LIMIT, format!("too many {kind}s"))
        .detail(format!("A session can have {MAX_NAMES} named {kind}s."))
        .hint(format!("Close {kind}s that are no longer needed.")))
}

/// A cache of recently parsed statements, because drivers parse the same statements repeatedly. The
/// engine caches statements by their text and returns a new one after a schema change, so a
/// description is valid for the same engine statement.
#[derive(Default)]
struct Cache {
    /// Most recently used last.
    entries: Vec<(Box<[u8]>, Arc<Prepared>)>,
}

impl Cache {
    fn get(&mut self, statement: &Arc<Statement>, oids: Oids<'_>) -> Option<Arc<Prepared>> {
        let found = self.entries.iter().rposition(|(types, prepared)| {
            let same = matches!(&prepared.plan, Plan::Engine(cached) if Arc::ptr_eq(cached, statement));
            same && **types == *oids.bytes()
        })?;
        self.entries[found..].rotate_left(1);
        self.entries.last().map(|entry| entry.1.clone())
    }

    fn put(&mut self, prepared: Arc<Prepared>, oids: Oids<'_>) {
        if self.entries.len() == CACHE_CAPACITY {
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
    fn statement_is_charged_once_until_the_last_reference_is_dropped() {
        let mut statements = Statements::new(Quota::unlimited());
        let hold = |statements: &Statements, text| {
            let plan = Plan::Command { command: Arc::new(Command::ShowAll), redacted: "".into() };
            statements.charge(Prepared::new(plan, Oids::default(), Vec::new()), text)
        };
        let prepared = hold(&statements, 100 << 20).unwrap();
        for name in ["a", "b", "c"] {
            statements.check_free(name).unwrap();
            statements.insert(name, prepared.clone()).unwrap();
        }
        statements.new_portal("p").unwrap().prepared = Some(prepared);
        let state = |held: Result<Arc<Prepared>>| held.err().map(|error| error.state());
        let limit_error = Some(sqlstate::PROGRAM_LIMIT);
        assert_eq!(state(hold(&statements, 30 << 20)), limit_error);
        statements.close_statements();
        assert_eq!(
            state(hold(&statements, 30 << 20)),
            limit_error,
            "a portal must keep its statement charged"
        );
        statements.close_portals();
        assert_eq!(state(hold(&statements, 125 << 20)), None);
    }

    #[test]
    fn statement_names_are_charged() {
        const COUNT: usize = 2000;
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let mut statements = Statements::new(Quota::of_memory(tenant.clone()));
        let plan = Plan::Command { command: Arc::new(Command::ShowAll), redacted: "".into() };
        let prepared = statements.charge(Prepared::new(plan, Oids::default(), Vec::new()), 0).unwrap();
        let name = |number: usize| format!("{number:0>MAX_NAME_BYTES$}");
        for number in 0..COUNT {
            statements.insert(&name(number), prepared.clone()).unwrap();
        }
        assert!(tenant.used_bytes() > (COUNT * MAX_NAME_BYTES) as u64, "{} bytes", tenant.used_bytes());
        for number in 0..COUNT - 1 {
            assert!(statements.close_statement(&name(number)));
        }
        assert_eq!(tenant.used_bytes(), 0);
        assert!(statements.named.capacity() <= RETAINED_NAMES, "capacity {}", statements.named.capacity());
        assert!(statements.statement(&name(COUNT - 1)).is_ok());
    }

    #[test]
    fn portal_names_and_formats_are_charged() {
        const COUNT: usize = 2000;
        const COLUMNS: usize = 2000;
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let memory = Quota::of_memory(tenant.clone());
        let mut statements = Statements::new(memory.clone());
        for number in 0..COUNT {
            let portal = statements.new_portal(&format!("{number:0>MAX_NAME_BYTES$}")).unwrap();
            portal.set_formats(Formats::Each(SmallVec::from_elem(Format::Binary, COLUMNS)));
            portal.reserve_values(1, 10, &memory).unwrap();
            portal.hold_values(&memory).unwrap();
            portal.forget_values();
        }
        let min_bytes = COUNT * (MAX_NAME_BYTES + COLUMNS);
        assert!(tenant.used_bytes() > min_bytes as u64, "{} bytes", tenant.used_bytes());
        statements.close_portals();
        assert_eq!(tenant.used_bytes(), 0);
        assert_eq!(statements.portals.capacity(), 0);
    }

    #[test]
    fn formats_of_the_unnamed_portal_are_charged() {
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let memory = Quota::of_memory(tenant.clone());
        let mut statements = Statements::new(memory.clone());
        let portal = statements.new_portal("").unwrap();
        portal.set_formats(Formats::Each(SmallVec::from_elem(Format::Text, 60_000)));
        portal.reserve_values(0, 0, &memory).unwrap();
        assert!(tenant.used_bytes() > 0);
        statements.new_portal("").unwrap();
        assert_eq!(tenant.used_bytes(), 0);
    }

    #[test]
    fn long_names_are_rejected() {
        let mut statements = Statements::new(Quota::unlimited());
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for name in [&long, &long[1..]] {
            let expected = (name.len() > MAX_NAME_BYTES).then_some(sqlstate::PROGRAM_LIMIT);
            assert_eq!(statements.check_free(name).err().map(|error| error.state()), expected);
            assert_eq!(statements.new_portal(name).err().map(|error| error.state()), expected);
        }
    }
}
