//! Prepares a CALL: resolves the procedure, its parameters and its result columns.

use fulmar_sqlite::sql::{Call, Token};
use fulmar_sqlite::{Error, ParameterInfo, Result, Statement, sqlstate};

use super::Session;
use crate::procedure::describe_here;

/// Describes `CALL name(arguments)`. The arguments are prepared as a query of their own.
pub(super) async fn describe(
    session: &mut Session,
    statement: &mut Statement,
    words: &[Token<'_>],
    sql: &str,
) -> Result<()> {
    let malformed =
        || Error::new(sqlstate::SYNTAX_ERROR, "syntax error in CALL").hint("Use CALL name(argument, ...).");
    let words = match words {
        [_, schema, dot, words @ ..] if dot.is_symbol(".") && is_main(schema) => words,
        [_, words @ ..] => words,
        [] => return Err(malformed()),
    };
    let [name, open, between @ .., close] = words else { return Err(malformed()) };
    let name = name.identifier().ok_or_else(malformed)?;
    if !open.is_symbol("(") || !close.is_symbol(")") {
        return Err(malformed());
    }
    let arguments = (!between.is_empty()).then(|| format!("SELECT {}", sql[open.end()..close.start].trim()));
    let arguments_id = session.engine.ticket();
    let described = {
        let (name, arguments) = (name.clone(), arguments.clone());
        session
            .with_connection(|connection| {
                let (parameters, columns) = describe_here(connection, &name)?;
                let count = match &arguments {
                    Some(arguments) => connection.describe_here(arguments_id, arguments)?.parameters,
                    None => 0,
                };
                Ok((parameters, columns, count))
            })
            .await
    };
    let (parameters, columns, count) = described?;
    statement.parameters = vec![ParameterInfo::default(); count];
    // A parameter that is passed directly as an argument gets the procedure parameter's type.
    let mut depth = 0_usize;
    let separates = |token: &Token<'_>| {
        depth = (depth + usize::from(token.is_symbol("("))).saturating_sub(token.is_symbol(")").into());
        depth == 0 && token.is_symbol(",")
    };
    for (argument, info) in between.split(separates).zip(parameters) {
        if let [parameter] = argument
            && let Some(number) =
                parameter.text.strip_prefix('$').and_then(|digits| digits.parse::<usize>().ok())
            && let Some(place) = number.checked_sub(1).and_then(|place| statement.parameters.get_mut(place))
        {
            *place = info;
        }
    }
    statement.columns = columns;
    statement.read_only = false;
    statement.plan.call = Some(Call { name, arguments_id, arguments });
    Ok(())
}

/// Whether a schema contains procedures: the database itself, which PostgreSQL clients call
/// `public`.
fn is_main(schema: &Token<'_>) -> bool {
    schema.identifier().is_some_and(|schema| ["public", "main"].contains(&schema.as_str()))
}
