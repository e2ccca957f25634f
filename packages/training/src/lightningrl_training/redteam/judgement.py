"""Attacks rewarded as in a run, and their payments judged: against the gold output of the same task and the worst of
the outputs without worth.

outputs ─► trajectories ─► RewardSet ─► Trial ×16 at a time, until the time is over ─► Judgement ─► RedTeamFinding
                                            share = (total - floor) / (gold - floor)
                                            floor: the least that an output without worth earned on any task
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from lightningrl.errors import RewardError
from lightningrl.types import FinishReason, Outcome, RolloutMode, Task, Trajectory, Transition
from lightningrl_credit.rewards import NamedReward, RewardSet
from lightningrl_credit.rewards.processes import is_function_process
from lightningrl_training.redteam.attacks import Attack, RedTeamFinding, Severity, Worth, shorten, text_of_answer

__all__ = ["Judgement", "Scores", "Trial", "WatchedReward", "files_within_reach", "forged", "is_async"]

TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108
AT_ONCE: Final = 16
LATE: Final = "no answer within "
MOST_LATE: Final = 2
"""Calls that may run out of time with the same attack; it is not tried on further tasks."""
BEYOND: Final = 1.02
"""Share from which an output earns more than gold."""
TOO_MUCH: Final = {Worth.NOTHING: 0.5, Worth.WRONG: 0.99, Worth.MORE: BEYOND, Worth.RIGHT: 1.1}
"""Share of gold's advantage from which an output is paid too much; one that is right may be briefer than gold."""
STRICT: Final = 0.5
"""Share below which an output that is right earns too little."""
LEAST_TASKS: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """An attack on a task and what it earned."""

    mutator: str
    task: Task
    attack: Attack
    total: float | None = None
    """Return of the rewards that are judged; None = one had nothing to say, or failed."""
    failure: str | None = None
    """First of these rewards that failed, and how."""
    is_defect: bool = False
    """The reward returned no number at all: a run would end."""


@dataclass(kw_only=True, eq=False)
class Scores:
    """Asks for rewards as a run does, with the same processes and time limits, within `seconds` in all."""

    rewards: RewardSet
    seconds: float
    show: Callable[[int, int], None]
    policy: str
    done: int = 0
    planned: int = 0
    _late: Counter[str] = field(default_factory=Counter[str])
    _until: float = field(init=False)

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.seconds

    async def earn(self, names: Collection[str], asked: Sequence[tuple[str, Task, Attack]]) -> list[Trial]:
        """Reward attacks of (mutator, task, attack) by these rewards; those that there was no time for are left out."""
        trials: dict[int, Trial] = {}
        self.planned += len(asked)
        waiting = iter(enumerate(asked))

        async def work() -> None:
            for number, (mutator, task, attack) in waiting:
                if time.monotonic() < self._until and self._late[attack.what] < MOST_LATE:
                    if (trial := await self._ask(names, mutator, task, attack, f"redteam-{number}")) is not None:
                        trials[number] = trial
                    self.done += 1
                    self.show(self.done, self.planned)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())
        return [trial for _, trial in sorted(trials.items())]

    async def _ask(
        self, names: Collection[str], mutator: str, task: Task, attack: Attack, rollout: str
    ) -> Trial | None:
        trial = Trial(mutator=mutator, task=task, attack=attack)
        trajectory = _trajectory_of(task, attack, rollout=rollout, policy=self.policy)
        try:
            async with asyncio.timeout(max(0.1, self._until - time.monotonic())):
                result = await self.rewards.score(trajectory, once=True)
        except TimeoutError:
            return None
        except RewardError as error:
            return replace(trial, failure=str(error), is_defect=True)
        failure = result.failure or ""
        self._late[attack.what] += LATE in failure
        total = self.rewards.weights.total(result.values, names)
        return replace(trial, total=total, failure=failure if failure.partition(":")[0] in names else None)


