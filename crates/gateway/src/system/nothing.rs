//! Tables of Postgres's that are always empty here: clients ask for what there could be.

use super::{Filled, Rows, table};
use crate::Result;

fn none(_: super::Asked<'_>) -> Result<Rows> {
    Ok(Vec::new())
}

/// Only the columns that clients are known to ask for.
pub(super) const TABLES: &[Filled] = &[
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
        none,
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
        none,
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
        none,
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
        none,
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
        none,
    ),
    (table("pg_publication_namespace", &[("oid", "OID"), ("pnpubid", "OID"), ("pnnspid", "OID")]), none),
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
        none,
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
        none,
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
        none,
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
        none,
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
        none,
    ),
    (table("pg_foreign_table", &[("ftrelid", "OID"), ("ftserver", "OID"), ("ftoptions", "TEXT")]), none),
    (table("pg_foreign_server", &[("oid", "OID"), ("srvname", "NAME"), ("srvfdw", "OID")]), none),
    (table("pg_foreign_data_wrapper", &[("oid", "OID"), ("fdwname", "NAME")]), none),
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
        none,
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
        none,
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
        none,
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
        none,
    ),
    (
        table(
            "pg_enum",
            &[("oid", "OID"), ("enumtypid", "OID"), ("enumsortorder", "FLOAT4"), ("enumlabel", "NAME")],
        ),
        none,
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
        none,
    ),
    (
        table(
            "pg_partitioned_table",
            &[("partrelid", "OID"), ("partstrat", "TEXT"), ("partnatts", "INT2"), ("partattrs", "TEXT")],
        ),
        none,
    ),
    (
        table(
            "pg_description",
            &[("objoid", "OID"), ("classoid", "OID"), ("objsubid", "INT4"), ("description", "TEXT")],
        ),
        none,
    ),
    (table("pg_shdescription", &[("objoid", "OID"), ("classoid", "OID"), ("description", "TEXT")]), none),
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
        none,
    ),
    (
        table(
            "pg_auth_members",
            &[("roleid", "OID"), ("member", "OID"), ("grantor", "OID"), ("admin_option", "BOOLEAN")],
        ),
        none,
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
        none,
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
        none,
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
        none,
    ),
    (table("pg_db_role_setting", &[("setdatabase", "OID"), ("setrole", "OID"), ("setconfig", "TEXT")]), none),
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
        none,
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
        none,
    ),
    (
        table(
            "pg_timezone_names",
            &[("name", "TEXT"), ("abbrev", "TEXT"), ("utc_offset", "TEXT"), ("is_dst", "BOOLEAN")],
        ),
        none,
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
        none,
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
        none,
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
        none,
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
        none,
    ),
];
