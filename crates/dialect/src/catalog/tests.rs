use crate::token::first_statement;

fn translated(sql: &str) -> String {
    super::translate(&first_statement(sql).0).unwrap().sql
}

#[test]
fn translates_catalog_queries() {
    for (postgres, sqlite) in [
        (
            "SELECT c.oid::pg_catalog.regclass FROM pg_catalog.pg_class c",
            "SELECT pg_regclass(c.oid) AS \"oid\" FROM pg_class AS \"c\"",
        ),
        (
            "SELECT relname FROM pg_class WHERE relkind = ANY (ARRAY['r', 'v'])",
            "SELECT relname FROM pg_class WHERE relkind IN ('r', 'v')",
        ),
        (
            "SELECT 1 FROM pg_class WHERE relname OPERATOR(pg_catalog.~) '^(t)$' COLLATE pg_catalog.default AND a",
            "SELECT 1 AS \"?column?\" FROM pg_class WHERE relname REGEXP '^(t)$' AND a",
        ),
        (
            "SELECT 'a' ~* 'b', x !~ 'y'",
            "SELECT 'a' REGEXP '(?i)' || 'b' AS \"?column?\", x NOT REGEXP 'y' AS \"?column?\"",
        ),
        (
            "SELECT tables.table_name FROM information_schema.tables WHERE information_schema.tables.a <= 1",
            "SELECT tables.table_name AS \"table_name\" FROM \"sqlite_system_information_schema.tables\" AS \"tables\" WHERE tables.a <= 1",
        ),
        ("SELECT format_type(a.b, -1)::text AS t", "SELECT CAST(format_type(a.b, -1) AS TEXT) AS \"t\""),
        (
            "SELECT CAST('x' AS pg_catalog.regclass) = c.oid",
            "SELECT pg_regclass('x') = c.oid AS \"?column?\"",
        ),
        (
            "SELECT (pg_catalog.current_schemas(true))[1]",
            "SELECT pg_array_item((current_schemas(true)), 1) AS \"?column?\"",
        ),
        (
            "SELECT a.n FROM pg_index i, unnest(i.indkey) WITH ORDINALITY AS a(n, at) WHERE true",
            "SELECT a.n AS \"n\" FROM pg_index AS \"i\" , (SELECT value AS \"n\", key + 1 AS \"at\" FROM json_each(pg_array_json(unnest(i.indkey)))) AS \"a\" WHERE true",
        ),
        (
            "SELECT oid, unnest(conkey) AS n FROM pg_constraint ORDER BY 1",
            "SELECT oid, set_0.value AS \"n\" FROM pg_constraint, json_each(pg_array_json(conkey)) AS set_0 ORDER BY 1",
        ),
        (
            "SELECT (information_schema._pg_expandarray(c.k)).n AS a, (r.keys).x FROM c",
            "SELECT (set_0.key + 1) AS \"a\", json_extract((r.keys), '$.x') AS \"?column?\" FROM c, json_each(pg_array_json(c.k)) AS set_0",
        ),
        (
            "SELECT trim(both '\"' from x) y, substring(a from 2 for 3)",
            "SELECT trim(x, '\"') AS \"y\", substr(a, 2, 3) AS \"substring\"",
        ),
        ("SELECT t.select AS a", "SELECT t.\"select\" AS \"a\""),
        ("SELECT EXISTS (SELECT FROM pg_class)", "SELECT EXISTS (SELECT NULL FROM pg_class) AS \"exists\""),
        ("SELECT E'a\\n', 'x'::\"char\"", "SELECT 'a\n' AS \"?column?\", 'x' AS \"?column?\""),
        (
            "SELECT 1 UNION ALL (SELECT 2)",
            "SELECT 1 AS \"?column?\" UNION ALL SELECT * FROM (SELECT 2 AS \"?column?\")",
        ),
        (
            "SELECT count(*) cnt, max(oid) FROM pg_class",
            "SELECT count(*) AS \"cnt\", max(oid) AS \"max\" FROM pg_class",
        ),
        (
            "SELECT array(select 1 from pg_roles where oid = any (r)) FROM (VALUES (1)) AS t(x)",
            "SELECT (WITH array_rows(c) AS (select 1 AS \"?column?\" FROM pg_roles where oid IN (SELECT value FROM json_each(pg_array_json(r)))) \
             SELECT array_agg(c) FROM array_rows) AS \"array\" FROM (WITH \"t\"(\"x\") AS (VALUES (1)) SELECT * FROM \"t\") AS \"t\"",
        ),
    ] {
        assert_eq!(super::query::query(&first_statement(postgres).0), sqlite);
    }
}

#[test]
fn nesting_is_bounded() {
    let deep = format!("SELECT {}1{}", "(".repeat(5000), ")".repeat(5000));
    assert_eq!(super::translate(&first_statement(&deep).0).unwrap_err().state(), "54000");
    let casts = format!("SELECT 1{}", "::int".repeat(5000));
    assert_eq!(super::translate(&first_statement(&casts).0).unwrap_err().state(), "54000");
    let long = format!("SELECT 1{}", " UNION SELECT 1".repeat(5000));
    assert_eq!(super::translate(&first_statement(&long).0).unwrap_err().state(), "54000");
}

