//! The relations of `pg_catalog` that there are, and their rows.

use fulmar_engine::Value;
use fulmar_meta::Catalog;

use super::query::CatalogQuery;
use super::schema::{self, Object};
use crate::Result;
use crate::dialect::token::Token;
use crate::session::Link;
use crate::types::Type;

/// A relation, as it can be asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relation {
    /// `pg_database`.
    Databases,
    /// `pg_roles`, `pg_user`.
    Roles,
    /// `pg_namespace`.
    Schemas,
    /// `pg_class`: tables, views, indexes.
    Classes,
    /// `pg_attribute`.
    Attributes,
    /// The indexes of one table.
    TableIndexes,
    /// One index.
    IndexDetail,
    /// `pg_constraint`.
    Constraints,
    /// `pg_trigger`.
    Triggers,
    /// What pgbench asks about partitions.
    Partitions,
    /// The text of a view.
    ViewDefinition,
    /// Something that Fulmar has none of: policies, publications, inheritance.
    Nothing,
}

type Columns = &'static [(&'static str, Type)];

impl Relation {
    /// Which relation a SELECT asks about; `None` if it is none of `pg_catalog`'s.
    pub(super) fn find(tokens: &[Token<'_>]) -> Option<Relation> {
        const NOTHING: [&str; 12] = [
            "pg_inherits",
            "pg_policy",
            "pg_statistic_ext",
            "pg_publication",
            "pg_subscription",
            "pg_proc",
            "pg_extension",
            "pg_rewrite",
            "pg_foreign_table",
            "pg_matviews",
            "pg_sequence",
            "pg_event_trigger",
        ];
        let mentions = |name: &str| tokens.iter().any(|token| token.is(name));
        if mentions("pg_partitioned_table") {
            return mentions("partstrat").then_some(Relation::Partitions);
        }
        if NOTHING.iter().any(|name| mentions(name)) {
            return Some(Relation::Nothing);
        }
        let mut depth = 0u32;
        let mut from = tokens.iter().skip_while(|token| {
            if token.is_sign('(') {
                depth += 1;
            } else if token.is_sign(')') {
                depth = depth.saturating_sub(1);
            }
            depth > 0 || !token.is("from")
        });
        from.next();
        let main = from.find(|token| !token.is("pg_catalog") && !token.is_sign('.'))?;
        let relation = match main.text.to_ascii_lowercase().as_str() {
            "pg_database" => Relation::Databases,
            "pg_roles" | "pg_user" | "pg_authid" => Relation::Roles,
            "pg_namespace" => Relation::Schemas,
            "pg_class" if mentions("indisprimary") => Relation::TableIndexes,
            "pg_class" => Relation::Classes,
            "pg_attribute" => Relation::Attributes,
            "pg_index" => Relation::IndexDetail,
            "pg_constraint" => Relation::Constraints,
            "pg_trigger" => Relation::Triggers,
            _ => return None,
        };
        Some(relation)
    }

    /// Its columns, among them the names that psql gives to expressions.
    pub(super) fn columns(self) -> Columns {
        use Type::{Bool, Int4, Name, Oid, Text};
        match self {
            Relation::Databases => &[
                ("oid", Oid),
                ("datname", Name),
                ("datdba", Oid),
                ("encoding", Int4),
                ("datistemplate", Bool),
                ("datallowconn", Bool),
                ("datcollate", Text),
                ("datctype", Text),
                ("Name", Name),
                ("pg_get_userbyid", Name),
                ("pg_encoding_to_char", Name),
                ("Size", Text),
            ],
            Relation::Roles => &[
                ("oid", Oid),
                ("rolname", Name),
                ("rolsuper", Bool),
                ("rolinherit", Bool),
                ("rolcreaterole", Bool),
                ("rolcreatedb", Bool),
                ("rolcanlogin", Bool),
                ("rolreplication", Bool),
                ("rolbypassrls", Bool),
                ("rolconnlimit", Int4),
                ("usename", Name),
                ("usesuper", Bool),
                ("memberof", Text),
            ],
            Relation::Schemas => &[
                ("oid", Oid),
                ("nspname", Name),
                ("nspowner", Oid),
                ("Name", Name),
                ("pg_get_userbyid", Name),
            ],
            Relation::Classes => &[
                ("oid", Oid),
                ("relname", Name),
                ("nspname", Name),
                ("relkind", Text),
                ("relhasindex", Bool),
                ("relchecks", Int4),
                ("relhasrules", Bool),
                ("relhastriggers", Bool),
                ("relrowsecurity", Bool),
                ("relforcerowsecurity", Bool),
                ("relhasoids", Bool),
                ("relispartition", Bool),
                ("reltablespace", Oid),
                ("relpersistence", Text),
                ("relreplident", Text),
                ("Name", Name),
                ("Type", Text),
                ("pg_get_userbyid", Name),
                ("Table", Name),
                ("Persistence", Text),
            ],
            Relation::Attributes => &[
                ("attrelid", Oid),
                ("attnum", Int4),
                ("attname", Name),
                ("format_type", Text),
                ("pg_get_expr", Text),
                ("attnotnull", Bool),
                ("attisdropped", Bool),
                ("attidentity", Text),
                ("attgenerated", Text),
                ("attstorage", Text),
                ("is_key", Text),
                ("indexdef", Text),
                ("attcollation", Text),
            ],
            Relation::TableIndexes => &[
                ("oid", Oid),
                ("relname", Name),
                ("indisprimary", Bool),
                ("indisunique", Bool),
                ("indisclustered", Bool),
                ("indisvalid", Bool),
                ("pg_get_indexdef", Text),
                ("contype", Text),
                ("condeferrable", Bool),
                ("condeferred", Bool),
                ("indisreplident", Bool),
                ("reltablespace", Oid),
                ("pg_get_constraintdef", Text),
            ],
            Relation::IndexDetail => &[
                ("oid", Oid),
                ("indisunique", Bool),
                ("indisprimary", Bool),
                ("indisclustered", Bool),
                ("indisvalid", Bool),
                ("condeferrable", Bool),
                ("condeferred", Bool),
                ("indisreplident", Bool),
                ("indnullsnotdistinct", Bool),
                ("amname", Name),
                ("relname", Name),
                ("pg_get_expr", Text),
            ],
            Relation::Constraints => &[
                ("conrelid", Oid),
                ("confrelid", Oid),
                ("contype", Text),
                ("conparentid", Oid),
                ("conname", Name),
                ("pg_get_constraintdef", Text),
                ("ontable", Text),
                ("sametable", Bool),
            ],
            Relation::Triggers => &[
                ("tgrelid", Oid),
                ("tgname", Name),
                ("pg_get_triggerdef", Text),
                ("tgenabled", Text),
                ("tgisinternal", Bool),
            ],
            Relation::Partitions => &[("relname", Name), ("n", Int4), ("count", Type::Int8)],
            Relation::ViewDefinition => &[("oid", Oid), ("pg_get_viewdef", Text)],
            Relation::Nothing => &[],
        }
    }

    /// How many of its columns `SELECT *` answers: those that `pg_catalog` has.
    pub(super) fn stored_columns(self) -> usize {
        match self {
            Relation::Databases => 8,
            Relation::Roles => 10,
            Relation::Schemas => 3,
            other => other.columns().len(),
        }
    }
}

/// Who asks, and where.
pub(crate) struct Viewer<'a> {
    pub(crate) catalog: &'a Catalog,
    pub(crate) user: &'a str,
    pub(crate) superuser: bool,
    pub(crate) owner: &'a str,
}

