//! Preparing: from a text to a [`Statement`] that says what it needs and answers.

use std::sync::Arc;

use super::{Session, call};
use crate::connection::{Columns, Connection, Prepared};
use crate::sql::{First, Plan, Shape, Token, classify, first_statement, shape, tokens};
use crate::{ColumnInfo, Known, ParameterInfo, Result, Statement, StatementKind};

pub(super) async fn prepare<'a>(
    session: &mut Session,
    sql: &'a str,
    known: Known<'_>,
) -> Result<(Arc<Statement>, &'a str)> {
    if let Some(failed) = failed_unless_control(session, sql) {
        return Err(failed);
    }
    if session.has_let_go() && !is_control(sql) {
        session.rebuild().await?;
    }
    let writing = session.open.as_ref().is_some_and(|open| open.has_written());
    let partition = session.partition().await?;
    let schema = partition.schema_cookie();
    if !writing
        && !known.once
        && let Some(kept) = partition.statements.get(sql, schema)
    {
        return Ok((kept, ""));
    }
    let (statement, rest) = describe(session, sql, known).await?;
    let statement = Arc::new(statement);
    // A description made under the transaction's own schema changes is nobody else's.
    // A procedure may be replaced without a change of the schema.
    let lasts = !known.once && !statement.plan.temporary && statement.plan.call.is_none();
    if !writing && rest.is_empty() && lasts && session.own.is_none() {
        partition.statements.put(sql, schema, &statement);
    }
    Ok((statement, rest))
}

/// In a failed transaction only its end is accepted.
fn failed_unless_control(session: &Session, sql: &str) -> Option<crate::Error> {
    if !session.open.as_ref().is_some_and(|open| open.has_failed()) {
        return None;
    }
    use StatementKind::{Commit, Empty, Rollback, RollbackTo};
    let accepted = matches!(first_kind(sql), Commit | Empty | Rollback | RollbackTo);
    (!accepted).then(super::open::failed_transaction)
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

async fn describe<'a>(session: &mut Session, sql: &'a str, known: Known<'_>) -> Result<(Statement, &'a str)> {
    let First { tokens: first, trigger, mut rest } = first_statement(sql);
    let (kind, begin) = classify(&first);
    let mut shape = shape(kind, &first);
    let end = shape.for_update.or(first.last().map(Token::end)).unwrap_or(0);
    let start = first.first().map_or(0, |t| t.start);
    let text = &sql[start..end.max(start)];
    let plan = Plan {
        begin,
        row: shape.row.take(),
        for_update: shape.for_update.is_some(),
        vacuum: kind == StatementKind::Utility("VACUUM"),
        checks_integrity: checks_integrity(&first),
        temporary: is_temporary(&first),
        system: known.system,
        explains: first.first().is_some_and(|token| token.is("EXPLAIN")),
        declares: known.declares,
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
    };
    let asks_sqlite = matches!(
        kind,
        StatementKind::Query
            | StatementKind::Insert
            | StatementKind::Update
            | StatementKind::Delete
            | StatementKind::Utility(_)
    );
    if asks_sqlite {
        let (prepared, tables) = ask_sqlite(session, &statement, &shape).await?;
        if trigger {
            rest = &sql[start + prepared.length..];
            statement.sql = text[..prepared.length].trim_end().trim_end_matches(';').into();
        }
        complete(&mut statement, prepared, &shape, &tables);
        learn(&mut statement, known.parameters);
    }
    if kind == StatementKind::Call {
        call::describe(session, &mut statement, &first, sql).await?;
    }
    if tokens(rest).all(|t| t.is_symbol(";")) {
        rest = "";
    }
    Ok((statement, rest))
}

/// Prepares the text and looks at the tables that it names.
async fn ask_sqlite(
    session: &mut Session,
    statement: &Statement,
    shape: &Shape,
) -> Result<(Prepared, Vec<Columns>)> {
    ask(session, |connection| {
        if statement.plan.system {
            connection.enter_system_here()?;
        }
        let describe = |connection: &mut Connection| connection.describe_here(statement.id, &statement.sql);
        let prepared = match statement.plan.declares {
            true => connection.with_open_schema(describe)?,
            false => describe(connection)?,
        };
        let needed = !shape.parameters.is_empty();
        let tables = if needed { connection.columns_here(&shape.tables) } else { Vec::new() };
        Ok((prepared, tables))
    })
    .await
}

/// Runs `body` on the transaction's connection, or on one that is borrowed for it.
pub(super) async fn ask<T>(
    session: &mut Session,
    body: impl FnOnce(&mut Connection) -> Result<T>,
) -> Result<T> {
    if let Some(connection) = session.open.as_mut().and_then(|open| open.connection.as_mut()) {
        return connection.run(body)?.await;
    }
    let variables = session.variables();
    let mut connection = session.checkout(variables).await?;
    {
        let mut transaction = connection.link.transaction.borrow_mut();
        transaction.track_reads = false;
        transaction.lone = true;
    }
    let answer = connection.run(body)?.await;
    session.give_back(connection);
    answer
}

/// The declared type of a column of these tables; `#2` is the third one of the first.
fn declared(tables: &[Columns], column: &str) -> Option<String> {
    match column.strip_prefix('#') {
        Some(position) => tables.first()?.get(position.parse::<usize>().ok()?)?.1.clone(),
        None => tables.iter().flatten().find(|(name, _)| name.eq_ignore_ascii_case(column))?.1.clone(),
    }
}

fn complete(statement: &mut Statement, prepared: Prepared, shape: &Shape, tables: &[Columns]) {
    if prepared.empty {
        statement.kind = StatementKind::Empty;
    }
    // What EXPLAIN explains is not run.
    statement.read_only = prepared.read_only || prepared.explain != 0;
    if statement.kind == StatementKind::Query && prepared.columns.is_empty() {
        // A PRAGMA that only sets something.
        statement.kind = StatementKind::Utility("SET");
    }
    statement.parameters = vec![ParameterInfo::default(); prepared.parameters];
    for place in &shape.parameters {
        if let Some(parameter) = statement.parameters.get_mut(place.number as usize - 1) {
            let known = parameter.declared_type.take();
            parameter.declared_type = known.or_else(|| declared(tables, &place.column));
        }
    }
    let columns = prepared.columns.into_iter();
    statement.columns = columns.map(|(name, declared_type)| ColumnInfo { name, declared_type }).collect();
}

/// Notes what the client's text says of parameters.
fn learn(statement: &mut Statement, parameters: &[(u16, String)]) {
    for (number, kind) in parameters {
        let place = usize::from(*number).checked_sub(1);
        let Some(parameter) = place.and_then(|place| statement.parameters.get_mut(place)) else { continue };
        parameter.declared_type = match (kind.as_str(), parameter.declared_type.take()) {
            ("[]", known) => Some(format!("{}[]", known.as_deref().unwrap_or("TEXT"))),
            (kind, _) => Some(kind.to_owned()),
        };
    }
}

/// The PRAGMAs, or the table-valued functions of the same names.
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
