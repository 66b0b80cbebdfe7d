//! PostgreSQL's system functions that clients call in catalog queries.

use std::sync::LazyLock;

use fulmar_pgwire::types::datetime::timestamp_text;
use fulmar_sqlite::{Error, SystemFunction, Value, ValueRef, array, sqlstate};
use regex::{Regex, RegexBuilder};

use super::arrays::{self, text_of};
use super::asked::CatalogRequest;
use super::schema::{Index, shown};
use super::viewer::Action;
use super::{cluster, constraints, relations, types};
use crate::Result;
use crate::token::{Lexer, quote_text};

type Arguments<'a, 'v> = &'a [ValueRef<'v>];
type Function = fn(Arguments<'_, '_>, CatalogRequest<'_>) -> Result<Value>;

/// A function: its name, its number of arguments and its implementation.
type Definition = (&'static str, i32, Function);

const UNDEFINED_OBJECT: &str = "42704";

/// Maximum total size of the arguments of a call.
const MAX_ARGUMENT_BYTES: usize = 4 << 20;

/// Any number of arguments.
const ANY: i32 = -1;

const FUNCTIONS: &[Definition] = &[
    ("format_type", 2, |arguments, _| {
        let modifier = integer(arguments.get(1)).unwrap_or(-1);
        Ok(integer(arguments.first())
            .map_or(Value::Null, |oid| Value::Text(types::format_type(oid, modifier))))
    }),
    // Expressions are stored as SQL text.
    ("pg_get_expr", ANY, |arguments, _| Ok(first(arguments))),
    ("pg_get_indexdef", ANY, index_definition),
    ("pg_get_constraintdef", ANY, |arguments, request| {
        let Some(oid) = integer(arguments.first()) else { return Ok(Value::Null) };
        let schema = request.group_of_oid(oid)?;
        Ok(text(schema.and_then(|schema| constraints::constraint_definition(&schema, oid))))
    }),
    ("pg_get_viewdef", ANY, |arguments, request| {
        let Some(value) = arguments.first() else { return Ok(Value::Null) };
        let Some(oid) = regclass_oid(*value, request)? else { return Ok(Value::Null) };
        let schema = request.group_of_oid(oid)?;
        let view = schema.as_ref().and_then(|schema| schema.relation_of(oid));
        Ok(text(view.filter(|relation| relation.is_view).map(|view| view.sql.clone())))
    }),
    ("pg_get_triggerdef", ANY, |arguments, request| {
        let Some(oid) = integer(arguments.first()) else { return Ok(Value::Null) };
        let schema = request.group_of_oid(oid)?;
        let trigger =
            schema.as_ref().and_then(|schema| schema.triggers.iter().find(|trigger| trigger.oid == oid));
        Ok(text(trigger.map(|trigger| trigger.sql.clone())))
    }),
    ("pg_get_userbyid", 1, |arguments, request| {
        let name = integer(arguments.first()).map(|oid| user_name(oid, request));
        // PostgreSQL's text for an unknown OID.
        Ok(text(name.map(|(oid, name)| name.unwrap_or_else(|| format!("unknown (OID={oid})")))))
    }),
    ("pg_encoding_to_char", 1, |_, _| Ok(Value::Text("UTF8".into()))),
    ("pg_char_to_encoding", 1, |_, _| Ok(Value::Integer(6))),
    ("pg_regclass", 1, |arguments, request| regclass(arguments, request, true)),
    ("to_regclass", 1, |arguments, request| regclass(arguments, request, false)),
    ("pg_regtype", 1, |arguments, _| {
        match (arguments.first(), arguments.first().map(|value| types::regtype(*value))) {
            (Some(ValueRef::Text(name)), Some(Value::Null)) => {
                let message = format!("type \"{}\" does not exist", String::from_utf8_lossy(name));
                Err(Error::new(UNDEFINED_OBJECT, message))
            }
            (_, found) => Ok(found.unwrap_or(Value::Null)),
        }
    }),
    ("to_regtype", 1, |arguments, _| {
        Ok(arguments.first().map_or(Value::Null, |value| types::regtype(*value)))
    }),
    ("pg_regnamespace", 1, |arguments, _| {
        Ok(arguments.first().map_or(Value::Null, |value| namespace(*value)))
    }),
    ("to_regnamespace", 1, |arguments, _| {
        Ok(arguments.first().map_or(Value::Null, |value| namespace(*value)))
    }),
    ("pg_regproc", 1, |arguments, _| {
        let name = arguments.first().and_then(|value| text_of(*value));
        Ok(text(name.map(|name| name.trim_start_matches("pg_catalog.").to_owned())))
    }),
    ("pg_regrole", 1, |arguments, request| {
        let role = arguments.first().and_then(|value| text_of(*value)).unwrap_or_default();
        Ok(match role.parse() {
            Ok(oid) => text(user_name(oid, request).1),
            Err(_) => cluster::user_numbers(request.viewer)
                .get(&role)
                .map_or(Value::Null, |oid| Value::Integer(*oid)),
        })
    }),
    ("pg_regclass_name", 1, |arguments, request| {
        shown_name(arguments, request, |arguments, request| regclass(arguments, request, true))
    }),
    ("pg_regtype_name", 1, |arguments, request| {
        let resolve = |value: &ValueRef<'_>| types::regtype(*value);
        shown_name(arguments, request, |arguments, _| Ok(arguments.first().map_or(Value::Null, resolve)))
    }),
    ("pg_regnamespace_name", 1, |arguments, request| {
        let resolve = |value: &ValueRef<'_>| namespace(*value);
        shown_name(arguments, request, |arguments, _| Ok(arguments.first().map_or(Value::Null, resolve)))
    }),
    ("pg_regproc_name", 1, |arguments, _| Ok(first(arguments))),
    ("pg_regrole_name", 1, |arguments, _| Ok(first(arguments))),
    ("current_schemas", 1, |arguments, _| {
        let all = integer(arguments.first()) != Some(0);
        Ok(Value::Text(if all { "{pg_catalog,public}" } else { "{public}" }.into()))
    }),
    ("set_config", 3, set_config),
    ("pg_cancel_backend", 1, |arguments, request| {
        let pid = integer(arguments.first()).unwrap_or(0);
        request.viewer.act(Action::Cancel(pid))
    }),
    ("pg_terminate_backend", ANY, |arguments, request| {
        let pid = integer(arguments.first()).unwrap_or(0);
        request.viewer.act(Action::Terminate(pid))
    }),
    ("pg_postmaster_start_time", 0, started),
    ("pg_conf_load_time", 0, started),
    ("current_setting", ANY, |arguments, request| {
        let name = arguments.first().and_then(|value| text_of(*value)).unwrap_or_default();
        let missing_ok = integer(arguments.get(1)) == Some(1);
        match request.viewer.setting(&name) {
            Ok(value) => Ok(Value::Text(value.to_owned())),
            Err(_) if missing_ok => Ok(Value::Null),
            Err(error) => Err(error),
        }
    }),
    ("quote_ident", 1, |arguments, _| {
        Ok(text(arguments.first().and_then(|name| text_of(*name)).map(|name| shown(&name))))
    }),
    ("quote_literal", 1, |arguments, _| {
        let quoted = |text: String| quote_text(&text);
        Ok(text(arguments.first().and_then(|value| text_of(*value)).map(quoted)))
    }),
    ("regexp", 2, matches),
    ("pg_size_pretty", 1, |arguments, _| Ok(text(integer(arguments.first()).map(size)))),
    ("pg_database_size", 1, |arguments, request| {
        // The sizes of other databases are not available in this session.
        let tenant = request.viewer.tenant();
        let own = arguments.first().is_some_and(|database| match database {
            ValueRef::Integer(oid) => *oid == cluster::oid(tenant),
            other => text_of(*other).as_deref() == Some(tenant.name.as_str()),
        });
        if own { database_size(request) } else { Ok(Value::Null) }
    }),
    ("pg_table_size", 1, |_, _| Ok(Value::Null)),
    ("pg_relation_size", ANY, |_, _| Ok(Value::Null)),
    ("pg_total_relation_size", 1, |_, _| Ok(Value::Null)),
    ("pg_indexes_size", 1, |_, _| Ok(Value::Null)),
    ("pg_is_in_recovery", 0, |_, request| Ok(Value::Integer(request.viewer.is_replica().into()))),
    ("pg_my_temp_schema", 0, no),
    ("pg_is_other_temp_schema", 1, no),
    ("pg_relation_is_publishable", 1, yes),
    ("pg_relation_is_updatable", 2, |_, _| Ok(Value::Integer(28))),
    ("pg_has_role", ANY, yes),
    ("obj_description", ANY, null),
    ("col_description", 2, null),
    ("shobj_description", 2, null),
    ("pg_get_serial_sequence", 2, null),
    ("pg_get_functiondef", 1, null),
    ("pg_get_function_result", 1, null),
    ("pg_get_function_arguments", 1, null),
    ("pg_get_function_identity_arguments", 1, null),
    ("pg_get_partkeydef", 1, null),
    ("pg_get_ruledef", ANY, null),
    ("pg_get_statisticsobjdef_columns", 1, null),
    ("pg_partition_ancestors", 1, null),
    ("pg_partition_root", 1, null),
    ("pg_tablespace_location", 1, null),
    ("pg_advisory_lock", ANY, |arguments, request| request.viewer.act(Action::Lock(advisory(arguments)))),
    ("pg_try_advisory_lock", ANY, |arguments, request| {
        request.viewer.act(Action::TryLock(advisory(arguments)))
    }),
    ("pg_advisory_unlock", ANY, |arguments, request| request.viewer.act(Action::Unlock(advisory(arguments)))),
    ("pg_advisory_unlock_all", 0, |_, request| request.viewer.act(Action::UnlockAll)),
    ("pg_get_keywords", 0, |_, _| Ok(Value::Text("{}".into()))),
    ("pg_stat_get_numscans", 1, no),
    ("pg_format", ANY, |arguments, _| Ok(text(format(arguments)))),
    ("parse_ident", ANY, |arguments, _| {
        let path = arguments.first().and_then(|value| text_of(*value)).unwrap_or_default();
        let names: Vec<String> = Lexer::new(&path).filter_map(|token| token.name()).collect();
        Ok(Value::Text(array::write(names.iter().map(|name| Some(name.as_str())), false)))
    }),
    ("inet_server_addr", 0, null),
    ("inet_server_port", 0, null),
    ("inet_client_addr", 0, null),
    ("inet_client_port", 0, null),
    ("pg_array", ANY, |arguments, _| Ok(arrays::of_arguments(arguments))),
    ("pg_array_item", 2, |arguments, _| Ok(arrays::item(arguments))),
    ("array_to_string", ANY, |arguments, _| arrays::join(arguments)),
    ("string_to_array", ANY, |arguments, _| Ok(arrays::split(arguments))),
    ("array_length", 2, |arguments, _| Ok(arrays::length(arguments))),
    ("array_upper", 2, |arguments, _| Ok(arrays::length(arguments))),
    ("array_lower", 2, |arguments, _| {
        Ok(if arrays::length(arguments) == Value::Null { Value::Null } else { Value::Integer(1) })
    }),
    ("cardinality", 1, |arguments, _| Ok(arrays::length(arguments))),
    ("array_remove", 2, |arguments, _| Ok(arrays::remove(arguments))),
    ("array_position", ANY, |arguments, _| Ok(arrays::position(arguments))),
    ("unnest", 1, |arguments, _| Ok(first(arguments))),
    ("generate_series", ANY, |arguments, _| arrays::series(arguments)),
];

/// Visibility and privilege functions. They always return true, because there are no object-level
/// privileges.
const ALWAYS_TRUE: [&str; 22] = [
    "pg_table_is_visible",
    "pg_type_is_visible",
    "pg_function_is_visible",
    "pg_operator_is_visible",
    "pg_opclass_is_visible",
    "pg_collation_is_visible",
    "pg_conversion_is_visible",
    "pg_statistics_obj_is_visible",
    "pg_ts_config_is_visible",
    "pg_ts_dict_is_visible",
    "has_table_privilege",
    "has_any_column_privilege",
    "has_column_privilege",
    "has_schema_privilege",
    "has_database_privilege",
    "has_function_privilege",
    "has_sequence_privilege",
    "has_tablespace_privilege",
    "has_type_privilege",
    "has_language_privilege",
    "has_server_privilege",
    "has_foreign_data_wrapper_privilege",
];

/// The aggregate function, which comes last.
const AGGREGATE: &str = "array_agg";

static ALL: LazyLock<Vec<SystemFunction>> = LazyLock::new(|| {
    let scalar = |name, arguments| SystemFunction { name, arguments, aggregate: false };
    let known = FUNCTIONS.iter().map(|(name, arguments, _)| scalar(name, *arguments));
    let always_true = ALWAYS_TRUE.iter().map(|name| scalar(name, ANY));
    let aggregate = SystemFunction { name: AGGREGATE, arguments: 1, aggregate: true };
    known.chain(always_true).chain([aggregate]).collect()
});

/// All system functions.
pub(crate) fn all() -> &'static [SystemFunction] {
    &ALL
}

/// Returns true if a call of this function identifies a statement as a catalog query. Names that
/// SQLite or an application may also use do not.
pub(crate) fn is_function(name: &str) -> bool {
    const COMMON: [&str; 6] =
        ["regexp", "unnest", "generate_series", "cardinality", "quote_literal", AGGREGATE];
    !COMMON.contains(&name) && !name.starts_with("array_") && ALL.iter().any(|function| function.name == name)
}

/// Calls the function with this index in [`all`].
pub(crate) fn call(
    function: usize,
    arguments: Arguments<'_, '_>,
    request: CatalogRequest<'_>,
) -> Result<Value> {
    let bytes = |value: &ValueRef<'_>| match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => bytes.len(),
        _ => 0,
    };
    if arguments.iter().map(bytes).sum::<usize>() > MAX_ARGUMENT_BYTES {
        let message = format!("arguments of a system function exceed {} MiB", MAX_ARGUMENT_BYTES >> 20);
        return Err(Error::new(sqlstate::PROGRAM_LIMIT, message));
    }
    match FUNCTIONS.get(function) {
        Some((_, _, run)) => run(arguments, request),
        None if function < FUNCTIONS.len() + ALWAYS_TRUE.len() => Ok(Value::Integer(1)),
        None => Ok(arrays::of_arguments(arguments)),
    }
}

