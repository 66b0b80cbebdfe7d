"""Catalog queries of BI and administration tools, in PostgreSQL's syntax: casts to regclass,
`= ANY`, `!~`, information_schema, settings as functions.

Started by tests/clients/run. The queries are sent with psycopg. PostgreSQL returns the same rows.
"""

import psycopg

from client import report, url

SCHEMA = """
    CREATE TABLE customer (id BIGINT NOT NULL PRIMARY KEY, email TEXT NOT NULL UNIQUE, since DATE);
    CREATE TABLE purchase (
        id BIGINT NOT NULL PRIMARY KEY, customer BIGINT NOT NULL REFERENCES customer (id) ON DELETE CASCADE,
        placed TIMESTAMP DEFAULT CURRENT_TIMESTAMP, total NUMERIC(10, 2), note VARCHAR(80)
    );
    CREATE INDEX purchase_customer ON purchase (customer, placed);
    CREATE VIEW spent AS SELECT customer, sum(total) AS total FROM purchase GROUP BY customer;
"""

QUERIES = {
    "the server": (
        "SELECT current_setting('server_version_num')::int / 10000 >= 15, current_schema(), current_setting('search_path') <> ''",
        [(True, "public", True)],
    ),
    "schemas": (
        "SELECT schema_name FROM information_schema.schemata WHERE schema_name NOT IN ('information_schema', 'pg_catalog', 'pg_toast')",
        [("public",)],
    ),
    "tables and views": (
        """SELECT table_schema, quote_ident(table_name), table_type FROM INFORMATION_SCHEMA.tables
           WHERE table_schema NOT IN ('information_schema', 'pg_catalog') ORDER BY table_name""",
        [("public", "customer", "BASE TABLE"), ("public", "purchase", "BASE TABLE"), ("public", "spent", "VIEW")],
    ),
    "tables from the catalog": (
        """SELECT "n"."nspname", "c"."relname", CASE "c"."relkind" WHEN 'r' THEN 'TABLE' WHEN 'v' THEN 'VIEW' END AS "kind"
           FROM "pg_catalog"."pg_class" AS "c" JOIN "pg_catalog"."pg_namespace" AS "n" ON "c"."relnamespace" = "n"."oid"
           LEFT JOIN pg_catalog.pg_description d ON d.objoid = c.oid AND d.objsubid = 0 AND d.classoid = 'pg_class'::regclass
           WHERE "n"."nspname" !~ '^pg_' AND n.nspname <> 'information_schema' AND c.relkind IN ('r', 'p', 'v', 'm')
           AND d.description IS NULL ORDER BY "kind", 2""",
        [("public", "customer", "TABLE"), ("public", "purchase", "TABLE"), ("public", "spent", "VIEW")],
    ),
    "columns": (
        """SELECT column_name, data_type, udt_name, is_nullable, ordinal_position, character_maximum_length, numeric_scale
           FROM information_schema.columns WHERE table_schema = 'public' AND table_name = 'purchase' ORDER BY ordinal_position""",
        [
            ("id", "bigint", "int8", "NO", 1, None, 0),
            ("customer", "bigint", "int8", "NO", 2, None, 0),
            ("placed", "timestamp without time zone", "timestamp", "YES", 3, None, None),
            ("total", "numeric", "numeric", "YES", 4, None, 2),
            ("note", "character varying", "varchar", "YES", 5, 80, None),
        ],
    ),
    "columns from the catalog": (
        """SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, col_description(a.attrelid, a.attnum)
           FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
           WHERE a.attrelid = '"purchase"'::regclass AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum""",
        [
            ("id", "bigint", True, None),
            ("customer", "bigint", True, None),
            ("placed", "timestamp without time zone", False, None),
            ("total", "numeric(10,2)", False, None),
            ("note", "character varying(80)", False, None),
        ],
    ),
    "primary keys": (
        """SELECT k.table_name, k.column_name FROM information_schema.table_constraints c
           JOIN information_schema.key_column_usage k
           ON k.constraint_name = c.constraint_name AND k.table_schema = c.table_schema AND k.table_name = c.table_name
           WHERE c.constraint_type = 'PRIMARY KEY' AND c.table_schema = 'public' ORDER BY 1""",
        [("customer", "id"), ("purchase", "id")],
    ),
    "foreign keys": (
        """SELECT f.relname, fa.attname, p.relname, pa.attname FROM pg_constraint c
           JOIN pg_class f ON f.oid = c.conrelid JOIN pg_attribute fa ON fa.attrelid = f.oid AND fa.attnum = ANY (c.conkey)
           JOIN pg_class p ON p.oid = c.confrelid JOIN pg_attribute pa ON pa.attrelid = p.oid AND pa.attnum = ANY (c.confkey)
           WHERE c.contype = 'f'::"char" """,
        [("purchase", "customer", "customer", "id")],
    ),
    "indexes": (
        """SELECT i.relname, x.indisunique, pg_get_indexdef(x.indexrelid, 2, false) FROM pg_index x
           JOIN pg_class i ON i.oid = x.indexrelid WHERE x.indrelid = 'public.purchase'::regclass AND NOT x.indisprimary""",
        [("purchase_customer", False, "placed")],
    ),
    "existence of tables": (
        "SELECT to_regclass('public.purchase') IS NOT NULL, to_regclass('no_such_table') IS NULL, 'purchase'::regclass::text",
        [(True, True, "purchase")],
    ),
    "types": (
        "SELECT typname, typtype, typcategory FROM pg_catalog.pg_type WHERE oid = ANY (ARRAY[20, 25]::oid[]) ORDER BY oid",
        [("int8", "b", "N"), ("text", "b", "S")],
    ),
    "privileges": (
        "SELECT has_table_privilege('purchase', 'SELECT'), has_schema_privilege('public', 'USAGE'), rolsuper "
        "FROM pg_roles WHERE rolname = current_user",
        [(True, True, True)],
    ),
    "rows of a qualified table": ('SELECT count(*) AS "n" FROM "public"."purchase" AS "source"', [(0,)]),
}


def main():
    report(f"driver bi {psycopg.__version__}")
    with psycopg.connect(url(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE shop")
    with psycopg.connect(url("shop"), autocommit=True) as connection:
        connection.execute(SCHEMA)
        for name, (query, expected) in QUERIES.items():
            for binary in False, True:
                read = connection.execute(query, binary=binary).fetchall()
                assert read == expected, f"{name}, binary={binary}: {read}"
            report(f"ok {name}")


if __name__ == "__main__":
    main()
