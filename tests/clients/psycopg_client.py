"""psycopg 3, the PostgreSQL driver for Python: the usual work of an application.

Started by tests/clients/run.
"""

import datetime
import decimal
import threading
import uuid

import psycopg
from psycopg import errors
from psycopg.rows import dict_row

from client import ENDLESS, Expect, report, restart_server, url


def connect(database="shop", user="ada", password="wing's", **options):
    return psycopg.connect(url(database, user, password), connect_timeout=60, **options)


def is_fulmar():
    with connect() as connection:
        return "Fulmar" in connection.execute("SELECT version()").fetchone()[0]


def passwords_and_privileges():
    with connect("fulmar", None, autocommit=True) as admin:
        assert admin.info.pgconn.ssl_in_use
        admin.execute("CREATE USER ada PASSWORD 'wing''s'")
        admin.execute("CREATE USER eve PASSWORD 'x'")
        admin.execute("CREATE DATABASE shop WITH OWNER ada")
    connect().close()
    rejected = [("ada", "wrong", "shop"), ("nobody", "x", "shop")]
    # In PostgreSQL every user may connect to a new database.
    rejected += [("eve", "x", "shop")] if is_fulmar() else []
    for user, password, database in rejected:
        with Expect(psycopg.OperationalError):
            connect(database, user, password)


MIGRATIONS = [
    """
    CREATE TABLE customer (id BIGINT PRIMARY KEY, email TEXT NOT NULL UNIQUE, since DATE);
    CREATE TABLE purchase (
        id BIGINT PRIMARY KEY, customer BIGINT NOT NULL REFERENCES customer (id) ON DELETE CASCADE, total NUMERIC(10, 2)
    );
    CREATE INDEX purchase_customer ON purchase (customer);
    INSERT INTO customer VALUES (1, 'ada@example.org', '2026-11-21');
    """,
    "ALTER TABLE customer ADD COLUMN note TEXT",
]


def migrate():
    """Applies the missing migrations in one transaction. Returns their number."""
    with connect() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS migration (version BIGINT PRIMARY KEY)")
        (done,) = connection.execute("SELECT count(*) FROM migration").fetchone()
        for version, script in enumerate(MIGRATIONS[done:], done):
            connection.execute(script)
            connection.execute("INSERT INTO migration VALUES (%s)", (version,))
        return len(MIGRATIONS) - done


def migrations():
    assert [migrate(), migrate()] == [2, 0]
    with connect() as connection, connection.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute("SELECT * FROM customer").fetchone()
        assert row == {"id": 1, "email": "ada@example.org", "since": datetime.date(2026, 11, 21), "note": None}, row
        columns = [(column.name, column.type_code) for column in cursor.description]
        assert columns == [("id", 20), ("email", 25), ("since", 1082), ("note", 25)], columns
    # A migration is applied completely or not at all.
    with Expect(errors.UndefinedTable), connect() as connection:
        connection.execute("CREATE TABLE half (id BIGINT); INSERT INTO no_such_table VALUES (1)")
    with Expect(errors.UndefinedTable), connect() as connection:
        connection.execute("SELECT * FROM half")


def values_round_trip():
    values = {
        "BIGINT": [0, -1, 2**31, -(2**63), 2**63 - 1],
        "INT4": [-(2**31)],
        "SMALLINT": [32767],
        "DOUBLE PRECISION": [0.5, -1e300],
        "TEXT": ["", "Hé 'quoted' \\ 鳥", "x" * 100_000],
        "BYTEA": [b"", bytes(range(256))],
        "BOOLEAN": [True, False],
        "DATE": [datetime.date(2026, 11, 20)],
        "TIME": [datetime.time(23, 59, 59, 5)],
        "TIMESTAMP": [datetime.datetime(2026, 11, 20, 23, 59, 59, 123456)],
        "TIMESTAMPTZ": [datetime.datetime(2026, 11, 20, 23, 59, 59, tzinfo=datetime.timezone.utc)],
        "NUMERIC": [decimal.Decimal("1234.5")],
        "UUID": [uuid.UUID("12345678-1234-5678-1234-567812345678")],
    }
    with connect() as connection:
        for number, (declared, samples) in enumerate(values.items()):
            connection.execute(f"CREATE TABLE v{number} (n BIGINT PRIMARY KEY, v {declared})")
            for n, sample in enumerate([*samples, None]):
                connection.execute(f"INSERT INTO v{number} VALUES (%s, %s)", (n, sample))
            for binary in False, True:
                cursor = connection.execute(f"SELECT v FROM v{number} ORDER BY n", binary=binary)
                read = [value for (value,) in cursor]
                assert read == [*samples, None], f"{declared}, binary={binary}: {read}"
                assert all(type(a) is type(b) for a, b in zip(read, samples)), f"{declared}: {read}"
        connection.execute("CREATE TABLE j (j JSON, b JSONB)")
        document = {"a": [1, None, "é"]}
        wrapped = (psycopg.types.json.Json(document), psycopg.types.json.Jsonb(document))
        connection.execute("INSERT INTO j VALUES (%s, %s)", wrapped)
        assert connection.execute("SELECT j, b FROM j").fetchone() == (document, document)


