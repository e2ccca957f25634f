"""An open database, whatever its kind, and the events of its commits.

    sqlite:///path/to/store.db     a file; one process writes it, others may read
    postgresql://user@host/name    a database, or a schema of one (?options=-csearch_path%3Dmine); several processes
                                   write it

`sqlite` and `postgresql` know how their database is opened, locked and asked, and what its errors mean; nothing else
does.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from sqlalchemy import Column, Connection, Engine, Index, Table, text
from sqlalchemy.exc import StatementError

from lightningrl.errors import StoreError
from lightningrl.types import RolloutState
from lightningrl_server.records import AttemptInfo
from lightningrl_server.store.errors import StoreTrouble

__all__ = [
    "CLUSTERED",
    "READERS",
    "Database",
    "EndEvent",
    "Event",
    "LeaseEvent",
    "Peers",
    "QueueEvent",
    "StartEvent",
    "explain",
    "partial_index",
    "take_lock",
]

CLUSTERED: Final[Mapping[str, Any]] = {"sqlite_with_rowid": False}
"""Options of a table whose rows lie in the order of its primary key."""
READERS: Final = 2
"""Connections that read at the same time."""
_LOCK_S = 2.0
"""Seconds for which a process that is just ending may still hold the lock."""


# ------------------------------------------------------------------ events of a commit, for whoever waits for it


@dataclass(frozen=True, slots=True)
class QueueEvent:
    """A rollout waits for a worker."""


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """A lease now ends at `expires_at`."""

    expires_at: float


@dataclass(frozen=True, slots=True)
class StartEvent:
    """An attempt was leased."""

    key_digest: bytes
    info: AttemptInfo


@dataclass(frozen=True, slots=True)
class EndEvent:
    """An attempt is over."""

    rollout_id: str
    attempt: int
    state: RolloutState
    """State of the rollout afterwards."""


Event = QueueEvent | LeaseEvent | StartEvent | EndEvent


# ------------------------------------------------------------------ databases


class Peers(Protocol):
    """The other processes that write the same store, and the server between us."""

    def settle(self) -> None:
        """Let others open the store: it is ready."""
        ...

    def now(self) -> float:
        """Unix seconds, the same for all."""
        ...

    def tell(self, db: Connection, events: Sequence[Event]) -> None:
        """Have the others hear of `events` when this transaction is committed."""
        ...

    def listen(self) -> AsyncIterator[tuple[Event, ...] | None]:
        """Events of other processes, for ever. None = some may have been missed: look at everything anew."""
        ...

    def is_lost(self, error: BaseException) -> bool:
        """True if the error says that the database went away."""
        ...

    def renew(self, db: Connection) -> None:
        """Extend leases that nobody could renew."""
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
    """Meaning of an error of the driver's."""
    unlock: Callable[[], object]
    errors: tuple[type[Exception], ...]
    """Errors that asking it may raise."""
    peers: Peers | None = None
    """None = one process writes it."""

    @property
    def is_shared(self) -> bool:
        return self.peers is not None

    def close(self) -> None:
        self.writing.dispose()
        self.reading.dispose()
        self.unlock()


def partial_index(name: str, column: Column[Any], where: str) -> Index:
    return Index(name, column, sqlite_where=text(where), postgresql_where=text(where))


def explain(error: Exception, database: Database) -> Exception:
    """Return the error that a person reads instead of the database's; anything else as it is."""
    original = error.orig if isinstance(error, StatementError) else error
    if isinstance(original, StoreError):  # a column's type said no
        return original
    return (database.means(original) if original is not None else None) or error


def take_lock(try_once: Callable[[], bool], name: str) -> None:
    """Take the lock of the one process that writes a store; it goes with the process, however that ends."""
    give_up = time.monotonic() + _LOCK_S
    while not try_once():
        if time.monotonic() > give_up:
            raise StoreTrouble(f"the store {name!r} is in use by another process; stop it first")
        time.sleep(0.02)
