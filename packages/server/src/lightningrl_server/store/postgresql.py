"""A store in PostgreSQL: several processes write it, one at a time.

    process A   BEGIN · lock · op op op · NOTIFY · COMMIT     the lock is the schema's, and goes with the transaction:
    process B   BEGIN · … lock · op op · NOTIFY · COMMIT      each process sees all that was committed before, as if
                    └─ waiters hear of it by LISTEN           it wrote alone

Beside it each process shares a lock with the others for as long as it has the store open. Tables are made by whoever
finds nobody there. Each run has a schema of its own, whose comment says for which folder it was made; a copy of that
folder reads it, and neither writes nor drops it.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError, StatementError
from sqlalchemy.pool import NullPool

from lightningrl.errors import StoreError
from lightningrl.types import RolloutState
from lightningrl_server.store.databases import READERS, Database, EndEvent, Event, QueueEvent, take_lock
from lightningrl_server.store.errors import StoreFull, StoreTrouble
from lightningrl_server.store.location import named_store

if TYPE_CHECKING:
    import psycopg

__all__ = ["check_database", "create_schema", "drop_schema", "move_schema", "open_postgresql"]

_STOOD_STILL_S = 5.0
_OPEN, _WRITE = 0x1167, 0x1168
"""Numbers of our advisory locks: one shared while a store is open, one to write it, each with the schema."""
_LONGEST_MESSAGE = 7_900
"""Bytes; PostgreSQL takes 8,000."""
_AGAIN_S = 0.5
_OPTION: Final = "-csearch_path="
_LONGEST_NAME: Final = 40
_COMMENT: Final = "LightningRL: "
_AUTHENTICATION: Final = "!password,!md5"
"""Value of libpq's `require_auth`, unless the URL or PGREQUIREAUTH says otherwise: no password in clear or nearly."""
_STALLED = "30s"
"""Time after which a process that stands still in mid-transaction loses it: the others wait for its lock."""
_SOCKET: Final[Mapping[str, Any]] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "application_name": "lightningrl",
}
"""Settings by which a machine that has vanished is noticed."""
_TAKE_TURN = f"SELECT pg_advisory_xact_lock({_WRITE}, hashtext(current_schema()))"
_NOTIFY = text("SELECT pg_notify(:channel, :message)")


class _Notification(msgspec.Struct, array_like=True):
    """One notification."""

    sender: str
    queued: bool = False
    ended: list[tuple[str, int, RolloutState]] = []
    is_cut: bool = False
    """True if there was more than it can hold: look at everything."""


