"""A store in PostgreSQL: several processes write it, one at a time.

    process A   BEGIN · lock · op op op · NOTIFY · COMMIT        the lock is the schema's, and goes with the transaction: each process sees
    process B   BEGIN · … lock · op op · NOTIFY · COMMIT         all that was committed before, as if it wrote alone
                    └─ who waits for a result or for work hears of it by LISTEN

Beside it each process shares a lock with the others for as long as it has the store open. What must be done alone (making the tables,
bringing an older version up to date, dropping the schema of a run) is done by who finds nobody there.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import SQLAlchemyError, StatementError
from sqlalchemy.pool import NullPool

from lightningrl.errors import StoreError
from lightningrl.types import RolloutState
from lightningrl_server.store.dialects import Database, take_lock
from lightningrl_server.store.errors import StoreFull, StoreTrouble
from lightningrl_server.store.events import EndEvent, Event, QueueEvent

if TYPE_CHECKING:
    import psycopg

__all__ = ["GRACE_S", "open_postgresql"]

GRACE_S: Final = 30.0
"""For the first heartbeat of a worker that runs an attempt while nobody can hear it."""
_READERS = 2
_OPEN, _WRITE = 0x1167, 0x1168
"""Of the advisory locks in PostgreSQL, ours: shared while a store is open, and taken to write it. Each with the schema beside it."""
_LONGEST_TOLD = 7_900
"""Bytes; PostgreSQL takes 8,000."""
_AGAIN_S = 0.5
_STALLED = "30s"
"""A process that stands still in the middle of a transaction loses it: the others wait for its lock."""
_SOCKET: Final[Mapping[str, Any]] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "application_name": "lightningrl",
}
"""A machine that has vanished is noticed."""
_RENEW = text("UPDATE attempts SET expires_at = :until WHERE outcome IS NULL AND expires_at < :until")
_NOTIFY = text("SELECT pg_notify(:channel, :told)")


class _Notification(msgspec.Struct, array_like=True):
    """One notification."""

    sender: str
    queued: bool = False
    ended: list[tuple[str, int, RolloutState]] = []
    is_cut: bool = False
    """There was more than it can hold: look at everything."""


class _Peers:
    """The processes that have one schema open; `lightningrl_server.store.dialects.Peers`."""

    def __init__(self, connect_args: Mapping[str, Any], writing: Engine, name: str) -> None:
        """Raises psycopg.Error and StoreError."""
        import psycopg

        self._connect_args = connect_args
        self._writing = writing
        self._me = secrets.token_hex(8)
        self._decode = msgspec.json.Decoder(_Notification).decode
        self._errors: tuple[type[Exception], ...] = (psycopg.Error, OSError)
        self._operational = psycopg.OperationalError
        self._holder: psycopg.Connection[Any] = psycopg.connect(**connect_args, autocommit=True)
        try:
            schema = self._ask("current_schema()")
            if schema is None:
                raise StoreTrouble(f"the store {name!r} is gone: its database has no such schema; restore it, or start a new run")
            self._schema = str(schema)
            self._ahead_s = float(self._ask("extract(epoch FROM clock_timestamp())")) - time.monotonic()
            self.is_alone = self._lock("pg_try_advisory_lock")
            if not self.is_alone:
                take_lock(lambda: self._lock("pg_try_advisory_lock_shared"), name)
        except BaseException:
            self._holder.close()
            raise

    def settle(self) -> None:
        if self.is_alone:
            self._lock("pg_advisory_lock_shared")
            self._lock("pg_advisory_unlock")
            self.is_alone = False

    def close(self) -> None:
        self._holder.close()

    def now(self) -> float:
        return time.monotonic() + self._ahead_s

    def tell(self, db: Connection, events: Sequence[Event]) -> None:
        ended = [(one.rollout_id, one.attempt, one.state) for one in events if isinstance(one, EndEvent)]
        queued = any(isinstance(one, QueueEvent) for one in events)
        if not ended and not queued:
            return
        told = msgspec.json.encode(_Notification(self._me, queued, ended))
        if len(told) > _LONGEST_TOLD:
            told = msgspec.json.encode(_Notification(self._me, is_cut=True))
        db.execute(_NOTIFY, {"channel": self._channel, "told": told.decode()})

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
                        told = self._decode(notice.payload)
                        if told.is_cut:
                            yield None
                        elif told.sender != self._me:
                            yield (*([QueueEvent()] if told.queued else []), *(EndEvent(*one) for one in told.ended))
            except self._errors:
                await asyncio.sleep(_AGAIN_S)

    def is_lost(self, error: BaseException) -> bool:
        original = error.orig if isinstance(error, StatementError) else error
        if not isinstance(original, self._operational):
            return False
        state: str | None = getattr(original, "sqlstate", None)
        return state is None or state[:2] == "08" or state in ("57P01", "57P02", "57P03", "25P03")

    def renew(self, db: Connection) -> None:
        db.execute(_RENEW, {"until": self.now() + GRACE_S})

    def regain(self) -> None:
        with self._writing.begin() as db:
            self.renew(db)

    @property
    def _channel(self) -> str:
        return f"lightningrl {self._schema}".replace('"', "")[:63]

    def _ask(self, what: str) -> Any:
        row = self._holder.execute(f"SELECT {what}".encode()).fetchone()
        return None if row is None else row[0]

    def _lock(self, function: str) -> bool:
        return bool(self._ask(f"{function}({_OPEN}, hashtext(current_schema()))"))


def open_postgresql(url: URL, *, read_only: bool, pragmas: Mapping[str, int]) -> Database:
    name = url.render_as_string(hide_password=True)
    try:
        import psycopg
    except ImportError:
        raise StoreError(f'the store {name!r} needs psycopg; `pip install "lightningrl[postgres]"`') from None

    def means(error: BaseException) -> StoreError | None:
        said = " ".join(str(error).split())
        if not isinstance(error, psycopg.Error):
            return None
        if error.sqlstate == "53100":  # disk_full
            return StoreFull(f"no room on the disk for the store {name!r}; nothing of this request was kept: free some space and repeat it")
        if isinstance(error, psycopg.DataError):  # a NUL in a text, a number of more than 32 bits
            return StoreError(f"the store {name!r} cannot keep a value ({said})")
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return StoreTrouble(
                f"the store {name!r} may not be used by its user ({said}); `GRANT CREATE ON DATABASE` lets runs make their schemas"
            )
        if isinstance(error, psycopg.OperationalError) and "password" in said:
            return StoreTrouble(f"the store {name!r} is not opened by this password ({said}); set PGPASSWORD or write it to ~/.pgpass")
        if isinstance(error, psycopg.OperationalError):
            return StoreTrouble(f"the store {name!r} cannot be written or read ({said}); check that its server runs and may be reached")
        return None

    url = url.set(drivername="postgresql+psycopg")
    if url.password is None and "password" not in url.query and (password := os.environ.get("PGPASSWORD", "").rstrip("\r\n")):
        url = url.set(password=password)  # less the line's end that a file leaves there
    writing = create_engine(url, poolclass=NullPool, connect_args=_SOCKET)
    event.listen(writing, "connect", _bound_stalls)
    event.listen(writing, "begin", _take_turn)
    reading = create_engine(
        url,
        pool_size=_READERS,
        max_overflow=0,
        pool_pre_ping=True,
        isolation_level="REPEATABLE READ",
        execution_options={"postgresql_readonly": True},
        connect_args=_SOCKET,
    )
    try:
        peers = None if read_only else _Peers({**writing.dialect.create_connect_args(url)[1], **_SOCKET}, writing, name)
    except psycopg.Error as error:
        raise means(error) or error from error
    return Database(
        name=name,
        writing=writing,
        reading=reading,
        insert=postgresql.insert,
        means=means,
        errors=(SQLAlchemyError, psycopg.Error),
        unlock=peers.close if peers is not None else lambda: None,
        peers=peers,
    )


def _bound_stalls(connection: psycopg.Connection[Any], _: object) -> None:
    connection.execute(f"SET idle_in_transaction_session_timeout = '{_STALLED}'".encode())
    connection.commit()


def _take_turn(connection: Connection) -> None:
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITE}, hashtext(current_schema()))")
