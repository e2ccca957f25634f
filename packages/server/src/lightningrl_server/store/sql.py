"""The store on a SQL database.

store = await SqlStore.open("sqlite:///runs/1/store.db")

queue     who works on what       queue.py, queue_writes.py    ┐ over one writing thread (group commit) and a few that
call log  model calls, tools      call_log.py, tool_calls.py   │ read (writer.py); each operation is a function of a
ledger    scores, steps           ledger.py                    │ Transaction (transaction.py), each query one of a
look      rollouts, trajectories  look.py, trajectories.py     ┘ read-only connection (reader.py)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, Self

from sqlalchemy import insert, inspect, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from lightningrl.errors import StoreError
from lightningrl_server.store.call_log import SqlCallLog
from lightningrl_server.store.databases import Database
from lightningrl_server.store.errors import EmptyStore
from lightningrl_server.store.ledger import SqlLedger
from lightningrl_server.store.look import SqlLook
from lightningrl_server.store.postgresql import open_postgresql
from lightningrl_server.store.queue import SqlQueue
from lightningrl_server.store.sqlite import open_sqlite
from lightningrl_server.store.tables import SCHEMA_VERSION, meta, metadata, rollouts

__all__ = ["SqlStore", "has_rollouts", "open_database"]


class SqlStore(SqlQueue, SqlCallLog, SqlLedger, SqlLook):
    """A `lightningrl_server.store.protocol.Store`. Made by `open`; used on the event loop it was opened on."""

    @classmethod
    async def open(cls, url: str, *, read_only: bool = False, pragmas: Mapping[str, int] | None = None) -> Self:
        """Open or make the store at a URL of `lightningrl_server.store.databases`; `read_only` beside a server. Raises
        StoreError: in use by another process, corrupt, of another version, no room."""
        database = await asyncio.to_thread(open_database, url, read_only=read_only, pragmas=pragmas)
        return cls(database, read_only=read_only)


OPENERS: Final = {"sqlite": open_sqlite, "postgresql": open_postgresql}
"""Function that opens a database, by the scheme of its URL."""
_FILE: Final = "sqlite:///"


def open_database(url: str, *, read_only: bool = False, pragmas: Mapping[str, int] | None = None) -> Database:
    """Open or create it (`pragmas`: SQLite's). Raises StoreError: unknown URL, in use, corrupt, another version."""
    try:
        parsed = _parse(url)
        open_ = OPENERS[parsed.get_backend_name()]
    except (ArgumentError, KeyError):
        examples = "'sqlite:///path/to/store.db' or 'postgresql://user@host/name'"
        raise StoreError(f"store URL {url!r} names no database that we know; write {examples}") from None
    database = open_(parsed, read_only=read_only, pragmas=pragmas or {})
    try:
        _prepare(database, read_only=read_only)
        database.settle()
    except BaseException as error:
        database.close()
        if isinstance(error, database.errors):
            raise database.explain(error) from error
        raise
    return database


def _parse(url: str) -> URL:
    """Parse a URL, in which a file's path stands as it is: a folder may be called `50%25` or `done?`."""
    return URL.create("sqlite", database=url.removeprefix(_FILE)) if url.startswith(_FILE) else make_url(url)


def has_rollouts(url: str) -> bool:
    """True if a store has any rollout. Raises StoreError."""
    try:
        database = open_database(url, read_only=True)
    except EmptyStore:
        return False
    try:
        with database.reading.connect() as db:
            return db.execute(select(rollouts.c.pk).limit(1)).scalar() is not None
    except database.errors as error:
        raise database.explain(error) from error
    finally:
        database.close()


def _prepare(database: Database, *, read_only: bool) -> None:
    engine = database.reading if read_only else database.writing
    with engine.begin() as db:
        tables = set(inspect(db).get_table_names())
        version = db.execute(select(meta.c.value).where(meta.c.key == "schema")).scalar() if "meta" in tables else None
        if version is not None and version != str(SCHEMA_VERSION):
            raise StoreError(
                f"the store {database.name!r} has schema version {version}, and this lightningrl reads version "
                f"{SCHEMA_VERSION}; open it with the lightningrl that wrote it, or start in a new folder"
            )
        if version is None and (tables or read_only):
            kind = StoreError if tables else EmptyStore
            raise kind(f"{database.name!r} is a database of something else, no LightningRL store; choose another path")
        if version is None:
            metadata.create_all(db)
            db.execute(insert(meta).values(key="schema", value=str(SCHEMA_VERSION)))
        if not read_only:
            database.renew(db)
