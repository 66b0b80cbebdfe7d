//! Prepares statements: turns a text into a [`Statement`] with its parameters, columns and plan.

use std::sync::{Arc, OnceLock};

use fulmar_mvcc::Partition;
use fulmar_sqlite::sql::{
    FirstStatement, Plan, Shape, TableKey, Token, classify, first_statement, shape, tokens,
};
use fulmar_sqlite::{
    ColumnInfo, Columns, Error, ParameterInfo, Prepared, Result, Statement, StatementContext, StatementKind,
    sqlstate, statement_too_long,
};
use hashbrown::HashMap;

use super::{Session, call};
use crate::idle::Idle;

impl Session {
    /// Prepares the first statement of `sql`, without running it. Returns it and the rest of the
    /// text (empty if there is none). In a failed transaction only transaction control is accepted
    /// (25P02).
    pub async fn prepare<'a>(&mut self, sql: &'a str) -> Result<(Arc<Statement>, &'a str)> {
        let _running = self.start();
        let prepared = prepare(self, sql, StatementContext::default()).await;
        if prepared.is_err() {
            self.fail();
        }
        prepared
    }

    /// Like [`Session::prepare`], with additional information about the text. The same text must
    /// always come with the same information.
    pub async fn prepare_as<'a>(
        &mut self,
        sql: &'a str,
        context: StatementContext<'_>,
    ) -> Result<(Arc<Statement>, &'a str)> {
        let _running = self.start();
        let prepared = prepare(self, sql, context).await;
        if prepared.is_err() {
            self.fail();
        }
        prepared
    }
}

async fn prepare<'a>(
    session: &mut Session,
    sql: &'a str,
    context: StatementContext<'_>,
) -> Result<(Arc<Statement>, &'a str)> {
    if let Some(failed) = failed_unless_control(session, sql) {
        return Err(failed);
    }
    if session.has_retired() && !is_control(sql) {
        session.rebuild().await?;
    }
    let writing = session.open.as_ref().is_some_and(|open| open.has_written());
    let partition = match session.partition().await {
        Ok(partition) => partition,
        // The transaction can still be ended.
        Err(error) if session.open.is_some() && is_moved(&error) && is_control(sql) => {
            let (statement, rest) = describe(session, sql, context, None).await?;
            return Ok((Arc::new(statement), rest));
        }
        Err(error) => return Err(error),
    };
    let schema = partition.schema_cookie();
    if !writing
        && !context.once
        && let Some(kept) = partition.attachment::<Idle>().statements.get(sql, schema)
    {
        return Ok((kept, ""));
    }
    // The session's temporary tables may hide others.
    let keys = (session.own.is_none() && !context.system && !context.once)
        .then_some(KeySource { partition: &partition, schema });
    let (statement, rest) = describe(session, sql, context, keys).await?;
    let statement = Arc::new(statement);
    // A description that depends on the transaction's own schema changes is valid for it only.
    // CALLs are not cached: a procedure can be replaced without a change of the schema.
    let lasts = !context.once && !statement.plan.temporary && statement.plan.call.is_none();
    if !writing && rest.is_empty() && lasts && session.own.is_none() {
        partition.attachment::<Idle>().statements.put(sql, schema, &statement, partition.heap());
    }
    Ok((statement, rest))
}

/// In a failed transaction only statements that end it are accepted.
fn failed_unless_control(session: &Session, sql: &str) -> Option<Error> {
    if !session.open.as_ref().is_some_and(|open| open.has_failed()) {
        return None;
    }
    use StatementKind::{Commit, Empty, Rollback, RollbackTo};
    let accepted = matches!(first_kind(sql), Commit | Empty | Rollback | RollbackTo);
    (!accepted).then(super::errors::failed_transaction)
}

fn is_moved(error: &Error) -> bool {
    error.state() == sqlstate::PARTITION_MOVED
}

/// Whether the first statement is transaction control, which needs no schema.
fn is_control(sql: &str) -> bool {
    use StatementKind::{Begin, Commit, Empty, Release, Rollback, RollbackTo, Savepoint};
    matches!(first_kind(sql), Begin | Commit | Empty | Release | Rollback | RollbackTo | Savepoint)
}

