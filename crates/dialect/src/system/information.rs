//! The views of `information_schema`: a tenant's schema as the SQL standard defines it.

use fulmar_pgwire::types::Type;

use super::asked::{By, CatalogRequest, Filled, Rows, TableByGroup, table};
use super::schema::{ForeignKey, Index, Relation, Schema};
use super::types;
use crate::{Result, row};

const SCHEMA: &str = "public";

pub(crate) const TABLES: &[Filled] = &[
    (
        table(
            "information_schema.schemata",
            &[("catalog_name", "NAME"), ("schema_name", "NAME"), ("schema_owner", "NAME")],
        ),
        |request| {
            let tenant = request.viewer.tenant();
            let schemas = [SCHEMA, "pg_catalog", "information_schema"].into_iter();
            Ok(schemas.map(|schema| row![tenant.name.as_str(), schema, tenant.owner.as_str()]).collect())
        },
    ),
    (
        table(
            "information_schema.routines",
            &[
                ("specific_name", "NAME"),
                ("routine_catalog", "NAME"),
                ("routine_schema", "NAME"),
                ("routine_name", "NAME"),
                ("routine_type", "TEXT"),
                ("data_type", "TEXT"),
                ("routine_definition", "TEXT"),
                ("external_language", "TEXT"),
            ],
        ),
        |_| Ok(Vec::new()),
    ),
    (
        table(
            "information_schema.sequences",
            &[
                ("sequence_catalog", "NAME"),
                ("sequence_schema", "NAME"),
                ("sequence_name", "NAME"),
                ("data_type", "TEXT"),
            ],
        ),
        |_| Ok(Vec::new()),
    ),
];

/// The column that determines the relation of a row, for tables whose rows each describe one
/// relation.
const TABLE_NAME: &[(&str, By)] = &[("table_name", By::Name)];