/// The rows that answer a question.
pub(crate) async fn answer(
    query: &CatalogQuery,
    viewer: &Viewer<'_>,
    link: &mut Link,
) -> Result<Vec<Vec<Value>>> {
    let rows = match query.relation {
        Relation::Databases => databases(viewer),
        Relation::Roles => roles(viewer),
        Relation::Schemas => {
            let (name, owner) = (text("public"), text(viewer.owner));
            vec![vec![Value::Integer(2200), name.clone(), Value::Integer(10), name, owner]]
        }
        Relation::Nothing => Vec::new(),
        relation => {
            let objects = schema::objects(link).await?;
            match relation {
                Relation::Classes => classes(&objects, viewer),
                Relation::Attributes => attributes(query, &objects, link).await?,
                Relation::TableIndexes => table_indexes(query, &objects, link).await?,
                Relation::IndexDetail => index_details(&objects),
                Relation::Constraints => constraints(&objects, link).await?,
                Relation::Triggers => triggers(&objects),
                Relation::Partitions => of_kind(&objects, "table")
                    .map(|object| vec![text(&object.name), Value::Integer(1), Value::Integer(0)])
                    .collect(),
                _ => of_kind(&objects, "view")
                    .map(|object| vec![Value::Integer(object.oid), text(&object.sql)])
                    .collect(),
            }
        }
    };
    Ok(query.select(rows))
}

