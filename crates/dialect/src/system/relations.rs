//! The `pg_catalog` tables that describe a tenant's schema, such as `pg_class` and `pg_attribute`.

use fulmar_pgwire::types::Type;
use fulmar_sqlite::Value;

use super::asked::{By, CatalogRequest, Filled, Rows, TableByGroup, table};
use super::constraints::constraints;
use super::schema::{Index, Key, Relation, Schema};
use super::types;
use crate::{Result, row};

/// The OIDs of the schemas.
pub(crate) const PUBLIC: i64 = 2200;
pub(crate) const PG_CATALOG: i64 = 11;
pub(crate) const INFORMATION_SCHEMA: i64 = 13_000;
/// The OID of the owner of all objects. Other roles have no permanent OIDs.
pub const OWNER: i64 = 10;

pub(crate) const TABLES: &[Filled] = &[(
    table("pg_namespace", &[("oid", "OID"), ("nspname", "NAME"), ("nspowner", "OID"), ("nspacl", "TEXT")]),
    |_| {
        let schemas =
            [(PG_CATALOG, "pg_catalog"), (PUBLIC, "public"), (INFORMATION_SCHEMA, "information_schema")];
        Ok(schemas.into_iter().map(|(oid, name)| row![oid, name, OWNER, ()]).collect())
    },
)];

