"""The record of what was tried before a run; every check and the bill read it and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from lightningrl.backends import MemoryPlan, Speed
from lightningrl.recipe import Recipe
from lightningrl.types import Trajectory, TrajectoryGroup, Transition
from lightningrl_training.redteam.attacks import RedTeamReport
from lightningrl_training.tasks import TaskSets

__all__ = ["NO_COST", "Cost", "Costs", "GpuMemory", "Lesson", "Machine", "Observation", "Repeat", "TriedStep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Time that something took."""

    seconds: float = 0.0
    cpu_seconds: float | None = None
    """CPU seconds of all our processes; None = the system does not say."""

    def __add__(self, other: Cost) -> Cost:
        pair = self.cpu_seconds, other.cpu_seconds
        cpu = None if pair[0] is None or pair[1] is None else pair[0] + pair[1]
        return Cost(seconds=self.seconds + other.seconds, cpu_seconds=cpu)

    def __mul__(self, times: float) -> Cost:
        cpu = None if self.cpu_seconds is None else self.cpu_seconds * times
        return Cost(seconds=self.seconds * times, cpu_seconds=cpu)

    def beyond(self, seconds: float) -> Cost:
        """The part after so many seconds."""
        return self * (max(0.0, 1.0 - seconds / self.seconds) if self.seconds else 0.0)


