"""From finished trajectories to their rewards and the evidence that credit needs: everything that asks somebody.

trajectories ─► tools' verdicts ─► intermediate rewards ─► terminal rewards ─► evidence ─► Scorer
                                                                └───────────────────┴─► kept as they are made: a resumed run asks
                                                                                        none again whose digest is the same
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from lightningrl.beside import is_being_cancelled
from lightningrl.config import OutcomesConfig
from lightningrl.credit.evidence import check_evidence
from lightningrl.credit.judge import Judge
from lightningrl.credit.services import PolicyQueries, RolloutServices
from lightningrl.errors import LightningError, PluginError, RewardError, describe_raised
from lightningrl.plugins import PluginManager
from lightningrl.protocols import CreditAssigner, GroupWitness, Services, Witness
from lightningrl.rewards import RewardSet, TurnReward
from lightningrl.rewards.reward_set import describe_failure
from lightningrl.rewards.threads import DaemonThreads
from lightningrl.rewards.value import BadValue
from lightningrl.store.protocol import Score
from lightningrl.types import Evidence, RolloutMode, ToolStatus, Trajectory, TrajectoryGroup

__all__ = ["Evaluator", "classify_tools"]

WITNESSES_AT_ONCE = 32
LONGEST_SCORE_S = 900.0
"""That a credit assigner's `score` may take, or the intermediate rewards of what is rewarded at once."""
KeepScores = Callable[[Sequence[Score]], Awaitable[None]]
"""Durable when it returns."""


