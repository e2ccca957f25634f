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
from typing import TypeVar

from lightningrl.errors import LightningError, PluginError, RewardError, describe_raised
from lightningrl.plugins import PluginManager
from lightningrl.protocols import CreditAssigner, GroupWitness, Services, Witness
from lightningrl.recipe_tables import OutcomesConfig
from lightningrl.records import Score
from lightningrl.types import Evidence, RolloutMode, ToolStatus, Trajectory, TrajectoryGroup
from lightningrl_credit.evidence import check_evidence
from lightningrl_credit.rewards import RewardSet, TurnReward
from lightningrl_credit.rewards.processes import DaemonThreads, FunctionProcesses, ProcessEnded
from lightningrl_credit.rewards.reward_set import Verdict, describe_failure, is_being_cancelled
from lightningrl_credit.rewards.value import BadValue
from lightningrl_training.evidence_services import PolicyQueries, RolloutServices
from lightningrl_training.judge import Judge

__all__ = ["Evaluator", "classify_tools"]

T = TypeVar("T")

WITNESSES_AT_ONCE = 32
LONGEST_SCORE_S = 900.0
"""Seconds that a credit assigner's `score` may take, or the intermediate rewards of what is rewarded at once."""
KeepScores = Callable[[Sequence[Score]], Awaitable[None]]
"""Keeps scores, durably once it returns."""
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
    _witnesses: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(WITNESSES_AT_ONCE))
    _threads: DaemonThreads = field(init=False, default_factory=lambda: DaemonThreads(1))
    _processes: FunctionProcesses = field(init=False)

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
        """The trajectories with their rewards; where an outcome is dropped or a reward failed, `reward=None`. Each
        value is kept by `keep` as it is made; values kept before, by the same reward, are taken as they are."""
        called = await self._reward_all_calls(trajectories)
        together: dict[str, list[str]] = {}
        """Rollouts that a witness sees at once."""
        for trajectory, _ in called:
            key = trajectory.group_id if isinstance(self.credit, GroupWitness) else trajectory.rollout_id
            together.setdefault(key, []).append(trajectory.rollout_id)

        async def hear(names: Sequence[str]) -> list[Trajectory]:
            rewarded = [await rewards[name] for name in names]
            if isinstance(self.credit, Witness | GroupWitness):
                async with self._witnesses:
                    rewarded = await self._add_evidence(self.credit, rewarded, keep)
            return rewarded

        try:
            async with asyncio.TaskGroup() as group:
                rewards = {
                    rollout.rollout_id: group.create_task(self._reward_one(rollout, keep, failure))
                    for rollout, failure in called
                }
                tasks = [group.create_task(hear(names)) for names in together.values()]
        except* LightningError as errors:
            raise errors.exceptions[0] from None
        done = {rollout.rollout_id: rollout for task in tasks for rollout in task.result()}
        return [done[trajectory.rollout_id] for trajectory in trajectories]

    def check_failures(self, rewarded: Sequence[Trajectory], *, to_come: int = 0) -> None:
        """Raise RewardError where more rewards failed than the recipe allows, even if none of those `to_come` fails."""
        asked = to_come + sum(self.outcomes.is_trained(trajectory.outcome) for trajectory in rewarded)
        failed = [trajectory for trajectory in rewarded if trajectory.unrewarded is not None]
        if len(failed) > self.outcomes.max_failed_rewards * asked:
            raise RewardError(
                f"a reward or evidence failed on {len(failed)} of {asked} rollouts, more than "
                f"outcomes.max_failed_rewards = {self.outcomes.max_failed_rewards:g} of them; last, on "
                f"{failed[-1].rollout_id!r}: {failed[-1].unrewarded}; mend it, or raise the limit; what was rewarded "
                "is kept and not asked again"
            )

    async def _reward_one(self, trajectory: Trajectory, keep: KeepScores | None, failure: str | None) -> Trajectory:
        """`failure`: of an intermediate reward."""
        if not self.outcomes.is_trained(trajectory.outcome):
            return replace(trajectory, reward=None, unrewarded=None)

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
        is_failed = failure is not None and result.total is not None
        total, unrewarded = (None, failure) if is_failed else (result.total, result.failure)
        return replace(trajectory, rewards=result.values, reward=total, unrewarded=unrewarded, digests=digests)

    async def _add_evidence(
        self, witness: Witness | GroupWitness, trajectories: Sequence[Trajectory], keep: KeepScores | None
    ) -> list[Trajectory]:
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
                pieces = await _hear(witness, asked, services)
        except PluginError:
            raise
        # the boundary to an assigner that waits for others
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            pieces, failure = [None] * len(asked), describe_failure("credit", describe_raised(error))
        heard: dict[str, Trajectory] = {}
        for rollout, evidence in zip(asked, pieces, strict=True):
            heard[rollout.rollout_id] = replace(
                rollout,
                reward=None if evidence is None else rollout.reward,
                unrewarded=failure,
                evidence=evidence,
                digests={**rollout.digests, **(digests if evidence is not None else {})},
                other_calls=rollout.other_calls if heard else (*rollout.other_calls, *services.asked),
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
        return [heard.get(rollout.rollout_id, rollout) for rollout in trajectories]

    def _digests_of(self, *keys: str) -> dict[str, str]:
        return {key: self.digests[key] for key in keys if key in self.digests}

    async def _reward_all_calls(self, trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, str | None]]:
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
        paid: list[tuple[Trajectory, str | None]] = []
        for trajectory in classified:
            payment = await pay(trajectory)
            if payment.defect is not None:
                raise RewardError(payment.defect)
            paid.append((_with_payment(trajectory, payment.value or {}), payment.failure))
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
            return Verdict(failure=describe_failure(name, why))
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


async def _hear(
    witness: Witness | GroupWitness, trajectories: Sequence[Trajectory], services: Services
) -> Sequence[Evidence]:
    """Evidence for each trajectory. Raises PluginError where it does not fit."""
    if isinstance(witness, GroupWitness):
        group = TrajectoryGroup(id=trajectories[0].group_id, trajectories=tuple(trajectories))
        pieces = await witness.score_group(group, services)
        if len(pieces) != len(trajectories):
            raise PluginError(
                f"`score_group` returned {len(pieces)} pieces of evidence for {len(trajectories)} rollouts; return one "
                "for each"
            )
    else:
        pieces = [await witness.score(trajectory, services) for trajectory in trajectories]
    for evidence, trajectory in zip(pieces, trajectories, strict=True):
        check_evidence(evidence, trajectory)
    return pieces
