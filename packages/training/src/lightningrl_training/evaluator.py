"""Asks for the rewards of finished trajectories, and for the evidence that credit needs of them.

trajectories ─► tools' verdicts ─► intermediate rewards ─► terminal rewards ─► evidence ─► Scorer
                                       kept as they are made ◄────┴────────────────┘
                                       a resumed run asks none again whose digest is the same
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from lightningrl.errors import LightningError, PluginError, RewardError, describe_raised, is_of_world
from lightningrl.plugins import PluginManager
from lightningrl.protocols import CreditAssigner, Services
from lightningrl.recipe_tables import OutcomesConfig
from lightningrl.records import Score
from lightningrl.types import Evidence, RolloutMode, ToolStatus, Trajectory, TrajectoryGroup
from lightningrl_credit.evidence import check_evidence
from lightningrl_credit.rewards import RewardResult, RewardSet, TurnReward
from lightningrl_credit.rewards.processes import DaemonThreads, FunctionProcesses, ProcessEnded
from lightningrl_credit.rewards.reward_set import Verdict, describe_failure, is_being_cancelled
from lightningrl_credit.rewards.value import BadValue
from lightningrl_training.evidence_services import PolicyQueries, RolloutServices
from lightningrl_training.judge import Judge

__all__ = ["Evaluator", "classify_tools"]

T = TypeVar("T")

SCORED_AT_ONCE = 32
LONGEST_SCORE_S = 900.0
"""Seconds that a credit assigner's `score` may take, or the intermediate rewards of what is rewarded at once."""
KeepScores = Callable[[Sequence[Score]], Awaitable[None]]
"""Keeps scores, durably once it returns."""
_INTERMEDIATE: Final = "intermediate rewards"
_Values = Mapping[str, Sequence[float | None]]
"""Intermediate rewards by name, one for each call."""


