//! Catalog tables that are always empty. They exist because clients, such as psql, query them.

use super::asked::{CatalogRequest, Filled, Rows, table};
use crate::Result;

fn no_rows(_: CatalogRequest<'_>) -> Result<Rows> {
    Ok(Vec::new())
}

/// Only the columns that known clients query.
pub(crate) const TABLES: &[Filled] = &[
    (
        table(
            "pg_inherits",
            &[
                ("inhrelid", "OID"),
                ("inhparent", "OID"),
                ("inhseqno", "INT4"),
                ("inhdetachpending", "BOOLEAN"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_policy",
            &[
                ("oid", "OID"),
                ("polname", "NAME"),
                ("polrelid", "OID"),
                ("polcmd", "TEXT"),
                ("polpermissive", "BOOLEAN"),
                ("polroles", "OID[]"),
                ("polqual", "TEXT"),
                ("polwithcheck", "TEXT"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_statistic_ext",
            &[
                ("oid", "OID"),
                ("stxrelid", "OID"),
                ("stxname", "NAME"),
                ("stxnamespace", "OID"),
                ("stxowner", "OID"),
                ("stxstattarget", "INT4"),
                ("stxkeys", "TEXT"),
                ("stxkind", "TEXT"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_publication",
            &[
                ("oid", "OID"),
                ("pubname", "NAME"),
                ("pubowner", "OID"),
                ("puballtables", "BOOLEAN"),
                ("pubinsert", "BOOLEAN"),
                ("pubupdate", "BOOLEAN"),
                ("pubdelete", "BOOLEAN"),
                ("pubtruncate", "BOOLEAN"),
                ("pubviaroot", "BOOLEAN"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_publication_rel",
            &[
                ("oid", "OID"),
                ("prpubid", "OID"),
                ("prrelid", "OID"),
                ("prqual", "TEXT"),
                ("prattrs", "INT2[]"),
            ],
        ),
        no_rows,
    ),
    (table("pg_publication_namespace", &[("oid", "OID"), ("pnpubid", "OID"), ("pnnspid", "OID")]), no_rows),
    (
        table(
            "pg_subscription",
            &[
                ("oid", "OID"),
                ("subname", "NAME"),
                ("subdbid", "OID"),
                ("subowner", "OID"),
                ("subenabled", "BOOLEAN"),
                ("subpublications", "TEXT"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_proc",
            &[
                ("oid", "OID"),
                ("proname", "NAME"),
                ("pronamespace", "OID"),
                ("proowner", "OID"),
                ("prolang", "OID"),
                ("prokind", "TEXT"),
                ("proretset", "BOOLEAN"),
                ("provolatile", "TEXT"),
                ("proparallel", "TEXT"),
                ("prosecdef", "BOOLEAN"),
                ("proleakproof", "BOOLEAN"),
                ("proisstrict", "BOOLEAN"),
                ("pronargs", "INT2"),
                ("prorettype", "OID"),
                ("proargtypes", "TEXT"),
                ("proallargtypes", "TEXT"),
                ("proargmodes", "TEXT"),
                ("proargnames", "TEXT"),
                ("prosrc", "TEXT"),
                ("proacl", "TEXT"),
                ("proisagg", "BOOLEAN"),
                ("proargdefaults", "TEXT"),
                ("procost", "FLOAT4"),
                ("prorows", "FLOAT4"),
                ("proconfig", "TEXT"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_extension",
            &[
                ("oid", "OID"),
                ("extname", "NAME"),
                ("extowner", "OID"),
                ("extnamespace", "OID"),
                ("extrelocatable", "BOOLEAN"),
                ("extversion", "TEXT"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_available_extensions",
            &[
                ("name", "NAME"),
                ("default_version", "TEXT"),
                ("installed_version", "TEXT"),
                ("comment", "TEXT"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_rewrite",
            &[
                ("oid", "OID"),
                ("rulename", "NAME"),
                ("ev_class", "OID"),
                ("ev_type", "TEXT"),
                ("ev_enabled", "TEXT"),
                ("is_instead", "BOOLEAN"),
            ],
        ),
        no_rows,
    ),
    (table("pg_foreign_table", &[("ftrelid", "OID"), ("ftserver", "OID"), ("ftoptions", "TEXT")]), no_rows),
    (table("pg_foreign_server", &[("oid", "OID"), ("srvname", "NAME"), ("srvfdw", "OID")]), no_rows),
    (table("pg_foreign_data_wrapper", &[("oid", "OID"), ("fdwname", "NAME")]), no_rows),
    (
        table(
            "pg_matviews",
            &[
                ("schemaname", "NAME"),
                ("matviewname", "NAME"),
                ("matviewowner", "NAME"),
                ("tablespace", "NAME"),
                ("hasindexes", "BOOLEAN"),
                ("ispopulated", "BOOLEAN"),
                ("definition", "TEXT"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_sequence",
            &[
                ("seqrelid", "OID"),
                ("seqtypid", "OID"),
                ("seqstart", "INT8"),
                ("seqincrement", "INT8"),
                ("seqmax", "INT8"),
                ("seqmin", "INT8"),
                ("seqcache", "INT8"),
                ("seqcycle", "BOOLEAN"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_sequences",
            &[
                ("schemaname", "NAME"),
                ("sequencename", "NAME"),
                ("sequenceowner", "NAME"),
                ("data_type", "TEXT"),
                ("start_value", "INT8"),
                ("last_value", "INT8"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_event_trigger",
            &[
                ("oid", "OID"),
                ("evtname", "NAME"),
                ("evtevent", "NAME"),
                ("evtowner", "OID"),
                ("evtfoid", "OID"),
                ("evtenabled", "TEXT"),
                ("evttags", "TEXT"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_enum",
            &[("oid", "OID"), ("enumtypid", "OID"), ("enumsortorder", "FLOAT4"), ("enumlabel", "NAME")],
        ),
        no_rows,
    ),
    (
        table(
            "pg_range",
            &[
                ("rngtypid", "OID"),
                ("rngsubtype", "OID"),
                ("rngmultitypid", "OID"),
                ("rngcollation", "OID"),
                ("rngsubopc", "OID"),
                ("rngcanonical", "TEXT"),
                ("rngsubdiff", "TEXT"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_partitioned_table",
            &[("partrelid", "OID"), ("partstrat", "TEXT"), ("partnatts", "INT2"), ("partattrs", "TEXT")],
        ),
        no_rows,
    ),
    (
        table(
            "pg_description",
            &[("objoid", "OID"), ("classoid", "OID"), ("objsubid", "INT4"), ("description", "TEXT")],
        ),
        no_rows,
    ),
    (table("pg_shdescription", &[("objoid", "OID"), ("classoid", "OID"), ("description", "TEXT")]), no_rows),
    (
        table(
            "pg_depend",
            &[
                ("classid", "OID"),
                ("objid", "OID"),
                ("objsubid", "INT4"),
                ("refclassid", "OID"),
                ("refobjid", "OID"),
                ("refobjsubid", "INT4"),
                ("deptype", "TEXT"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_auth_members",
            &[("roleid", "OID"), ("member", "OID"), ("grantor", "OID"), ("admin_option", "BOOLEAN")],
        ),
        no_rows,
    ),
    (
        table(
            "pg_opclass",
            &[
                ("oid", "OID"),
                ("opcname", "NAME"),
                ("opcmethod", "OID"),
                ("opcdefault", "BOOLEAN"),
                ("opcintype", "OID"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_operator",
            &[
                ("oid", "OID"),
                ("oprname", "NAME"),
                ("oprleft", "OID"),
                ("oprright", "OID"),
                ("oprresult", "OID"),
                ("oprkind", "TEXT"),
                ("oprnamespace", "OID"),
                ("oprcode", "OID"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_cast",
            &[
                ("oid", "OID"),
                ("castsource", "OID"),
                ("casttarget", "OID"),
                ("castcontext", "TEXT"),
                ("castmethod", "TEXT"),
                ("castfunc", "OID"),
            ],
        ),
        no_rows,
    ),
    (
        table("pg_db_role_setting", &[("setdatabase", "OID"), ("setrole", "OID"), ("setconfig", "TEXT")]),
        no_rows,
    ),
    (
        table(
            "pg_replication_slots",
            &[
                ("slot_name", "NAME"),
                ("plugin", "NAME"),
                ("slot_type", "TEXT"),
                ("datname", "NAME"),
                ("active", "BOOLEAN"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_locks",
            &[
                ("locktype", "TEXT"),
                ("database", "OID"),
                ("relation", "OID"),
                ("pid", "INT4"),
                ("mode", "TEXT"),
                ("granted", "BOOLEAN"),
                ("transactionid", "OID"),
                ("virtualxid", "TEXT"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_timezone_names",
            &[("name", "TEXT"), ("abbrev", "TEXT"), ("utc_offset", "TEXT"), ("is_dst", "BOOLEAN")],
        ),
        no_rows,
    ),
    (
        table(
            "pg_opfamily",
            &[
                ("oid", "OID"),
                ("opfmethod", "OID"),
                ("opfname", "NAME"),
                ("opfnamespace", "OID"),
                ("opfowner", "OID"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_conversion",
            &[
                ("oid", "OID"),
                ("conname", "NAME"),
                ("connamespace", "OID"),
                ("conowner", "OID"),
                ("conforencoding", "INT4"),
                ("contoencoding", "INT4"),
                ("condefault", "BOOLEAN"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "pg_stat_gssapi",
            &[
                ("pid", "INT4"),
                ("gss_authenticated", "BOOLEAN"),
                ("principal", "TEXT"),
                ("encrypted", "BOOLEAN"),
            ],
        ),
        no_rows,
    ),
    (
        table(
            "information_schema.character_sets",
            &[
                ("character_set_catalog", "NAME"),
                ("character_set_schema", "NAME"),
                ("character_set_name", "NAME"),
                ("character_repertoire", "NAME"),
                ("form_of_use", "NAME"),
            ],
        ),
        no_rows,
    ),
];