def lists_are_passed_as_json():
    """There are no arrays. A list of values is passed as JSON."""
    with connect() as connection:
        connection.execute("CREATE TABLE item (id BIGINT PRIMARY KEY)")
        connection.cursor().executemany("INSERT INTO item VALUES (%s)", [(n,) for n in range(10)])
        wanted = psycopg.types.json.Json([3, 5, 99])
        query = "SELECT id FROM item WHERE id IN (SELECT value FROM json_each(%s)) ORDER BY id"
        assert connection.execute(query, (wanted,)).fetchall() == [(3,), (5,)]


def procedures():
    with connect() as connection:
        connection.execute(
            """CREATE PROCEDURE product(a BIGINT, b BIGINT) RETURNS TABLE (total BIGINT)
               LANGUAGE lua AS 'return {{ total = a * b }}'"""
        )
        assert connection.execute("CALL product(%s, %s)", (6, 7)).fetchone() == (42,)


def transactions():
    with connect() as connection:
        connection.execute("CREATE TABLE account (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL CHECK (balance >= 0))")
        with connection.cursor() as cursor:
            cursor.executemany("INSERT INTO account VALUES (%s, %s)", [(n, 100) for n in range(1000)])
            assert cursor.rowcount == 1000
        connection.commit()

        connection.execute("UPDATE account SET balance = 0")
        connection.rollback()
        assert connection.execute("SELECT sum(balance) FROM account").fetchone() == (100_000,)

        with connection.transaction():
            connection.execute("UPDATE account SET balance = 1 WHERE id = 1")
            with connection.transaction():
                connection.execute("UPDATE account SET balance = 2 WHERE id = 2")
                raise psycopg.Rollback  # rolls back the inner block, a savepoint
        read = connection.execute("SELECT balance FROM account WHERE id IN (1, 2) ORDER BY id").fetchall()
        assert read == [(1,), (100,)], read


def rows_are_streamed():
    with connect() as connection, connection.cursor() as cursor:
        ids = [id for (id,) in cursor.stream("SELECT id FROM account ORDER BY id", size=100)]
        assert ids == list(range(1000))
        with cursor.copy("COPY account (id, balance) FROM STDIN") as copy:
            for id in range(2000, 2100):
                copy.write_row((id, 7))
        with cursor.copy("COPY (SELECT id FROM account WHERE balance = 7 ORDER BY id) TO STDOUT") as copy:
            copy.set_types(["int8"])
            assert list(copy.rows()) == [(id,) for id in range(2000, 2100)]
        connection.rollback()


def errors_have_the_right_class():
    with connect() as connection:
        expected = [
            (errors.UniqueViolation, "23505", "INSERT INTO account VALUES (1, 1)"),
            (errors.CheckViolation, "23514", "UPDATE account SET balance = -1 WHERE id = 3"),
            (errors.NotNullViolation, "23502", "INSERT INTO account VALUES (5000, NULL)"),
            (errors.ForeignKeyViolation, "23503", "INSERT INTO purchase VALUES (1, 77, 1)"),
            (errors.UndefinedTable, "42P01", "SELECT * FROM no_such_table"),
            (errors.UndefinedColumn, "42703", "SELECT no_such_column FROM account"),
            (errors.UndefinedFunction, "42883", "SELECT no_such_function(1)"),
            (errors.SyntaxError, "42601", "SELEKT 1"),
        ]
        for error, state, sql in expected:
            with Expect(error) as expect:
                connection.execute(sql)
            assert expect.caught.sqlstate == state
            with Expect(errors.InFailedSqlTransaction):
                connection.execute("SELECT 1")
            connection.rollback()
        with Expect(errors.InvalidTextRepresentation):
            connection.execute("SELECT id FROM account WHERE id = %s", ("seven",))


def pipelines():
    with connect(autocommit=True, prepare_threshold=0) as connection:
        with connection.pipeline():
            cursors = [connection.execute("SELECT balance + %s FROM account WHERE id = %s", (n, n)) for n in range(3, 53)]
        assert [cursor.fetchone()[0] for cursor in cursors] == [100 + n for n in range(3, 53)]
        with Expect(errors.UniqueViolation), connection.pipeline() as pipeline:
            connection.execute("UPDATE account SET balance = 7 WHERE id = 7")
            connection.execute("INSERT INTO account VALUES (7, 7)")
            pipeline.sync()
        balance = connection.execute("SELECT balance FROM account WHERE id = 7").fetchone()
        assert balance == (100,), "a pipeline must be one transaction"


