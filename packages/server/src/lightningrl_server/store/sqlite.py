"""A store in an SQLite file: one process writes it, others may read."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import IO

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from lightningrl.errors import StoreError
from lightningrl.files import lock, release
from lightningrl_server.store.databases import READERS, Database, take_lock
from lightningrl_server.store.errors import StoreFull, StoreTrouble

__all__ = ["open_sqlite"]


class SqliteDatabase(Database):
    """A file that one process has locked."""

    insert = staticmethod(sqlite.insert)
    errors = (SQLAlchemyError, sqlite3.Error, OSError)

    def __init__(self, name: str, writing: Engine, reading: Engine, lock: IO[bytes] | None) -> None:
        super().__init__(name, writing, reading)
        self._lock = lock

    def means(self, error: BaseException) -> StoreError | None:
        return _meaning(error, self.name)

    def unlock(self) -> None:
        if self._lock is not None:
            release(self._lock)


def open_sqlite(url: URL, *, read_only: bool, pragmas: Mapping[str, int]) -> SqliteDatabase:
    if not url.database or url.database == ":memory:":
        raise StoreError(f"store URL {str(url)!r} names no SQLite file; write 'sqlite:///path/to/store.db'")
    path = Path(url.database)
    if read_only and not path.exists():
        raise StoreError(f"there is no store at '{path}'; check the path of the run folder")
    if not read_only:
        _refuse_other(path)
    lock = None if read_only else _lock_file(path)
    wal: dict[str, int | str] = {"journal_mode": "WAL", "synchronous": "FULL", **pragmas}
    writing = _make_engine(path, "BEGIN IMMEDIATE", wal, pool=NullPool)
    reading = _make_engine(path, "BEGIN", {"query_only": 1}, pool=QueuePool, pool_size=READERS, max_overflow=0)
    return SqliteDatabase(str(path), writing, reading, lock)


def _meaning(error: BaseException, name: str) -> StoreError | None:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return StoreFull.of(name)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        problem = f"the store {name!r} is no readable SQLite database ({error})"
        return StoreTrouble(f"{problem}; restore a copy or start in a new folder")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreTrouble(f"the store {name!r} is in use by another process; stop it first")
    unwritable = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
    if code in unwritable or isinstance(error, OSError):
        problem = f"the store {name!r} cannot be written or read ({error})"
        return StoreTrouble(f"{problem}; check the folder, its rights and the disk")
    return None


def _make_engine(
    path: Path, begin: str, pragmas: Mapping[str, int | str], pool: type[NullPool] | type[QueuePool], **options: int
) -> Engine:
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        poolclass=pool,
        connect_args={"check_same_thread": False, "timeout": 30},
        **options,
    )

    def connected(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        for name, value in {"busy_timeout": 30_000, "foreign_keys": 1, **pragmas}.items():
            connection.execute(f"PRAGMA {name} = {value}")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", partial(Connection.exec_driver_sql, statement=begin))
    return engine


def _refuse_other(path: Path) -> None:
    """Raise StoreError for another program's database, before a setting of ours is written into it."""
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        raise _meaning(error, str(path)) or error from error
    if tables and "meta" not in tables:
        raise StoreError(f"{str(path)!r} is a database of something else, no LightningRL store; choose another path")


def _lock_file(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _open_private(path).close()  # SQLite gives its other files the rights of this one
        file = _open_private(path.with_name(path.name + "-lock"))
    except OSError as error:
        raise _meaning(error, str(path)) or error from error

    def try_once() -> bool:
        try:
            lock(file)
        except OSError:
            return False
        return True

    try:
        take_lock(try_once, str(path))
    except StoreError:
        file.close()
        raise
    os.set_inheritable(file.fileno(), False)
    return file


def _open_private(path: Path) -> IO[bytes]:
    """Open a file, made for its owner alone: it holds what agents were asked, and the reference answers."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "ab")
