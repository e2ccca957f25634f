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
from typing import Self

from lightningrl_server.store.call_log import SqlCallLog
from lightningrl_server.store.ledger import SqlLedger
from lightningrl_server.store.look import SqlLook
from lightningrl_server.store.opening import open_database
from lightningrl_server.store.queue import SqlQueue

__all__ = ["SqlStore"]


class SqlStore(SqlQueue, SqlCallLog, SqlLedger, SqlLook):
    """A `lightningrl_server.store.protocol.Store`. Made by `open`; used on the event loop it was opened on."""

    @classmethod
    async def open(cls, url: str, *, read_only: bool = False, pragmas: Mapping[str, int] | None = None) -> Self:
        """Open or make the store at a URL of `lightningrl_server.store.databases`; `read_only` beside a server. Raises
        StoreError: in use by another process, corrupt, of another version, no room."""
        database = await asyncio.to_thread(open_database, url, read_only=read_only, pragmas=pragmas)
        return cls(database, read_only=read_only)
