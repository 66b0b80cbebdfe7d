//! Helpers that run one prepared statement and read its row.

use super::inputs::Customer;
use crate::client::{Client, Error, Parameter, Row, Statement, Type};
use crate::workload::AttemptError;

/// Converts integers to parameters of type `INTEGER`.
pub(super) fn integers<const N: usize>(values: [i32; N]) -> [Parameter<'static>; N] {
    values.map(Parameter::Int4)
}

/// Runs a statement and returns the value that `read` takes from its row. No row is an error.
pub(super) async fn one<T>(
    client: &mut Client,
    statement: &Statement,
    parameters: &[Parameter<'_>],
    what: &str,
    read: impl FnMut(&mut Row<'_>) -> Result<T, Error>,
) -> Result<T, AttemptError> {
    let found = at_most_one(client, statement, parameters, read).await?;
    found.ok_or_else(|| missing(what, parameters))
}

/// Like [`one`], and returns `None` without a row. With several rows it returns the value of the
/// last.
pub(super) async fn at_most_one<T>(
    client: &mut Client,
    statement: &Statement,
    parameters: &[Parameter<'_>],
    mut read: impl FnMut(&mut Row<'_>) -> Result<T, Error>,
) -> Result<Option<T>, AttemptError> {
    let mut found = None;
    client
        .fetch(statement, parameters, |row| {
            found = Some(read(row)?);
            Ok(())
        })
        .await?;
    Ok(found)
}

/// Runs a statement that must change exactly one row.
pub(super) async fn change_one(
    client: &mut Client,
    statement: &Statement,
    parameters: &[Parameter<'_>],
    what: &str,
) -> Result<(), AttemptError> {
    match client.execute(statement, parameters).await? {
        1 => Ok(()),
        _ => Err(missing(what, parameters)),
    }
}

pub(super) fn missing(what: &str, parameters: &[Parameter<'_>]) -> AttemptError {
    AttemptError::Data(format!("no {what} for {parameters:?}; drop the TPC-C tables and load them again"))
}

const BY_NAME: &str =
    "SELECT c_id FROM customer WHERE c_w_id = $1 AND c_d_id = $2 AND c_last = $3 ORDER BY c_first";
const BY_NAME_TYPES: [Type; 3] = [Type::Int4, Type::Int4, Type::Varchar];

pub(super) async fn prepare_by_name(client: &mut Client) -> Result<Statement, Error> {
    client.prepare(BY_NAME, &BY_NAME_TYPES).await
}

/// Returns the number of a customer. Of all customers with the same last name it is the middle one
/// by first name (clause 2.5.2.2).
pub(super) async fn number_of(
    client: &mut Client,
    by_name: &Statement,
    [warehouse, district]: [i32; 2],
    customer: &Customer,
) -> Result<i32, AttemptError> {
    let name = match customer {
        Customer::Number(number) => return Ok(*number),
        Customer::LastName(name) => name,
    };
    let parameters = [Parameter::Int4(warehouse), Parameter::Int4(district), Parameter::Text(name)];
    let mut numbers = Vec::new();
    client
        .fetch(by_name, &parameters, |row| {
            numbers.push(row.next_i32()?);
            Ok(())
        })
        .await?;
    let middle = numbers.len().saturating_sub(1) / 2;
    numbers.get(middle).copied().ok_or_else(|| missing("customer", &parameters))
}