fn first_kind(sql: &str) -> StatementKind {
    let statement = tokens(sql).skip_while(|t| t.is_symbol(";"));
    let first: Vec<Token<'_>> = statement.take(6).take_while(|t| !t.is_symbol(";")).collect();
    classify(&first).0
}

/// Where the primary keys of tables are cached. A transaction that changes the schema may cache the
/// key of its own table until the schema changes again: only statistics depend on it.
#[derive(Clone, Copy)]
struct KeySource<'a> {
    partition: &'a Partition,
    schema: u32,
}

impl KeySource<'_> {
    fn get(&self, table: &str) -> Option<Arc<TableKey>> {
        self.partition.attachment::<Idle>().keys.get(table, self.schema)
    }

    fn put(&self, key: &Arc<TableKey>) {
        self.partition.attachment::<Idle>().keys.put(self.schema, key.clone());
    }
}

async fn describe<'a>(
    session: &mut Session,
    sql: &'a str,
    context: StatementContext<'_>,
    key_source: Option<KeySource<'_>>,
) -> Result<(Statement, &'a str)> {
    let limit_bytes = session.engine.max_statement_bytes();
    let FirstStatement { tokens: first, trigger, mut rest } =
        first_statement(sql, limit_bytes).ok_or_else(|| statement_too_long(limit_bytes))?;
    let (kind, begin) = classify(&first);
    let mut shape = shape(kind, &first);
    let end = shape.for_update.or(first.last().map(Token::end)).unwrap_or(0);
    let start = first.first().map_or(0, |t| t.start);
    let text = &sql[start..end.max(start)];
    let plan = Plan {
        begin,
        row: shape.row.take(),
        keys: None,
        for_update: shape.for_update.is_some(),
        vacuum: kind == StatementKind::Utility("VACUUM"),
        checks_integrity: checks_integrity(&first),
        temporary: is_temporary(&first),
        system: context.system,
        explains: first.first().is_some_and(|token| token.is("EXPLAIN")),
        declares: context.declares,
        call: None,
    };
    let id = session.engine.ticket();
    let mut statement = Statement {
        id,
        sql: text.into(),
        kind,
        read_only: true,
        parameters: Vec::new(),
        columns: Vec::new(),
        plan,
        note: OnceLock::new(),
    };
    // Only a CALL needs its tokens while SQLite prepares; of other statements they are freed.
    let words = if kind == StatementKind::Call { first } else { Vec::new() };
    let needs_sqlite = matches!(
        kind,
        StatementKind::Query
            | StatementKind::Insert
            | StatementKind::Update
            | StatementKind::Delete
            | StatementKind::Utility(_)
    );
    if needs_sqlite {
        let values = shape.keys.take().zip(key_source);
        let known = values.as_ref().and_then(|(values, source)| source.get(&values.table));
        let unknown = values.as_ref().filter(|_| known.is_none()).map(|(values, _)| &*values.table);
        let (prepared, tables, key) = describe_in_sqlite(session, &statement, &shape, unknown).await?;
        if trigger {
            rest = &sql[start + prepared.length..];
            statement.sql = text[..prepared.length].trim_end().trim_end_matches(';').into();
        }
        if let Some((values, source)) = values
            && let Some(key) = known.or(key.inspect(|key| source.put(key)))
        {
            statement.plan.keys = values.of_key(&key);
        }
        complete(&mut statement, prepared, &shape, &tables);
        apply_parameter_types(&mut statement, context.parameters);
    }
    if kind == StatementKind::Call {
        call::describe(session, &mut statement, &words, sql).await?;
    }
    if tokens(rest).all(|t| t.is_symbol(";")) {
        rest = "";
    }
    Ok((statement, rest))
}

/// Prepares the text in SQLite, and reads the columns of the tables that it names, and the primary
/// key of the table `keyed`.
async fn describe_in_sqlite(
    session: &mut Session,
    statement: &Statement,
    shape: &Shape,
    keyed: Option<&str>,
) -> Result<(Prepared, Vec<Columns>, Option<Arc<TableKey>>)> {
    session
        .with_connection(|connection| {
            if statement.plan.system {
                connection.enter_system_here()?;
            }
            let describe = |connection: &mut fulmar_sqlite::Connection| {
                connection.describe_here(statement.id, &statement.sql)
            };
            let prepared = match statement.plan.declares {
                true => connection.with_open_schema(describe)?,
                false => describe(connection)?,
            };
            let needed = !shape.parameters.is_empty();
            let tables = if needed { connection.columns_here(&shape.tables)? } else { Vec::new() };
            // Without its key, the statement counts as one without a key.
            let key = keyed.and_then(|table| connection.primary_key_here(table).ok());
            Ok((prepared, tables, key.map(Arc::new)))
        })
        .await
}

