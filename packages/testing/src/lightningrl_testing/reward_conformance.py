"""The conformance suite of rewards: subclass it in a test file, give the reward and trajectories, and pytest runs it.

class TestExactMatch(RewardConformance):
    def make_reward(self): return exact_match
    def trajectories(self): return [make_trajectory("r", [make_transition("r/0")], output="4", answer="4")]
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightningrl.protocols import IntermediateReward
from lightningrl.types import Trajectory
from lightningrl_credit.rewards import NamedReward, RewardSet
from lightningrl_testing._pytest import call_factories, pytest

__all__ = ["IntermediateRewardConformance", "RewardConformance"]


class RewardConformance:
    """The specification of a terminal reward, as tests. They score through `RewardSet`, as a run does."""

    pytestmark = pytest.mark.asyncio  # whatever `asyncio_mode` the plugin's own tests have

    timeout_s: float = 30.0

    def make_reward(self) -> Callable[..., Any]:
        """The reward."""
        raise NotImplementedError

    def trajectories(self) -> Sequence[Trajectory]:
        """At least one finished trajectory that the reward is meant for."""
        raise NotImplementedError

    def _rewards(self) -> RewardSet:
        return RewardSet([NamedReward(name="reward", function=self.make_reward(), timeout_s=self.timeout_s)])

    async def _score(self, rewards: RewardSet, trajectory: Trajectory) -> float | None:
        result = await rewards.score(trajectory)
        assert result.failure is None, result.failure
        assert result.values == {"reward": result.total}
        return result.total

    async def test_installed_factories_make_it(self) -> None:
        call_factories("lightningrl_reward_functions", self.make_reward(), recipe_folder=Path.cwd(), range=None)

    async def test_gives_a_finite_number_or_none(self) -> None:
        rewards = self._rewards()
        for trajectory in self.trajectories():
            value = await self._score(rewards, trajectory)
            assert value is None or math.isfinite(value)

    async def test_gives_the_same_twice(self) -> None:
        first, second = self._rewards(), self._rewards()
        for trajectory in self.trajectories():
            assert await self._score(first, trajectory) == await self._score(second, trajectory)

    async def test_many_at_once_give_the_same_as_one_by_one(self) -> None:
        one_by_one, at_once = self._rewards(), self._rewards()
        trajectories = list(self.trajectories()) * 4
        expected = [await self._score(one_by_one, trajectory) for trajectory in trajectories]
        scored = await asyncio.gather(*(self._score(at_once, trajectory) for trajectory in trajectories))
        assert list(scored) == expected

    async def test_trajectory_stays_as_it_was(self) -> None:
        reward = self.make_reward()
        for trajectory in self.trajectories():
            before = _snapshot(trajectory)
            value = reward(trajectory.task, trajectory.output, trajectory)
            if inspect.isawaitable(value):
                await value
            assert _snapshot(trajectory) == before

    async def test_agent_that_returned_nothing_is_no_crash(self) -> None:
        rewards = self._rewards()
        for trajectory in self.trajectories():
            value = await self._score(rewards, replace(trajectory, output=None))
            assert value is None or math.isfinite(value)


class IntermediateRewardConformance:
    """The specification of an automatic intermediate reward, as tests."""

    def make_reward(self) -> IntermediateReward:
        """The reward."""
        raise NotImplementedError

    def trajectories(self) -> Sequence[Trajectory]:
        """At least one finished trajectory that the reward is meant for."""
        raise NotImplementedError

    def test_installed_factories_make_it(self) -> None:
        call_factories("lightningrl_intermediate_rewards", self.make_reward())

    def test_one_entry_per_call_finite_or_none(self) -> None:
        for trajectory in self.trajectories():
            values = self.make_reward()(trajectory)
            assert len(values) == len(trajectory.transitions)
            assert all(value is None or math.isfinite(value) for value in values)

    def test_gives_the_same_twice(self) -> None:
        for trajectory in self.trajectories():
            reward = self.make_reward()
            assert list(reward(trajectory)) == list(reward(trajectory))

    def test_trajectory_without_calls_gets_no_entries(self) -> None:
        for trajectory in self.trajectories():
            assert list(self.make_reward()(replace(trajectory, transitions=(), tool_calls=()))) == []

    def test_calls_without_tools_are_no_crash(self) -> None:
        for trajectory in self.trajectories():
            values = self.make_reward()(replace(trajectory, tool_calls=()))
            assert all(value is None or math.isfinite(value) for value in values)

    def test_trajectory_stays_as_it_was(self) -> None:
        for trajectory in self.trajectories():
            before = _snapshot(trajectory)
            self.make_reward()(trajectory)
            assert _snapshot(trajectory) == before


def _snapshot(trajectory: Trajectory) -> str:
    calls = [
        (call.id, dict(call.rewards), call.prompt_ids.tobytes(), call.completion_ids.tobytes())
        for call in trajectory.transitions
    ]
    return repr(
        (trajectory.output, trajectory.reward, dict(trajectory.rewards), trajectory.task, calls, trajectory.tool_calls)
    )