@dataclass(kw_only=True, eq=False)
class Evaluator:
    """Asks rewards for values, and judges, critics and policies for evidence."""

    rewards: RewardSet
    intermediate: Mapping[str, TurnReward]
    credit: CreditAssigner
    """Its evidence is heard, where it wants any."""
    outcomes: OutcomesConfig
    plugins: PluginManager
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of the parts, by the recipe's key."""
    judge: Judge | None = None
    policies: PolicyQueries = field(default_factory=lambda: PolicyQueries({}))
    """The run's policies, as evidence asks them; they are connected once their backends are built."""
    _scoring: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(SCORED_AT_ONCE))
    _threads: DaemonThreads = field(init=False, default_factory=lambda: DaemonThreads(1))
    _processes: FunctionProcesses = field(init=False)
    _have_paid: bool = field(init=False, default=False)
    """True once the intermediate rewards have worked on a rollout."""

    def __post_init__(self) -> None:
        calls = {"calls": (partial(_pay_calls, dict(self.intermediate)), 1)} if self.intermediate else {}
        self._processes = FunctionProcesses(calls)

    async def reward(self, trajectories: Sequence[Trajectory], keep: KeepScores | None = None) -> list[Trajectory]:
        """`evaluate`, and tell whoever watches rollouts."""
        rewarded = await self.evaluate(trajectories, keep)
        for trajectory in rewarded:
            self.plugins.notify("lightningrl_rollout_finished", trajectory=trajectory)
        return rewarded

    async def evaluate(self, trajectories: Sequence[Trajectory], keep: KeepScores | None = None) -> list[Trajectory]:
        """The trajectories with their rewards. The lowest, where the policy caused a failure, of the agent or of a
        reward that works on other outputs; `reward=None`, where the world did. Each value is kept by `keep` as it is
        made; values kept before, by the same reward, are taken as they are."""
        called = await self._reward_all_calls(trajectories)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._reward_one(rollout, keep, failure)) for rollout, failure in called]
            # only now is it known what the others earned, and which rewards work
            rewarded = [self._judge(*task.result()) for task in tasks]
            if self.credit.has("score", "score_group"):
                rewarded = await self._add_evidence(rewarded, keep)
        except* LightningError as errors:
            raise errors.exceptions[0] from None
        return rewarded

    async def _add_evidence(self, rewarded: Sequence[Trajectory], keep: KeepScores | None) -> list[Trajectory]:
        """Add evidence to all of them; those that credit looks at together, at once."""
        together: dict[str, list[Trajectory]] = {}
        for rollout in rewarded:
            key = rollout.group_id if self.credit.has("score_group") else rollout.rollout_id
            together.setdefault(key, []).append(rollout)

        async def score(rollouts: Sequence[Trajectory]) -> list[Trajectory]:
            async with self._scoring:
                return await self._score_together(rollouts, keep)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(score(rollouts)) for rollouts in together.values()]
        scored = {rollout.rollout_id: rollout for task in tasks for rollout in task.result()}
        return [scored[rollout.rollout_id] for rollout in rewarded]

    def check_failures(self, rewarded: Sequence[Trajectory], *, to_come: int = 0) -> None:
        """Raise RewardError where more rewards failed than the recipe allows, even if none of those `to_come` fails."""
        asked = to_come + sum(self.outcomes.asks_rewards(trajectory.outcome) for trajectory in rewarded)
        failed = [trajectory for trajectory in rewarded if trajectory.unrewarded is not None]
        share = self.outcomes.max_failed_rewards
        is_a_single_one = share > 0 and len(failed) == 1 < asked
        if len(failed) > share * asked and not is_a_single_one:
            raise RewardError(
                f"a reward or evidence failed on {len(failed)} of {asked} rollouts, more than "
                f"outcomes.max_failed_rewards = {self.outcomes.max_failed_rewards:g} of them; last, on "
                f"{failed[-1].rollout_id!r}: {failed[-1].unrewarded}; mend it, or raise the limit; what was rewarded "
                "is kept and not asked again"
            )

    async def _reward_one(
        self, trajectory: Trajectory, keep: KeepScores | None, failure: Verdict[_Values] | None
    ) -> tuple[Trajectory, RewardResult | None]:
        """The trajectory with its rewards, and what they said; None = they were not asked. `failure`: of the
        intermediate rewards."""
        if not self.outcomes.asks_rewards(trajectory.outcome):
            return replace(trajectory, reward=None, unrewarded=None), None

        rollout, attempt = trajectory.rollout_id, trajectory.attempt

        async def keep_value(name: str, value: float | None) -> None:
            if keep is not None:
                digests = self._digests_of(f"rewards.{name}")
                score = Score(rollout_id=rollout, attempt=attempt, rewards={name: value}, digests=digests)
                await keep([score])

        recorded = {
            name: trajectory.rewards[name]
            for name in self.rewards.weights.names
            if name in trajectory.rewards
            and trajectory.digests.get(f"rewards.{name}", "") == self.digests.get(f"rewards.{name}")
        }
        result = await self.rewards.score(trajectory, earlier=recorded, keep=keep_value)
        keys = (
            *(f"rewards.{name}" for name in result.values),
            *(f"intermediate_rewards.{name}" for name in self.intermediate),
        )
        digests = self._digests_of(*keys)
        if "credit" in trajectory.digests:  # of its evidence
            digests["credit"] = trajectory.digests["credit"]
        if failure is not None and result.total is not None:
            suspects = frozenset() if failure.is_of_world else frozenset({_INTERMEDIATE})
            result = replace(result, total=None, failure=failure.failure, suspects=suspects)
        rewarded = replace(
            trajectory, rewards=result.values, reward=result.total, unrewarded=result.failure, digests=digests
        )
        return rewarded, result

    def _judge(self, trajectory: Trajectory, result: RewardResult | None) -> Trajectory:
        """Give the lowest reward to what the policy broke: a rollout of its own, or a reward that works on others."""
        if result is None:
            return self._with_lowest(trajectory) if self.outcomes.is_trained(trajectory.outcome) else trajectory
        if not result.suspects:
            return trajectory
        has_worked = self._have_paid if _INTERMEDIATE in result.suspects else self.rewards.have_worked(result.suspects)
        return self._with_lowest(trajectory) if has_worked else trajectory

    def _with_lowest(self, trajectory: Trajectory) -> Trajectory:
        """Give it the least that the recipe's rewards can."""
        values = self.rewards.lowest()
        return replace(trajectory, rewards=values, reward=self.rewards.weights.of_rollout(values))

    async def _score_together(self, trajectories: Sequence[Trajectory], keep: KeepScores | None) -> list[Trajectory]:
        """The trajectories with the evidence that credit needs of them; unrewarded where there is none to be had."""
        asked = [
            rollout
            for rollout in trajectories
            if rollout.reward is not None and rollout.mode is RolloutMode.TRAIN and rollout.transitions
        ]
        digests = self._digests_of("credit")
        if all(rollout.evidence is not None and digests.items() <= rollout.digests.items() for rollout in asked):
            return list(trajectories)
        services = RolloutServices(self.judge, self.policies, *asked)
        pieces: Sequence[Evidence | None]
        failure = None
        try:
            async with asyncio.timeout(LONGEST_SCORE_S):
                pieces = await self._evidence_of(asked, services)
        except PluginError:
            raise
        # the boundary to an assigner that waits for others
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            pieces, failure = [None] * len(asked), describe_failure("credit", describe_raised(error))
        scored: dict[str, Trajectory] = {}
        for rollout, evidence in zip(asked, pieces, strict=True):
            scored[rollout.rollout_id] = replace(
                rollout,
                reward=None if evidence is None else rollout.reward,
                unrewarded=failure or rollout.unrewarded,
                evidence=evidence,
                digests={**rollout.digests, **(digests if evidence is not None else {})},
                other_calls=rollout.other_calls if scored else (*rollout.other_calls, *services.asked),
            )
        if keep is not None:
            await keep(
                [
                    Score(
                        rollout_id=rollout.rollout_id,
                        attempt=rollout.attempt,
                        evidence=evidence,
                        digests=digests if evidence is not None else {},
                        asked=() if number else tuple(services.asked),
                    )
                    for number, (rollout, evidence) in enumerate(zip(asked, pieces, strict=True))
                ]
            )
        return [scored.get(rollout.rollout_id, rollout) for rollout in trajectories]

    async def _evidence_of(self, trajectories: Sequence[Trajectory], services: Services) -> Sequence[Evidence]:
        """Evidence for each trajectory. Raises PluginError where it does not fit."""
        group = TrajectoryGroup(id=trajectories[0].group_id, trajectories=tuple(trajectories))
        pieces = await self.credit.score_group(group, services)
        if len(pieces) != len(trajectories):
            raise PluginError(
                f"`score_group` returned {len(pieces)} pieces of evidence for {len(trajectories)} rollouts; return one "
                "for each"
            )
        for evidence, trajectory in zip(pieces, trajectories, strict=True):
            check_evidence(evidence, trajectory)
        return pieces

    def _digests_of(self, *keys: str) -> dict[str, str]:
        return {key: self.digests[key] for key in keys if key in self.digests}

    async def _reward_all_calls(
        self, trajectories: Sequence[Trajectory]
    ) -> list[tuple[Trajectory, Verdict[_Values] | None]]:
        """Give each trajectory its tools' verdicts and its turn rewards; where a reward failed none, and the reason.
        Runs beside the event loop, which engines and workers talk through: they are functions of the user's."""
        left = LONGEST_SCORE_S
        loop = asyncio.get_running_loop()

        async def ask(work: Callable[[Callable[[], None]], Awaitable[T]]) -> T:
            """Do the work within the time that is left; waiting for its turn, which `start` ends, takes none of it."""
            nonlocal left
            try:
                async with asyncio.timeout(None) as limit:
                    value = await work(lambda: limit.reschedule(loop.time() + left))
                    left = left if (until := limit.when()) is None else until - loop.time()
                    return value
            except TimeoutError:
                if not limit.expired():
                    raise
                names = ", ".join(map(repr, self.intermediate)) or "lightningrl_classify_tool_result"
                who = f"intermediate rewards ({names}) of {len(trajectories)} rollouts"
                raise RewardError(f"{who} took more than {LONGEST_SCORE_S:g} s; mend the slow one") from None

        def classify() -> list[Trajectory]:
            return [classify_tools(trajectory, self.plugins) for trajectory in trajectories]

        async def pay(trajectory: Trajectory) -> Verdict[_Values]:
            try:
                return await ask(lambda start: self._processes.run("calls", trajectory, on_start=start))
            except ProcessEnded as error:
                return Verdict(failure=describe_failure("intermediate rewards", str(error)))

        classified: list[Trajectory] = await ask(
            lambda start: self._threads.run(classify, on_start=start, name="of-calls")
        )
        if not self.intermediate:
            return [(_with_payment(trajectory, {}), None) for trajectory in classified]
        paid: list[tuple[Trajectory, Verdict[_Values] | None]] = []
        for trajectory in classified:
            payment = await pay(trajectory)
            if payment.defect is not None:
                raise RewardError(payment.defect)
            self._have_paid = self._have_paid or payment.value is not None
            failure = None if payment.failure is None else payment
            paid.append((_with_payment(trajectory, payment.value or {}), failure))
        return paid


