"""The terminal rewards of a run: named, weighted, sync or async, each with its own timeout.

trajectory ─► function(task, output, trajectory), all at once ─► {"name": float | None} ─► Σ weight · value | None
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightningrl.errors import ConfigError, RewardError
from lightningrl.rewards._threads import DaemonThreads
from lightningrl.roles import is_role_among
from lightningrl.types import Trajectory

__all__ = ["NamedReward", "RewardSet"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedReward:
    """One terminal reward of a run."""

    name: str
    function: Callable[..., Any]
    """A `protocols.Reward`: sync functions run in a thread, coroutines on the loop."""
    weight: float = 1.0
    """0.0 = computed and shown, but no part of the return."""
    agents: frozenset[str] | None = None
    """Roles that it pays; None = all."""
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError(f"reward {self.name!r}: weight {self.weight!r} is not a finite number; set one, such as 1.0")
        if not self.timeout_s > 0:
            raise ConfigError(f"reward {self.name!r}: timeout_s {self.timeout_s!r} is not positive; give it some seconds, such as 30")
        if not callable(self.function):
            raise ConfigError(f"reward {self.name!r} is a {type(self.function).__name__}, not callable; name a function")


class RewardSet:
    """Scores trajectories. A reward that raises, hangs or returns no finite number is an error, never a zero."""

    def __init__(self, rewards: Sequence[NamedReward], *, threads: int = 8) -> None:
        """`threads`: sync rewards at work at a time."""
        if not rewards:
            raise ConfigError("no reward is configured; add one under [rewards]")
        names = [reward.name for reward in rewards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two rewards are named {twice[0]!r}; rename one")
        self._rewards = tuple(rewards)
        self._threads = DaemonThreads(threads)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(reward.name for reward in self._rewards)

    async def score(self, trajectory: Trajectory) -> tuple[dict[str, float | None], float | None]:
        """The rewards by name, and the return: their weighted sum, None when a term with a weight is None. A reward that pays some
        roles alone may be None beside others: then it adds nothing.

        Raises RewardError naming the reward, the rollout and what to do; of several, the first in order.
        """
        found = await asyncio.gather(*(self._value(reward, trajectory) for reward in self._rewards), return_exceptions=True)
        values: dict[str, float | None] = {}
        for reward, value in zip(self._rewards, found, strict=True):
            if isinstance(value, BaseException):
                raise value
            values[reward.name] = value
        counted = [reward for reward in self._rewards if reward.weight != 0.0]
        present = [reward for reward in counted if reward.agents is None or values[reward.name] is not None]
        return values, None if counted and not present else _weighted_sum(present, values)

    @property
    def roles(self) -> frozenset[str]:
        """Roles that have rewards of their own."""
        return frozenset().union(*(reward.agents for reward in self._rewards if reward.agents is not None and reward.weight != 0.0))

    def paid_to(self, agent: str | None) -> frozenset[str]:
        """Names of the rewards that a role's calls are paid."""
        return frozenset(
            reward.name
            for reward in self._rewards
            if reward.weight != 0.0 and (reward.agents is None or (agent is not None and is_role_among(agent, reward.agents)))
        )

    def total(self, values: Mapping[str, float | None], names: Collection[str]) -> float | None:
        """The weighted sum of some rewards; None when one of them is None, or none is named."""
        paid = [reward for reward in self._rewards if reward.name in names]
        return _weighted_sum(paid, values) if paid else None

    async def _value(self, reward: NamedReward, trajectory: Trajectory) -> float | None:
        where = f"on rollout {trajectory.rollout_id!r} (task {trajectory.task.id!r})"
        try:
            async with asyncio.timeout(None) as limit:
                value = await self._call(reward, trajectory, limit)
        except TimeoutError as error:
            if not limit.expired():
                raise _raised(reward, where, error) from error
            raise RewardError(
                f"reward {reward.name!r} took longer than {reward.timeout_s:g} s {where}; "
                f"make it faster or raise rewards.{reward.name}.timeout_s"
            ) from None
        except (Exception, SystemExit) as error:
            raise _raised(reward, where, error) from error
        return _as_number(value, reward, where)

    async def _call(self, reward: NamedReward, trajectory: Trajectory, limit: asyncio.Timeout) -> Any:
        """The function's value; the time limit starts when the function does, not while it waits for a thread."""
        arguments = (trajectory.task, trajectory.output, trajectory)
        loop = asyncio.get_running_loop()
        if _is_async(reward.function):
            limit.reschedule(loop.time() + reward.timeout_s)
            return await reward.function(*arguments)
        value = await self._threads.run(
            lambda: reward.function(*arguments), on_start=lambda: limit.reschedule(loop.time() + reward.timeout_s), name=reward.name
        )
        return await value if inspect.isawaitable(value) else value


def _weighted_sum(rewards: Sequence[NamedReward], values: Mapping[str, float | None]) -> float | None:
    total = 0.0
    for reward in rewards:
        value = values.get(reward.name)
        if value is None:
            return None
        total += reward.weight * value
    return total


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _as_number(value: Any, reward: NamedReward, where: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (numbers.Real, np.bool_)):
        raise RewardError(
            f"reward {reward.name!r} returned {_short(value)} of type {type(value).__name__} {where}; return a float, or None"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"reward {reward.name!r} returned {number!r} {where}; return a finite float, or None where it has nothing to say")
    return number


def _raised(reward: NamedReward, where: str, error: BaseException) -> RewardError:
    return RewardError(
        f"reward {reward.name!r} raised {type(error).__name__}: {error} {where}; fix it, or let it return None where it has nothing to say"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