const TRUE: Value = Value::Integer(1);
const FALSE: Value = Value::Integer(0);

fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

fn boolean(value: bool) -> Value {
    Value::Integer(value.into())
}

fn of_kind<'a>(objects: &'a [Object], kind: &'a str) -> impl Iterator<Item = &'a Object> {
    objects.iter().filter(move |object| object.kind == kind)
}

/// The databases that the viewer may connect to: the names of other tenants are their own affair.
fn databases(viewer: &Viewer<'_>) -> Vec<Vec<Value>> {
    let user = viewer.catalog.user(viewer.user);
    let visible = |tenant: &fulmar_meta::Tenant| {
        viewer.superuser || user.as_ref().is_some_and(|user| viewer.catalog.may_connect(user, tenant))
    };
    let row = |tenant: &fulmar_meta::Tenant| {
        let oid = Value::Integer(i64::from(tenant.partition.0 as u32));
        let (name, owner) = (text(&tenant.name), text(&tenant.owner));
        let (utf8, collation) = (Value::Integer(6), text("C"));
        let stored = [oid, name.clone(), Value::Integer(10), utf8, FALSE, TRUE, collation.clone(), collation];
        stored.into_iter().chain([name, owner, text("UTF8"), Value::Null]).collect()
    };
    viewer.catalog.tenants().iter().filter(|tenant| visible(tenant)).map(|tenant| row(tenant)).collect()
}

fn roles(viewer: &Viewer<'_>) -> Vec<Vec<Value>> {
    let users = viewer.catalog.users();
    let visible = users.iter().filter(|user| viewer.superuser || user.name == viewer.user);
    let row = |(index, user): (usize, &std::sync::Arc<fulmar_meta::User>)| {
        let (name, superuser) = (text(&user.name), boolean(user.superuser));
        let may = || superuser.clone();
        let oid = Value::Integer(10 + index as i64);
        let stored =
            [oid, name.clone(), may(), TRUE, may(), may(), boolean(user.verifier.is_some()), FALSE, FALSE];
        let rest = [Value::Integer(-1), name, may(), text("{}")];
        stored.into_iter().chain(rest).collect()
    };
    visible.enumerate().map(row).collect()
}

fn classes(objects: &[Object], viewer: &Viewer<'_>) -> Vec<Vec<Value>> {
    let shown = objects.iter().filter(|object| !object.letter().is_empty() && !object.is_internal());
    shown
        .map(|object| {
            let is_table = object.kind == "table";
            let table = if object.kind == "index" { text(&object.table) } else { Value::Null };
            let name = text(&object.name);
            vec![
                Value::Integer(object.oid),
                name.clone(),
                text("public"),
                text(object.letter()),
                boolean(is_table),
                Value::Integer(0),
                FALSE,
                boolean(is_table), // psql asks for foreign keys only where it believes that there are triggers
                FALSE,
                FALSE,
                FALSE,
                FALSE,
                Value::Integer(0),
                text("p"),
                text("d"),
                name,
                text(&object.kind),
                text(viewer.owner),
                table,
                text("permanent"),
            ]
        })
        .collect()
}

/// The object that a question is about, by its number.
fn wanted<'a>(query: &CatalogQuery, column: &str, objects: &'a [Object]) -> Option<&'a Object> {
    let oid: i64 = query.wanted(column)?.parse().ok()?;
    objects.iter().find(|object| object.oid == oid)
}

