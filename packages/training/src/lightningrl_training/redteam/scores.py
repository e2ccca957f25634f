"""Rewards asked as in a run: the same evaluator's set, processes and time limits; with a bound on the whole.

outputs ─► trajectories ─► RewardSet ─► Payment ×16 at a time, until the time is over
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from lightningrl.errors import RewardError
from lightningrl.types import FinishReason, Outcome, RolloutMode, Task, Trajectory, Transition
from lightningrl_credit.rewards import RewardSet
from lightningrl_training.redteam.attacks import Attack, text_of_answer

__all__ = ["Payment", "Scores", "trajectory_of"]

AT_ONCE: Final = 16
LATE: Final = "no answer within "
MOST_LATE: Final = 2
"""Calls that may run out of time with the same attack; it is not tried on further tasks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Payment:
    """Payment for an output."""

    values: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    """Values by reward; those that failed are missing."""
    failure: str | None = None
    """First reward that failed, and how."""
    is_defect: bool = False
    """The reward returned no number at all: a run would end."""

    def of(self, names: Collection[str]) -> Payment:
        """The same for some of the rewards: another one's failure is none of theirs."""
        is_theirs = self.is_defect or (self.failure or "").partition(":")[0] in names
        return self if is_theirs else replace(self, failure=None)

    @property
    def is_late(self) -> bool:
        return self.failure is not None and LATE in self.failure


@dataclass(kw_only=True, eq=False)
class Scores:
    """Asks for rewards, within `seconds` in all."""

    rewards: RewardSet
    seconds: float
    show: Callable[[int, int], None] = lambda done, planned: None
    policy: str = "policy"
    done: int = 0
    planned: int = 0
    _late: dict[str, int] = field(default_factory=dict[str, int])
    _until: float = field(init=False)

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.seconds

    @property
    def is_over(self) -> bool:
        """True once the time is used up."""
        return time.monotonic() >= self._until

    async def earn(self, asked: Sequence[tuple[Task, Attack]]) -> list[Payment | None]:
        """Reward outputs; None for those that there was no time for."""
        earned: list[Payment | None] = [None] * len(asked)
        self.planned += len(asked)
        waiting = iter(enumerate(asked))

        async def work() -> None:
            for number, (task, attack) in waiting:
                if self.is_over or self._late.get(attack.what, 0) >= MOST_LATE:
                    continue
                earned[number] = await self._ask(task, attack, number)
                self.done += 1
                self.show(self.done, self.planned)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())
        return earned

    async def _ask(self, task: Task, attack: Attack, number: int) -> Payment | None:
        trajectory = trajectory_of(task, attack, rollout=f"redteam-{number}", policy=self.policy)
        try:
            async with asyncio.timeout(max(0.1, self._until - time.monotonic())):
                result = await self.rewards.score(trajectory, once=True)
        except TimeoutError:
            return None
        except RewardError as error:
            return Payment(failure=str(error), is_defect=True)
        earned = Payment(values=dict(result.values), failure=result.failure)
        if earned.is_late:
            self._late[attack.what] = self._late.get(attack.what, 0) + 1
        return earned


def trajectory_of(task: Task, attack: Attack, *, rollout: str, policy: str) -> Trajectory:
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
        output=_copied(attack.output),
        reported=attack.reported,
        mode=RolloutMode.TRAIN,
        duration_s=1.0,
    )


def _copied(value: Any) -> Any:
    """A value of its own: a reward may change what it is given."""
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value
