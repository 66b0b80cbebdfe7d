//! Array functions. Arrays are represented as text ([`fulmar_sqlite::array`]). The translation
//! converts them to JSON where SQLite's table-valued functions read them.

use std::borrow::Cow;

use fulmar_sqlite::array::{Element, read, write};
use fulmar_sqlite::{Error, Value, ValueRef, sqlstate};

use crate::Result;

/// Maximum size of the result of `array_to_string`.
const MAX_JOINED_BYTES: usize = 16 << 20;
/// Maximum number of elements of `generate_series`.
const MAX_SERIES_ELEMENTS: i64 = 100_000;

/// Converts a SQL value to an array element.
pub(crate) fn text_of(value: ValueRef<'_>) -> Element {
    match value {
        ValueRef::Null => None,
        ValueRef::Integer(integer) => Some(integer.to_string()),
        ValueRef::Real(real) => Some(real.to_string()),
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
    }
}

/// The text of an argument that is an array.
fn array(arguments: &[ValueRef<'_>]) -> Option<String> {
    arguments.first().and_then(|array| text_of(*array))
}

/// `pg_array(a, b)` and `array_agg(a)`: creates an array of the arguments.
pub(crate) fn of_arguments(arguments: &[ValueRef<'_>]) -> Value {
    let elements: Vec<Element> = arguments.iter().map(|value| text_of(*value)).collect();
    Value::Text(write(elements.iter().map(Option::as_deref), false))
}

/// `array[n]`. Indexes start at 1, in vectors (`int2vector`, `oidvector`) at 0.
pub(crate) fn item(arguments: &[ValueRef<'_>]) -> Value {
    let (Some(text), Some(ValueRef::Integer(index))) = (array(arguments), arguments.get(1)) else {
        return Value::Null;
    };
    let first = i64::from(text.trim_start().starts_with('{'));
    let index = usize::try_from(index.saturating_sub(first)).ok();
    let element = index.and_then(|index| read(&text).nth(index)).flatten();
    element.map_or(Value::Null, scalar)
}

/// Converts an element to a value: an integer if it parses as one, otherwise text.
fn scalar(text: String) -> Value {
    text.parse().map_or(Value::Text(text), Value::Integer)
}

/// `array_to_string(array, separator, null)`.
pub(crate) fn join(arguments: &[ValueRef<'_>]) -> Result<Value> {
    let Some(array) = array(arguments) else { return Ok(Value::Null) };
    let separator = arguments.get(1).and_then(|value| text_of(*value)).unwrap_or_default();
    let null = arguments.get(2).and_then(|value| text_of(*value));
    let shown =
        || read(&array).filter_map(|element| element.map(Cow::Owned).or(null.as_deref().map(Cow::Borrowed)));
    // The size is checked before anything is copied, because the separator and the text for NULL
    // are repeated for each element.
    let bytes = shown().map(|text| text.len() + separator.len()).sum::<usize>();
    if bytes > MAX_JOINED_BYTES {
        let message = format!("result of array_to_string exceeds {} MiB", MAX_JOINED_BYTES >> 20);
        return Err(Error::new(sqlstate::PROGRAM_LIMIT, message));
    }
    let mut joined = String::with_capacity(bytes);
    for (index, text) in shown().enumerate() {
        if index > 0 {
            joined.push_str(&separator);
        }
        joined.push_str(&text);
    }
    Ok(Value::Text(joined))
}

/// `string_to_array(text, separator)`.
pub(crate) fn split(arguments: &[ValueRef<'_>]) -> Value {
    let mut texts = arguments.iter().map(|value| text_of(*value));
    let (Some(Some(text)), Some(Some(separator))) = (texts.next(), texts.next()) else { return Value::Null };
    if text.is_empty() {
        return Value::Text("{}".into());
    }
    let parts: Vec<&str> = if separator.is_empty() { vec![&text] } else { text.split(&separator).collect() };
    Value::Text(write(parts.into_iter().map(Some), false))
}

/// `array_length(array, dimension)`, `array_upper`, `cardinality`.
pub(crate) fn length(arguments: &[ValueRef<'_>]) -> Value {
    let count = array(arguments).map(|array| read(&array).count() as i64);
    count.filter(|count| *count > 0).map_or(Value::Null, Value::Integer)
}

/// `array_position(array, element)`.
pub(crate) fn position(arguments: &[ValueRef<'_>]) -> Value {
    let wanted = arguments.get(1).and_then(|value| text_of(*value));
    let index = array(arguments).and_then(|array| read(&array).position(|element| element == wanted));
    index.map_or(Value::Null, |index| Value::Integer(index as i64 + 1))
}

/// `array_remove(array, element)`.
pub(crate) fn remove(arguments: &[ValueRef<'_>]) -> Value {
    let unwanted = arguments.get(1).and_then(|value| text_of(*value));
    let Some(array) = array(arguments) else { return Value::Null };
    Value::Text(write(read(&array).filter(|element| *element != unwanted), false))
}

/// `generate_series(first, last, step)`.
pub(crate) fn series(arguments: &[ValueRef<'_>]) -> Result<Value> {
    let mut numbers = arguments.iter().map(|value| match value {
        ValueRef::Integer(number) => Some(*number),
        _ => None,
    });
    let (Some(Some(first)), Some(Some(last))) = (numbers.next(), numbers.next()) else {
        return Ok(Value::Null);
    };
    let step = numbers.next().flatten().unwrap_or(1);
    if step == 0 {
        return Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, "step size cannot equal zero"));
    }
    let (distance, step) = (i128::from(last) - i128::from(first), i128::from(step));
    let count = if distance.signum() * step.signum() < 0 { 0 } else { distance / step + 1 };
    if count > i128::from(MAX_SERIES_ELEMENTS) {
        let message = format!("generate_series exceeds {MAX_SERIES_ELEMENTS} elements");
        return Err(Error::new(sqlstate::PROGRAM_LIMIT, message));
    }
    let numbers = (0..count).map(|index| (i128::from(first) + index * step).to_string());
    Ok(Value::Text(format!("{{{}}}", numbers.collect::<Vec<_>>().join(","))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn item_and_join_read_arrays_and_vectors() {
        assert_eq!(item(&[ValueRef::Text(b"{7,8}"), ValueRef::Integer(2)]), Value::Integer(8));
        assert_eq!(item(&[ValueRef::Text(b"7 8"), ValueRef::Integer(0)]), Value::Integer(7));
        assert_eq!(
            join(&[ValueRef::Text(b"{a,NULL,b}"), ValueRef::Text(b", ")]).unwrap(),
            Value::Text("a, b".into())
        );
    }

    #[test]
    fn array_to_string_result_is_bounded() {
        let nulls = format!("{{NULL{}}}", ",NULL".repeat(999));
        let join = |separator: &[u8], null: &[u8]| {
            join(&[ValueRef::Text(nulls.as_bytes()), ValueRef::Text(separator), ValueRef::Text(null)])
        };
        assert_eq!(join(b",", b"x").unwrap(), Value::Text(format!("x{}", ",x".repeat(999))));
        // 1,000 elements of 100 KB.
        let long = vec![b'x'; 100_000];
        assert_eq!(join(b",", &long).unwrap_err().state(), sqlstate::PROGRAM_LIMIT);
        assert_eq!(join(&long, b"x").unwrap_err().state(), sqlstate::PROGRAM_LIMIT);
    }

    #[test]
    fn generate_series_is_bounded() {
        let series = |first, last, step| series(&[first, last, step].map(ValueRef::Integer));
        assert_eq!(series(1, 3, 1).unwrap(), Value::Text("{1,2,3}".into()));
        assert_eq!(series(3, 1, -2).unwrap(), Value::Text("{3,1}".into()));
        assert_eq!(series(1, 0, 1).unwrap(), Value::Text("{}".into()));
        assert_eq!(series(3, 1, 5).unwrap(), Value::Text("{}".into()));
        assert_eq!(series(i64::MAX - 1, i64::MAX, 5).unwrap(), Value::Text(format!("{{{}}}", i64::MAX - 1)));
        assert!(series(i64::MIN, i64::MAX, 1).is_err() && series(1, 2, 0).is_err());
    }
}
