"""Runs as sources of rows: their rollouts listed in pages, their calls read as chat messages, a batch at a time.

an own run         recorded tokens, which prompts.py reads back; a teacher's, requests and answers
imported traces    requests and answers, each with its grade; grades.jsonl has the reasons, and those of a call that is
                   rl-safe say why it is no data for tuning
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.records import RolloutFilter
from lightningrl.types import Task, Trajectory
from lightningrl_credit.trained_calls import TrainedCalls, calls_left_out, trained_calls_of
from lightningrl_runs.dialogue import is_chat, read_exchange
from lightningrl_runs.foreign.messages import REPARSED
from lightningrl_runs.origin import RunOrigin
from lightningrl_runs.reader import StoredRun
from lightningrl_runs.segments import SegmentReader
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.rendering.templates import load_template
from lightningrl_server.rendering.tokenizer import load_tokenizer
from lightningrl_traces.curation.prompts import PromptReader
from lightningrl_traces.curation.rules import ChatCall, LeftOut, Likeness, UnreadCall
from lightningrl_traces.grades import ENDED, Grade
from lightningrl_traces.run_store import StoredCall, read_calls

__all__ = ["ListedRollout", "OwnSource", "Source", "TraceSource", "read_forwarded"]

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


class TraceSource(Source):
    """A run that was imported. Its rollouts of nearly equal tasks are compared: nobody sampled them as groups."""

    is_foreign = True

    def __init__(self, folder: Path, stored: StoredRun) -> None:
        super().__init__(folder, stored)
        self._unfit = _read_unfit(folder / "grades.jsonl")

    def calls(self, trajectory: Trajectory) -> Iterator[ChatCall | UnreadCall]:
        """Read the calls of a trajectory."""
        values = {call.id: {**call.reported, **call.rewards} for call in trajectory.transitions}
        for call in read_calls(trajectory):
            if (trajectory.rollout_id, call.id) in self._unfit:
                yield UnreadCall(id=call.id, reason=LeftOut.UNFIT)
            else:
                yield _as_chat(call, values.get(call.id, {}))


def read_forwarded(trajectory: Trajectory) -> Iterator[ChatCall | UnreadCall]:
    """Read the answered calls of chat, streamed or not; a body too large to be kept is unreadable."""
    for number, call in enumerate(trajectory.other_calls):
        if call.code is not None or not is_chat(call):
            continue
        name = f"{trajectory.rollout_id}/{number}"
        notes: set[str] = set()
        asked, answered = read_exchange(call, notes)
        if not answered.get("answer"):
            yield UnreadCall(id=name, reason=LeftOut.UNKEPT)
        # Anthropic's answers have a tool's arguments as an object, so that their text is ours
        elif notes - {REPARSED}:
            yield UnreadCall(id=name, reason=LeftOut.UNREADABLE)
        else:
            asked_and_answered = StoredCall(
                id=name,
                grade=Grade.SFT,
                model=call.model,
                agent=call.agent,
                messages=asked.get("messages") or [],
                tools=asked.get("tools"),
                answer=answered["answer"],
                finish_reason=answered.get("finish_reason"),
            )
            yield _as_chat(asked_and_answered, {})


def _as_chat(call: StoredCall, rewards: Mapping[str, float | None]) -> ChatCall | UnreadCall:
    if not call.messages or not call.answer:
        return UnreadCall(id=call.id, reason=LeftOut.UNREADABLE)
    if call.finish_reason is not None and call.finish_reason not in ENDED:
        return UnreadCall(id=call.id, reason=LeftOut.CUT)
    return ChatCall(
        id=call.id,
        role=call.agent,
        prompt=tuple(call.messages),
        answer={**call.answer, "role": "assistant"},
        tools=tuple(call.tools or ()),
        likeness=Likeness.FOREIGN,
        grade=call.grade.value,
        rewards=rewards,
    )


def _read_unfit(path: Path) -> frozenset[tuple[str, str]]:
    """Return the calls that are rl-safe and no data for tuning. Raises RunFolderError for a line that is none."""
    unfit: set[tuple[str, str]] = set()
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                grade = json.loads(line)
                if grade["grade"] == "rl-safe" and grade["reasons"]:
                    unfit.add((grade["rollout_id"], grade["call_id"]))
    except OSError as error:
        raise RunFolderError(f"{str(path)!r} cannot be read: {error.strerror}; import the traces again") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"line {number} of {str(path)!r} is no grade; import the traces again") from error
    return frozenset(unfit)