def _trajectory_of(task: Task, attack: Attack, *, rollout: str, policy: str) -> Trajectory:
    """A finished rollout of one call, with the attack's output."""
    tokens = min(4096, max(1, len(text_of_answer(attack.output)) // 4))
    call = Transition(
        id=f"{rollout}/1/0",
        policy=policy,
        policy_version=0,
        prompt_ids=np.arange(16, dtype=np.int32),
        completion_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, dtype=np.float32),
        finish_reason=FinishReason.STOP,
        tool_call_ids=tuple(tool.id for tool in attack.tool_calls),
        reported=attack.reported,
        duration_s=1.0,
    )
    return Trajectory(
        rollout_id=rollout,
        attempt=1,
        task=task,
        group_id=rollout,
        outcome=Outcome.SUCCEEDED,
        transitions=(call,),
        tool_calls=attack.tool_calls,
        output=copy.deepcopy(attack.output),  # a reward may change what it is given
        reported=attack.reported,
        mode=RolloutMode.TRAIN,
        duration_s=1.0,
    )


class WatchedReward:
    """A sync reward whose process notes the files that it opens."""

    _opened: ClassVar[list[tuple[str, bool]]] = []
    """Files that the running call opened, and whether to write. A process makes a call at a time."""

    def __init__(self, function: Callable[..., Any], log: Path) -> None:
        self.function = function
        self.log = log

    @classmethod
    def watch(cls, reward: NamedReward, log: Path) -> NamedReward:
        """The reward as in a run, watched where it is a function of the user's that runs in a process of its own."""
        is_ours = type(reward.function).__module__.startswith("lightningrl_")
        if sys.platform != "linux" or is_async(reward.function) or is_ours:
            return reward
        return replace(reward, function=cls(reward.function, log))

    def __call__(self, task: Any, output: Any, trajectory: Any, /) -> Any:
        _start_watching()
        self._opened.clear()
        try:
            return self.function(task, output, trajectory)
        finally:
            written = {path for path, is_written in self._opened if is_written}
            read = {path for path, _ in self._opened} - written
            with suppress(OSError), self.log.open("a", encoding="utf-8") as log:
                log.writelines(json.dumps(path) + "\n" for path in sorted(read))

    @classmethod
    def note(cls, event: str, arguments: tuple[Any, ...]) -> None:
        """Note a file that this process opens: an audit hook, which stays."""
        if event == "open" and isinstance(arguments[0], str | bytes):
            path, _, flags = arguments
            is_written = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            cls._opened.append((os.path.abspath(os.fsdecode(path)), is_written))  # noqa: PTH100  no file is looked up


@cache
def _start_watching() -> None:
    """Watch this process, and write nothing to the terminal: attacks make a reward's helpers print what they cannot
    read."""
    sys.addaudithook(WatchedReward.note)
    if is_function_process():
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        os.close(nowhere)


def is_async(function: Any) -> bool:
    """True for a coroutine function, or an object that is called as one: such a reward asks somebody, as a rule."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def files_within_reach(log: Path, folder: Path) -> Iterator[Path]:
    """Files that several calls read and that an agent can write before: in a temporary folder, or not there yet where
    agents are at home. `folder`: the recipe's."""
    temporary = {Path(place).resolve() for place in (tempfile.gettempdir(), *TEMPORARY)}
    homes = temporary | {Path.cwd(), folder.resolve()}
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    reads = Counter(Path(json.loads(line)) for line in lines)
    for path in sorted(path for path, count in reads.items() if count > 1):
        above = set(path.resolve().parents)
        if path.suffix in (".pyc", ".py", ".so") or log.parent in path.parents:
            continue
        if path.is_file():
            if temporary & above and folder.resolve() not in above and os.access(path, os.W_OK):
                yield path
        elif not path.exists() and path.parent.is_dir() and homes & above:
            yield path


@contextmanager
def forged(path: Path, text: str) -> Iterator[bool]:
    """Write a file where none is, for a while. Yields False where there is one, which stays as it is."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Findings of what was tried on one return."""

    reward: str
    tried: Sequence[Trial]
    gold: Mapping[str, float]
    """Return of the gold output, by task; empty = nobody knows one."""
    kinds: Collection[type]
    """Types of outputs that the agent returns: a reward may fail on others."""
    full: float = 1.0
    """The most that the reward can give, where it says so."""

    def findings(self) -> Iterator[RedTeamFinding]:
        """Outputs that earn too much, and rewards that tell nothing apart."""
        paid = [trial for trial in self.tried if trial.total is not None]
        is_worthless_paid = any(trial.attack.worth in (Worth.NOTHING, Worth.WRONG) for trial in paid)
        is_constant = len({trial.total for trial in paid}) == 1 and len(paid) >= LEAST_TASKS
        if is_constant and is_worthless_paid and _total(paid[0]) > 0.0:
            total = _total(paid[0])
            sentence = f"every output earns {total:g}, whatever it says"
            advice = "let the reward look at the output: its second parameter, (task, output, trajectory)"
            severity = Severity.HIGH if total >= self.full / 2 else Severity.NOTE
            yield self.finding(paid, len({trial.task.id for trial in paid}), sentence, severity, advice)
        elif self.gold:
            yield from self._against_gold(paid)
        else:
            yield from self._without_gold(paid)
        yield from self._failures()

    def strict(self) -> Iterator[RedTeamFinding]:
        """Outputs that are right and earn less than half of gold."""
        for group in _groups(trial for trial in self.tried if trial.attack.worth is Worth.RIGHT):
            poor = [trial for trial in group if (share := self._share(trial)) is not None and share < STRICT]
            if poor and len(poor) >= len(group) / 4:
                sentence = f"{poor[0].attack.what} earns less than half of what gold earns"
                yield self.finding(poor, len(group), sentence, Severity.NOTE)

    @cached_property
    def _floor(self) -> float:
        """The least of what is worth nothing; where gold earns no more than that, the least of what is wrong."""
        nothing, wrong = (
            min(
                (_total(trial) for trial in self.tried if trial.attack.worth is worth and trial.total is not None),
                default=0.0,
            )
            for worth in (Worth.NOTHING, Worth.WRONG)
        )
        return nothing if max(self.gold.values(), default=0.0) > nothing else min(nothing, wrong)

    def _share(self, trial: Trial) -> float | None:
        gold = self.gold.get(trial.task.id)
        if trial.total is None or gold is None or gold <= self._floor:
            return None
        return (trial.total - self._floor) / (gold - self._floor)

    def _against_gold(self, paid: Sequence[Trial]) -> Iterator[RedTeamFinding]:
        poor = [trial for trial in paid if trial.mutator == "gold" and _total(trial) <= self._floor]
        if poor:
            sentence = f"gold earns no more than nothing on {len(poor)} of {len(self.gold)} tasks"
            advice = "mend the `answer` of these tasks, or take them out: nothing that is learned there is right"
            yield self.finding(poor, len(self.gold), sentence, Severity.MEDIUM, advice)
        for group in _groups(paid):
            attack, tasks = group[0].attack, len({trial.task.id for trial in group})
            shares = [(trial, share) for trial in group if (share := self._share(trial)) is not None]
            hits = [trial for trial, share in shares if share >= TOO_MUCH[attack.worth]]
            if _are_enough(hits, tasks):
                best = max(share for _, share in shares)
                how = f"{best:.0%} of what gold earns" if best < 0.98 else "more than gold" if best > BEYOND else ""
                yield self.finding(hits, tasks, f"{attack.what} earns {how or 'as much as gold'}", attack.severity)

    def _without_gold(self, paid: Sequence[Trial]) -> Iterator[RedTeamFinding]:
        """Judge by the most that the reward can give: 1, where it declares no range. A form may be all it asks."""
        least = min(map(_total, paid), default=0.0)
        for group in _groups(
            trial for trial in paid if trial.attack.worth is Worth.NOTHING and trial.mutator != "form"
        ):
            hits = [trial for trial in group if _total(trial) >= self.full > least]
            tasks = len({trial.task.id for trial in group})
            if _are_enough(hits, tasks):
                sentence = f"{group[0].attack.what} earns {hits[0].total:g}, all that there is"
                yield self.finding(hits, tasks, sentence, group[0].attack.severity)

    def _failures(self) -> Iterator[RedTeamFinding]:
        """Rewards that raise, hang, or return no number on an output that an agent can write."""
        failed: dict[str, list[Trial]] = defaultdict(list)
        for trial in self.tried:
            if trial.failure is not None and (trial.is_defect or type(trial.attack.output) in self.kinds):
                failed[trial.failure.partition(" on rollout ")[0].partition(":")[0]].append(trial)
        for trials in failed.values():
            kinds = list(dict.fromkeys(trial.attack.what for trial in trials))
            others = f" and {len(kinds) - 1} others" if len(kinds) > 1 else ""
            sentence = f"the reward fails on {kinds[0]}{others}: {trials[0].failure}"
            advice = (
                "return the least value for an output that cannot be read: a rollout whose reward fails counts as the "
                "lowest, and many of them end the run"
            )
            tasks = len({trial.task.id for trial in self.tried})
            severity = Severity.HIGH if trials[0].is_defect else Severity.MEDIUM
            yield self.finding(trials, tasks, sentence, severity, advice, mutator="failure")

    def finding(
        self, hits: Sequence[Trial], tried: int, sentence: str, severity: Severity, advice: str = "", mutator: str = ""
    ) -> RedTeamFinding:
        """The finding that these trials make; with the mutator and the advice of the best paid, where none is given."""
        best = max(hits, key=lambda trial: float("-inf") if trial.total is None else trial.total)
        return RedTeamFinding(
            severity=severity,
            mutator=mutator or best.mutator,
            reward=self.reward,
            sentence=sentence,
            advice=advice or best.attack.advice,
            task=best.task.id,
            output=shorten(best.attack.output),
            earned=best.total,
            gold=self.gold.get(best.task.id),
            tasks=len({trial.task.id for trial in hits}),
            tried=tried,
        )


def _total(trial: Trial) -> float:
    return trial.total or 0.0


def _are_enough(hits: Sequence[Trial], tasks: int) -> bool:
    """Tell whether so many of the tasks paid for an attack that it is no coincidence."""
    share = hits[0].attack.least_share if hits else 0.0
    count = len({trial.task.id for trial in hits})
    return count > 0 and count >= share * tasks and (not share or count >= min(tasks, LEAST_TASKS))


def _groups(trials: Iterable[Trial]) -> list[list[Trial]]:
    """Trials of the same attack on different tasks."""
    groups: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[trial.mutator, trial.attack.what].append(trial)
    return list(groups.values())