class PostgresqlDatabase(Database):
    """One schema, and the processes that have it open."""

    insert = staticmethod(postgresql.insert)

    def __init__(self, name: str, writing: Engine, reading: Engine, connect_args: Mapping[str, Any] | None) -> None:
        """`connect_args`: for a connection beside the engines', None = this process only reads. Raises StoreError."""
        import psycopg

        super().__init__(name, writing, reading)
        self.errors = SQLAlchemyError, psycopg.Error
        self.is_shared: bool = connect_args is not None
        self._operational = psycopg.OperationalError
        self._held = ExitStack()
        self._is_alone = False
        if connect_args is None:
            return
        self._connect_args = connect_args
        self._me = secrets.token_hex(8)
        self._decode = msgspec.json.Decoder(_Notification).decode
        try:
            self._holder: psycopg.Connection[Any] = psycopg.connect(**connect_args, autocommit=True)
            self._held.callback(self._holder.close)
            self._join()
        except BaseException as error:
            self.close()
            if isinstance(error, psycopg.Error):
                raise self.explain(error) from error
            raise

    def _join(self) -> None:
        """Take part among the processes that have the schema open."""
        schema = self._ask("current_schema()")
        if schema is None:
            raise StoreTrouble(
                f"the store {self.name!r} is gone: its database has no such schema; restore it, or start a new run"
            )
        self._channel = f"lightningrl {schema}".replace('"', "")[:63]
        self._ahead_s = float(self._ask("extract(epoch FROM clock_timestamp())")) - time.monotonic()
        self._looked_at = self.now()
        self._is_alone = self._lock("pg_try_advisory_lock")
        if not self._is_alone:
            take_lock(lambda: self._lock("pg_try_advisory_lock_shared"), self.name)

    def unlock(self) -> None:
        self._held.close()

    def settle(self) -> None:
        if self._is_alone:
            self._lock("pg_advisory_lock_shared")
            self._lock("pg_advisory_unlock")
            self._is_alone = False

    def now(self) -> float:
        return time.monotonic() + self._ahead_s

    def has_stood_still(self) -> bool:
        looked_at, self._looked_at = self._looked_at, self.now()
        return self._looked_at - looked_at > _STOOD_STILL_S

    def tell(self, db: Connection, events: Sequence[Event]) -> None:
        ends = [event for event in events if isinstance(event, EndEvent)]
        ended = [(end.rollout_id, end.attempt, end.state) for end in ends]
        queued = any(isinstance(event, QueueEvent) for event in events)
        if not ended and not queued:
            return
        message = msgspec.json.encode(_Notification(self._me, queued, ended))
        if len(message) > _LONGEST_MESSAGE:
            message = msgspec.json.encode(_Notification(self._me, is_cut=True))
        db.execute(_NOTIFY, {"channel": self._channel, "message": message.decode()})

    async def listen(self) -> AsyncIterator[tuple[Event, ...] | None]:
        import psycopg

        while True:
            try:
                async with await psycopg.AsyncConnection.connect(**self._connect_args, autocommit=True) as connection:
                    # where the database was started anew, the lock of the opening is gone
                    await connection.execute("SELECT pg_advisory_lock_shared(%s, hashtext(current_schema()))", [_OPEN])
                    await connection.execute(f'LISTEN "{self._channel}"'.encode())
                    yield None
                    async for notice in connection.notifies():
                        news = self._decode(notice.payload)
                        if news.is_cut:
                            yield None
                        elif news.sender != self._me:
                            yield (*([QueueEvent()] if news.queued else []), *(EndEvent(*end) for end in news.ended))
            except (psycopg.Error, OSError):
                await asyncio.sleep(_AGAIN_S)

    def is_lost(self, error: BaseException) -> bool:
        original = error.orig if isinstance(error, StatementError) else error
        if not self.is_shared or not isinstance(original, self._operational):
            return False
        state: str | None = getattr(original, "sqlstate", None)
        return state is None or state[:2] == "08" or state in ("57P01", "57P02", "57P03", "25P03")

    def _ask(self, what: str) -> Any:
        row = self._holder.execute(f"SELECT {what}".encode()).fetchone()
        return None if row is None else row[0]

    def _lock(self, function: str) -> bool:
        return bool(self._ask(f"{function}({_OPEN}, hashtext(current_schema()))"))

    def means(self, error: BaseException) -> StoreError | None:
        import psycopg

        name, detail = self.name, " ".join(str(error).split())
        if not isinstance(error, psycopg.Error):
            return None
        if error.sqlstate == "53100":  # disk_full
            return StoreFull.of(self.name)
        if isinstance(error, psycopg.DataError):  # a NUL in a text, a number of more than 32 bits
            return StoreError(f"the store {name!r} cannot keep a value ({detail})")
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            remedy = "`GRANT CREATE ON DATABASE` lets runs make their schemas"
            return StoreTrouble(f"the store {name!r} may not be used by its user ({detail}); {remedy}")
        if not isinstance(error, psycopg.OperationalError):
            return None
        if "authentication method requirement" in detail:
            remedy = "let it ask by SCRAM, or set PGREQUIREAUTH to what you trust it with"
            return StoreError(f"the store {name!r} asks for a password that others could read ({detail}); {remedy}")
        if "password" in detail:
            remedy = "set PGPASSWORD or write it to ~/.pgpass"
            return StoreTrouble(f"the store {name!r} is not opened by this password ({detail}); {remedy}")
        remedy = "check that its server runs and may be reached"
        return StoreTrouble(f"the store {name!r} cannot be written or read ({detail}); {remedy}")


def open_postgresql(url: URL, *, read_only: bool, pragmas: Mapping[str, int]) -> PostgresqlDatabase:
    name = url.render_as_string(hide_password=True)
    try:
        import psycopg
    except ImportError:
        raise StoreError(f'the store {name!r} needs psycopg; `pip install "lightningrl[postgres]"`') from None

    url = url.set(drivername="postgresql+psycopg")
    password = os.environ.get("PGPASSWORD", "").rstrip("\r\n")  # less the line's end that a file leaves there
    if url.password is None and "password" not in url.query and password:
        url = url.set(password=password)
    can_require = psycopg.pq.version() >= 160000  # older libpqs do not know the parameter
    if can_require and "require_auth" not in url.query and not os.environ.get("PGREQUIREAUTH"):
        url = url.update_query_dict({"require_auth": _AUTHENTICATION})
    writing = create_engine(url, poolclass=NullPool, connect_args=_SOCKET)
    event.listen(writing, "connect", _bound_stalls)
    event.listen(writing, "begin", partial(Connection.exec_driver_sql, statement=_TAKE_TURN))
    reading = create_engine(
        url,
        pool_size=READERS,
        max_overflow=0,
        pool_pre_ping=True,
        isolation_level="REPEATABLE READ",
        execution_options={"postgresql_readonly": True},
        connect_args=_SOCKET,
    )
    connect_args = {**writing.dialect.create_connect_args(url)[1], **_SOCKET}
    return PostgresqlDatabase(name, writing, reading, None if read_only else connect_args)