async fn attributes(query: &CatalogQuery, objects: &[Object], link: &mut Link) -> Result<Vec<Vec<Value>>> {
    let Some(object) = wanted(query, "attrelid", objects) else { return Ok(Vec::new()) };
    let oid = Value::Integer(object.oid);
    if object.kind == "index" {
        let definition = object.definition().unwrap_or_default();
        let row =
            vec![oid, TRUE, text("(columns)"), Value::Null, Value::Null, FALSE, FALSE, text(""), text("")];
        let rest = [text("p"), text("yes"), text(definition), Value::Null];
        return Ok(vec![row.into_iter().chain(rest).collect()]);
    }
    let columns = schema::columns(link, &object.name).await?;
    let rows = columns.into_iter().enumerate().map(|(index, column)| {
        vec![
            oid.clone(),
            Value::Integer(index as i64 + 1),
            text(&column.name),
            text(&column.declared),
            column.default.map_or(Value::Null, Value::Text),
            boolean(column.not_null),
            FALSE,
            text(""),
            text(if column.generated { "s" } else { "" }),
            text("p"),
            Value::Null,
            Value::Null,
            Value::Null,
        ]
    });
    Ok(rows.collect())
}

async fn table_indexes(query: &CatalogQuery, objects: &[Object], link: &mut Link) -> Result<Vec<Vec<Value>>> {
    let Some(table) = wanted(query, "oid", objects) else { return Ok(Vec::new()) };
    let indexes = schema::indexes(link, objects, &table.name).await?;
    let rows = indexes.into_iter().map(|index| {
        let unique = if index.unique { "UNIQUE " } else { "" };
        let (name, on) = (schema::shown(&index.name), schema::shown(&table.name));
        let constraint = match (index.primary, index.constraint) {
            (true, _) => text("p"),
            (_, true) => text("u"),
            _ => Value::Null,
        };
        vec![
            Value::Integer(table.oid),
            text(&index.name),
            boolean(index.primary),
            boolean(index.unique),
            FALSE,
            TRUE,
            text(&format!("CREATE {unique}INDEX {name} ON {on} USING btree {}", index.definition)),
            constraint,
            FALSE,
            FALSE,
            FALSE,
            Value::Integer(0),
            Value::Null,
        ]
    });
    Ok(rows.collect())
}

fn index_details(objects: &[Object]) -> Vec<Vec<Value>> {
    let row = |index: &Object| {
        let unique = index.sql.is_empty() || index.sql.to_ascii_uppercase().starts_with("CREATE UNIQUE");
        let head =
            [Value::Integer(index.oid), boolean(unique), FALSE, FALSE, TRUE, FALSE, FALSE, FALSE, FALSE];
        head.into_iter().chain([text("btree"), text(&index.table), Value::Null]).collect()
    };
    of_kind(objects, "index").map(row).collect()
}

async fn constraints(objects: &[Object], link: &mut Link) -> Result<Vec<Vec<Value>>> {
    let oid = |name: &str| {
        let table = of_kind(objects, "table").find(|object| object.name.eq_ignore_ascii_case(name));
        table.map_or(Value::Null, |table| Value::Integer(table.oid))
    };
    let keys = schema::foreign_keys(link).await?;
    let mut rows: Vec<Vec<Value>> = keys
        .iter()
        .map(|key| {
            vec![
                oid(&key.table),
                oid(&key.to_table),
                text("f"),
                Value::Integer(0),
                text(&key.name()),
                text(&key.definition()),
                text(&schema::shown(&key.table)),
                TRUE,
            ]
        })
        .collect();
    rows.sort_by(|a, b| match (&a[4], &b[4]) {
        (Value::Text(a), Value::Text(b)) => a.cmp(b),
        _ => std::cmp::Ordering::Equal,
    });
    Ok(rows)
}

fn triggers(objects: &[Object]) -> Vec<Vec<Value>> {
    let table = |name: &str| {
        let owner = objects.iter().find(|object| object.name == name && object.kind != "index");
        owner.map_or(Value::Null, |object| Value::Integer(object.oid))
    };
    of_kind(objects, "trigger")
        .map(|trigger| {
            let (name, sql) = (text(&trigger.name), text(&trigger.sql));
            vec![table(&trigger.table), name, sql, text("O"), FALSE]
        })
        .collect()
}