pub(crate) const BY_GROUP: &[TableByGroup] = &[
    (
        table(
            "pg_class",
            &[
                ("oid", "OID"),
                ("relname", "NAME"),
                ("relnamespace", "OID"),
                ("reltype", "OID"),
                ("reloftype", "OID"),
                ("relowner", "OID"),
                ("relam", "OID"),
                ("relfilenode", "OID"),
                ("reltablespace", "OID"),
                ("relpages", "INT4"),
                ("reltuples", "FLOAT4"),
                ("relallvisible", "INT4"),
                ("reltoastrelid", "OID"),
                ("relhasindex", "BOOLEAN"),
                ("relisshared", "BOOLEAN"),
                ("relpersistence", "TEXT"),
                ("relkind", "TEXT"),
                ("relnatts", "INT2"),
                ("relchecks", "INT2"),
                ("relhasrules", "BOOLEAN"),
                ("relhastriggers", "BOOLEAN"),
                ("relhassubclass", "BOOLEAN"),
                ("relrowsecurity", "BOOLEAN"),
                ("relforcerowsecurity", "BOOLEAN"),
                ("relispopulated", "BOOLEAN"),
                ("relreplident", "TEXT"),
                ("relispartition", "BOOLEAN"),
                ("relrewrite", "OID"),
                ("relfrozenxid", "OID"),
                ("relminmxid", "OID"),
                ("relacl", "TEXT"),
                ("reloptions", "TEXT"),
                ("relpartbound", "TEXT"),
            ],
        ),
        &[("oid", By::Oid), ("relname", By::Name)],
        classes,
    ),
    (
        table(
            "pg_attribute",
            &[
                ("attrelid", "OID"),
                ("attname", "NAME"),
                ("atttypid", "OID"),
                ("attstattarget", "INT4"),
                ("attlen", "INT2"),
                ("attnum", "INT2"),
                ("attndims", "INT4"),
                ("attcacheoff", "INT4"),
                ("atttypmod", "INT4"),
                ("attbyval", "BOOLEAN"),
                ("attalign", "TEXT"),
                ("attstorage", "TEXT"),
                ("attcompression", "TEXT"),
                ("attnotnull", "BOOLEAN"),
                ("atthasdef", "BOOLEAN"),
                ("atthasmissing", "BOOLEAN"),
                ("attidentity", "TEXT"),
                ("attgenerated", "TEXT"),
                ("attisdropped", "BOOLEAN"),
                ("attislocal", "BOOLEAN"),
                ("attinhcount", "INT4"),
                ("attcollation", "OID"),
                ("attacl", "TEXT"),
                ("attoptions", "TEXT"),
                ("attfdwoptions", "TEXT"),
                ("attmissingval", "TEXT"),
            ],
        ),
        &[("attrelid", By::Oid)],
        attributes,
    ),
    (
        table("pg_attrdef", &[("oid", "OID"), ("adrelid", "OID"), ("adnum", "INT2"), ("adbin", "TEXT")]),
        &[("adrelid", By::Oid)],
        defaults,
    ),
    (
        table(
            "pg_index",
            &[
                ("indexrelid", "OID"),
                ("indrelid", "OID"),
                ("indnatts", "INT2"),
                ("indnkeyatts", "INT2"),
                ("indisunique", "BOOLEAN"),
                ("indnullsnotdistinct", "BOOLEAN"),
                ("indisprimary", "BOOLEAN"),
                ("indisexclusion", "BOOLEAN"),
                ("indimmediate", "BOOLEAN"),
                ("indisclustered", "BOOLEAN"),
                ("indisvalid", "BOOLEAN"),
                ("indcheckxmin", "BOOLEAN"),
                ("indisready", "BOOLEAN"),
                ("indislive", "BOOLEAN"),
                ("indisreplident", "BOOLEAN"),
                ("indkey", "TEXT"),
                ("indcollation", "TEXT"),
                ("indclass", "TEXT"),
                ("indoption", "TEXT"),
                ("indexprs", "TEXT"),
                ("indpred", "TEXT"),
            ],
        ),
        &[("indexrelid", By::Oid), ("indrelid", By::Oid)],
        indexes,
    ),
    (
        table(
            "pg_constraint",
            &[
                ("oid", "OID"),
                ("conname", "NAME"),
                ("connamespace", "OID"),
                ("contype", "TEXT"),
                ("condeferrable", "BOOLEAN"),
                ("condeferred", "BOOLEAN"),
                ("convalidated", "BOOLEAN"),
                ("conrelid", "OID"),
                ("contypid", "OID"),
                ("conindid", "OID"),
                ("conparentid", "OID"),
                ("confrelid", "OID"),
                ("confupdtype", "TEXT"),
                ("confdeltype", "TEXT"),
                ("confmatchtype", "TEXT"),
                ("conislocal", "BOOLEAN"),
                ("coninhcount", "INT4"),
                ("connoinherit", "BOOLEAN"),
                ("conkey", "INT2[]"),
                ("confkey", "INT2[]"),
                ("conbin", "TEXT"),
            ],
        ),
        &[("oid", By::Oid), ("conrelid", By::Oid)],
        constraints,
    ),
    (
        table(
            "pg_trigger",
            &[
                ("oid", "OID"),
                ("tgrelid", "OID"),
                ("tgparentid", "OID"),
                ("tgname", "NAME"),
                ("tgfoid", "OID"),
                ("tgtype", "INT2"),
                ("tgenabled", "TEXT"),
                ("tgisinternal", "BOOLEAN"),
                ("tgconstraint", "OID"),
            ],
        ),
        &[("oid", By::Oid), ("tgrelid", By::Oid)],
        triggers,
    ),
    (
        table(
            "pg_tables",
            &[
                ("schemaname", "NAME"),
                ("tablename", "NAME"),
                ("tableowner", "NAME"),
                ("tablespace", "NAME"),
                ("hasindexes", "BOOLEAN"),
                ("hasrules", "BOOLEAN"),
                ("hastriggers", "BOOLEAN"),
                ("rowsecurity", "BOOLEAN"),
            ],
        ),
        &[("tablename", By::Name)],
        |request, schema| {
            let owner = request.viewer.tenant().owner.as_str();
            let tables = schema.relations.iter().filter(|relation| !relation.is_view);
            let row = |table: &Relation| {
                let indexed = schema.indexes.iter().any(|index| index.table == table.oid);
                let triggered = schema.triggers.iter().any(|trigger| trigger.table == table.name);
                row!["public", table.name.as_str(), owner, (), indexed, false, triggered, false]
            };
            Ok(tables.map(row).collect())
        },
    ),
    (
        table(
            "pg_views",
            &[("schemaname", "NAME"), ("viewname", "NAME"), ("viewowner", "NAME"), ("definition", "TEXT")],
        ),
        &[("viewname", By::Name)],
        |request, schema| {
            let owner = request.viewer.tenant().owner.as_str();
            let views = schema.relations.iter().filter(|relation| relation.is_view);
            Ok(views.map(|view| row!["public", view.name.as_str(), owner, view.sql.as_str()]).collect())
        },
    ),
    (
        table(
            "pg_indexes",
            &[
                ("schemaname", "NAME"),
                ("tablename", "NAME"),
                ("indexname", "NAME"),
                ("tablespace", "NAME"),
                ("indexdef", "TEXT"),
            ],
        ),
        &[("tablename", By::Name), ("indexname", By::Name)],
        |_, schema| {
            let row = |index: &Index| {
                row!["public", index.table_name.as_str(), index.name.as_str(), (), index.sql()]
            };
            Ok(schema.indexes.iter().map(row).collect())
        },
    ),
    (
        table(
            "pg_stat_user_tables",
            &[
                ("relid", "OID"),
                ("schemaname", "NAME"),
                ("relname", "NAME"),
                ("seq_scan", "INT8"),
                ("idx_scan", "INT8"),
                ("n_tup_ins", "INT8"),
                ("n_tup_upd", "INT8"),
                ("n_tup_del", "INT8"),
                ("n_live_tup", "INT8"),
                ("n_dead_tup", "INT8"),
                ("last_vacuum", "TIMESTAMPTZ"),
                ("last_analyze", "TIMESTAMPTZ"),
            ],
        ),
        &[("relid", By::Oid), ("relname", By::Name)],
        |_, schema| {
            let tables = schema.relations.iter().filter(|relation| !relation.is_view);
            Ok(tables
                .map(|table| {
                    row![table.oid, "public", table.name.as_str(), (), (), (), (), (), (), (), (), ()]
                })
                .collect())
        },
    ),
];

