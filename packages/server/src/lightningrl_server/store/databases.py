"""An open database, whatever its kind, and the events of its commits.

    sqlite:///path/to/store.db     a file; one process writes it, others may read
    postgresql://user@host/name    a database, or a schema of one (?options=-csearch_path%3Dmine); for several processes

Only `sqlite` and `postgresql` know how their database is opened, locked and asked, and what its errors mean.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Column, Connection, Engine, Index, Table, text
from sqlalchemy.exc import StatementError

from lightningrl.errors import StoreError
from lightningrl.types import RolloutState
from lightningrl_server.records import AttemptInfo
from lightningrl_server.store.errors import StoreTrouble

__all__ = [
    "CLUSTERED",
    "LOOK_S",
    "READERS",
    "Database",
    "EndEvent",
    "Event",
    "LeaseClock",
    "LeaseEvent",
    "QueueEvent",
    "StartEvent",
    "partial_index",
    "take_lock",
]

CLUSTERED: Final[Mapping[str, Any]] = {"sqlite_with_rowid": False}
"""Options of a table whose rows lie in the order of its primary key."""
READERS: Final = 2
"""Connections that read at the same time."""
LOOK_S: Final = 1.0
"""Longest time between two looks at the lease clock while this process runs."""
GRACE_S: Final = 30.0
"""Seconds for the first heartbeat of a worker that runs an attempt while nobody can hear it."""
_RENEW = text("UPDATE attempts SET expires_at = :until WHERE outcome IS NULL AND expires_at < :until")
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


class LeaseClock:
    """The clock of leases. It starts with the time of day and does not jump with it; where this process stood still,
    and so heard no heartbeat, it stood still too."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._now = time.time()
        self._looked_at = monotonic()

    def now(self) -> float:
        looked_at = self._monotonic()
        self._now += min(looked_at - self._looked_at, LOOK_S)
        self._looked_at = looked_at
        return self._now


class Database:
    """An open database: one engine to write, one to read. As it is here, one process writes it; one that several write
    overrides `is_shared` and what stands below it."""

    insert: Callable[[Table], Any]
    """With `on_conflict_do_update`."""
    errors: tuple[type[Exception], ...]
    """Errors that asking it may raise."""
    is_shared = False

    def __init__(self, name: str, writing: Engine, reading: Engine) -> None:
        self.name: Final = name
        """For messages: the file's path, or the URL without its password."""
        self.writing: Final = writing
        self.reading: Final = reading
        self._clock = LeaseClock()

    def means(self, error: BaseException) -> StoreError | None:
        """Meaning of an error of the driver's."""
        raise NotImplementedError

    def unlock(self) -> None:
        """Let another process open it."""
        raise NotImplementedError

    def explain(self, error: Exception) -> Exception:
        """Return the error that a person reads instead of the database's; anything else as it is."""
        original = error.orig if isinstance(error, StatementError) else error
        if isinstance(original, StoreError):  # a column's type said no
            return original
        return (self.means(original) if original is not None else None) or error

    def close(self) -> None:
        self.writing.dispose()
        self.reading.dispose()
        self.unlock()

    # ------------------------------------------------------------------ with other processes that write it

    def settle(self) -> None:
        """Let others open the store: it is ready."""

    def now(self) -> float:
        """Time by the clock of leases, in Unix seconds; the same for all."""
        return self._clock.now()

    def has_stood_still(self) -> bool:
        """True if this process stood still since the last call, and the clock of leases did not."""
        return False

    def renew(self, db: Connection) -> None:
        """Extend leases that nobody could renew."""
        db.execute(_RENEW, {"until": self.now() + GRACE_S})

    def tell(self, db: Connection, events: Sequence[Event]) -> None:
        """Have the others hear of `events` when this transaction is committed."""

    def listen(self) -> AsyncIterator[tuple[Event, ...] | None]:
        """Events of other processes, for ever. None = some may have been missed: look at everything anew."""
        raise NotImplementedError

    def is_lost(self, error: BaseException) -> bool:
        """True if the error says that the database went away, and will come back."""
        return False

    def regain(self) -> None:
        """Reach the database again, and `renew`."""
        with self.writing.begin() as db:
            self.renew(db)


def partial_index(name: str, column: Column[Any], where: str) -> Index:
    return Index(name, column, sqlite_where=text(where), postgresql_where=text(where))


def take_lock(try_once: Callable[[], bool], name: str) -> None:
    """Take the lock of the one process that writes a store; it goes with the process, however that ends."""
    give_up = time.monotonic() + _LOCK_S
    while not try_once():
        if time.monotonic() > give_up:
            raise StoreTrouble(f"the store {name!r} is in use by another process; stop it first")
        time.sleep(0.02)