def _with_payment(trajectory: Trajectory, values: _Values) -> Trajectory:
    if not values and not any(call.rewards for call in trajectory.transitions):
        return trajectory
    calls = [
        replace(call, rewards={name: column[index] for name, column in values.items()})
        for index, call in enumerate(trajectory.transitions)
    ]
    return replace(trajectory, transitions=tuple(calls))


def _pay_calls(intermediate: Mapping[str, TurnReward], trajectory: Trajectory) -> Verdict[_Values]:
    """Compute the intermediate rewards of a rollout, in a process of their own."""
    values: dict[str, Sequence[float | None]] = {}
    for name, reward in intermediate.items():
        try:
            values[name] = list(reward(trajectory))
        except LightningError as error:
            return Verdict(defect=str(error))
        except BaseException as error:  # noqa: BLE001  the boundary to a function of the user's, in its own process
            why = str(error) if isinstance(error, BadValue) else describe_raised(error)
            return Verdict(failure=describe_failure(name, why), is_of_world=is_of_world(error))
    return Verdict(value=values)


def classify_tools(trajectory: Trajectory, plugins: PluginManager) -> Trajectory:
    """The trajectory with the verdicts of plugins on its tool calls."""
    if not trajectory.tool_calls:
        return trajectory
    classified = []
    for call in trajectory.tool_calls:
        verdict: ToolStatus | None = plugins.hook.lightningrl_classify_tool_result(tool_call=call)
        classified.append(call if verdict is None else replace(call, status=verdict))
    return replace(trajectory, tool_calls=tuple(classified))
