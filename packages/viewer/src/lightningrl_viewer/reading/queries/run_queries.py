"""`RunQueries`: one store's queries, on the store's read-only connections."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from lightningrl_server.store.protocol import Look
from lightningrl_viewer.reading.queries import health, rollout_counts, rollout_rows
from lightningrl_viewer.reading.queries.rollout_index import RolloutIndex

__all__ = ["RunQueries"]

T = TypeVar("T")
P = ParamSpec("P")


def _reading(
    query: Callable[Concatenate[Connection, P], T],
) -> Callable[Concatenate[RunQueries, P], Coroutine[Any, Any, T]]:
    """Make the method that asks `query`."""

    async def method(self: RunQueries, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._store.read(lambda db: query(db, *args, **kwargs))

    return method


def _counting(
    query: Callable[Concatenate[RolloutIndex, Connection, P], T],
) -> Callable[Concatenate[RunQueries, P], Coroutine[Any, Any, T]]:
    """Make the method that asks `query` of an index that is up to date."""

    async def method(self: RunQueries, /, *args: P.args, **kwargs: P.kwargs) -> T:
        def ask(db: Connection) -> T:
            with self._index.lock:
                self._index.update(db)
                return query(self._index, db, *args, **kwargs)

        return await self._store.read(ask)

    return method


class RunQueries:
    """The questions of pages and reports that `Look` has not; each method is the function of its name."""

    def __init__(self, store: Look) -> None:
        self._store = store
        self._index = RolloutIndex()

    list_rows = _counting(rollout_rows.list_rows)
    neighbours = _reading(rollout_rows.read_neighbours)
    cells = _counting(rollout_counts.count_cells)
    task_counts = _counting(rollout_counts.count_tasks)
    part_counts = _counting(rollout_counts.count_parts)
    reward_values = _counting(rollout_counts.read_reward_values)
    step_rewards = _counting(rollout_counts.read_step_rewards)
    tool_counts = _reading(rollout_counts.count_tools)
    cut_calls = _reading(rollout_counts.count_cut_calls)
    position = _reading(health.read_position)
    health = _reading(health.read_health)
