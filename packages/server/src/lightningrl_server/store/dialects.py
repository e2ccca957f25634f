"""What each database has of its own: how it is opened, locked and asked, and what its errors mean. Nothing else in the store knows which
one it is.

    sqlite:///path/to/store.db     a file; one process writes it, others may read         here
    postgresql://user@host/name    a database, or a schema of one: ?options=-csearch_path%3Dmine; several processes write it
                                                                                         `lightningrl_server.store.postgresql`
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeVar

from sqlalchemy import URL, Column, Connection, Engine, Index, Table, create_engine, event, text
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import SQLAlchemyError, StatementError
from sqlalchemy.pool import NullPool, QueuePool

from lightningrl.errors import StoreError
from lightningrl_server.store.errors import StoreFull, StoreTrouble
from lightningrl_server.store.events import Event

__all__ = ["CLUSTERED", "Database", "Peers", "explain", "open_sqlite", "partial_index", "patiently", "take_lock"]

CLUSTERED: Final[Mapping[str, Any]] = {"sqlite_with_rowid": False}
"""For a table whose rows lie in the order of its primary key."""
_READERS = 2
_LOCK_S = 2.0
"""How long a process that is just ending may still hold the lock."""
_PATIENCE_S = 30.0
"""For a database that went away: as long as a restart of its server takes."""
_PAUSE_S = 0.2
T = TypeVar("T")


def partial_index(name: str, column: Column[Any], where: str) -> Index:
    return Index(name, column, sqlite_where=text(where), postgresql_where=text(where))


class Peers(Protocol):
    """The other processes that write the same store, and the server between us."""

    is_alone: bool
    """There was no other when the store was opened, and none comes before `settle`."""

    def settle(self) -> None:
        """The store is ready; others may open it."""
        ...

    def now(self) -> float:
        """Unix seconds, the same for all."""
        ...

    def tell(self, db: Connection, events: Sequence[Event]) -> None:
        """Have the others hear of it when this transaction is committed."""
        ...

    def listen(self) -> AsyncIterator[tuple[Event, ...] | None]:
        """Events that others tell, for ever. None = something may have been missed: look at everything anew."""
        ...

    def is_lost(self, error: BaseException) -> bool:
        """Whether an error says that the database went away."""
        ...

    def renew(self, db: Connection) -> None:
        """Leases that nobody could renew go on for a while."""
        ...

    def regain(self) -> None:
        """Reach the database again, and `renew`."""
        ...


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
    peers: Peers | None = None
    """None = one process writes it."""

    @property
    def is_shared(self) -> bool:
        return self.peers is not None

    def close(self) -> None:
        self.writing.dispose()
        self.reading.dispose()
        self.unlock()


def explain(error: Exception, database: Database) -> Exception:
    """The error that a person reads instead of the database's; anything else as it is."""
    original = error.orig if isinstance(error, StatementError) else error
    if isinstance(original, StoreError):  # a column's type said no
        return original
    return (database.means(original) if original is not None else None) or error


def patiently(database: Database, work: Callable[[], T]) -> T:
    """Do it, and return what it returns; where the database went away, do it again once that is back."""
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return work()
        except database.errors as error:
            if database.peers is None or not database.peers.is_lost(error) or time.monotonic() > give_up:
                raise
        time.sleep(_PAUSE_S)
        with suppress(*database.errors):
            database.peers.regain()


def take_lock(try_once: Callable[[], bool], name: str) -> None:
    """One process writes a store. The lock goes with the process, however it ends."""
    give_up = time.monotonic() + _LOCK_S
    while not try_once():
        if time.monotonic() > give_up:
            raise StoreTrouble(f"the store {name!r} is in use by another process; stop it first")
        time.sleep(0.02)


# ------------------------------------------------------------------ SQLite


def open_sqlite(url: URL, *, read_only: bool, pragmas: Mapping[str, int]) -> Database:
    if not url.database or url.database == ":memory:":
        raise StoreError(f"store URL {str(url)!r} names no SQLite file; write 'sqlite:///path/to/store.db'")
    path = Path(url.database)
    if read_only and not path.exists():
        raise StoreError(f"there is no store at '{path}'; check the path of the run folder")
    if not read_only:
        _refuse_other(path)
    lock = None if read_only else _lock_file(path)
    return Database(
        name=str(path),
        writing=_sqlite_engine(path, "BEGIN IMMEDIATE", {"journal_mode": "WAL", "synchronous": "FULL", **pragmas}, pool=NullPool),
        reading=_sqlite_engine(path, "BEGIN", {"query_only": 1}, pool=QueuePool, pool_size=_READERS, max_overflow=0),
        insert=sqlite.insert,
        means=lambda error: _means_sqlite(error, str(path)),
        errors=(SQLAlchemyError, sqlite3.Error, OSError),
        unlock=partial(_unlock_file, lock) if lock is not None else lambda: None,
    )


def _means_sqlite(error: BaseException, name: str) -> StoreError | None:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return StoreFull(f"no room on the disk for the store {name!r}; nothing of this request was kept: free some space and repeat it")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreTrouble(f"the store {name!r} is no readable SQLite database ({error}); restore a copy or start in a new folder")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreTrouble(f"the store {name!r} is in use by another process; stop it first")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or isinstance(error, OSError):
        return StoreTrouble(f"the store {name!r} cannot be written or read ({error}); check the folder, its rights and the disk")
    return None


def _sqlite_engine(
    path: Path, begin: str, pragmas: Mapping[str, int | str], pool: type[NullPool] | type[QueuePool], **options: int
) -> Engine:
    engine = create_engine(
        URL.create("sqlite", database=str(path)), poolclass=pool, connect_args={"check_same_thread": False, "timeout": 30}, **options
    )

    def connected(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        for name, value in {"busy_timeout": 30_000, "foreign_keys": 1, **pragmas}.items():
            connection.execute(f"PRAGMA {name} = {value}")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def _refuse_other(path: Path) -> None:
    """Raise StoreError for another program's database, before a setting of ours is written into it."""
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        raise _means_sqlite(error, str(path)) or error from error
    if tables and "meta" not in tables:
        raise StoreError(f"{str(path)!r} is a database of something else, no LightningRL store; choose another path")


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
        take_lock(try_once, str(path))
    except StoreError:
        lock.close()
        raise
    os.set_inheritable(lock.fileno(), False)
    return lock


def _unlock_file(lock: IO[bytes]) -> None:
    import fcntl

    if not lock.closed:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closed alone, it would be held by processes that were forked meanwhile
    lock.close()


def _open_private(path: Path) -> IO[bytes]:
    """For its owner alone where it is made now: what agents were asked and said, and the reference answers."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "ab")