def prepared_statements_after_schema_change():
    with connect(autocommit=True, prepare_threshold=0) as connection:
        connection.execute("CREATE TABLE grows (a BIGINT)")
        connection.execute("INSERT INTO grows VALUES (1)")
        by_name, all_columns = "SELECT a FROM grows", "SELECT * FROM grows"
        assert connection.execute(by_name).fetchone() == connection.execute(all_columns).fetchone() == (1,)
        with connect(autocommit=True) as other:
            other.execute("ALTER TABLE grows ADD COLUMN b BIGINT")
        assert connection.execute(by_name).fetchone() == (1,)
        # The result would differ from the description, so the client must prepare the statement
        # again.
        with Expect(errors.FeatureNotSupported):
            connection.execute(all_columns)
        connection.execute("DEALLOCATE ALL")
        assert connection.execute(all_columns, prepare=False).fetchone() == (1, None)


def types_are_found():
    with connect(autocommit=True) as connection:
        text = psycopg.types.TypeInfo.fetch(connection, "text")
        assert (text.oid, text.array_oid, text.regtype) == (25, 1009, "text")
        assert psycopg.types.TypeInfo.fetch(connection, "hstore") is None


def retry(work, attempts=5):
    """Runs a transaction, and retries it after a conflict. docs/clients.md shows this."""
    with connect(autocommit=True) as connection:
        connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        for attempt in range(1, attempts + 1):
            try:
                with connection.transaction():
                    return work(connection, attempt)
            except (errors.SerializationFailure, errors.DeadlockDetected):
                if attempt == attempts:
                    raise


def conflicts_are_retried():
    def double(connection, attempt):
        (balance,) = connection.execute("SELECT balance FROM account WHERE id = 800").fetchone()
        if attempt == 1:
            with connect(autocommit=True) as other:
                other.execute("UPDATE account SET balance = balance + 1 WHERE id = 800")
        connection.execute("UPDATE account SET balance = %s WHERE id = 800", (2 * balance,))
        return attempt

    assert retry(double) == 2
    with connect() as connection:
        assert connection.execute("SELECT balance FROM account WHERE id = 800").fetchone() == (202,)


def hot_row(threads=8, times=25):
    def increment():
        with connect(autocommit=True) as connection:
            for _ in range(times):
                connection.execute("UPDATE account SET balance = balance + 1 WHERE id = 900")

    workers = [threading.Thread(target=increment) for _ in range(threads)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    with connect() as connection:
        balance = connection.execute("SELECT balance FROM account WHERE id = 900").fetchone()
        assert balance == (100 + threads * times,), f"no increment may be lost or fail: {balance}"


def cancel():
    with connect(autocommit=True) as connection:
        # A request that arrives before the statement has no effect, so it is repeated until it
        # works.
        done, failures = threading.Event(), []

        def keep_cancelling():
            while not done.wait(0.05):
                try:
                    connection.cancel_safe()
                except psycopg.Error as failure:
                    failures.append(failure)

        canceller = threading.Thread(target=keep_cancelling)
        canceller.start()
        try:
            with Expect(errors.QueryCanceled):
                connection.execute(ENDLESS)
        finally:
            done.set()
            canceller.join()
        assert not failures, failures
        connection.execute("SET statement_timeout = 100")
        with Expect(errors.QueryCanceled):
            connection.execute(ENDLESS)


def commits_survive_a_crash():
    with connect(autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (id BIGINT PRIMARY KEY)")
        for n in range(50):
            connection.execute("INSERT INTO kept VALUES (%s)", (n,))
        restart_server()
        with Expect(psycopg.OperationalError):
            connection.execute("SELECT 1")
        assert connection.broken
    with connect() as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (50,)


def main():
    report(f"driver psycopg {psycopg.__version__}")
    passwords_and_privileges()
    report("ok passwords_and_privileges")
    checks = [
        migrations,
        values_round_trip,
        transactions,
        rows_are_streamed,
        errors_have_the_right_class,
        pipelines,
        prepared_statements_after_schema_change,
        types_are_found,
        conflicts_are_retried,
        hot_row,
        cancel,
        commits_survive_a_crash,
    ]
    for check in checks + ([lists_are_passed_as_json, procedures] if is_fulmar() else []):
        check()
        report(f"ok {check.__name__}")


if __name__ == "__main__":
    main()