/// The declared type of a column of these tables; `#2` is the third column of the first table.
fn declared(tables: &[Columns], column: &str) -> Option<String> {
    match column.strip_prefix('#') {
        Some(position) => tables.first()?.get(position.parse::<usize>().ok()?)?.1.clone(),
        None => tables.iter().flatten().find(|(name, _)| name.eq_ignore_ascii_case(column))?.1.clone(),
    }
}

/// The declared types of all columns of these tables, by name in lower case. The first column of a
/// name counts.
fn declared_by_name(tables: &[Columns]) -> HashMap<String, Option<String>> {
    let mut by_name = HashMap::new();
    for (name, declared) in tables.iter().flatten() {
        by_name.entry(name.to_ascii_lowercase()).or_insert_with(|| declared.clone());
    }
    by_name
}

fn complete(statement: &mut Statement, prepared: Prepared, shape: &Shape, tables: &[Columns]) {
    if prepared.empty {
        statement.kind = StatementKind::Empty;
    }
    // EXPLAIN does not run its statement.
    statement.read_only = prepared.read_only || prepared.explain != 0;
    if statement.kind == StatementKind::Query && prepared.columns.is_empty() {
        // A PRAGMA that only sets a value.
        statement.kind = StatementKind::Utility("SET");
    }
    statement.parameters = vec![ParameterInfo::default(); prepared.parameters];
    /// Number of parameters up to which each is looked up by a linear search of all columns.
    const MAX_LINEAR_SEARCH: usize = 100;
    let by_name = (shape.parameters.len() > MAX_LINEAR_SEARCH).then(|| declared_by_name(tables));
    for place in &shape.parameters {
        if let Some(parameter) = statement.parameters.get_mut(place.number as usize - 1) {
            let context = parameter.declared_type.take();
            let by_name = by_name.as_ref().filter(|_| !place.column.starts_with('#'));
            parameter.declared_type = context.or_else(|| match by_name {
                Some(by_name) => by_name.get(&place.column.to_ascii_lowercase()).cloned().flatten(),
                None => declared(tables, &place.column),
            });
        }
    }
    // ALTER TABLE runs an internal query to check existing rows, and reports its columns.
    let returns_rows = statement.kind != StatementKind::Utility("ALTER TABLE");
    let columns = prepared.columns.into_iter().filter(|_| returns_rows);
    statement.columns = columns.map(|(name, declared_type)| ColumnInfo { name, declared_type }).collect();
}

/// Applies the parameter types that the client's text specifies.
fn apply_parameter_types(statement: &mut Statement, parameters: &[(u16, String)]) {
    for (number, kind) in parameters {
        let place = usize::from(*number).checked_sub(1);
        let Some(parameter) = place.and_then(|place| statement.parameters.get_mut(place)) else { continue };
        parameter.declared_type = match (kind.as_str(), parameter.declared_type.take()) {
            ("[]", context) => Some(format!("{}[]", context.as_deref().unwrap_or("TEXT"))),
            (kind, _) => Some(kind.to_owned()),
        };
    }
}

/// Whether the statement uses one of these PRAGMAs, or the table-valued function of the same name.
fn checks_integrity(tokens: &[Token<'_>]) -> bool {
    tokens.iter().filter_map(Token::name).any(|name| {
        let name = name.strip_prefix("pragma_").unwrap_or(&name);
        name == "integrity_check" || name == "quick_check"
    })
}

fn is_temporary(tokens: &[Token<'_>]) -> bool {
    tokens.first().is_some_and(|t| t.is("CREATE"))
        && tokens.get(1).is_some_and(|t| t.is("TEMP") || t.is("TEMPORARY"))
        || tokens.windows(2).take(6).any(|w| w[0].is("TEMP") && w[1].is_symbol("."))
}