fn yes(_: Arguments<'_, '_>, _: CatalogRequest<'_>) -> Result<Value> {
    Ok(Value::Integer(1))
}

fn no(_: Arguments<'_, '_>, _: CatalogRequest<'_>) -> Result<Value> {
    Ok(Value::Integer(0))
}

fn null(_: Arguments<'_, '_>, _: CatalogRequest<'_>) -> Result<Value> {
    Ok(Value::Null)
}

fn first(arguments: Arguments<'_, '_>) -> Value {
    arguments.first().map_or(Value::Null, |value| ValueRef::to_owned(*value))
}

fn text(text: Option<String>) -> Value {
    text.map_or(Value::Null, Value::Text)
}

fn integer(value: Option<&ValueRef<'_>>) -> Option<i64> {
    match value? {
        ValueRef::Integer(integer) => Some(*integer),
        other => text_of(*other)?.parse().ok(),
    }
}

/// The time at which the node started to accept connections.
fn started(_: Arguments<'_, '_>, request: CatalogRequest<'_>) -> Result<Value> {
    Ok(timestamp_text(request.viewer.started_ms()))
}

/// The key of an advisory lock. Two 32-bit keys are combined into one.
fn advisory(arguments: Arguments<'_, '_>) -> i64 {
    let number = |index| integer(arguments.get(index)).unwrap_or(0);
    if arguments.len() == 2 { number(0) << 32 | number(1) & 0xffff_ffff } else { number(0) }
}

