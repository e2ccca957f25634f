"""Opens a store's database: schema version, migrations, leases that nobody could renew meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, insert, inspect, select, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from lightningrl.errors import StoreError
from lightningrl_server.store.dialects import Database, explain, open_sqlite
from lightningrl_server.store.errors import EmptyStore, OlderStore
from lightningrl_server.store.migrations import MIGRATIONS
from lightningrl_server.store.postgresql import GRACE_S, open_postgresql
from lightningrl_server.store.schema import SCHEMA_VERSION, attempts, meta, metadata, rollouts

__all__ = ["has_rollouts", "open_database"]

logger = logging.getLogger(__name__)

DIALECTS: Final = {"sqlite": open_sqlite, "postgresql": open_postgresql}
"""By the beginning of a store's URL."""
_FILE: Final = "sqlite:///"


def open_database(url: str, *, read_only: bool = False, pragmas: Mapping[str, int] | None = None) -> Database:
    """Open or create it; an older version's is brought up to date. `pragmas`: SQLite's.

    Raises StoreError: unknown URL, in use by another process, corrupt, written by a newer version, or by an older one and `read_only`.
    """
    try:
        parsed = _parse(url)
        open_ = DIALECTS[parsed.get_backend_name()]
    except (ArgumentError, KeyError):
        raise StoreError(
            f"store URL {url!r} names no database that we know; write 'sqlite:///path/to/store.db' or 'postgresql://user@host/name'"
        ) from None
    database = open_(parsed, read_only=read_only, pragmas=pragmas or {})
    try:
        _prepare(database, read_only=read_only)
        if database.peers is not None:
            database.peers.settle()
    except database.errors as error:
        database.close()
        raise explain(error, database) from error
    except BaseException:
        database.close()
        raise
    return database


def _parse(url: str) -> URL:
    """A file's path stands in it as it is: a folder may be called `50%25` or `done?`."""
    return URL.create("sqlite", database=url.removeprefix(_FILE)) if url.startswith(_FILE) else make_url(url)


def has_rollouts(url: str) -> bool:
    """Whether a store has any. Raises StoreError."""
    try:
        database = open_database(url, read_only=True)
    except EmptyStore:
        return False
    try:
        with database.reading.connect() as db:
            return db.execute(select(rollouts.c.pk).limit(1)).scalar() is not None
    except database.errors as error:
        raise explain(error, database) from error
    finally:
        database.close()


def _migrate(db: Connection, version: int, name: str) -> None:
    """Bring an older store up to date, in the transaction of its opening."""
    for step in range(version, SCHEMA_VERSION):
        if step not in MIGRATIONS:
            raise StoreError(f"the store {name!r} has schema version {version}, which nothing brings up to date; start in a new folder")
        MIGRATIONS[step](db)
    db.execute(update(meta).where(meta.c.key == "schema").values(value=str(SCHEMA_VERSION)))
    logger.info("store %s: brought from schema version %d to %d", name, version, SCHEMA_VERSION)


def _add_indices(db: Connection) -> None:
    """Those that stores of the same version were made without: they make reading quicker and nothing else."""
    known = inspect(db)
    for table in metadata.tables.values():
        there = {index["name"] for index in known.get_indexes(table.name)}
        for index in table.indexes:
            if index.name not in there:
                index.create(db)


def _prepare(database: Database, *, read_only: bool) -> None:
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
            if database.peers is not None and not database.peers.is_alone:
                raise StoreError(f"the store {database.name!r} is in use by an older version of lightningrl; stop its servers first")
            _migrate(db, int(version), database.name)
        if version is None and (tables or read_only):
            kind = StoreError if tables else EmptyStore
            raise kind(f"{database.name!r} is a database of something else, no LightningRL store; choose another path")
        if version is None:
            metadata.create_all(db)
            db.execute(insert(meta).values(key="schema", value=str(SCHEMA_VERSION)))
        if not read_only:
            _add_indices(db)
            until = (time.time() if database.peers is None else database.peers.now()) + GRACE_S
            nobody_heard = attempts.c.outcome.is_(None) & (attempts.c.expires_at < until)
            db.execute(update(attempts).where(nobody_heard).values(expires_at=until))
