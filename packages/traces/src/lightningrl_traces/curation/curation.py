"""Curating runs: list their rollouts, map them to the agent's own input and answer, split the tasks, read the calls
group by group, write the rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.types import Task, Trajectory
from lightningrl_credit.rewards import RewardSet
from lightningrl_runs.dialogue import answer_in, ask_as_agent
from lightningrl_runs.origin import RunOrigin, read_import
from lightningrl_runs.reader import open_run
from lightningrl_traces.curation.files import Report, RowFiles, check_target
from lightningrl_traces.curation.near_equality import TaskFamilies
from lightningrl_traces.curation.rows import Candidate, RowWriter
from lightningrl_traces.curation.rules import (
    ChatCall,
    GroupRewards,
    LeftOut,
    Rules,
    call_problem,
    rollout_problem,
    score_problem,
)
from lightningrl_traces.curation.sources import OwnSource, Source, TraceSource
from lightningrl_traces.records import Message

__all__ = ["TaskMapping", "curate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskMapping:
    """Places of the input and answer of the agent's own function, as dotted paths.

    input    {"messages": [["user", "7 + 8?"]]}          ─►  "7 + 8?"   or what `--input messages.0.1` names
    output   {"messages": [ …, {"content": "15", …}]}    ─►  "15"       or what `--output messages.-1.content` names

    None = the text that a state of messages asks, and the last message's text; the value itself where it is not such a
    state."""

    input: str | None = None
    output: str | None = None

    def map_task(self, task: Task) -> Task:
        """Return a task with the agent's own input. Raises ConfigError naming the task that the path does not fit."""
        if self.input is not None:
            return replace(task, input=_follow(task.input, self.input, f"--input {self.input!r}", task.id))
        return ask_as_agent(task)

    def answer_of(self, trajectory: Trajectory) -> Any:
        """Return what a rollout answered; None where its trace does not say. Raises ConfigError as above."""
        if self.output is not None:
            return _follow(trajectory.output, self.output, f"--output {self.output!r}", trajectory.task.id)
        return answer_in(trajectory.output)

    def map_rollout(self, trajectory: Trajectory) -> Trajectory:
        """Return a rollout as a reward of the agent's own function reads it. Raises ConfigError as above."""
        return replace(trajectory, task=self.map_task(trajectory.task), output=self.answer_of(trajectory))


def _follow(value: Any, path: str, option: str, task: str) -> Any:
    for part in path.split("."):
        try:
            if isinstance(value, list) and part.removeprefix("-").isdigit():
                value = value[int(part)]
            elif isinstance(value, dict):
                value = value[part]
            else:
                raise LookupError(part)
        except LookupError:
            there = f"{len(value)} items" if isinstance(value, list) else type(value).__name__
            there = ", ".join(value) or "nothing" if isinstance(value, dict) else there
            problem = f"there is no {part!r}; there is: {there}"
            raise ConfigError(f"{option} does not fit task {task!r}: {problem}") from None
    return value


@dataclass(frozen=True, slots=True)
class _Entry:
    """Entry of a run's list: a rollout to read."""

    id: str
    reward: float | None
    task: int
    """Number of its task."""


Groups = dict[str, list[_Entry]]


async def curate(
    runs: Sequence[Path],
    into: Path,
    rules: Rules = Rules(),  # noqa: B008
    rewards: RewardSet | None = None,
    mapping: TaskMapping | None = None,
) -> Report:
    """Write the rows of runs into an empty or absent folder, which appears when all are whole. `rewards`: in place of
    those that the runs have; `mapping`: of tasks to the agent's input and answer, by default of imported ones alone.

    Memory holds ids of all rollouts, fingerprints of tasks and rows, and the calls of a few rollouts. Raises
    RunFolderError for a run or folder that is none, ConfigError where no row is left.
    """
    check_target(into)
    names = [run.resolve() for run in runs]
    if len(set(names)) < len(names):
        raise ConfigError("a run is named twice; name each once")
    async with AsyncExitStack() as stack:
        sources = [await stack.enter_async_context(_open(run)) for run in runs]
        return await _Curation(sources, rules, rewards, mapping).write(into)


@asynccontextmanager
async def _open(folder: Path) -> AsyncIterator[Source]:
    """Open a run to read rows from. Raises RunFolderError where there is none."""
    if not folder.is_dir():  # noqa: ASYNC240  (a moment)
        raise RunFolderError(f"no run in {str(folder)!r}; name the folder of a run")
    origin = None if read_import(folder) is not None else RunOrigin.read(folder)
    async with open_run(folder) as stored:
        yield TraceSource(folder, stored) if origin is None else OwnSource(folder, stored, origin)