/// The name of the user with this OID, if the viewer may see it.
fn user_name(oid: i64, request: CatalogRequest<'_>) -> (i64, Option<String>) {
    if oid == relations::OWNER {
        return (oid, Some(request.viewer.tenant().owner.clone()));
    }
    let users = request.viewer.users();
    (oid, users.into_iter().find(|(known, _)| *known == oid).map(|(_, user)| user.name.clone()))
}

/// The name of the object that a value identifies by OID or by name.
fn shown_name(
    arguments: Arguments<'_, '_>,
    request: CatalogRequest<'_>,
    resolve: impl Fn(Arguments<'_, '_>, CatalogRequest<'_>) -> Result<Value>,
) -> Result<Value> {
    match resolve(arguments, request)? {
        Value::Integer(number) => resolve(&[ValueRef::Integer(number)], request),
        name => Ok(name),
    }
}

/// The OID of a relation or index, from its name or its OID as text.
fn regclass_oid(value: ValueRef<'_>, request: CatalogRequest<'_>) -> Result<Option<i64>> {
    let Some(text) = text_of(value) else { return Ok(None) };
    if let Ok(oid) = text.parse() {
        return Ok(Some(oid));
    }
    let last = Lexer::new(&text).filter(|token| !token.is_symbol('.')).last();
    let Some(name) = last.and_then(|token| token.name()) else { return Ok(None) };
    if let Some(oid) = request.outline()?.oid_of(&name) {
        return Ok(Some(oid));
    }
    // A primary key without an index.
    let schema = request.group_of_name(&name)?;
    let named = |index: &&Index| index.name.eq_ignore_ascii_case(&name);
    Ok(schema.as_ref().and_then(|schema| schema.indexes.iter().find(named)).map(|index| index.oid))
}

/// `x::regclass`: converts an OID to a name, or a name to an OID.
fn regclass(arguments: Arguments<'_, '_>, request: CatalogRequest<'_>, must_exist: bool) -> Result<Value> {
    let Some(value) = arguments.first().filter(|value| **value != ValueRef::Null) else {
        return Ok(Value::Null);
    };
    if let ValueRef::Integer(oid) = value {
        let name = match request.outline()?.name_of(*oid) {
            Some(name) => Some(shown(name)),
            None => {
                let schema = request.group_of_oid(*oid)?;
                let index =
                    schema.as_ref().and_then(|schema| schema.indexes.iter().find(|index| index.oid == *oid));
                index.map(|index| shown(&index.name))
            }
        };
        return Ok(Value::Text(name.unwrap_or_else(|| oid.to_string())));
    }
    match regclass_oid(*value, request)? {
        Some(oid) => Ok(Value::Integer(oid)),
        None if must_exist => {
            let message = format!("relation \"{}\" does not exist", text_of(*value).unwrap_or_default());
            Err(Error::new(sqlstate::UNDEFINED_TABLE, message))
        }
        None => Ok(Value::Null),
    }
}

fn namespace(value: ValueRef<'_>) -> Value {
    let schemas = [
        (relations::PG_CATALOG, "pg_catalog"),
        (relations::PUBLIC, "public"),
        (relations::INFORMATION_SCHEMA, "information_schema"),
    ];
    match value {
        ValueRef::Integer(wanted) => {
            text(schemas.iter().find(|(oid, _)| *oid == wanted).map(|(_, name)| (*name).to_owned()))
        }
        other => {
            let wanted = text_of(other).unwrap_or_default();
            let found = schemas.iter().find(|(_, name)| *name == wanted);
            found.map_or(Value::Null, |(oid, _)| Value::Integer(*oid))
        }
    }
}

/// `set_config(name, value, is_local)`.
fn set_config(arguments: Arguments<'_, '_>, request: CatalogRequest<'_>) -> Result<Value> {
    let mut texts = arguments.iter().map(|value| text_of(*value));
    let (name, value) =
        (texts.next().flatten().unwrap_or_default(), texts.next().flatten().unwrap_or_default());
    let local = integer(arguments.get(2)) == Some(1);
    request.viewer.act(Action::SetConfig { name: &name, value: &value, local })
}

/// `pg_get_indexdef(index [, column])`.
fn index_definition(arguments: Arguments<'_, '_>, request: CatalogRequest<'_>) -> Result<Value> {
    let Some(oid) = integer(arguments.first()) else { return Ok(Value::Null) };
    let schema = request.group_of_oid(oid)?;
    let found = schema.as_ref().and_then(|schema| schema.indexes.iter().find(|index| index.oid == oid));
    let Some(index) = found else { return Ok(Value::Null) };
    let column = integer(arguments.get(1)).unwrap_or(0);
    if column == 0 {
        return Ok(Value::Text(index.sql()));
    }
    let key = usize::try_from(column - 1).ok().and_then(|position| index.keys.get(position));
    Ok(text(key.map(|key| shown(&key.name))))
}

/// `format('%I.%I', schema, table)`.
fn format(arguments: Arguments<'_, '_>) -> Option<String> {
    let mut values = arguments.iter().map(|value| text_of(*value));
    let pattern = values.next()??;
    let mut text = String::new();
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let mut value = || values.next().flatten().unwrap_or_default();
        match characters.next() {
            Some('s') => text.push_str(&value()),
            Some('I') => text.push_str(&shown(&value())),
            Some('L') => text.push_str(&quote_text(&value())),
            Some(other) => text.push(other),
            None => {}
        }
    }
    Some(text)
}

