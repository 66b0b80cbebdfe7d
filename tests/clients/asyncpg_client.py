"""asyncpg, an asyncio driver for Python: all statements are prepared, and all values are binary.

Started by tests/clients/run.
"""

import asyncio
import datetime
import decimal
import io
import uuid

import asyncpg

from client import ENDLESS, Expect, report, restart_server, url


async def connect(database="shop", user="ada", password="wing's"):
    return await asyncpg.connect(url(database, user, password), timeout=60)


def connected(check):
    """Gives a check its own connection."""

    async def with_connection():
        connection = await connect()
        try:
            await check(connection)
        finally:
            await connection.close(timeout=60)

    with_connection.__name__ = check.__name__
    return with_connection


async def passwords():
    admin = await connect("fulmar", None)
    await admin.execute("CREATE USER ada PASSWORD 'wing''s'")
    await admin.execute("CREATE DATABASE shop WITH OWNER ada")
    await admin.close()
    with Expect(asyncpg.InvalidPasswordError):
        await connect(password="wrong")
    with Expect(asyncpg.InvalidCatalogNameError):
        await connect("no_such_database", None)


@connected
async def migrations(connection):
    script = """
        CREATE TABLE IF NOT EXISTS customer (id BIGINT PRIMARY KEY, email TEXT NOT NULL UNIQUE, since DATE);
        CREATE TABLE IF NOT EXISTS account (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL CHECK (balance >= 0));
        CREATE INDEX IF NOT EXISTS customer_since ON customer (since);
    """
    for _ in range(2):
        async with connection.transaction():
            await connection.execute(script)
    status = await connection.execute("INSERT INTO customer VALUES ($1, $2, $3)", 1, "ada@example.org", None)
    assert status == "INSERT 0 1", status
    rows = [(n, 100) for n in range(1000)]
    await connection.executemany("INSERT INTO account VALUES ($1, $2)", rows)
    assert await connection.fetchval("SELECT count(*) FROM account") == 1000


@connected
async def values_round_trip(connection):
    samples = {
        "BIGINT": [0, -(2**63), 2**63 - 1],
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
        "JSON": ['{"a": [1, null, "é"]}'],
    }
    for number, (declared, values) in enumerate(samples.items()):
        await connection.execute(f"CREATE TABLE v{number} (n BIGINT PRIMARY KEY, v {declared})")
        for n, value in enumerate([*values, None]):
            await connection.execute(f"INSERT INTO v{number} VALUES ($1, $2)", n, value)
        read = [row["v"] for row in await connection.fetch(f"SELECT v FROM v{number} ORDER BY n")]
        assert read == [*values, None], f"{declared}: {read}"
        assert all(isinstance(a, type(b)) for a, b in zip(read, values)), f"{declared}: {read}"
    # The driver reports a mistake of the client before it sends anything.
    with Expect(asyncpg.DataError):
        await connection.execute("INSERT INTO v0 VALUES ($1, $2)", 9, "nine")


@connected
async def transactions(connection):
    with Expect(ZeroDivisionError):
        async with connection.transaction():
            await connection.execute("UPDATE account SET balance = 0")
            1 / 0
    assert await connection.fetchval("SELECT min(balance) FROM account") == 100
    async with connection.transaction(isolation="serializable"):
        await connection.execute("UPDATE account SET balance = 1 WHERE id = 1")
        with Expect(ZeroDivisionError):
            async with connection.transaction():  # a savepoint
                await connection.execute("UPDATE account SET balance = 2 WHERE id = 2")
                1 / 0
    rows = await connection.fetch("SELECT balance FROM account WHERE id IN (1, 2) ORDER BY id")
    assert [row["balance"] for row in rows] == [1, 100]


@connected
async def cursors(connection):
    async with connection.transaction():
        ids = [row["id"] async for row in connection.cursor("SELECT id FROM account ORDER BY id", prefetch=100)]
        assert ids == list(range(1000))
        cursor = await connection.cursor("SELECT id FROM account WHERE id >= $1 ORDER BY id", 500)
        assert [row["id"] for row in await cursor.fetch(3)] == [500, 501, 502]
        assert (await cursor.fetchrow())["id"] == 503


@connected
async def copy(connection):
    await connection.execute("CREATE TABLE loaded (id BIGINT, name TEXT)")
    source = io.BytesIO(b"1\tone\n2\ttwo\n")
    assert await connection.copy_to_table("loaded", source=source) == "COPY 2"
    assert await connection.copy_to_table("loaded", source=io.BytesIO(b"3,\n"), format="csv") == "COPY 1"
    target = io.BytesIO()
    await connection.copy_from_query("SELECT * FROM loaded WHERE id = 2", output=target)
    assert target.getvalue() == b"2\ttwo\n", target.getvalue()


