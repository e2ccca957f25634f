"""What each database has of its own: how it is opened, locked and asked, and what its errors mean. Nothing else in the store knows which
one it is.

    sqlite:///path/to/store.db             a file; one process writes it, others may read
    postgresql+psycopg://user@host/name    a database, or a schema of one: ?options=-csearch_path%3Dmine
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

from sqlalchemy import URL, Column, Engine, Index, Table, create_engine, event, func, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError, StatementError
from sqlalchemy.pool import NullPool, QueuePool

from lightningrl.errors import StoreError
from lightningrl.store.errors import StoreFull

__all__ = ["CLUSTERED", "DIALECTS", "Database", "explain", "partial_index"]

CLUSTERED: Final[Mapping[str, Any]] = {"sqlite_with_rowid": False}
"""For a table whose rows lie in the order of its primary key."""
_READERS = 2
_LOCK_S = 2.0
"""How long a process that is just ending may still hold the lock."""
_LOCK = 0x1167
"""Of the advisory locks in PostgreSQL, ours."""


def partial_index(name: str, column: Column[Any], where: str) -> Index:
    return Index(name, column, sqlite_where=text(where), postgresql_where=text(where))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Database:
    """An open database: one engine to write, one to read."""

    name: str
    """For messages: the file's path, or the URL without its password."""
    writing: Engine
    reading: Engine
    insert: Callable[[Table], Any]
    """With `on_conflict_do_update`."""
    means: Callable[[BaseException], StoreError | None]
    """What an error of the driver's means."""
    unlock: Callable[[], object]
    errors: tuple[type[Exception], ...]
    """What may be raised while it is asked."""

    def close(self) -> None:
        self.writing.dispose()
        self.reading.dispose()
        self.unlock()


def explain(error: Exception, database: Database) -> Exception:
    """What a person reads instead of a database error; anything else as it is."""
    original = error.orig if isinstance(error, StatementError) else error
    if isinstance(original, StoreError):  # a column's type said no
        return original
    return (database.means(original) if original is not None else None) or error


def _take_lock(try_once: Callable[[], bool], name: str) -> None:
    """One process writes a store. The lock goes with the process, however it ends."""
    give_up = time.monotonic() + _LOCK_S
    while not try_once():
        if time.monotonic() > give_up:
            raise StoreError(f"the store {name!r} is in use by another process; stop it first")
        time.sleep(0.02)


# ------------------------------------------------------------------ SQLite


def _open_sqlite(url: URL, *, read_only: bool, pragmas: Mapping[str, int]) -> Database:
    if not url.database or url.database == ":memory:":
        raise StoreError(f"store URL {str(url)!r} names no SQLite file; write 'sqlite:///path/to/store.db'")
    path = Path(url.database)
    if read_only and not path.exists():
        raise StoreError(f"there is no store at '{path}'; check the path of the run folder")
    lock = None if read_only else _lock_file(path)
    return Database(
        name=str(path),
        writing=_sqlite_engine(path, "BEGIN IMMEDIATE", {"journal_mode": "WAL", "synchronous": "FULL", **pragmas}, pool=NullPool),
        reading=_sqlite_engine(path, "BEGIN", {"query_only": 1}, pool=QueuePool, pool_size=_READERS, max_overflow=0),
        insert=sqlite.insert,
        means=lambda error: _means_sqlite(error, str(path)),
        errors=(SQLAlchemyError, sqlite3.Error, OSError),
        unlock=lock.close if lock is not None else lambda: None,
    )


def _means_sqlite(error: BaseException, name: str) -> StoreError | None:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return StoreFull(f"no room on the disk for the store {name!r}; nothing of this request was kept: free some space and repeat it")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreError(f"the store {name!r} is no readable SQLite database ({error}); restore a copy or start in a new folder")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(f"the store {name!r} is in use by another process; stop it first")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or isinstance(error, OSError):
        return StoreError(f"the store {name!r} cannot be written or read ({error}); check the folder, its rights and the disk")
    return None


def _sqlite_engine(
    path: Path, begin: str, pragmas: Mapping[str, int | str], pool: type[NullPool] | type[QueuePool], **options: int
) -> Engine:
    engine = create_engine(f"sqlite:///{path}", poolclass=pool, connect_args={"check_same_thread": False, "timeout": 30}, **options)

    def connected(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        for name, value in {"busy_timeout": 30_000, "foreign_keys": 1, **pragmas}.items():
            connection.execute(f"PRAGMA {name} = {value}")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def _lock_file(path: Path) -> IO[bytes] | None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _open_private(path).close()  # SQLite gives its other files the rights of this one
        lock = _open_private(path.with_name(path.name + "-lock"))
    except OSError as error:
        raise _means_sqlite(error, str(path)) or error from error
    try:
        import fcntl
    except ImportError:
        lock.close()
        return None

    def try_once() -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    try:
        _take_lock(try_once, str(path))
    except StoreError:
        lock.close()
        raise
    os.set_inheritable(lock.fileno(), False)
    return lock


def _open_private(path: Path) -> IO[bytes]:
    """For its owner alone where it is made now: what agents were asked and said, and the reference answers."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "ab")


# ------------------------------------------------------------------ PostgreSQL


def _open_postgresql(url: URL, *, read_only: bool, pragmas: Mapping[str, int]) -> Database:
    name = url.render_as_string(hide_password=True)
    try:
        import psycopg
    except ImportError:
        raise StoreError(f"the store {name!r} needs psycopg; `pip install 'lightningrl[postgres]'`") from None

    def means(error: BaseException) -> StoreError | None:
        if not isinstance(error, psycopg.Error):
            return None
        if error.sqlstate == "53100":  # disk_full
            return StoreFull(f"no room on the disk for the store {name!r}; nothing of this request was kept: free some space and repeat it")
        if isinstance(error, psycopg.DataError):  # a NUL in a text, a number of more than 32 bits
            return StoreError(f"the store {name!r} cannot keep a value ({error})")
        if isinstance(error, psycopg.OperationalError):
            return StoreError(f"the store {name!r} cannot be written or read ({error}); check that its server runs and may be reached")
        return None

    writing = create_engine(url, poolclass=NullPool)
    reading = create_engine(
        url,
        pool_size=_READERS,
        max_overflow=0,
        pool_pre_ping=True,
        isolation_level="REPEATABLE READ",
        execution_options={"postgresql_readonly": True},
    )
    database = Database(
        name=name,
        writing=writing,
        reading=reading,
        insert=postgresql.insert,
        means=means,
        unlock=lambda: None,
        errors=(SQLAlchemyError, psycopg.Error),
    )
    if read_only:
        return database
    try:
        holder = writing.connect().execution_options(isolation_level="AUTOCOMMIT")
    except SQLAlchemyError as error:
        raise explain(error, database) from error
    taken = select(func.pg_try_advisory_lock(_LOCK, func.hashtext(func.current_schema())))
    try:
        _take_lock(lambda: bool(holder.execute(taken).scalar_one()), name)
    except BaseException:
        holder.close()
        raise
    return replace(database, unlock=holder.close)


DIALECTS: Final = {"sqlite": _open_sqlite, "postgresql": _open_postgresql}
"""By the beginning of a store's URL."""