fn database_size(request: CatalogRequest<'_>) -> Result<Value> {
    let rows = request.database.query("SELECT page_count * 4096 FROM pragma_page_count", &[])?;
    Ok(rows.into_iter().flatten().next().unwrap_or(Value::Null))
}

fn size(bytes: i64) -> String {
    let mut size = bytes;
    for unit in ["bytes", "kB", "MB", "GB"] {
        if size < 10 * 1024 {
            return format!("{size} {unit}");
        }
        size = (size + 512) / 1024;
    }
    format!("{size} TB")
}

/// `text REGEXP pattern`. SQLite passes the pattern first.
fn matches(arguments: Arguments<'_, '_>, _: CatalogRequest<'_>) -> Result<Value> {
    const MAX_PATTERN_BYTES: usize = 4 << 10;
    const MAX_TEXT_BYTES: usize = 64 << 10;
    const MAX_COMPILED_BYTES: usize = 1 << 20;
    let mut texts = arguments.iter().map(|value| text_of(*value));
    let (Some(Some(pattern)), Some(Some(text))) = (texts.next(), texts.next()) else {
        return Ok(Value::Null);
    };
    if pattern.len() > MAX_PATTERN_BYTES || text.len() > MAX_TEXT_BYTES {
        return Err(Error::new(sqlstate::PROGRAM_LIMIT, "regular expression or its subject is too long")
            .detail(format!(
                "The maximum is {MAX_PATTERN_BYTES} bytes for a pattern and {MAX_TEXT_BYTES} bytes \
                 for a text."
            )));
    }
    thread_local! {
        /// The last compiled pattern. A catalog query usually matches one pattern against many
        /// names.
        static LAST: std::cell::RefCell<Option<(String, Regex)>> = const { std::cell::RefCell::new(None) };
    }
    LAST.with_borrow_mut(|last| {
        if last.as_ref().is_none_or(|(cached, _)| *cached != pattern) {
            let builder = RegexBuilder::new(&pattern).size_limit(MAX_COMPILED_BYTES).build();
            let compiled = builder.map_err(|cause| {
                const INVALID_PATTERN: &str = "2201B";
                Error::new(INVALID_PATTERN, format!("invalid regular expression: {cause}"))
            })?;
            *last = Some((pattern, compiled));
        }
        let matched = last.as_ref().is_some_and(|(_, regex)| regex.is_match(&text));
        Ok(Value::Integer(matched.into()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pg_size_pretty_matches_postgres() {
        assert_eq!(size(8192), "8192 bytes");
        assert_eq!(size(20 << 10), "20 kB");
        assert_eq!(size(300 << 20), "300 MB");
    }

    #[test]
    fn dialect_recognizes_every_system_function() {
        use crate::{Context, Dispatch, translate};
        let context = Context { database: "shop", user: "anna", pid: 1 };
        for function in all().iter().filter(|function| is_function(function.name)) {
            let sql = format!("SELECT {}(1)", function.name);
            assert!(matches!(translate(&sql, &context), Ok(Dispatch::Translated(..))), "{sql}");
        }
    }

    #[test]
    fn function_names_are_unique() {
        let mut names: Vec<&str> = all().iter().map(|function| function.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
