//! Tests of the translation of PostgreSQL statements.

use fulmar_meta::Access;
use fulmar_pgwire::copy::{Columns, Format, Header};
use fulmar_pgwire::version_text;
use fulmar_sqlite::sqlstate;

use super::*;
use crate::admin::{AdminStatement, Source};
use crate::copy::Copy;

const CONTEXT: Context<'_> = Context { database: "shop", user: "o'neill", pid: 7 };

fn command(sql: &str) -> Command {
    match translate(sql, &CONTEXT).unwrap() {
        Dispatch::Command(command, _) => *command,
        other => panic!("{sql}: {other:?}"),
    }
}

fn admin(sql: &str) -> AdminStatement {
    match command(sql) {
        Command::Admin(admin) => admin,
        other => panic!("{sql}: {other:?}"),
    }
}

fn rewritten(sql: &str) -> String {
    match translate(sql, &CONTEXT).unwrap() {
        Dispatch::Rewritten(text, _) => text,
        other => panic!("{sql}: {other:?}"),
    }
}

fn passes(sql: &str) -> bool {
    translate(sql, &CONTEXT).unwrap() == Dispatch::Pass
}

fn batch(sql: &str) -> (Vec<String>, &'static str) {
    match command(sql) {
        Command::Batch { statements, tag } => (statements, tag),
        other => panic!("{sql}: {other:?}"),
    }
}

fn failure(sql: &str) -> &'static str {
    translate(sql, &CONTEXT).unwrap_err().state()
}

#[test]
fn sqlite_statements_pass_unchanged() {
    for sql in [
        "SELECT abalance FROM pgbench_accounts WHERE aid = $1",
        "select region from t where version = 1",
        "UPDATE t SET now = 1",
        "SELECT t.current_user FROM t",
        "SELECT public.a FROM t AS public",
        "BEGIN",
        "COMMIT",
        "CREATE TABLE t (a int)",
        "create index i on t (a) where a > 1",
        "CREATE TABLE t (a) WITHOUT ROWID",
        "DROP TABLE IF EXISTS t",
        "ALTER TABLE t ADD COLUMN b",
        "ALTER TABLE t RENAME TO u",
        "VACUUM",
        "VACUUM main INTO 'x'",
        "VACUUM INTO 'x'",
        "ANALYZE t",
        "-- nothing",
        "",
    ] {
        assert!(passes(sql), "{sql}");
    }
}

