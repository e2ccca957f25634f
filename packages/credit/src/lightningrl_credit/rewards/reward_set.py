"""The terminal rewards of a run: named, weighted, sync or async, each with its own timeout.

trajectory ─► function(task, output, trajectory), at once ─► {"name": float | None} ─► Σ weight · value | None
                    └─ raised, timed out, NaN ─► again, after a pause ─► failure: "judge: OSError"

A reward that fails on an output and works on others says that the output is at fault (`lowest`).
Async functions run on the loop, all others in the main thread of a process (`rewards.processes`), made with the set.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from lightningrl.errors import ConfigError, RewardError, describe_raised, is_of_world
from lightningrl.sanitize import one_line
from lightningrl.types import Trajectory
from lightningrl_credit.rewards.execution import Execution
from lightningrl_credit.rewards.processes import FunctionProcesses, ProcessEnded
from lightningrl_credit.rewards.value import BadValue, Range, RewardWeights, WeightedReward, check_range, read_value

__all__ = ["NamedReward", "RewardResult", "RewardSet", "Verdict", "describe_failure", "is_being_cancelled"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
"""Longest pause between two tries; each is twice the one before."""
_LONGEST_FAILURE = 300
"""Characters of a failure's text."""
_ON_A_GPU = "; make the reward async, or start anew and load its model in its first call"
Keep = Callable[[str, float | None], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedReward(WeightedReward):
    """One terminal reward of a run."""

    function: Callable[..., Any]
    """A `protocols.Reward`: sync functions run in the main thread of a process, coroutines on the loop."""
    timeout_s: float = 30.0
    retries: int = 0
    concurrency: int = 16
    """Most calls at a time. A sync function gets another process for a call that would wait for a second."""
    range: Range | None = None
    """Least and most that it may return; another value is a failure. None = any."""

    def __post_init__(self) -> None:
        WeightedReward.__post_init__(self)
        check_range(f"reward {self.name!r}", self.range)
        if not self.timeout_s > 0:
            raise ConfigError(
                f"reward {self.name!r}: timeout_s {self.timeout_s!r} is not positive; give it some seconds, such as 30"
            )
        if not callable(self.function):
            raise ConfigError(
                f"reward {self.name!r} is a {type(self.function).__name__}, not callable; name a function"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """The rewards of a trajectory, computed or failed."""

    values: Mapping[str, float | None]
    """Values of rewards that did not fail. None = nothing to say."""
    total: float | None
    """Σ weight · value; None where a term with a weight is None or failed. See `RewardWeights.of_rollout`."""
    failure: str | None = None
    """First reward in order that failed, of those with a weight: `judge: ConnectionError: no route`."""
    suspects: frozenset[str] = frozenset()
    """Rewards that failed for what was judged, as far as is known; none where the network or a host failed one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(Generic[T]):
    """Outcome of a call of rewards: a value, or why there is none."""

    value: T | None = None
    failure: str | None = None
    """Reason why there is no value."""
    is_of_world: bool = False
    """True of a failure that no output caused: the network's, or a host's."""
    defect: str | None = None
    """Sentence about what is wrong with the function itself, as a value that is no number at all."""


class _RewardFailure(Exception):
    """A reward failed for good; the text is the reason."""

    def __init__(self, reason: str, *, is_of_world: bool = False) -> None:
        super().__init__(reason)
        self.is_of_world = is_of_world


class RewardSet:
    """Scores trajectories. A reward that raises, hangs or returns NaN is tried again, and is never a zero."""

    def __init__(self, rewards: Sequence[NamedReward]) -> None:
        self.weights = RewardWeights(rewards)
        self.rewards = tuple(rewards)
        self._seen: dict[str, Range] = {}
        """Least and most that each reward has returned."""
        self._worked: set[str] = set()
        """Rewards that have answered, be it None."""
        self._places: tuple[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] | None = None
        self._processes = FunctionProcesses(
            {
                reward.name: (partial(_judge, reward), reward.concurrency)
                for reward in rewards
                if not _is_async(reward.function)
            }
        )

    async def score(
        self,
        trajectory: Trajectory,
        *,
        earlier: Mapping[str, float | None] | None = None,
        keep: Keep | None = None,
        once: bool = False,
    ) -> RewardResult:
        """Ask all rewards but those with a value in `earlier`. `keep(name, value)` is awaited as each value is made.
        With `once` one that fails is not asked again. Raises RewardError, of several the first, where a reward returned
        no number at all, a defect of the function."""
        values = dict(earlier or {})
        self._note(values)
        asked = [reward for reward in self.rewards if reward.name not in values]
        asking = (self._value(reward, trajectory, keep, 0 if once else reward.retries) for reward in asked)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        failures: dict[str, _RewardFailure] = {}
        for reward, value in zip(asked, answers, strict=True):
            if isinstance(value, _RewardFailure):
                if reward.weight == 0.0:
                    logger.warning(
                        "rollout %r: reward %s; it has no weight, so nothing is lost", trajectory.rollout_id, value
                    )
                else:
                    failures[reward.name] = value
            elif isinstance(value, BaseException):
                raise value
            else:
                values[reward.name] = value
                self._note({reward.name: value})
        if failures:
            is_of_world = any(failure.is_of_world for failure in failures.values())
            first, suspects = str(next(iter(failures.values()))), frozenset(() if is_of_world else failures)
            return RewardResult(values=values, total=None, failure=first, suspects=suspects)
        ordered = {name: values[name] for name in self.weights.names if name in values}
        return RewardResult(values=ordered, total=self.weights.of_rollout(values))

    def have_worked(self, names: Collection[str]) -> bool:
        """True if each of these rewards has answered for some trajectory."""
        return self._worked.issuperset(names)

    def lowest(self, names: Collection[str] | None = None) -> dict[str, float]:
        """Values of all rewards, or of those named, that make a return the lowest: an end of each range, else of [0, 1]
        and what the reward has returned so far."""
        ends = {
            reward.name: reward.range or _hull((0.0, 1.0), self._seen.get(reward.name))
            for reward in self.rewards
            if names is None or reward.name in names
        }
        weights = self.weights.by_name
        return {name: most if weights.get(name, 1.0) < 0.0 else least for name, (least, most) in ends.items()}

    def _note(self, values: Mapping[str, float | None]) -> None:
        """Remember what rewards returned."""
        self._worked.update(values)
        for name, value in values.items():
            if value is not None:
                self._seen[name] = _hull((value, value), self._seen.get(name))

    async def _value(
        self, reward: NamedReward, trajectory: Trajectory, keep: Keep | None, retries: int
    ) -> float | None:
        pause = FIRST_PAUSE_S
        for left in reversed(range(retries + 1)):
            try:
                value = await self._try(reward, trajectory)
                break
            except _RewardFailure:
                if not left:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)
        if keep is not None:
            await keep(reward.name, value)
        return value

    async def _try(self, reward: NamedReward, trajectory: Trajectory) -> float | None:
        try:
            async with asyncio.timeout(None) as limit:
                verdict = await self._call(reward, trajectory, limit)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            is_late = isinstance(error, TimeoutError) and limit.expired()
            if isinstance(reward.function, Execution) and (is_late or isinstance(error, ProcessEnded)):
                return reward.function.worst  # a model's program did it
            if is_late:  # an async reward waits for somebody else
                raise _failed(
                    reward,
                    f"no answer within {reward.timeout_s:g} s; raise rewards.{reward.name}.timeout_s",
                    is_of_world=_is_async(reward.function),
                ) from None
            why = str(error) if isinstance(error, ProcessEnded) else describe_raised(error)
            raise _failed(reward, why, is_of_world=is_of_world(error)) from error
        if verdict.defect is not None:
            raise RewardError(verdict.defect)
        if verdict.failure is not None:
            raise _failed(reward, verdict.failure, is_of_world=verdict.is_of_world)
        return verdict.value

    async def _call(self, reward: NamedReward, trajectory: Trajectory, limit: asyncio.Timeout) -> Verdict[float]:
        """Call the function; its time limit starts when it does, not while it waits for its turn."""
        loop = asyncio.get_running_loop()

        def start() -> None:
            limit.reschedule(loop.time() + reward.timeout_s)

        if not _is_async(reward.function):
            verdict: Verdict[float] = await self._processes.run(reward.name, trajectory, on_start=start)
            return verdict
        async with self._place(reward):
            start()
            # copies: what a reward does to them is not seen by others, nor by its next try
            task, output = copy.deepcopy((trajectory.task, trajectory.output))
            seen = replace(trajectory, task=task, output=output)
            return _read(reward, await reward.function(task, output, seen), trajectory)

    def _place(self, reward: NamedReward) -> asyncio.Semaphore:
        """Semaphore of a reward on the running loop."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = (loop, {})
        return self._places[1].setdefault(reward.name, asyncio.Semaphore(reward.concurrency))


def _judge(reward: NamedReward, trajectory: Trajectory) -> Verdict[float]:
    """Call a sync reward, in its process."""
    try:
        value = reward.function(trajectory.task, trajectory.output, trajectory)
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
    except BaseException as error:  # noqa: BLE001  the boundary to a user's function, which may raise anything
        raised = describe_raised(error)
        hint = _ON_A_GPU if "re-initialize CUDA" in raised else ""
        return Verdict(failure=f"{raised}{hint}", is_of_world=is_of_world(error))
    return _read(reward, value, trajectory)


async def _await(value: Awaitable[Any]) -> Any:
    return await value


def _read(reward: NamedReward, value: Any, trajectory: Trajectory) -> Verdict[float]:
    try:
        return Verdict(
            value=read_value(value, what=f"reward {reward.name!r}", trajectory=trajectory, range=reward.range)
        )
    except BadValue as error:
        return Verdict(failure=str(error))
    except RewardError as error:
        return Verdict(defect=str(error))


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _failed(reward: NamedReward, why: str, *, is_of_world: bool = False) -> _RewardFailure:
    return _RewardFailure(describe_failure(reward.name, why), is_of_world=is_of_world)


def _hull(first: Range, second: Range | None) -> Range:
    """The range of both."""
    return first if second is None else (min(first[0], second[0]), max(first[1], second[1]))


def describe_failure(name: str, why: str) -> str:
    """Describe a failure in one clean line of bounded length."""
    return one_line(f"{name}: {why}", _LONGEST_FAILURE)


def is_being_cancelled() -> bool:
    """True if somebody cancels the running task; a CancelledError of what it awaits is a failure like others."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