def _bound_stalls(connection: psycopg.Connection[Any], _: object) -> None:
    connection.execute(f"SET idle_in_transaction_session_timeout = '{_STALLED}'".encode())
    connection.commit()


# ------------------------------------------------------------------ the schemas of runs


def check_database(database: str) -> None:
    """Raise StoreError where it cannot be used: no psycopg, not there, not ours."""
    with _writing(make_url(database)) as db:
        if not db.execute(text("SELECT has_database_privilege(current_database(), 'CREATE')")).scalar():
            user, name = db.execute(text("SELECT current_user, current_database()")).one()
            raise StoreError(
                f"user {user!r} may make no schema in the database {name!r}; GRANT CREATE ON DATABASE {name} TO {user}"
            )


def create_schema(database: str, folder: Path) -> str:
    """Make a schema for a run's store; returns its URL. Raises StoreError."""
    name = re.sub("[^a-z0-9]+", "_", folder.resolve().name.lower())[:_LONGEST_NAME].strip("_")
    schema = f"lightningrl_{name}_{secrets.token_hex(4)}"
    with _writing(make_url(database)) as db:
        db.execute(text(f'CREATE SCHEMA "{schema}"'))
        _sign(db, schema, folder)
    return _with_schema(make_url(database), schema)


def move_schema(store: str, database: str, folder: Path) -> str:
    """Give the schema of a store moved to `database` the name of `folder`; returns the new URL. Raises StoreError."""
    moved, schema = _with_schema(make_url(database), _schema_of(store)), _schema_of(store)
    with _writing(make_url(database)) as db:
        owner = _owner(db, schema)
        if owner is None:
            problem = f"the database {database!r} has no schema {schema!r}, which has the run's rollouts"
            raise StoreError(f"{problem}; restore it, or start a new run")
        if owner != folder.resolve() and (owner / "run.json").is_file() and named_store(owner) in (store, moved):
            problem = f"the run's rollouts are those of {str(owner)!r}, of which this is a copy"
            raise StoreError(f"{problem}: look at it, and go on with that one")
        _sign(db, schema, folder)
    return moved


def drop_schema(store: str, folder: Path) -> None:
    """Remove the schema that was made for `folder`, with all that is in it. Raises StoreError."""
    url, schema = make_url(store), _schema_of(store)
    with _writing(url.difference_update_query(["options"])) as db:
        if _owner(db, schema) == folder.resolve():
            db.execute(text(f'DROP SCHEMA "{schema}" CASCADE'))


@contextmanager
def _writing(url: URL) -> Iterator[Connection]:
    database = open_postgresql(url, read_only=True, pragmas={})
    try:
        with database.writing.begin() as db:
            yield db
    except SQLAlchemyError as error:
        raise database.explain(error) from error
    finally:
        database.close()


def _sign(db: Connection, schema: str, folder: Path) -> None:
    quoting = text("SELECT quote_literal(:comment)")
    comment = db.execute(quoting, {"comment": f"{_COMMENT}{folder.resolve()}"}).scalar_one()
    db.exec_driver_sql(f'COMMENT ON SCHEMA "{schema}" IS {comment}'.replace("%", "%%"))


def _owner(db: Connection, schema: str) -> Path | None:
    """Read which folder a schema was made for; None = there is no such schema."""
    comments = text("SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = :schema")
    row = db.execute(comments, {"schema": schema}).one_or_none()
    return None if row is None else Path(str(row[0]).removeprefix(_COMMENT))


def _with_schema(url: URL, schema: str) -> str:
    return url.update_query_dict({"options": f"{_OPTION}{schema}"}).render_as_string(hide_password=False)


def _schema_of(store: str) -> str:
    url = make_url(store)
    if not str(options := url.query.get("options")).startswith(_OPTION):
        raise StoreError(f"the store {url.render_as_string()!r} of the run's run.json has no schema; restore the file")
    return str(options).removeprefix(_OPTION)