class Evaluator:
    """Asks rewards, and for evidence whoever gives it."""

    def __init__(
        self,
        *,
        rewards: RewardSet,
        intermediate: Mapping[str, TurnReward],
        credit: CreditAssigner,
        outcomes: OutcomesConfig,
        plugins: PluginManager,
        digests: Mapping[str, str] | None = None,
        judge: Judge | None = None,
        policies: PolicyQueries | None = None,
    ) -> None:
        """`credit`: whose evidence is heard, where it wants any. `digests`: of the parts, by the recipe's key."""
        self._rewards = rewards
        self._intermediate = intermediate
        self._credit = credit
        self._outcomes = outcomes
        self._plugins = plugins
        self._digests = dict(digests or {})
        self._judge = judge
        self.policies = policies or PolicyQueries({})
        """What evidence asks the run's policies by; whoever builds their backends connects them."""
        self._witnesses = asyncio.Semaphore(WITNESSES_AT_ONCE)
        self._threads = DaemonThreads(1)

    async def reward(self, trajectories: Sequence[Trajectory], keep: KeepScores | None = None) -> list[Trajectory]:
        """`evaluate`, and tell whoever watches rollouts."""
        rewarded = await self.evaluate(trajectories, keep)
        for trajectory in rewarded:
            self._plugins.notify("lightningrl_rollout_finished", trajectory=trajectory)
        return rewarded

    async def evaluate(self, trajectories: Sequence[Trajectory], keep: KeepScores | None = None) -> list[Trajectory]:
        """The trajectories with their rewards; one whose outcome is dropped, or whose reward failed, has `reward=None`. Each value is
        kept by `keep` as it is made; those that were kept before, by the same reward, are taken as they are."""
        called = await self._reward_all_calls(trajectories)
        together: dict[str, list[str]] = {}
        """Rollouts that a witness sees at once."""
        for trajectory, _ in called:
            key = trajectory.group_id if isinstance(self._credit, GroupWitness) else trajectory.rollout_id
            together.setdefault(key, []).append(trajectory.rollout_id)

        async def hear(names: Sequence[str]) -> list[Trajectory]:
            rewarded = [await rewards[name] for name in names]
            if isinstance(self._credit, Witness | GroupWitness):
                async with self._witnesses:
                    rewarded = await self._add_evidence(self._credit, rewarded, keep)
            return rewarded

        try:
            async with asyncio.TaskGroup() as group:
                rewards = {one.rollout_id: group.create_task(self._reward_one(one, keep, failure)) for one, failure in called}
                tasks = [group.create_task(hear(names)) for names in together.values()]
        except* LightningError as errors:
            raise errors.exceptions[0] from None
        found = {one.rollout_id: one for task in tasks for one in task.result()}
        return [found[trajectory.rollout_id] for trajectory in trajectories]

    def check_failures(self, rewarded: Sequence[Trajectory], *, to_come: int = 0) -> None:
        """Raise RewardError where more rewards failed than the recipe allows, also if none of the rollouts fails that are `to_come`."""
        asked = to_come + sum(self._outcomes.is_trained(trajectory.outcome) for trajectory in rewarded)
        failed = [trajectory for trajectory in rewarded if trajectory.unrewarded is not None]
        if len(failed) > self._outcomes.max_failed_rewards * asked:
            raise RewardError(
                f"a reward or evidence failed on {len(failed)} of {asked} rollouts, more than outcomes.max_failed_rewards = "
                f"{self._outcomes.max_failed_rewards:g} of them; last, on {failed[-1].rollout_id!r}: {failed[-1].unrewarded}; mend it, "
                "or raise the limit; what was rewarded is kept and not asked again"
            )

    async def _reward_one(self, trajectory: Trajectory, keep: KeepScores | None, failure: str | None) -> Trajectory:
        """`failure`: of an intermediate reward."""
        if not self._outcomes.is_trained(trajectory.outcome):
            return replace(trajectory, reward=None, unrewarded=None)

        async def keep_value(name: str, value: float | None) -> None:
            if keep is not None:
                digests = self._digests_of(f"rewards.{name}")
                await keep([Score(rollout_id=trajectory.rollout_id, attempt=trajectory.attempt, rewards={name: value}, digests=digests)])

        known = {
            name: trajectory.rewards[name]
            for name in self._rewards.weights.names
            if name in trajectory.rewards and trajectory.digests.get(f"rewards.{name}", "") == self._digests.get(f"rewards.{name}")
        }
        result = await self._rewards.score(trajectory, known=known, keep=keep_value)
        keys = (*(f"rewards.{name}" for name in result.values), *(f"intermediate_rewards.{name}" for name in self._intermediate))
        digests = self._digests_of(*keys)
        if "credit" in trajectory.digests:  # of its evidence
            digests["credit"] = trajectory.digests["credit"]
        is_failed = failure is not None and result.total is not None
        total, unrewarded = (None, failure) if is_failed else (result.total, result.failure)
        return replace(trajectory, rewards=result.values, reward=total, unrewarded=unrewarded, digests=digests)

    async def _add_evidence(
        self, witness: Witness | GroupWitness, trajectories: Sequence[Trajectory], keep: KeepScores | None
    ) -> list[Trajectory]:
        """The trajectories with the evidence that credit needs of them; unrewarded where there is none to be had."""
        asked = [one for one in trajectories if one.reward is not None and one.mode is RolloutMode.TRAIN and one.transitions]
        digests = self._digests_of("credit")
        if all(one.evidence is not None and digests.items() <= one.digests.items() for one in asked):
            return list(trajectories)
        services = RolloutServices(self._judge, self.policies, *asked)
        found: Sequence[Evidence | None]
        failure = None
        try:
            async with asyncio.timeout(LONGEST_SCORE_S):
                found = await _hear(witness, asked, services)
        except PluginError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # the boundary to an assigner that waits for others
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            found, failure = [None] * len(asked), describe_failure("credit", describe_raised(error))
        heard: dict[str, Trajectory] = {}
        for one, evidence in zip(asked, found, strict=True):
            heard[one.rollout_id] = replace(
                one,
                reward=None if evidence is None else one.reward,
                unrewarded=failure,
                evidence=evidence,
                digests={**one.digests, **(digests if evidence is not None else {})},
                other_calls=one.other_calls if heard else (*one.other_calls, *services.asked),
            )
        if keep is not None:
            await keep(
                [
                    Score(
                        rollout_id=one.rollout_id,
                        attempt=one.attempt,
                        evidence=evidence,
                        digests=digests if evidence is not None else {},
                        asked=() if number else tuple(services.asked),
                    )
                    for number, (one, evidence) in enumerate(zip(asked, found, strict=True))
                ]
            )
        return [heard.get(one.rollout_id, one) for one in trajectories]

    def _digests_of(self, *keys: str) -> dict[str, str]:
        return {key: self._digests[key] for key in keys if key in self._digests}

    async def _reward_all_calls(self, trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, str | None]]:
        """Beside the loop, which engines and workers talk through: they are functions of the user's."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                found: list[tuple[Trajectory, str | None]] = await self._threads.run(
                    lambda: [self._reward_calls(trajectory) for trajectory in trajectories],
                    on_start=lambda: limit.reschedule(loop.time() + LONGEST_SCORE_S),
                    name="of-calls",
                )
        except TimeoutError:
            if not limit.expired():
                raise
            names = ", ".join(map(repr, self._intermediate)) or "lightningrl_classify_tool_result"
            raise RewardError(
                f"intermediate rewards ({names}) of {len(trajectories)} rollouts took more than {LONGEST_SCORE_S:g} s; mend the slow one"
            ) from None
        return found

    def _reward_calls(self, trajectory: Trajectory) -> tuple[Trajectory, str | None]:
        """The trajectory with its tools' verdicts and its turn rewards; where one of them failed with none, and why."""
        trajectory = classify_tools(trajectory, self._plugins)
        if not self._intermediate and not any(call.rewards for call in trajectory.transitions):
            return trajectory, None
        values: dict[str, Sequence[float | None]] = {}
        failure: str | None = None
        for name, reward in self._intermediate.items():
            try:
                values[name] = list(reward(trajectory))
            except LightningError:
                raise
            except Exception as error:  # noqa: BLE001  the boundary to a function of the user's
                why = str(error) if isinstance(error, BadValue) else describe_raised(error)
                values, failure = {}, describe_failure(name, why)
                break
        calls = [
            replace(call, rewards={name: column[index] for name, column in values.items()})
            for index, call in enumerate(trajectory.transitions)
        ]
        return replace(trajectory, transitions=tuple(calls)), failure


def classify_tools(trajectory: Trajectory, plugins: PluginManager) -> Trajectory:
    """The trajectory with what plugins say of its tool calls."""
    if not trajectory.tool_calls:
        return trajectory
    classified = []
    for call in trajectory.tool_calls:
        verdict: ToolStatus | None = plugins.hook.lightningrl_classify_tool_result(tool_call=call)
        classified.append(call if verdict is None else replace(call, status=verdict))
    return replace(trajectory, tool_calls=tuple(classified))


async def _hear(witness: Witness | GroupWitness, trajectories: Sequence[Trajectory], services: Services) -> Sequence[Evidence]:
    """Evidence of each. Raises PluginError where it does not fit."""
    if isinstance(witness, GroupWitness):
        group = TrajectoryGroup(id=trajectories[0].group_id, trajectories=tuple(trajectories))
        found = await witness.score_group(group, services)
        if len(found) != len(trajectories):
            raise PluginError(
                f"`score_group` returned {len(found)} pieces of evidence for {len(trajectories)} rollouts; return one for each"
            )
    else:
        found = [await witness.score(trajectory, services) for trajectory in trajectories]
    for evidence, trajectory in zip(found, trajectories, strict=True):
        check_evidence(evidence, trajectory)
    return found
