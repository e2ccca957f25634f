"""The replaceable parts. A Protocol says what it does, pluggy says who is installed, the recipe says which one runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightningrl.types import Advantages, Array, BranchPoint, Evidence, IntArray, Task, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from lightningrl.recipe import Recipe

__all__ = [
    "Ask",
    "CreditAssigner",
    "IntermediateReward",
    "MetricLogger",
    "Need",
    "Reward",
    "Services",
    "StepReport",
    "TaskSource",
]


class TaskSource(Protocol):
    """Tasks of a kind (`tasks.use`), and what belongs to them where it has that, found by name.

    reward(task, output, trajectory)   a `Reward`                                       rewards.right.use = "tasks"
    agent(input), agent(input, task)   returns an output; sync or async                 agent = "tasks"
    gold(task)                         the output that earns the most; None = unknown

    A worker makes the source anew, from its name and options. An `agent` sees no task's answer."""

    @property
    def requires(self) -> frozenset[str]:
        """Needs of it: `container`, `network`, `one_at_a_time` (in a process), `python>=3.12`. Empty = nothing."""
        ...

    def tasks(self, split: str, /, *, seed: int, count: int | None) -> Iterator[Task]:
        """Tasks of `train`, `validation` or another set of its own, lazily; (split, seed, number) is one task for
        ever. `count`: the most that are asked for; None = all, of a generator without end."""
        ...


class Reward(Protocol):
    """A terminal reward: a float, or None where it has nothing to say. Sync or async."""

    def __call__(
        self, task: Task, output: Any, trajectory: Trajectory, /
    ) -> float | Awaitable[float | None] | None: ...


class IntermediateReward(Protocol):
    """Automatic intermediate reward (AIR): per-call rewards from what monitoring saw; one entry per transition, None
    = no opinion."""

    def __call__(self, trajectory: Trajectory, /) -> Sequence[float | None]: ...


class Ask(Protocol):
    """The judge of the recipe, for one rollout."""

    async def __call__(self, messages: str | Sequence[Mapping[str, Any]], /, **settings: Any) -> str:
        """Answer a question, or messages. Raises JudgeError where there is no answer, or the budget is used up."""
        ...


class Services(Ask, Protocol):
    """All that may be asked about one rollout: called, it is the judge. `policy` is a name of the run; None = the
    rollout's own.

    Raises BackendError where there is no answer, or the budget (`credit.max_tokens`) is used up."""

    async def logprobs(
        self,
        tokens: Sequence[int] | IntArray,
        context: Sequence[int] | IntArray,
        *,
        policy: str | None = None,
        reference: bool = False,
    ) -> Array:
        """log π(token | context, the tokens before it), one per token, at temperature 1: of the policy's weights of
        now, or of those that it started from (`reference`)."""
        ...

    async def values(self, contexts: Sequence[Sequence[int] | IntArray], *, policy: str | None = None) -> Array:
        """The return that the policy's critic expects after each context."""
        ...

    async def token_values(
        self, tokens: Sequence[int] | IntArray, context: Sequence[int] | IntArray, *, policy: str | None = None
    ) -> Array:
        """The critic's value after the context, and after each token: one more than there are tokens."""
        ...

    async def encode(self, text: str, *, policy: str | None = None) -> list[int]:
        """The text's tokens, none added around them."""
        ...

    async def read(self, trajectory: Trajectory, /) -> Sequence[Sequence[tuple[str, str]]]:
        """For each call what it adds to those before it, as (who, text): `system`, `user`, `tool_result` …, then the
        policy's own words: `policy`, `policy reasoning`, `policy tool_call`."""
        ...


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a credit assigner `requires` and that not every run has; see `CreditAssigner.requires`."""

    is_met: Callable[[Recipe], bool]
    """True where a run of this recipe will have it."""
    remedy: str
    """The change to a recipe that does not meet it."""
    is_recorded: Callable[[Sequence[TrajectoryGroup]], bool] = lambda groups: True
    """True where recorded groups have it."""
    later: str = ""
    """The remedy for rollouts that are recorded already, where it is another."""
    is_service: bool = False
    """The trainer backend provides it, where `Capabilities.services` has its name."""


class CreditAssigner(ABC):
    """Spreads an episode's return over its calls. A subclass writes `assign` and, of the others, what it needs."""

    requires: frozenset[str] = frozenset()
    """Needs that the run must meet, by the names of `lightningrl_credit.needs`. Checked when the run starts."""

    @abstractmethod
    def assign(self, group: TrajectoryGroup, /) -> Advantages:
        """Advantages of the group's calls. Pure numpy; the group stays as it was."""

    def assign_by_role(self, group: TrajectoryGroup, /) -> Advantages:
        """The same, compared within each role's calls: for `credit.compare = "role"`."""
        raise NotImplementedError

    async def score(self, trajectory: Trajectory, ask: Services, /) -> Evidence:
        """Evidence of a rewarded trajectory, which may wait and cost; `assign` finds it in `trajectory.evidence`. It is
        kept with the attempt: a resumed run asks nobody twice. Raising = the rollout is left out and counted."""
        return Evidence()

    async def score_group(self, group: TrajectoryGroup, ask: Services, /) -> Sequence[Evidence]:
        """Evidence of rollouts of a group that are looked at together, once all have ended, in their order. Those
        without a reward are not among them. Raising = all of them are left out and counted. Asked again for all of them
        where that of one is missing."""
        return [await self.score(trajectory, ask) for trajectory in group.trajectories]

    def branch_points(self, trajectories: Sequence[Trajectory], /) -> Mapping[BranchPoint, int]:
        """Where the rewarded rollouts of a group are to branch, and how often; `assign` finds them in
        `group.branches`, rewarded. The same for the same rollouts: a resumed run finds those that it has."""
        return {}

    def value_targets(self, group: TrajectoryGroup, /) -> Advantages | None:
        """Targets of a critic, `[trajectory][transition][token]`: the return to be expected before the token; NaN, or
        None for a whole call, where none is. Pure numpy, and never whitened."""
        return None

    def finish_step(
        self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages], /
    ) -> Mapping[str, float]:
        """Metrics of a step, from all its groups and what `assign` made of them; they are reported as `credit/NAME`.
        Called once for each step: here one that remembers takes in what the next step is compared with."""
        return {}

    def state(self) -> Any:
        """Memory that lasts over steps, as JSON: kept with each checkpoint, for `load` when a run goes on from it."""
        return None

    def load(self, state: Any, /) -> None:  # noqa: B027
        """Go on from `state`."""

    def has(self, *methods: str) -> bool:
        """True where one of these methods is its own, and not this class's."""
        return any(getattr(type(self), name) is not getattr(CreditAssigner, name) for name in methods)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Report of one training step, as `lightningrl_step_finished` sees and `metrics.jsonl` keeps it."""

    step: int
    metrics: Mapping[str, float]
    outcomes: Mapping[str, int]


@runtime_checkable
class MetricLogger(Protocol):
    """Keeps numbers by step. A step may be logged in several parts (training, then validation)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Write what is pending. Closing twice does nothing."""
        ...
