"""psycopg 3, PostgreSQL's driver for Python, against a node: what an application does, from connect to cancel.

    python tests/psycopg_client.py target/debug/fulmar

Starts a node in a temporary directory with passwords, logs in, works in a tenant, kills the node, looks again. Ends
with exit code 0, or with the first thing that is not as it should be.
"""

import datetime
import decimal
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid

import psycopg
from psycopg import errors


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Node:
    """A node, from its start to the end of the `with` block."""

    def __init__(self, binary, data):
        self.binary, self.data = binary, data
        self.sql, self.http = free_port(), free_port()

    def __enter__(self):
        self.process = subprocess.Popen(
            [self.binary, "start", "--data", self.data, "--sql", f"127.0.0.1:{self.sql}"]
            + ["--http", f"127.0.0.1:{self.http}", "--memory", "256MB"],
            stdout=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        assert line.startswith("fulmar ready: "), line
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        assert code == 0, f"the node ended with {code}"

    def crash(self):
        self.process.kill()
        self.process.wait()
        self.__enter__()

    def connect(self, database, user="fulmar", password=None, **options):
        password = password or pathlib.Path(self.data, "superuser-password").read_text().strip()
        return psycopg.connect(
            host="127.0.0.1", port=self.sql, dbname=database, user=user, password=password, connect_timeout=10, **options
        )


def passwords_and_rights(node):
    with node.connect("fulmar", autocommit=True) as admin:
        admin.execute("CREATE USER ada PASSWORD 'wing''s'")
        admin.execute("CREATE USER eve PASSWORD 'x'")
        admin.execute("CREATE DATABASE shop WITH OWNER ada")
    node.connect("shop", "ada", "wing's").close()
    for user, password, database in [("ada", "wrong", "shop"), ("nobody", "x", "shop"), ("eve", "x", "shop")]:
        try:
            node.connect(database, user, password)
        except psycopg.OperationalError:
            continue
        raise AssertionError(f"{user} got into {database}")


def values_come_back(node):
    values = {
        "INTEGER": [0, -1, 2**31, -(2**63), 2**63 - 1],
        "REAL": [0.5, -1e300],
        "TEXT": ["", "Hé 'quoted' \\ 鳥", "x" * 100_000],
        "BLOB": [b"", bytes(range(256))],
        "BOOLEAN": [True, False],
        "DATE": [datetime.date(2026, 11, 20)],
        "TIMESTAMP": [datetime.datetime(2026, 11, 20, 23, 59, 59, 123456)],
        "NUMERIC": [decimal.Decimal("1234.5")],
        "UUID": [uuid.UUID("12345678-1234-5678-1234-567812345678")],
    }
    with node.connect("shop", "ada", "wing's") as connection:
        for number, (declared, samples) in enumerate(values.items()):
            connection.execute(f"CREATE TABLE v{number} (n INTEGER PRIMARY KEY, v {declared})")
            for n, sample in enumerate([*samples, None]):
                connection.execute(f"INSERT INTO v{number} VALUES (%s, %s)", (n, sample))
            for binary in False, True:
                cursor = connection.execute(f"SELECT v FROM v{number} ORDER BY n", binary=binary)
                read = [value for (value,) in cursor]
                assert read == [*samples, None], f"{declared}, binary={binary}: {read}"
                assert all(type(a) is type(b) for a, b in zip(read, samples)), f"{declared}: {read}"


def transactions(node):
    with node.connect("shop", "ada", "wing's") as connection:
        connection.execute("CREATE TABLE account (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL CHECK (balance >= 0))")
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
                raise psycopg.Rollback  # ends the inner block, as a savepoint
        read = connection.execute("SELECT balance FROM account WHERE id IN (1, 2) ORDER BY id").fetchall()
        assert read == [(1,), (100,)], read


def errors_have_their_class(node):
    with node.connect("shop", "ada", "wing's") as connection:
        expected = [
            (errors.UniqueViolation, "INSERT INTO account VALUES (1, 1)"),
            (errors.CheckViolation, "UPDATE account SET balance = -1 WHERE id = 3"),
            (errors.NotNullViolation, "INSERT INTO account VALUES (5000, NULL)"),
            (errors.UndefinedTable, "SELECT * FROM no_such_table"),
            (errors.SyntaxError, "SELEKT 1"),
        ]
        for error, sql in expected:
            try:
                connection.execute(sql)
            except error:
                try:
                    connection.execute("SELECT 1")
                except errors.InFailedSqlTransaction:
                    connection.rollback()
                    continue
            raise AssertionError(f"{sql} did not answer {error.__name__}")


def pipelines_and_prepared_statements(node):
    with node.connect("shop", "ada", "wing's", autocommit=True, prepare_threshold=0) as connection:
        with connection.pipeline():
            cursors = [connection.execute("SELECT balance + %s FROM account WHERE id = %s", (n, n)) for n in range(3, 53)]
        assert [cursor.fetchone()[0] for cursor in cursors] == [100 + n for n in range(3, 53)]
        with connection.pipeline() as pipeline:
            connection.execute("UPDATE account SET balance = 7 WHERE id = 7")
            connection.execute("INSERT INTO account VALUES (7, 7)")
            try:
                pipeline.sync()
            except errors.UniqueViolation:
                pass
            else:
                raise AssertionError("a duplicate in a pipeline was accepted")
        assert connection.execute("SELECT balance FROM account WHERE id = 7").fetchone() == (100,), "not one transaction"


def hot_row(node, threads=8, times=25):
    def increment():
        with node.connect("shop", "ada", "wing's", autocommit=True) as connection:
            for _ in range(times):
                connection.execute("UPDATE account SET balance = balance + 1 WHERE id = 900")

    workers = [threading.Thread(target=increment) for _ in range(threads)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    with node.connect("shop", "ada", "wing's") as connection:
        balance = connection.execute("SELECT balance FROM account WHERE id = 900").fetchone()
        assert balance == (100 + threads * times,), f"increments were lost, or answered with an error: {balance}"


def cancel(node):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with node.connect("shop", "ada", "wing's", autocommit=True) as connection:
        # The request may come before the statement has begun, and then does nothing: it is sent until it works.
        done = threading.Event()

        def keep_cancelling():
            while not done.wait(0.05):
                connection.cancel()

        canceller = threading.Thread(target=keep_cancelling)
        canceller.start()
        try:
            connection.execute(endless)
            raise AssertionError("an endless statement ended")
        except errors.QueryCanceled:
            pass
        finally:
            done.set()
            canceller.join()
        connection.execute("SET statement_timeout = 100")
        try:
            connection.execute(endless)
            raise AssertionError("an endless statement ended")
        except errors.QueryCanceled:
            pass


def a_crash_loses_nothing(node):
    with node.connect("shop", "ada", "wing's", autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (id INTEGER PRIMARY KEY)")
        for n in range(50):
            connection.execute("INSERT INTO kept VALUES (%s)", (n,))
        node.crash()
    with node.connect("shop", "ada", "wing's") as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (50,)


def main():
    binary = os.path.abspath(sys.argv[1])
    steps = [
        passwords_and_rights,
        values_come_back,
        transactions,
        errors_have_their_class,
        pipelines_and_prepared_statements,
        hot_row,
        cancel,
        a_crash_loses_nothing,
    ]
    with tempfile.TemporaryDirectory(prefix="fulmar-psycopg-") as directory:
        with Node(binary, os.path.join(directory, "data")) as node:
            for step in steps:
                began = time.monotonic()
                step(node)
                print(f"psycopg {psycopg.__version__}: {step.__name__} ... ok ({time.monotonic() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
