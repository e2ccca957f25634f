"""Runs as sources of rows: their rollouts listed in pages, their calls read as chat messages, a batch at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from lightningrl.errors import ConfigError
from lightningrl.records import RolloutFilter
from lightningrl.types import Task, Trajectory
from lightningrl_credit.trained_calls import TrainedCalls, calls_left_out, trained_calls_of
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.rendering.templates import load_template
from lightningrl_server.rendering.tokenizer import load_tokenizer
from lightningrl_traces.curation.chat_calls import ChatCall, LeftOut, UnreadCall
from lightningrl_traces.curation.forwarded import read_forwarded
from lightningrl_traces.curation.prompts import PromptReader
from lightningrl_viewer.reading.origin import RunOrigin
from lightningrl_viewer.reading.reader import StoredRun
from lightningrl_viewer.reading.segments import SegmentReader

__all__ = ["ListedRollout", "OwnSource", "Source"]

_PAGE: Final = 500
_AT_ONCE: Final = 16
"""Trajectories in memory together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRollout:
    """A rollout as a run lists it, without its calls."""

    id: str
    group: str
    mode: str
    task: Task
    reward: float | None
    has_ended: bool


class Source(ABC):
    """A run, opened."""

    is_foreign: bool = False
    """Imported: no group was sampled to be compared, so rollouts of nearly equal tasks are."""

    def __init__(self, folder: Path, stored: StoredRun) -> None:
        self.name = folder.resolve().name
        self._stored = stored

    @abstractmethod
    def calls(self, trajectory: Trajectory) -> Iterator[ChatCall | UnreadCall]:
        """Read the calls of a trajectory."""

    async def rollouts(self) -> AsyncIterator[ListedRollout]:
        """List all rollouts, newest first, each once also while the run goes on."""
        seen: set[str] = set()
        for offset in range(0, 2**40, _PAGE):
            page = await self._stored.list_rollouts(RolloutFilter(limit=_PAGE, offset=offset))
            for record in page:
                if record.id not in seen:
                    seen.add(record.id)
                    yield ListedRollout(
                        id=record.id,
                        group=record.spec.group_id,
                        mode=record.spec.mode.value,
                        task=record.spec.task,
                        reward=record.reward,
                        has_ended=record.outcome is not None,
                    )
            if len(page) < _PAGE:
                return

    async def trajectories(self, rollout_ids: Sequence[str]) -> AsyncIterator[Trajectory]:
        """Read trajectories in the order asked, a few at a time."""
        for start in range(0, len(rollout_ids), _AT_ONCE):
            for trajectory in await self._stored.look.trajectories(rollout_ids[start : start + _AT_ONCE]):
                yield trajectory


class OwnSource(Source):
    """A run of our own."""

    def __init__(self, folder: Path, stored: StoredRun, origin: RunOrigin) -> None:
        super().__init__(folder, stored)
        self._is_forwarded = not origin.models
        """A provider answered in place of any policy: a teacher's rollouts."""
        self._trained: Mapping[str, TrainedCalls] = trained_calls_of(origin.recipe)
        self._reader_of = cache(lambda policy: _reader(origin, policy))

    def calls(self, trajectory: Trajectory) -> Iterator[ChatCall | UnreadCall]:
        """Read the calls of a trajectory that are training data by the recipe."""
        if self._is_forwarded:
            yield from read_forwarded(trajectory)
            return
        left_out = calls_left_out(trajectory.transitions, self._trained)
        for policy in dict.fromkeys(call.policy for call in trajectory.transitions):
            calls = [call for call in trajectory.transitions if call.policy == policy]
            reader = None if all(call.id in left_out for call in calls) else self._reader_of(policy)
            read: Iterator[ChatCall | UnreadCall] = (
                (UnreadCall(id=call.id, reason=LeftOut.NO_MODEL) for call in calls)
                if reader is None
                else reader.read(trajectory, calls)
            )
            for call in read:
                yield UnreadCall(id=call.id, reason=LeftOut.NOT_TRAINED) if call.id in left_out else call


def _reader(origin: RunOrigin, policy: str) -> PromptReader | None:
    """Return what reads a policy's calls, by the renderer that its gateway had; None where its tokenizer has gone."""
    settings = origin.recipe.all_policies.get(policy)
    if settings is None or policy not in origin.models:
        return None
    own = None
    if settings.chat_template is not None:
        own = load_template(settings.chat_template, origin.recipe.folder, policy)
    try:
        tokenizer = load_tokenizer(origin.models[policy], is_there=True, chat_template=own)
    except ConfigError:
        return None
    renderer = PolicyRenderer(
        tokenizer,
        settings.renderer,
        name=policy,
        template_kwargs=settings.chat_template_kwargs,
        chat_template=own,
    )
    return PromptReader(renderer, SegmentReader(tokenizer))