NO_COST: Final = Cost(cpu_seconds=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Measurements for the bill."""

    start: Cost = Cost()
    """Cost until the policy was served and the workers were ready, and of what the first rollouts took longer than
    others; its CPU time includes importing what draws curves."""
    collect: Cost = Cost()
    """Cost of all groups, those of rehearsed steps included, with rewards and branches."""
    learn: Cost = Cost()
    """Cost of the first step and the rehearsed ones, of policies with a row that has an advantage."""
    planted: Cost = NO_COST
    """Cost of the first step of the other policies, with advantages planted on all rows."""
    validate: Cost = Cost()
    """Cost of the validation rollouts that were tried."""
    save: Cost = Cost()
    """Cost of one checkpoint."""
    draw: Cost = NO_COST
    """CPU time of one curve. Each step and each validation has it drawn beside the work, so it takes no seconds."""
    checkpoint_bytes: int = 0
    store_bytes: int = 0
    """Bytes in the store of all rollouts that were tried."""
    trained_tokens: int = 0
    """Tokens in the rows of all groups that the untrained policy has made."""
    learned_groups: int = 0
    """Groups of the first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The memory and disk that a run may use."""

    memory: int | None
    """Bytes of the machine or of the container; None = not known."""
    memory_used: int | None
    """Largest use of server, workers, engine and learner together, in bytes."""
    disk_free: int
    """Free bytes where runs are written."""
    gpus: int = 0
    """GPUs that a process here may use; only NVIDIA's are seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """Use of a GPU's memory by a learning step, in bytes."""

    before: int
    """Engine, weights, and state that the learner keeps between steps."""
    peak: int
    """The same with the step's own memory, at its peak."""
    total: int
    """Size of the GPU's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """Effect of one learning step on one policy, on a copy of its weights."""

    rows: int
    """Rows that were taught; 0 = none was trainable."""
    is_planted: bool = False
    """No row had an advantage of its own, so +1 was put on all of them."""
    gain: float | None = None
    """Mean of sign(A) · Δ log π over the trained tokens with an advantage, in nats; None = the backend tells no
    log-probabilities."""
    gradient: float | None = None
    """Norm of the gradient; None = the backend does not say."""
    learning_rate: float | None = None
    error: str | None = None
    """The learner's error, in which case the step was not made."""
    is_out_of_memory: bool = False
    """The error was for want of memory."""
    grown: int | None = None
    """Bytes of the machine's memory that the step had beyond those before it, at its worst; None = the system does not
    say."""
    gpu: GpuMemory | None = None
    """None = the backend uses none, or does not say."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Repeat:
    """A rollout whose calls were all answered as they were, to see whether the agent asks the same again."""

    recorded: Trajectory
    again: Trajectory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TriedStep:
    """Credited groups of one policy version."""

    groups: tuple[TrajectoryGroup, ...]
    signals: tuple[bool, ...]
    """True for each group in which a trained call has an advantage other than 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """A few real rollouts and one or more learning steps."""

    recipe: Recipe
    tasks: TaskSets
    groups: tuple[TrajectoryGroup, ...]
    """Credited groups; calls of roles that are not trained are not `trainable`."""
    signals: tuple[bool, ...]
    """True for each group in which a trained call has an advantage other than 0."""
    first: tuple[Trajectory, ...] = ()
    """Rollouts before all others, in which the workers import what the agent needs."""
    falls_silent: bool = False
    """A group has no advantage once its rollouts all earn the same."""
    rehearsed: tuple[TriedStep, ...] = ()
    """Further steps of the run, each collected with the weights that the steps before it left, and learned."""
    requires: frozenset[str] = frozenset()
    """Needs of the credit assigner."""
    missing_roles: str | None = None
    """A sentence on roles that the recipe names and no call has."""
    reward_error: str | None = None
    """Error that a reward or the credit assigner raised for good: nothing is rewarded then."""
    attack: RedTeamReport | None = None
    """Outcome of a small attack on the rewards; None = there was none."""
    unread_rewards: str | None = None
    """A sentence on rewards of calls that credit does not read."""
    validation: tuple[Trajectory, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    contexts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Longest context in tokens, by policy."""
    overridden: Mapping[str, int] = field(default_factory=dict[str, int])
    """Calls in which the agent asked for a sampling setting that it did not get, by setting (`temperature=0`)."""
    ignored: Mapping[str, int] = field(default_factory=dict[str, int])
    """Calls with a field that nobody reads, by field."""
    without_tools: tuple[str, ...] = ()
    """A sentence for each policy that cannot be offered tools."""
    sampled_tokens: int | None = None
    """Tokens that the engines made for all rollouts; None = not known."""
    attempts: int = 0
    """Attempts of all rollouts but the repeats."""
    lessons: Mapping[str, Lesson] = field(default_factory=dict[str, Lesson])
    """Lessons by policy."""
    speed: Speed | None = None
    """Size and speed of a large policy; None = it is small, or its backend does not say."""
    costs: Costs = Costs()
    machine: Machine | None = None
    plans: Mapping[str, MemoryPlan] = field(default_factory=dict[str, MemoryPlan])
    """Plans of the memory of trained policies whose backend makes them, by name."""
    memory_idle: int | None = None
    """Bytes of all processes once the policies were served and measured, before the first rollout; None = the system
    does not say."""
    memory_rollouts: int | None = None
    """The most until the first step of the learner."""

    @cached_property
    def steps(self) -> tuple[TriedStep, ...]:
        """The untrained policy, then each rehearsed step."""
        return TriedStep(groups=self.groups, signals=self.signals), *self.rehearsed

    @cached_property
    def rollouts(self) -> tuple[Trajectory, ...]:
        """Rollouts of the groups, without branches."""
        return tuple(trajectory for group in self.groups for trajectory in group.trajectories)

    @cached_property
    def tried(self) -> tuple[Trajectory, ...]:
        """Rollouts of the groups and of the validation, without branches."""
        return (*self.rollouts, *self.validation)

    @cached_property
    def every(self) -> tuple[Trajectory, ...]:
        """All rollouts: the first, and those of groups, branches and validation."""
        return (*self.first, *self.validation, *(member for group in self.groups for member in group.members))

    @cached_property
    def calls(self) -> tuple[Transition, ...]:
        """Calls of the groups' rollouts."""
        return tuple(call for trajectory in self.rollouts for call in trajectory.transitions)
