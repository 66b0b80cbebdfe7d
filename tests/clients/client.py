"""Common code of the Python driver tests: server URL, reports to the runner, expected errors."""

import os
import sys
from urllib.parse import quote, urlsplit, urlunsplit

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def url(database="fulmar", user=None, password=None, scheme="postgresql"):
    """The server's URL for a database and a user (default: the superuser)."""
    given = urlsplit(os.environ["DATABASE_URL"])
    login = given.netloc.rpartition("@")[0] if user is None else f"{quote(user)}:{quote(password)}"
    netloc = f"{login}@{given.hostname}:{given.port}"
    return urlunsplit((scheme, netloc, f"/{database}", given.query, ""))


def report(line):
    print(line, flush=True)


def restart_server():
    """Kills the server and starts it again."""
    report("restart")
    assert sys.stdin.readline() == "restarted\n"


class Expect:
    """`with Expect(E):` requires that the block raises E, and swallows it."""

    def __init__(self, error):
        self.error, self.caught = error, None

    def __enter__(self):
        return self

    def __exit__(self, kind, value, _):
        if kind is None:
            raise AssertionError(f"expected {self.error.__name__}, but no exception was raised")
        self.caught = value
        return issubclass(kind, self.error)