pub(crate) const BY_GROUP: &[TableByGroup] = &[
    (
        table(
            "information_schema.tables",
            &[
                ("table_catalog", "NAME"),
                ("table_schema", "NAME"),
                ("table_name", "NAME"),
                ("table_type", "TEXT"),
                ("self_referencing_column_name", "NAME"),
                ("reference_generation", "TEXT"),
                ("is_insertable_into", "TEXT"),
                ("is_typed", "TEXT"),
                ("commit_action", "TEXT"),
            ],
        ),
        TABLE_NAME,
        |request, schema| {
            let row = |relation: &Relation| {
                let (kind, insertable) =
                    if relation.is_view { ("VIEW", "NO") } else { ("BASE TABLE", "YES") };
                row![database(request), SCHEMA, relation.name.as_str(), kind, (), (), insertable, "NO", ()]
            };
            Ok(schema.relations.iter().map(row).collect())
        },
    ),
    (
        table(
            "information_schema.views",
            &[
                ("table_catalog", "NAME"),
                ("table_schema", "NAME"),
                ("table_name", "NAME"),
                ("view_definition", "TEXT"),
                ("check_option", "TEXT"),
                ("is_updatable", "TEXT"),
                ("is_insertable_into", "TEXT"),
            ],
        ),
        TABLE_NAME,
        |request, schema| {
            let views = schema.relations.iter().filter(|relation| relation.is_view);
            let row = |view: &Relation| {
                row![database(request), SCHEMA, view.name.as_str(), view.sql.as_str(), "NONE", "NO", "NO"]
            };
            Ok(views.map(row).collect())
        },
    ),
    (
        table(
            "information_schema.columns",
            &[
                ("table_catalog", "NAME"),
                ("table_schema", "NAME"),
                ("table_name", "NAME"),
                ("column_name", "NAME"),
                ("ordinal_position", "INT4"),
                ("column_default", "TEXT"),
                ("is_nullable", "TEXT"),
                ("data_type", "TEXT"),
                ("character_maximum_length", "INT4"),
                ("character_octet_length", "INT4"),
                ("numeric_precision", "INT4"),
                ("numeric_precision_radix", "INT4"),
                ("numeric_scale", "INT4"),
                ("datetime_precision", "INT4"),
                ("interval_type", "TEXT"),
                ("collation_name", "NAME"),
                ("domain_name", "NAME"),
                ("udt_catalog", "NAME"),
                ("udt_schema", "NAME"),
                ("udt_name", "NAME"),
                ("is_identity", "TEXT"),
                ("identity_generation", "TEXT"),
                ("is_generated", "TEXT"),
                ("generation_expression", "TEXT"),
                ("is_updatable", "TEXT"),
            ],
        ),
        TABLE_NAME,
        columns,
    ),
    (
        table(
            "information_schema.table_constraints",
            &[
                ("constraint_catalog", "NAME"),
                ("constraint_schema", "NAME"),
                ("constraint_name", "NAME"),
                ("table_catalog", "NAME"),
                ("table_schema", "NAME"),
                ("table_name", "NAME"),
                ("constraint_type", "TEXT"),
                ("is_deferrable", "TEXT"),
                ("initially_deferred", "TEXT"),
                ("enforced", "TEXT"),
            ],
        ),
        TABLE_NAME,
        |request, schema| {
            let row = |name: String, table: &str, kind: &str| {
                let catalog = database(request);
                row![catalog.as_str(), SCHEMA, name, catalog.as_str(), SCHEMA, table, kind, "NO", "NO", "YES"]
            };
            let mut rows: Rows =
                keys(schema).map(|(index, kind)| row(index.name.clone(), &index.table_name, kind)).collect();
            rows.extend(
                schema.foreign_keys.iter().map(|key| row(key.name(), &key.table_name, "FOREIGN KEY")),
            );
            for relation in &schema.relations {
                rows.extend(
                    relation.checks().into_iter().map(|check| row(check.name, &relation.name, "CHECK")),
                );
            }
            Ok(rows)
        },
    ),
    (
        table(
            "information_schema.key_column_usage",
            &[
                ("constraint_catalog", "NAME"),
                ("constraint_schema", "NAME"),
                ("constraint_name", "NAME"),
                ("table_catalog", "NAME"),
                ("table_schema", "NAME"),
                ("table_name", "NAME"),
                ("column_name", "NAME"),
                ("ordinal_position", "INT4"),
                ("position_in_unique_constraint", "INT4"),
            ],
        ),
        TABLE_NAME,
        key_columns,
    ),
    (
        table(
            "information_schema.constraint_column_usage",
            &[
                ("table_catalog", "NAME"),
                ("table_schema", "NAME"),
                ("table_name", "NAME"),
                ("column_name", "NAME"),
                ("constraint_catalog", "NAME"),
                ("constraint_schema", "NAME"),
                ("constraint_name", "NAME"),
            ],
        ),
        &[],
        constraint_columns,
    ),
    (
        table(
            "information_schema.referential_constraints",
            &[
                ("constraint_catalog", "NAME"),
                ("constraint_schema", "NAME"),
                ("constraint_name", "NAME"),
                ("unique_constraint_catalog", "NAME"),
                ("unique_constraint_schema", "NAME"),
                ("unique_constraint_name", "NAME"),
                ("match_option", "TEXT"),
                ("update_rule", "TEXT"),
                ("delete_rule", "TEXT"),
            ],
        ),
        &[],
        |request, schema| {
            let catalog = database(request);
            let mut rows = Rows::new();
            for key in &schema.foreign_keys {
                let to = referred(request, key)?.map(|index| index.name);
                let (name, update, delete) = (key.name(), key.on_update.as_str(), key.on_delete.as_str());
                let catalog = catalog.as_str();
                rows.push(row![catalog, SCHEMA, name, catalog, SCHEMA, to, "NONE", update, delete]);
            }
            Ok(rows)
        },
    ),
];

fn database(request: CatalogRequest<'_>) -> String {
    request.viewer.tenant().name.clone()
}

