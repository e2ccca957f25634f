"""A run read from its folder: its store is opened read-only and without its lock, whether a trainer writes to it, was
killed or has ended."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from sqlalchemy import Connection

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.records import RolloutFilter, RolloutRecord
from lightningrl.types import Outcome, Trajectory
from lightningrl_runs.group_diff import Siblings, build_siblings
from lightningrl_runs.origin import RunOrigin, read_models, read_run_file, template_of
from lightningrl_runs.queries import health, rollout_counts, rollout_rows
from lightningrl_runs.queries.rollout_index import RolloutIndex
from lightningrl_runs.segments import SegmentReader
from lightningrl_runs.trace import CallTrace, Trace, Window, build_trace, read_messages
from lightningrl_runs.why_no_gradient import NoGradient, Token, read_tokens
from lightningrl_server.rendering.tokenizer import load_tokenizer
from lightningrl_server.store import SqlStore
from lightningrl_server.store.errors import EmptyStore
from lightningrl_server.store.location import find_store, has_store
from lightningrl_server.store.protocol import Look

__all__ = ["Group", "RunQueries", "StoredRun", "ask_run", "open_run", "read_group"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The rollouts of one task that are compared with each other."""

    rollouts: tuple[RolloutRecord, ...]
    """In the order in which they were asked for."""
    mean: float | None
    """Mean reward; None = none has one."""
    std: float | None


async def read_group(run: StoredRun, group_id: str) -> Group:
    """Return a group's rollouts side by side; empty where there is none of that name."""
    rollouts = tuple(reversed(await run.list_rollouts(RolloutFilter(group_id=group_id, limit=1000))))
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return Group(
        rollouts=rollouts,
        mean=statistics.fmean(rewards) if rewards else None,
        std=statistics.pstdev(rewards) if rewards else None,
    )


class StoredRun:
    """A run read from its store."""

    def __init__(self, look: Look, tokenizer_of: Callable[[str], Any | None]) -> None:
        """`tokenizer_of(policy)` is None where nobody has it."""
        self.look = look
        """The store's questions and answers."""
        self.queries = RunQueries(look)
        """Questions of pages and reports."""
        self._reader_of = cache(lambda policy: SegmentReader(tokenizer_of(policy)))

    async def list_rollouts(self, where: RolloutFilter = RolloutFilter()) -> Sequence[RolloutRecord]:  # noqa: B008
        return await self.look.list_rollouts(where)

    async def siblings(self, group_id: str, *, most: int = 64) -> Siblings:
        """Compare a group's first `most` rollouts; empty where there is none of that name."""
        rollouts = (await read_group(self, group_id)).rollouts
        ended = [rollout.spec.id for rollout in rollouts[:most] if _has_ended(rollout)]
        trajectories, scores = await self.look.trajectories(ended), await self.look.scores(ended)
        return await asyncio.to_thread(build_siblings, group_id, rollouts, trajectories, scores, self._reader_of, most)

    async def trace(self, rollout_id: str, window: Window | None = None) -> Trace:
        """Read a rollout as text: all of it, or what `window` says. Raises LightningError naming rollouts near it where
        there is none."""
        rollout = await self.look.rollout(rollout_id)
        if not rollout.attempts:
            return Trace(rollout=rollout, attempt=None)
        trajectory = await self._trajectory(rollout)
        score = next(iter(await self.look.scores([rollout_id])), None) if _has_ended(rollout) else None
        return await asyncio.to_thread(build_trace, rollout, trajectory, score, self._reader_of, window)

    async def row_text(self, rollout_id: str, call: int, start: int, end: int) -> str | None:
        """Return the text of some tokens of a call's row: prompt, then completion. None where it has no such call."""
        rollout = await self.look.rollout(rollout_id)
        calls = (await self._trajectory(rollout)).transitions if rollout.attempts else ()
        made = next((candidate for candidate in calls if candidate.index == call), None)
        if made is None:
            return None
        row = np.concatenate((made.prompt_ids, made.completion_ids))[start:end]
        return await asyncio.to_thread(self._reader_of(made.policy).text, row)

    def messages(self, trajectory: Trajectory) -> list[list[tuple[str, str]]]:
        """Read what each call adds to those before it; see `read_messages`."""
        return read_messages(trajectory, self._reader_of)

    def has_text(self, policy: str) -> bool:
        """True where its tokens can be read; else they are shown by their numbers."""
        return self._reader_of(policy).has_text

    def tokens(
        self, call: CallTrace, reason: NoGradient | None, *, start: int = 0, count: int | None = None
    ) -> list[Token]:
        """List the tokens that the policy sampled in a call, from the completion's `start`-th on."""
        return list(read_tokens(call, reason, self._reader_of(call.call.policy), start=start, count=count))

    async def _trajectory(self, rollout: RolloutRecord) -> Trajectory:
        """Return the trajectory of the deciding attempt, or of the one that runs."""
        if not _has_ended(rollout):
            return await self._so_far(rollout)
        return (await self.look.trajectories([rollout.spec.id]))[0]

    async def _so_far(self, rollout: RolloutRecord) -> Trajectory:
        """Return what the running attempt has called; its tool calls come when it ends."""
        place = rollout.spec.id, rollout.attempts[-1].attempt
        return Trajectory(
            rollout_id=rollout.spec.id,
            attempt=rollout.attempts[-1].attempt,
            task=rollout.spec.task,
            group_id=rollout.spec.group_id,
            outcome=Outcome.CANCELLED,
            transitions=tuple(record.transition for record in await self.look.calls(*place)),
            other_calls=await self.look.other_calls(*place),
        )


def _has_ended(rollout: RolloutRecord) -> bool:
    return any(attempt.outcome is not None for attempt in rollout.attempts)


@asynccontextmanager
async def open_run(folder: Path) -> AsyncIterator[StoredRun]:
    """Open a run. Raises RunFolderError where there is no store."""
    if not has_store(folder):
        raise RunFolderError(f"no store in {str(folder)!r}; name the folder of a run")
    try:
        store = await SqlStore.open(find_store(folder), read_only=True)
    except EmptyStore:
        problem = f"no store in {str(folder)!r} yet: its run is just starting; look again in a moment"
        raise RunFolderError(problem) from None
    try:
        yield StoredRun(store, _tokenizers(folder))
    finally:
        await store.close()


async def ask_run(folder: Path, question: Callable[[StoredRun], Awaitable[T]]) -> T:
    """Open a run for one question. Raises RunFolderError where there is no store."""
    async with open_run(folder) as run:
        return await question(run)


def _tokenizers(folder: Path) -> Callable[[str], Any | None]:
    """Return what finds a policy's tokenizer, as the run had it; it finds None where the model has gone."""
    models = read_models(folder)

    def tokenizer_of(policy: str) -> Any | None:
        try:
            return load_tokenizer(models[policy], is_there=True, chat_template=_template(folder, policy))
        except (KeyError, ConfigError):
            return None

    return tokenizer_of


def _template(folder: Path, policy: str) -> str | None:
    own = read_run_file(folder).get("templates")  # of a folder without a recipe, as `try` makes it
    if isinstance(own, dict):
        return own[policy] if isinstance(own.get(policy), str) else None
    try:
        return template_of(RunOrigin.read(folder).recipe, policy)
    except RunFolderError:  # made by another version
        return None


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

    call_counts = _reading(rollout_rows.count_calls)
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