@connected
async def errors_have_the_right_class(connection):
    expected = [
        (asyncpg.UniqueViolationError, "23505", "INSERT INTO account VALUES (1, 1)"),
        (asyncpg.CheckViolationError, "23514", "UPDATE account SET balance = -1 WHERE id = 3"),
        (asyncpg.NotNullViolationError, "23502", "INSERT INTO account VALUES (5000, NULL)"),
        (asyncpg.UndefinedTableError, "42P01", "SELECT * FROM no_such_table"),
        (asyncpg.PostgresSyntaxError, "42601", "SELEKT 1"),
    ]
    for error, state, sql in expected:
        transaction = connection.transaction()
        await transaction.start()
        with Expect(error) as expect:
            await connection.fetch(sql)  # is prepared first, which raises some of the errors
        assert expect.caught.sqlstate == state
        with Expect(asyncpg.InFailedSQLTransactionError):
            await connection.execute("SELECT 1")
        await transaction.rollback()
    with Expect(asyncpg.UniqueViolationError):
        await connection.executemany("INSERT INTO account VALUES ($1, $2)", [(3000, 1), (3001, 1), (1, 1)])
    count = await connection.fetchval("SELECT count(*) FROM account WHERE id >= 3000")
    assert count == 0, "executemany must be one transaction"


async def retry(work, attempts=5):
    """Runs a transaction, and retries it after a conflict. docs/clients.md shows this."""
    connection = await connect()
    try:
        for attempt in range(1, attempts + 1):
            try:
                async with connection.transaction(isolation="serializable"):
                    return await work(connection, attempt)
            except (asyncpg.SerializationError, asyncpg.DeadlockDetectedError):
                if attempt == attempts:
                    raise
    finally:
        await connection.close()


async def conflicts_are_retried():
    async def double(connection, attempt):
        balance = await connection.fetchval("SELECT balance FROM account WHERE id = $1", 800)
        if attempt == 1:
            other = await connect()
            await other.execute("UPDATE account SET balance = balance + 1 WHERE id = 800")
            await other.close()
        await connection.execute("UPDATE account SET balance = $1 WHERE id = 800", 2 * balance)
        return attempt

    assert await retry(double) == 2
    connection = await connect()
    assert await connection.fetchval("SELECT balance FROM account WHERE id = 800") == 202
    await connection.close()


@connected
async def cancel(connection):
    with Expect(asyncio.TimeoutError):
        await connection.execute(ENDLESS, timeout=0.2)
    await connection.execute("SET statement_timeout = 100")
    with Expect(asyncpg.QueryCanceledError):
        await connection.execute(ENDLESS)
    assert await connection.fetchval("SELECT sum(balance) FROM account WHERE id = 5") == 100


@connected
async def prepared_statements_after_schema_change(connection):
    await connection.execute("CREATE TABLE grows (a BIGINT)")
    await connection.execute("INSERT INTO grows VALUES (1)")
    by_name, all_columns = await connection.prepare("SELECT a FROM grows"), await connection.prepare("SELECT * FROM grows")
    assert tuple(await by_name.fetchrow()) == tuple(await all_columns.fetchrow()) == (1,)
    await connection.execute("ALTER TABLE grows ADD COLUMN b BIGINT")
    assert tuple(await by_name.fetchrow()) == (1,)
    with Expect(asyncpg.InvalidCachedStatementError):
        await all_columns.fetchrow()
    # The driver prepares a statement again if it has prepared it implicitly.
    assert tuple(await connection.fetchrow("SELECT * FROM grows")) == (1, None)
    await connection.execute("ALTER TABLE grows ADD COLUMN c BIGINT")
    assert tuple(await connection.fetchrow("SELECT * FROM grows")) == (1, None, None)


async def pool_reconnects():
    pool = await asyncpg.create_pool(url("shop", "ada", "wing's"), min_size=2, max_size=4, timeout=60)
    add = "UPDATE account SET balance = balance + 1 WHERE id = 900"
    await asyncio.gather(*[pool.execute(add) for _ in range(50)])
    restart_server()
    # A connection of the pool may turn out to be lost when it is used. The next use replaces it.
    for attempt in range(1, 6):
        try:
            assert await pool.fetchval("SELECT balance FROM account WHERE id = 900") == 150
            break
        except (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError):
            assert attempt < 5, "the pool must reconnect"
    await pool.close()


async def main():
    report(f"driver asyncpg {asyncpg.__version__}")
    checks = [
        passwords,
        migrations,
        values_round_trip,
        transactions,
        cursors,
        copy,
        errors_have_the_right_class,
        conflicts_are_retried,
        cancel,
        prepared_statements_after_schema_change,
        pool_reconnects,
    ]
    for check in checks:
        await check()
        report(f"ok {check.__name__}")


if __name__ == "__main__":
    asyncio.run(main())