class _Curation:
    """One curation, while it is made."""

    def __init__(
        self, sources: Sequence[Source], rules: Rules, rewards: RewardSet | None, mapping: TaskMapping | None
    ) -> None:
        self._sources = sources
        self._rules = rules
        self._rewards = rewards
        self._mapping = mapping
        self._report = Report(runs=[source.name for source in sources], rules=rules)
        self._families = TaskFamilies(rules.near)
        self._held_back: frozenset[int] = frozenset()
        self._written: set[int] = set()
        """Tasks in tasks.jsonl, by family."""

    async def write(self, into: Path) -> Report:
        groups = [await self._list(source) for source in self._sources]
        groups = [self._regroup(source, listed) for source, listed in zip(self._sources, groups, strict=True)]
        self._held_back = self._families.validation(self._rules.validation)
        with RowFiles(into, self._report) as files:
            writer = RowWriter(files, self._report)
            for source, listed in zip(self._sources, groups, strict=True):
                for group in reversed(listed.values()):  # the oldest first
                    await self._write_group(source, group[::-1], files, writer)
            if not any(self._report.total(kind) for kind in ("sft", "dpo", "kto")):
                raise ConfigError(f"no row is left: {self._report.explain()}")
            files.publish()
        return self._report

    async def _list(self, source: Source) -> Groups:
        """List a run's rollouts by group, newest first."""
        groups: Groups = defaultdict(list)
        async for rollout in source.rollouts():
            self._report.rollouts_read += 1
            if rollout.mode not in self._rules.modes:
                self._report.rollouts_left_out[LeftOut.MODE] += 1
            elif not rollout.has_ended:
                self._report.rollouts_left_out[LeftOut.UNFINISHED] += 1
            else:
                task = self._families.add(self._map(source, rollout.task))
                groups[rollout.group].append(_Entry(rollout.id, rollout.reward, task))
        return groups if self._rewards is None else await self._reward(source, groups, self._rewards)

    def _mapping_of(self, source: Source) -> TaskMapping | None:
        return self._mapping or (TaskMapping() if source.is_foreign else None)

    def _map(self, source: Source, task: Task) -> Task:
        mapping = self._mapping_of(source)
        return task if mapping is None else mapping.map_task(task)

    async def _reward(self, source: Source, groups: Groups, rewards: RewardSet) -> Groups:
        """Return the groups with the rewards that were asked for."""
        values: dict[str, float | None] = {}
        mapping = self._mapping_of(source)
        async for trajectory in source.trajectories([entry.id for group in groups.values() for entry in group]):
            result = await rewards.score(trajectory if mapping is None else mapping.map_rollout(trajectory))
            values[trajectory.rollout_id] = result.total
            if result.failure is not None:
                self._report.reward_failures[result.failure] += 1
        return {name: [replace(entry, reward=values[entry.id]) for entry in group] for name, group in groups.items()}

    def _regroup(self, source: Source, groups: Groups) -> Groups:
        """Return the groups that are compared, once all families of tasks are there."""
        if not source.is_foreign:
            return groups
        by_family: Groups = defaultdict(list)
        for group in groups.values():
            for entry in group:
                by_family[str(self._families.family(entry.task))].append(entry)
        return by_family

    async def _write_group(self, source: Source, group: list[_Entry], files: RowFiles, writer: RowWriter) -> None:
        """Write a group's rows, the greatest rewards first, so that caps keep the best."""
        rewards = GroupRewards.of([(rollout.id, rollout.reward) for rollout in group], self._rules.best)
        order = sorted(group, key=lambda rollout: float("inf") if rollout.reward is None else -rollout.reward)
        listed = {rollout.id: rollout for rollout in order}
        waiting: dict[int, dict[str, object]] = {}
        """Tasks of rollouts that are nothing to imitate, by family."""
        async for stored in source.trajectories(list(listed)):
            trajectory = stored
            if self._rewards is not None:
                trajectory = replace(stored, reward=listed[stored.rollout_id].reward)
            family = self._families.family(listed[trajectory.rollout_id].task)
            side = self._side(family)
            problem = rollout_problem(self._rules, trajectory, rewards)
            has_calls, answer = False, None
            for call in source.calls(trajectory):
                has_calls = True
                self._report.calls_read += 1
                reason = call_problem(self._rules, call) if isinstance(call, ChatCall) else call.reason
                if reason is not None or not isinstance(call, ChatCall):
                    self._report.calls_left_out[reason or LeftOut.UNREADABLE] += 1
                    continue
                answer = call.answer
                candidate = Candidate(
                    call=call,
                    run=source.name,
                    rollout_id=trajectory.rollout_id,
                    reward=trajectory.reward,
                    problem=problem or score_problem(self._rules, trajectory, call),
                    family=family,
                    side=side,
                )
                writer.add(candidate, rewards)
            if not has_calls:
                self._report.rollouts_left_out[LeftOut.SPEECHLESS] += 1
            if answer is not None and family not in self._written:
                row = self._task_row(source, trajectory, answer, is_good=problem is None)
                if problem is not None and source.is_foreign:
                    waiting.setdefault(family, row)  # a better rollout may say what the answer is
                    continue
                self._written.add(family)
                self._report.states += source.is_foreign and isinstance(row["input"], dict | list)
                files.write(side, "tasks", row)
        for family, row in waiting.items():
            if family not in self._written:
                self._written.add(family)
                files.write(self._side(family), "tasks", row)
        writer.finish_group()

    def _side(self, family: int) -> str:
        if not self._rules.validation:
            return ""
        return "validation" if family in self._held_back else "train"

    def _task_row(self, source: Source, trajectory: Trajectory, last: Message, *, is_good: bool) -> dict[str, object]:
        """Return a task as `tasks.train` reads it from a file. The answer of one that has none is a good rollout's own;
        `last`: its last message, where the trace tells no output."""
        task, mapping = self._map(source, trajectory.task), self._mapping_of(source)
        answer = task.answer
        if answer is None and mapping is not None and is_good:
            output = mapping.answer_of(trajectory)
            answer = (last.get("content") or None) if output is None else output
        return {**task.metadata, "id": task.id, "input": task.input, **({} if answer is None else {"answer": answer})}