fn columns(request: CatalogRequest<'_>, schema: &Schema) -> Result<Rows> {
    let catalog = database(request);
    let mut rows = Vec::new();
    for relation in &schema.relations {
        for (position, column) in (1i64..).zip(&relation.columns) {
            let (kind, modifier) = (column.declared.kind, i64::from(column.declared.modifier));
            let length = matches!(kind, Type::Varchar | Type::Bpchar)
                .then_some(modifier - 4)
                .filter(|length| *length > 0);
            let packed = (kind == Type::Numeric && modifier >= 4).then_some(modifier - 4);
            let precision = match kind {
                Type::Int2 => Some(16i64),
                Type::Int4 => Some(32),
                Type::Int8 => Some(64),
                Type::Float4 => Some(24),
                Type::Float8 => Some(53),
                _ => packed.map(|packed| packed >> 16),
            };
            let radix = precision.map(|_| if kind == Type::Numeric { 10i64 } else { 2 });
            let scale = match kind {
                Type::Int2 | Type::Int4 | Type::Int8 => Some(0),
                _ => packed.map(|packed| packed & 0xffff),
            };
            let time = matches!(kind, Type::Time | Type::Timestamp | Type::Timestamptz).then_some(6i64);
            let (nullable, generated) = (!column.not_null, column.generated);
            rows.push(row![
                catalog.as_str(),
                SCHEMA,
                relation.name.as_str(),
                column.name.as_str(),
                position,
                column.default.clone(),
                if nullable { "YES" } else { "NO" },
                kind.name(),
                length,
                length.map(|length| length * 4),
                precision,
                radix,
                scale,
                time,
                (),
                (),
                (),
                catalog.as_str(),
                "pg_catalog",
                types::short_name(kind),
                "NO",
                (),
                if generated { "ALWAYS" } else { "NEVER" },
                (),
                if generated || relation.is_view { "NO" } else { "YES" },
            ]);
        }
    }
    Ok(rows)
}

/// Primary keys and UNIQUE constraints, with the constraint type of the SQL standard.
fn keys(schema: &Schema) -> impl Iterator<Item = (&Index, &'static str)> {
    let constraints = schema.indexes.iter().filter(|index| index.primary || index.constraint);
    constraints.map(|index| (index, if index.primary { "PRIMARY KEY" } else { "UNIQUE" }))
}

/// The unique index that a foreign key references.
fn referred(request: CatalogRequest<'_>, key: &ForeignKey) -> Result<Option<Index>> {
    let Some(schema) = request.group_of_name(&key.to_table)? else { return Ok(None) };
    let Some(to) = schema.relation(&key.to_table) else { return Ok(None) };
    let same = |index: &Index| match key.to_columns.is_empty() {
        true => index.primary,
        false => {
            let names = index.keys.iter().map(|key| key.name.to_lowercase());
            names.eq(key.to_columns.iter().map(|name| name.to_lowercase()))
        }
    };
    Ok(schema.indexes.iter().find(|index| index.table == to.oid && index.unique && same(index)).cloned())
}

fn key_columns(request: CatalogRequest<'_>, schema: &Schema) -> Result<Rows> {
    let catalog = database(request);
    let row = |name: &str, table: &str, column: &str, position: i64, other: Option<i64>| {
        row![catalog.as_str(), SCHEMA, name, catalog.as_str(), SCHEMA, table, column, position, other]
    };
    let mut rows = Vec::new();
    for (index, _) in keys(schema) {
        let columns = (1..).zip(&index.keys);
        rows.extend(
            columns.map(|(position, key)| row(&index.name, &index.table_name, &key.name, position, None)),
        );
    }
    for key in &schema.foreign_keys {
        let (name, columns) = (key.name(), (1..).zip(&key.columns));
        rows.extend(
            columns.map(|(position, column)| row(&name, &key.table_name, column, position, Some(position))),
        );
    }
    Ok(rows)
}

fn constraint_columns(request: CatalogRequest<'_>, schema: &Schema) -> Result<Rows> {
    let catalog = database(request);
    let row = |table: &str, column: &str, name: &str| {
        row![catalog.as_str(), SCHEMA, table, column, catalog.as_str(), SCHEMA, name]
    };
    let mut rows = Vec::new();
    for (index, _) in keys(schema) {
        rows.extend(index.keys.iter().map(|key| row(&index.table_name, &key.name, &index.name)));
    }
    for key in &schema.foreign_keys {
        let name = key.name();
        if let Some(index) = referred(request, key)? {
            rows.extend(index.keys.iter().map(|column| row(&index.table_name, &column.name, &name)));
        }
    }
    Ok(rows)
}