fn classes(_: CatalogRequest<'_>, schema: &Schema) -> Result<Rows> {
    let class =
        |oid: i64, name: &str, kind: &str, columns: usize, checks: usize, indexed: bool, triggered: bool| {
            let method = match kind {
                "r" => 2i64,
                "i" => 403,
                _ => 0,
            };
            row![
                oid,
                name,
                PUBLIC,
                0i64,
                0i64,
                OWNER,
                method,
                oid,
                0i64,
                0i64,
                -1i64,
                0i64,
                0i64,
                indexed,
                false,
                "p",
                kind,
                columns as i64,
                checks as i64,
                false,
                triggered,
                false,
                false,
                false,
                true,
                "d",
                false,
                0i64,
                0i64,
                0i64,
                (),
                (),
                (),
            ]
        };
    let mut rows: Rows = schema
        .relations
        .iter()
        .map(|relation| {
            let kind = if relation.is_view { "v" } else { "r" };
            let indexed = schema.indexes.iter().any(|index| index.table == relation.oid);
            let checks = relation.checks().len();
            // Foreign keys are triggers in PostgreSQL, and psql queries them only if
            // `relhastriggers` is true.
            class(
                relation.oid,
                &relation.name,
                kind,
                relation.columns.len(),
                checks,
                indexed,
                !relation.is_view,
            )
        })
        .collect();
    rows.extend(
        schema
            .indexes
            .iter()
            .map(|index| class(index.oid, &index.name, "i", index.keys.len(), 0, false, false)),
    );
    Ok(rows)
}

fn attributes(_: CatalogRequest<'_>, schema: &Schema) -> Result<Rows> {
    let mut rows = Vec::new();
    for relation in &schema.relations {
        for (number, column) in (1i64..).zip(&relation.columns) {
            let kind = column.declared.kind;
            let collation = if types::is_text(kind) { types::DEFAULT_COLLATION } else { 0 };
            let generated = if column.generated { "s" } else { "" };
            let has_default = column.default.is_some();
            rows.push(row![
                relation.oid,
                column.name.as_str(),
                i64::from(kind.oid()),
                -1i64,
                i64::from(kind.size()),
                number,
                0i64,
                -1i64,
                i64::from(column.declared.modifier),
                kind.size() > 0,
                "i",
                "p",
                "",
                column.not_null,
                has_default,
                false,
                "",
                generated,
                false,
                true,
                0i64,
                collation,
                (),
                (),
                (),
                (),
            ]);
        }
    }
    for index in &schema.indexes {
        let relation = schema.relation_of(index.table);
        for (number, key) in (1i64..).zip(&index.keys) {
            let column =
                relation.and_then(|relation| relation.columns.get(usize::try_from(key.number - 1).ok()?));
            let kind = column.map_or(Type::Text, |column| column.declared.kind);
            let modifier = column.map_or(-1, |column| column.declared.modifier);
            let name = if key.name.is_empty() { "expr".to_owned() } else { key.name.clone() };
            rows.push(row![
                index.oid,
                name,
                i64::from(kind.oid()),
                -1i64,
                i64::from(kind.size()),
                number,
                0i64,
                -1i64,
                i64::from(modifier),
                kind.size() > 0,
                "i",
                "p",
                "",
                false,
                false,
                false,
                "",
                "",
                false,
                true,
                0i64,
                0i64,
                (),
                (),
                (),
                (),
            ]);
        }
    }
    Ok(rows)
}

fn defaults(_: CatalogRequest<'_>, schema: &Schema) -> Result<Rows> {
    let mut rows: Rows = Vec::new();
    for relation in &schema.relations {
        for (number, column) in (1i64..).zip(&relation.columns) {
            if let Some(default) = &column.default {
                let oid = relation.oid * 1000 + number;
                rows.push(row![oid, relation.oid, number, default.as_str()]);
            }
        }
    }
    Ok(rows)
}

fn indexes(_: CatalogRequest<'_>, schema: &Schema) -> Result<Rows> {
    let row = |index: &Index| {
        let each = |field: fn(&Key) -> i64| {
            index.keys.iter().map(|key| field(key).to_string()).collect::<Vec<_>>().join(" ")
        };
        let count = index.keys.len() as i64;
        let expressions = index.keys.iter().any(|key| key.number == 0).then(|| index.definition());
        row![
            index.oid,
            index.table,
            count,
            count,
            index.unique,
            false,
            index.primary,
            false,
            true,
            false,
            true,
            false,
            true,
            true,
            false,
            each(|key| key.number),
            each(|_| 0),
            each(|_| 0),
            each(|key| if key.descending { 3 } else { 0 }),
            expressions,
            index.condition(),
        ]
    };
    Ok(schema.indexes.iter().map(row).collect())
}

fn triggers(_: CatalogRequest<'_>, schema: &Schema) -> Result<Rows> {
    let rows = schema.triggers.iter().map(|trigger| {
        let table: Value =
            schema.relation(&trigger.table).map_or(Value::Null, |table| Value::Integer(table.oid));
        row![trigger.oid, table, 0i64, trigger.name.as_str(), 0i64, 0i64, "O", false, 0i64]
    });
    Ok(rows.collect())
}
