"""SQLAlchemy 2 on psycopg 3: Core and ORM, from create_all and reflection to the retry of a transaction.

Started by tests/clients/run.
"""

import datetime
import decimal
import uuid

import sqlalchemy as sa
from sqlalchemy import exc, orm
from sqlalchemy.dialects.postgresql import insert

from client import ENDLESS, Expect, restart_server, tell, url


def engine_of(database="shop", user="ada", password="wing's", **options):
    return sa.create_engine(url(database, user, password, scheme="postgresql+psycopg"), **options)


class Base(orm.DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"
    id: orm.Mapped[int] = orm.mapped_column(sa.BigInteger, primary_key=True, autoincrement=False)
    email: orm.Mapped[str] = orm.mapped_column(sa.String(80), unique=True)
    since: orm.Mapped[datetime.date | None]
    purchases: orm.Mapped[list["Purchase"]] = orm.relationship(back_populates="customer", cascade="all, delete-orphan")


class Purchase(Base):
    __tablename__ = "purchase"
    __table_args__ = (sa.Index("purchase_customer", "customer_id", "placed"), sa.CheckConstraint("total >= 0"))
    id: orm.Mapped[int] = orm.mapped_column(sa.BigInteger, primary_key=True, autoincrement=False)
    customer_id: orm.Mapped[int] = orm.mapped_column(sa.ForeignKey("customer.id", ondelete="CASCADE"))
    placed: orm.Mapped[datetime.datetime] = orm.mapped_column(server_default=sa.func.current_timestamp())
    total: orm.Mapped[decimal.Decimal] = orm.mapped_column(sa.Numeric(10, 2))
    customer: orm.Mapped[Customer] = orm.relationship(back_populates="purchases")


class Note(Base):
    """Its key is SQLAlchemy's usual one: SERIAL, filled by the server."""

    __tablename__ = "note"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    text: orm.Mapped[str]


def passwords(_):
    admin = engine_of("fulmar", None, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(sa.text("CREATE USER ada PASSWORD 'wing''s'"))
        connection.execute(sa.text("CREATE DATABASE shop WITH OWNER ada"))
    admin.dispose()
    with Expect(exc.OperationalError):
        engine_of(password="wrong").connect()


def tables_are_made_once(engine):
    for _ in range(2):
        Base.metadata.create_all(engine)


def tables_are_reflected(engine):
    inspector = sa.inspect(engine)
    assert set(inspector.get_table_names()) == {"customer", "note", "purchase"}
    assert inspector.has_table("customer") and not inspector.has_table("no_such_table")
    columns = {column["name"]: column for column in inspector.get_columns("purchase")}
    assert list(columns) == ["id", "customer_id", "placed", "total"]
    assert isinstance(columns["id"]["type"], sa.BigInteger) and not columns["id"]["nullable"]
    assert isinstance(columns["placed"]["type"], sa.DateTime)
    assert (columns["total"]["type"].precision, columns["total"]["type"].scale) == (10, 2)
    assert inspector.get_pk_constraint("purchase")["constrained_columns"] == ["id"]
    (key,) = inspector.get_foreign_keys("purchase")
    assert (key["constrained_columns"], key["referred_columns"]) == (["customer_id"], ["id"])
    assert key["referred_table"] == "customer"
    assert key["options"] == {"ondelete": "CASCADE"}
    (index,) = inspector.get_indexes("purchase")
    assert (index["name"], index["column_names"], index["unique"]) == ("purchase_customer", ["customer_id", "placed"], False)
    (unique,) = inspector.get_unique_constraints("customer")
    assert unique["column_names"] == ["email"]

    reflected = sa.MetaData()
    reflected.reflect(engine)
    assert set(reflected.tables) == {"customer", "note", "purchase"}
    assert [key.column.table.name for key in reflected.tables["purchase"].foreign_keys] == ["customer"]


def objects_come_back(engine):
    with orm.Session(engine) as session:
        ada = Customer(id=1, email="ada@example.org", since=datetime.date(2026, 11, 21))
        ada.purchases = [Purchase(id=n, total=decimal.Decimal("1.50") * n) for n in range(1, 4)]
        session.add(ada)
        session.commit()
    with orm.Session(engine) as session:
        query = sa.select(Customer).options(orm.selectinload(Customer.purchases)).where(Customer.email == "ada@example.org")
        ada = session.scalars(query).one()
        assert ada.since == datetime.date(2026, 11, 21)
        assert [purchase.total for purchase in ada.purchases] == [decimal.Decimal(n) for n in ("1.5", "3", "4.5")]
        assert all(isinstance(purchase.placed, datetime.datetime) for purchase in ada.purchases)
        ada.purchases.pop()
        session.commit()
        total = sa.select(sa.func.sum(Purchase.total)).join(Customer).where(Customer.id.in_([1, 2, 3]))
        assert session.scalar(total) == decimal.Decimal("4.5")


def keys_are_numbered(engine):
    with orm.Session(engine) as session:
        notes = [Note(text=str(n)) for n in range(100)]
        session.add_all(notes)
        session.commit()
        ids = [note.id for note in notes]
        assert ids == sorted(set(ids)) and len(ids) == 100, ids


def values_come_back(engine):
    table = sa.Table(
        "v",
        sa.MetaData(),
        sa.Column("n", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("small", sa.SmallInteger),
        sa.Column("float", sa.Double),
        sa.Column("text", sa.Text),
        sa.Column("bytes", sa.LargeBinary),
        sa.Column("yes", sa.Boolean),
        sa.Column("date", sa.Date),
        sa.Column("time", sa.Time),
        sa.Column("at", sa.DateTime),
        sa.Column("instant", sa.DateTime(timezone=True)),
        sa.Column("id", sa.Uuid),
        sa.Column("document", sa.JSON),
    )
    table.create(engine)
    row = {
        "n": 2**62,
        "small": -1,
        "float": 0.5,
        "text": "Hé 'quoted' \\ 鳥",
        "bytes": bytes(range(256)),
        "yes": True,
        "date": datetime.date(2026, 11, 20),
        "time": datetime.time(23, 59, 59, 5),
        "at": datetime.datetime(2026, 11, 20, 23, 59, 59, 123456),
        "instant": datetime.datetime(2026, 11, 20, 23, 59, 59, tzinfo=datetime.timezone.utc),
        "id": uuid.UUID("12345678-1234-5678-1234-567812345678"),
        "document": {"a": [1, None, "é"]},
    }
    nothing = {column.name: None for column in table.columns} | {"n": 1, "document": sa.null()}
    with engine.begin() as connection:
        connection.execute(table.insert(), [row, nothing])
        read = [row._asdict() for row in connection.execute(table.select().order_by(table.c.n))]
        assert read == [nothing | {"document": None}, row], read
        # An upsert, with what it wrote.
        again = insert(table).values(n=1, text="new").on_conflict_do_update(index_elements=["n"], set_={"text": "newer"})
        assert connection.scalar(again.returning(table.c.text)) == "newer"
        many = [{"n": n, "text": str(n)} for n in range(1000, 3000)]
        inserted = connection.scalars(table.insert().returning(table.c.n, sort_by_parameter_order=True), many).all()
        assert inserted == [row["n"] for row in many]


def errors_have_their_class(engine):
    expected = [
        (exc.IntegrityError, "23505", "INSERT INTO customer (id, email) VALUES (1, 'another')"),
        (exc.IntegrityError, "23503", "INSERT INTO purchase (id, customer_id, total) VALUES (9, 9, 9)"),
        (exc.ProgrammingError, "42P01", "SELECT * FROM no_such_table"),
        (exc.ProgrammingError, "42601", "SELEKT 1"),
    ]
    for error, state, sql in expected:
        with engine.connect() as connection:
            with Expect(error) as expect:
                connection.execute(sa.text(sql))
            assert expect.caught.orig.sqlstate == state
            with Expect(exc.InternalError) as expect:
                connection.execute(sa.text("SELECT 1"))
            assert expect.caught.orig.sqlstate == "25P02"


def savepoints(engine):
    with orm.Session(engine) as session, session.begin():
        session.add(Customer(id=2, email="eve@example.org"))
        with Expect(exc.IntegrityError), session.begin_nested():
            session.add(Customer(id=3, email="ada@example.org"))
            session.flush()
    with orm.Session(engine) as session:
        assert session.scalars(sa.select(Customer.id).order_by(Customer.id)).all() == [1, 2]


def retry(engine, work, attempts=5):
    """Runs a transaction, again if it met another one. docs/clients.md shows this."""
    for attempt in range(1, attempts + 1):
        try:
            with orm.Session(engine.execution_options(isolation_level="SERIALIZABLE")) as session, session.begin():
                return work(session, attempt)
        except exc.OperationalError as failure:
            if attempt == attempts or failure.orig.sqlstate not in ("40001", "40P01"):
                raise


def conflicts_are_retried(engine):
    def double(session, attempt):
        purchase = session.get(Purchase, 1)
        if attempt == 1:
            with engine.begin() as other:
                other.execute(sa.update(Purchase).where(Purchase.id == 1).values(total=Purchase.total + 1))
        purchase.total *= 2
        return attempt

    assert retry(engine, double) == 2
    with orm.Session(engine) as session:
        assert session.get(Purchase, 1).total == decimal.Decimal("5")


def timeouts(engine):
    with engine.connect() as connection:
        connection.execute(sa.text("SET statement_timeout = 100"))
        with Expect(exc.OperationalError) as expect:
            connection.execute(sa.text(ENDLESS))
        assert expect.caught.orig.sqlstate == "57014"


def a_pool_reconnects(engine):
    """`pool_pre_ping` asks a connection that comes from the pool whether it lives."""
    with engine.connect() as first, engine.connect() as second:
        first.execute(sa.text("SELECT 1")), second.execute(sa.text("SELECT 1"))
    restart_server()
    with orm.Session(engine) as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Customer)) == 2


def main():
    tell(f"driver SQLAlchemy {sa.__version__}")
    engine = engine_of(pool_pre_ping=True, connect_args={"connect_timeout": 10})
    checks = [
        passwords,
        tables_are_made_once,
        tables_are_reflected,
        objects_come_back,
        keys_are_numbered,
        values_come_back,
        errors_have_their_class,
        savepoints,
        conflicts_are_retried,
        timeouts,
        a_pool_reconnects,
    ]
    for check in checks:
        check(engine)
        tell(f"ok {check.__name__}")
    engine.dispose()


if __name__ == "__main__":
    main()
