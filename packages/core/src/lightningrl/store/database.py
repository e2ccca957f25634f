"""Opens the database file: settings, lock, schema version; and says in a sentence what a database error means."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection, Engine, create_engine, event, insert, inspect, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError, StatementError
from sqlalchemy.pool import NullPool, QueuePool

from lightningrl.errors import StoreError
from lightningrl.store.errors import OlderStore, StoreFull
from lightningrl.store.migrations import MIGRATIONS
from lightningrl.store.schema import SCHEMA_VERSION, attempts, meta, metadata

__all__ = ["Database", "explain", "open_database"]

logger = logging.getLogger(__name__)

_READERS = 2
_GRACE_S = 30.0
"""For the first heartbeat of a worker that runs an attempt while its store is opened: nobody could hear those before it."""
_LOCK_S = 2.0
"""How long a process that is just ending may still hold the lock."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Database:
    """An open database: one engine to write, one to read."""

    name: str
    """For messages: the file's path."""
    writing: Engine
    reading: Engine
    lock: IO[bytes] | None = None

    def close(self) -> None:
        self.writing.dispose()
        self.reading.dispose()
        if self.lock is not None:
            self.lock.close()


def open_database(url: str, *, read_only: bool = False, pragmas: Mapping[str, int] | None = None) -> Database:
    """Open or create it; an older version's is brought up to date.

    Raises StoreError: unknown URL, in use by another process, corrupt, written by a newer version, or by an older one and `read_only`.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise StoreError(f"store URL {url!r} cannot be read; write 'sqlite:///path/to/store.db'") from None
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        raise StoreError(f"store URL {url!r} names no SQLite file; write 'sqlite:///path/to/store.db'")
    path = Path(parsed.database)
    if read_only and not path.exists():
        raise StoreError(f"there is no store at '{path}'; check the path of the run folder")
    lock = None if read_only else _lock(path)
    database = Database(
        name=str(path),
        writing=_engine(path, "BEGIN IMMEDIATE", {"synchronous": "FULL", **(pragmas or {})}, pool=NullPool),
        reading=_engine(path, "BEGIN", {"query_only": 1}, pool=QueuePool),
        lock=lock,
    )
    try:
        _prepare(database, read_only=read_only)
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        database.close()
        raise explain(error, database.name) from error
    except BaseException:
        database.close()
        raise
    return database


def explain(error: Exception, name: str) -> Exception:
    """What a person reads instead of a database error; anything else as it is."""
    if isinstance(error, StoreError):
        return error
    original = error.orig if isinstance(error, StatementError) else error
    if isinstance(original, StoreError):  # a column's type said no
        return original
    code = getattr(original, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (isinstance(original, OSError) and original.errno in (errno.ENOSPC, errno.EDQUOT)):
        return StoreFull(f"no room on the disk for the store {name!r}; nothing of this request was kept: free some space and repeat it")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreError(f"the store {name!r} is no readable SQLite database ({original}); restore a copy or start in a new folder")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(f"the store {name!r} is in use by another process; stop it first")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or isinstance(original, OSError):
        return StoreError(f"the store {name!r} cannot be written or read ({original}); check the folder, its rights and the disk")
    return error


def _engine(path: Path, begin: str, pragmas: Mapping[str, int | str], pool: type[NullPool] | type[QueuePool]) -> Engine:
    options: dict[str, Any] = {"pool_size": _READERS, "max_overflow": 0} if pool is QueuePool else {}
    engine = create_engine(
        f"sqlite:///{path}",
        poolclass=pool,
        connect_args={"check_same_thread": False, "timeout": 30},
        **options,
    )

    def connected(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        for name, value in {"busy_timeout": 30_000, "foreign_keys": 1, **pragmas}.items():
            connection.execute(f"PRAGMA {name} = {value}")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def _lock(path: Path) -> IO[bytes] | None:
    """One process writes a store. The lock goes with the process, however it ends."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _open_private(path).close()  # SQLite gives its other files the rights of this one
        lock = _open_private(path.with_name(path.name + "-lock"))
    except OSError as error:
        raise explain(error, str(path)) from error
    try:
        import fcntl
    except ImportError:
        lock.close()
        return None
    give_up = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > give_up:
                lock.close()
                raise StoreError(f"the store '{path}' is in use by another process; stop it first") from None
        time.sleep(0.02)
    os.set_inheritable(lock.fileno(), False)
    return lock


def _migrate(db: Connection, version: int, name: str) -> None:
    """Bring an older store up to date, in the transaction of its opening."""
    for step in range(version, SCHEMA_VERSION):
        if step not in MIGRATIONS:
            raise StoreError(f"the store {name!r} has schema version {version}, which nothing brings up to date; start in a new folder")
        MIGRATIONS[step](db)
    db.execute(update(meta).where(meta.c.key == "schema").values(value=str(SCHEMA_VERSION)))
    logger.info("store %s: brought from schema version %d to %d", name, version, SCHEMA_VERSION)


def _open_private(path: Path) -> IO[bytes]:
    """For its owner alone where it is made now: what agents were asked and said, and the reference answers."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def _prepare(database: Database, *, read_only: bool) -> None:
    if not read_only:
        connection = database.writing.raw_connection()
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        finally:
            connection.close()
    engine = database.reading if read_only else database.writing
    with engine.begin() as db:
        tables = set(inspect(db).get_table_names())
        version = db.execute(select(meta.c.value).where(meta.c.key == "schema")).scalar() if "meta" in tables else None
        if version is not None and int(version) > SCHEMA_VERSION:
            raise StoreError(
                f"the store {database.name!r} has schema version {version}, newer than {SCHEMA_VERSION}; "
                "update lightningrl or open it with the version that wrote it"
            )
        if version is not None and int(version) < SCHEMA_VERSION:
            if read_only:
                raise OlderStore(
                    f"the store {database.name!r} has schema version {version}, older than {SCHEMA_VERSION}; resume or serve its run once, "
                    "which brings it up to date"
                )
            _migrate(db, int(version), database.name)
        if version is None and (tables or read_only):
            raise StoreError(f"{database.name!r} is a database of something else, no LightningRL store; choose another path")
        if version is None:
            metadata.create_all(db)
            db.execute(insert(meta).values(key="schema", value=str(SCHEMA_VERSION)))
        if not read_only:
            db.execute(update(attempts).where(attempts.c.outcome.is_(None)).values(expires_at=time.time() + _GRACE_S))