#[test]
fn detects_postgres_syntax_and_catalog_names() {
    let concerns = |sql: &str| super::needs_translation(first_statement(sql).0.into_iter());
    assert!(concerns("SELECT 1 FROM pg_class"));
    assert!(concerns("SELECT 1 FROM fulmar.limits"));
    assert!(concerns("SELECT 't'::regclass"));
    assert!(concerns("SELECT format_type(23, -1)"));
    assert!(concerns("UPDATE t SET a = $1::INTEGER"));
    assert!(concerns("SELECT a FROM t WHERE id = any($1)"));
    assert!(!concerns("SELECT all FROM t WHERE a = (1)"));
    assert!(!concerns("SELECT fulmar, format_type FROM information"));
    assert!(!concerns("SELECT pg_xact_status(1)"));
}

#[test]
fn translates_only_postgres_syntax_of_user_statements() {
    for (postgres, sqlite) in [
        (
            "SELECT a COLLATE NOCASE, format('%05d', b), CAST(c AS REAL) / d FROM t AS Ä WHERE id = ANY ($1) ORDER BY e ISNULL",
            "SELECT a COLLATE NOCASE, format('%05d', b), CAST(c AS REAL) / d FROM t AS Ä WHERE id IN (SELECT value FROM json_each(pg_array_json($1))) ORDER BY e ISNULL",
        ),
        (
            "SELECT count(*)::float8 / 7, '5'::numeric > 10, x ->> '$.a', ~y FROM t",
            "SELECT CAST(count(*) AS REAL) / 7, 5 > 10, x ->> '$.a', ~y FROM t",
        ),
        ("SELECT '\\x00ff'::bytea, 'true'::boolean, created::date", "SELECT x'00ff', 1, date(created)"),
        (
            "INSERT INTO t SELECT '2026-11-21T10:00:00+02:00'::timestamptz",
            "INSERT INTO t SELECT '2026-11-21 08:00:00'",
        ),
        (
            "DELETE FROM t WHERE a <> ALL (ARRAY[1, 2]::int[]) AND b != ALL ($1::text[])",
            "DELETE FROM t WHERE a NOT IN (1, 2) AND b NOT IN (SELECT value FROM json_each(pg_array_json($1/*text[]*/)))",
        ),
        (
            "INSERT INTO t SELECT p0::VARCHAR FROM (VALUES ($1::VARCHAR, 0)) AS v(p0, n) ORDER BY n RETURNING t.id",
            "INSERT INTO t SELECT CAST(p0 AS TEXT) FROM (WITH v(p0,n) AS (VALUES ($1/*varchar*/, 0)) SELECT * FROM v) AS v ORDER BY n RETURNING t.id",
        ),
        // SQLite reports the errors of these.
        ("SELECT 1 WHERE a < ANY ($1) AND b = ALL ($2)", "SELECT 1 WHERE a < ANY ($1) AND b = ALL ($2)"),
        (
            "SELECT 1 WHERE a = ANY (ARRAY[1] || b)",
            "SELECT 1 WHERE a IN (SELECT value FROM json_each(pg_array_json(ARRAY[1] || b)))",
        ),
        (
            "SELECT $1::TIMESTAMP(3) WITH TIME ZONE, $2::character varying",
            "SELECT $1/*timestamptz*/, $2/*varchar*/",
        ),
    ] {
        assert_eq!(translated(postgres), sqlite);
    }
}

#[test]
fn casts_determine_parameter_types() {
    let sql =
        "UPDATE t SET a = $1::INTEGER, b = CAST($2 AS varchar(3)) WHERE c = $4::regclass AND id = any($3)";
    let translated = super::translate(&first_statement(sql).0).unwrap();
    let expected = "UPDATE t SET a = $1/*integer*/, b = CAST($2 AS varchar(3)) WHERE c = pg_regclass($4) AND id IN (SELECT value FROM json_each(pg_array_json($3)))";
    assert_eq!(translated.sql, expected);
    assert!(translated.system);
    let kind = |number: u16, kind: &str| (number, kind.to_owned());
    assert_eq!(
        translated.parameters,
        [kind(1, "integer"), kind(2, "varchar"), kind(4, "text"), kind(3, "[]")]
    );
    assert!(!super::translate(&first_statement("SELECT $1::int8").0).unwrap().system);
}

proptest::proptest! {
    /// Holds for meaningless statements too. (PostgreSQL collations are left out with any name that
    /// they contain.)
    #[test]
    fn arbitrary_words_translate_without_repeating_a_parameter(words in proptest::collection::vec(
        proptest::sample::select(vec![
            "select", "from", "pg_class", "(", ")", "[", "]", "::", "regclass", ",", ".", "as", "a", "any", "array",
            "=", "~", "!", "cast", "operator", "union", "all", "with", "unnest", "collate", "'x'", "lateral", "join",
            "on", "information_schema", "pg_catalog", "case", "end", "$1", "exists",
        ]),
        0..24,
    )) {
        let sql = words.join(" ");
        let parameters = |sql: &str| sql.matches("$1").count();
        let translated = translated(&sql);
        proptest::prop_assert!(parameters(&translated) <= parameters(&sql), "{}", translated);
    }
}