#[test]
fn translates_pgbench_initialization() {
    let drop = "drop table if exists pgbench_accounts, pgbench_branches";
    let expected =
        vec![r#"DROP TABLE IF EXISTS "pgbench_accounts""#, r#"DROP TABLE IF EXISTS "pgbench_branches""#];
    assert_eq!(batch(drop), (expected.into_iter().map(String::from).collect(), "DROP TABLE"));
    let create = "create table t(tid int not null,filler char(84)) with (fillfactor=100)";
    assert_eq!(rewritten(create), "CREATE table t(tid int not null,filler char(84)) ");
    assert_eq!(rewritten("create unlogged table t(a int)"), "CREATE table t(a int)");
    assert_eq!(batch("truncate table a, b").0, [r#"DELETE FROM "a""#, r#"DELETE FROM "b""#]);
    let Command::AddPrimaryKey(key) = command("alter table pgbench_tellers add primary key (tid)") else {
        panic!()
    };
    assert_eq!(
        key.create_index_sql(),
        r#"CREATE UNIQUE INDEX "pgbench_tellers_pkey" ON "pgbench_tellers" ("tid")"#
    );
    assert_eq!(batch("vacuum analyze t"), (vec![r#"ANALYZE "t""#.to_owned()], "VACUUM"));
    assert_eq!(batch("vacuum t"), (vec![], "VACUUM"));
    let Command::Copy(Copy::In { table, columns, format }) =
        command("copy pgbench_accounts from stdin with (freeze on)")
    else {
        panic!()
    };
    assert_eq!((table.name.as_str(), columns.len()), ("pgbench_accounts", 0));
    assert_eq!(format, Format::text());
}

#[test]
fn parses_copy() {
    let copy = |sql: &str| match command(sql) {
        Command::Copy(copy) => copy,
        other => panic!("{other:?}"),
    };
    let Copy::In { table, columns, format } =
        copy("COPY public.t (a, \"B\") FROM STDIN (DELIMITER ',', NULL '', HEADER)")
    else {
        panic!()
    };
    assert_eq!((table.sql(), columns), (r#""main"."t""#.to_owned(), vec!["a".to_owned(), "B".to_owned()]));
    let expected = Format { delimiter: b',', null: String::new(), header: Header::Names, ..Format::text() };
    assert_eq!(format, expected);
    let out = |sql: &str| match copy(sql) {
        Copy::Out { query, format } => (query, format),
        other => panic!("{other:?}"),
    };
    let current_syntax =
        out("COPY t (a) TO STDOUT WITH (FORMAT csv, FORCE_QUOTE (a, b), ESCAPE '!', HEADER true)");
    let force_quote = Columns::Named(vec!["a".into(), "b".into()]);
    let format = Format { header: Header::Names, escape: b'!', force_quote, ..Format::csv() };
    assert_eq!(current_syntax, (r#"SELECT "a" FROM "t""#.to_owned(), format));
    let old_syntax = out("copy ( SELECT (1), ')' ) to stdout csv header quote as '''' force_quote *");
    let format = Format {
        header: Header::Names,
        quote: b'\'',
        escape: b'\'',
        force_quote: Columns::All,
        ..Format::csv()
    };
    assert_eq!(old_syntax, ("SELECT (1), ')'".to_owned(), format));
    for ambiguous in ["DELIMITER '\"'", "QUOTE ','", "NULL 'a,b'", "QUOTE 'ab'"] {
        let sql = format!("COPY t FROM STDIN (FORMAT csv, {ambiguous})");
        assert_eq!(failure(&sql), sqlstate::INVALID_PARAMETER_VALUE, "{sql}");
    }
    assert_eq!(failure("COPY t TO STDOUT (HEADER MATCH)"), sqlstate::FEATURE_NOT_SUPPORTED);
    assert_eq!(failure("COPY t TO '/tmp/x'"), sqlstate::FEATURE_NOT_SUPPORTED);
    assert_eq!(failure("COPY (SELECT 1 TO STDOUT"), sqlstate::SYNTAX_ERROR);
    assert_eq!(failure("COPY t FROM '/etc/passwd'"), sqlstate::FEATURE_NOT_SUPPORTED);
    assert_eq!(failure("COPY t FROM STDIN WITH (FORMAT binary)"), sqlstate::FEATURE_NOT_SUPPORTED);
    assert_eq!(failure("COPY t FROM STDIN (DELIMITER 'ab')"), sqlstate::INVALID_PARAMETER_VALUE);
    assert_eq!(failure("COPY t FROM STDIN bogus"), sqlstate::FEATURE_NOT_SUPPORTED);
    assert_eq!(failure("COPY t FROM STDIN (FREEZE"), sqlstate::SYNTAX_ERROR);
}

#[test]
fn replaces_session_functions_by_literals() {
    assert_eq!(rewritten("SELECT current_database()"), r#"SELECT 'shop' AS "current_database""#);
    assert_eq!(
        rewritten("select pg_catalog.version(), current_user; rest"),
        format!(r#"select '{}' AS "version", 'o''neill' AS "current_user""#, version_text())
    );
    assert_eq!(
        rewritten("INSERT INTO t VALUES (now(), 'now()')"),
        "INSERT INTO t VALUES (CURRENT_TIMESTAMP, 'now()')"
    );
    assert_eq!(rewritten("SELECT abs(pg_backend_pid()), now() + 1"), "SELECT abs(7), CURRENT_TIMESTAMP + 1");
    assert!(passes("SELECT pg_current_xact_id()"));
}

#[test]
fn parses_settings() {
    let set = |name: &str, value: Option<&str>, local| Command::Set {
        name: name.into(),
        value: value.map(String::from),
        local,
    };
    assert_eq!(command("SET statement_timeout = '5s'"), set("statement_timeout", Some("5s"), false));
    assert_eq!(command("set local Fulmar.Key to -1.5"), set("fulmar.key", Some("-1.5"), true));
    assert_eq!(command("SET search_path TO a, \"B\""), set("search_path", Some("a, B"), false));
    assert_eq!(command("SET TIME ZONE 'UTC'"), set("timezone", Some("UTC"), false));
    assert_eq!(command("SET a TO DEFAULT"), set("a", None, false));
    assert_eq!(command("RESET a"), set("a", None, false));
    assert_eq!(command("SHOW transaction isolation level"), Command::Show("transaction_isolation".into()));
    assert_eq!(
        command("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"),
        Command::SetTransaction { read_only: Some(true), session: true }
    );
    assert_eq!(command("DEALLOCATE PREPARE s1"), Command::Deallocate(Some("s1".into())));
    assert_eq!(failure("SET a"), sqlstate::SYNTAX_ERROR);
    assert_eq!(failure("SET a = "), sqlstate::SYNTAX_ERROR);
    assert_eq!(failure("SHOW"), sqlstate::SYNTAX_ERROR);
    assert_eq!(failure("SET ROLE x"), sqlstate::FEATURE_NOT_SUPPORTED);
}

#[test]
fn parses_statements_about_databases() {
    assert_eq!(
        admin("CREATE DATABASE \"Shop\" WITH OWNER = anna TEMPLATE base;"),
        AdminStatement::CreateDatabase {
            name: "Shop".into(),
            owner: Some("anna".into()),
            source: Some(Source { database: "base".into(), at_unix_ms: None }),
            durability: None,
        }
    );
    let branch = |at_unix_ms| AdminStatement::CreateDatabase {
        name: "copy".into(),
        owner: None,
        source: Some(Source { database: "shop".into(), at_unix_ms }),
        durability: None,
    };
    assert_eq!(admin("CREATE DATABASE copy BRANCH OF shop"), branch(None));
    let at = "CREATE DATABASE copy BRANCH OF shop AT TIMESTAMP '2026-11-21 19:07:06.007+01'";
    assert_eq!(admin(at), branch(Some(1_795_284_426_007)));
    assert_eq!(
        admin("ALTER DATABASE shop RESTORE TO TIMESTAMP '2026-11-21 18:07:06'"),
        AdminStatement::RestoreDatabase { name: "shop".into(), at_unix_ms: 1_795_284_426_000 }
    );
    assert_eq!(admin("ALTER DATABASE shop RESUME"), AdminStatement::ResumeDatabase { name: "shop".into() });
    assert_eq!(failure("CREATE DATABASE a BRANCH b"), sqlstate::SYNTAX_ERROR);
    assert_eq!(failure("ALTER DATABASE a RESTORE TO '2026-11-21'"), sqlstate::FEATURE_NOT_SUPPORTED);
    assert_eq!(failure("ALTER DATABASE a RESTORE TO TIMESTAMP 'soon'"), sqlstate::INVALID_DATETIME);
    for durability in ["shared", "= 'shared'"] {
        assert_eq!(
            admin(&format!("CREATE DATABASE a DURABILITY {durability}")),
            AdminStatement::CreateDatabase {
                name: "a".into(),
                owner: None,
                source: None,
                durability: Some("shared".into())
            }
        );
    }
    assert_eq!(
        admin("drop database if exists Shop with (force)"),
        AdminStatement::DropDatabase { name: "shop".into(), if_exists: true, force: true }
    );
    assert_eq!(
        admin("ALTER DATABASE a RENAME TO b"),
        AdminStatement::RenameDatabase { from: "a".into(), to: "b".into() }
    );
    for (sql, name, value) in [
        ("ALTER DATABASE a SET max_size = '64MB'", "max_size", Some("64MB")),
        ("ALTER DATABASE a SET Statement_Timeout TO 250", "statement_timeout", Some("250")),
        ("ALTER DATABASE a SET cpu_share = DEFAULT", "cpu_share", None),
        ("ALTER DATABASE a RESET cpu_share", "cpu_share", None),
    ] {
        let value = value.map(str::to_owned);
        assert_eq!(admin(sql), AdminStatement::AlterLimit { database: "a".into(), name: name.into(), value });
    }
    assert_eq!(admin("ALTER DATABASE a RESET ALL"), AdminStatement::ResetLimits { database: "a".into() });
    for (sql, is_pinned) in [("ALTER DATABASE a PIN", true), ("alter database a unpin", false)] {
        assert_eq!(admin(sql), AdminStatement::PinDatabase { name: "a".into(), is_pinned });
    }
    for (sql, is_forbidden) in [("ALTER NODE 'n-2' FORBID", true), ("alter node \"n-2\" allow", false)] {
        assert_eq!(admin(sql), AdminStatement::ForbidNode { name: "n-2".into(), is_forbidden });
    }
    let (name, node) = ("n1".to_owned(), "n-2".to_owned());
    let (mechanism, limit) = (Some("flush".to_owned()), Some("20MB".to_owned()));
    assert_eq!(
        admin("ALTER NODE n1 MOVE TO 'n-2' USING flush LIMIT '20MB'"),
        AdminStatement::MoveNode { name, node, mechanism, limit }
    );
    assert_eq!(failure("ALTER NODE n1 MOVE"), sqlstate::SYNTAX_ERROR);
    for (sql, value) in [
        ("ALTER SYSTEM SET control.high = 0.8", Some("0.8")),
        ("ALTER SYSTEM SET control.high TO '80%'", Some("80%")),
        ("ALTER SYSTEM RESET control.high", None),
    ] {
        let value = value.map(str::to_owned);
        assert_eq!(admin(sql), AdminStatement::AlterSystem { name: "control.high".into(), value });
    }
    assert_eq!(admin("ALTER SYSTEM CANCEL PLAN"), AdminStatement::CancelPlan);
    assert_eq!(failure("ALTER DATABASE a SET max_size"), sqlstate::SYNTAX_ERROR);
    assert_eq!(failure("ALTER DATABASE a OWNER TO b"), sqlstate::FEATURE_NOT_SUPPORTED);
    assert_eq!(failure("CREATE DATABASE"), sqlstate::SYNTAX_ERROR);
    assert_eq!(failure("CREATE DATABASE a TABLESPACE x"), sqlstate::FEATURE_NOT_SUPPORTED);
}

#[test]
fn parses_statements_about_users_and_tokens() {
    assert_eq!(
        admin("CREATE ROLE anna WITH LOGIN SUPERUSER PASSWORD 'it''s'"),
        AdminStatement::CreateUser { name: "anna".into(), superuser: true, password: Some("it's".into()) }
    );
    assert_eq!(
        admin("ALTER USER anna PASSWORD NULL"),
        AdminStatement::AlterPassword { name: "anna".into(), password: None }
    );
    assert_eq!(
        admin("CREATE TOKEN \"T\" FOR DATABASE shop EXPIRES IN '2h'"),
        AdminStatement::CreateToken {
            name: "T".into(),
            database: Some("shop".into()),
            is_admin: false,
            lasts_ms: Some(7_200_000)
        }
    );
    for (sql, is_admin) in [("create token t", false), ("CREATE TOKEN t FOR ADMIN", true)] {
        assert_eq!(
            admin(sql),
            AdminStatement::CreateToken { name: "t".into(), database: None, is_admin, lasts_ms: None }
        );
    }
    for (time, problem) in [
        ("soon", "not a time interval"),
        ("90", "no unit"),
        ("0", "no unit"),
        ("1. ", "no unit"),
        ("59s", "too short"),
        ("0d", "too short"),
    ] {
        let error = translate(&format!("CREATE TOKEN t EXPIRES IN '{time}'"), &CONTEXT).unwrap_err();
        assert_eq!(error.state(), sqlstate::INVALID_PARAMETER_VALUE, "{time}");
        assert!(error.message().contains(problem), "{time}: {}", error.message());
    }
    assert_eq!(
        admin("DROP TOKEN IF EXISTS t"),
        AdminStatement::DropToken { name: "t".into(), if_exists: true }
    );
    for (sql, access) in [
        ("GRANT CONNECT ON DATABASE a, b TO anna", Access::ReadWrite),
        ("GRANT ALL PRIVILEGES ON DATABASE a, b TO anna", Access::ReadWrite),
        ("GRANT SELECT ON DATABASE a, b TO anna", Access::ReadOnly),
    ] {
        let (databases, users) = (vec!["a".into(), "b".into()], vec!["anna".into()]);
        assert_eq!(admin(sql), AdminStatement::Grant { access, databases, users });
    }
    assert_eq!(
        admin("REVOKE SELECT ON DATABASE a FROM anna CASCADE"),
        AdminStatement::Revoke {
            access: Access::ReadOnly,
            databases: vec!["a".into()],
            users: vec!["anna".into()]
        }
    );
    assert_eq!(failure("GRANT SELECT ON t TO anna"), sqlstate::FEATURE_NOT_SUPPORTED);
    assert_eq!(failure("CREATE USER a CREATEDB"), sqlstate::SYNTAX_ERROR);
}

#[test]
fn returns_the_text_after_the_statement() {
    let Dispatch::Command(_, rest) = translate("SET a.b = 1; SELECT 2", &CONTEXT).unwrap() else { panic!() };
    assert_eq!(rest, " SELECT 2");
}
