"""What was observed before a run: the record that every check and the bill read, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lightningrl.recipe import Recipe
from lightningrl.types import Trajectory, TrajectoryGroup, Transition
from lightningrl_training.doctor.machine import Machine
from lightningrl_training.tasks import TaskSets

__all__ = ["Cost", "Costs", "GpuMemory", "Lesson", "Observation", "Repeat", "TriedStep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The time and memory that something took."""

    seconds: float = 0.0
    cpu_seconds: float | None = None
    """Of all processes of ours; None = the system does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What was measured, for the bill."""

    start: Cost = Cost()
    """Until the policy was served and the workers were ready; with the CPU time of what draws curves, which is imported once."""
    collect: Cost = Cost()
    """All groups, those of rehearsed steps, rewards and branches included."""
    learn: Cost = Cost()
    """The first step and those that were rehearsed."""
    validate: Cost = Cost()
    """The validation rollouts that were tried."""
    save: Cost = Cost()
    """One checkpoint."""
    draw: Cost = Cost(cpu_seconds=0.0)
    """The curve, as each step and each validation has it drawn beside the work: no seconds."""
    checkpoint_bytes: int = 0
    store_bytes: int = 0
    """For all rollouts that were tried."""
    trained_tokens: int = 0
    """In the rows of all groups that the policy as it is has made."""
    learned_groups: int = 0
    """That the first step had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """What a learning step had of a GPU, in bytes."""

    before: int
    """Of engine, weights and what the learner keeps between steps."""
    peak: int
    """With the step's own."""
    total: int
    """That the GPU has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """What one learning step did to one policy, on a copy of its weights."""

    rows: int
    """Taught; 0 = none was trainable."""
    is_planted: bool = False
    """No row had an advantage of its own, so +1 was put on all of them."""
    gain: float | None = None
    """Mean of sign(A) · Δ log π over the trained tokens with an advantage, in nats; None = the backend tells no log-probabilities."""
    gradient: float | None = None
    """Norm; None = the backend does not say."""
    learning_rate: float | None = None
    error: str | None = None
    """What the learner raised; the step was not made then."""
    is_out_of_memory: bool = False
    """Whether that was for want of memory."""
    grown: int | None = None
    """Bytes of this machine's memory that the step had beyond those before it, at its worst; None = the system does not say."""
    gpu: GpuMemory | None = None
    """None = the backend uses none, or does not say."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Repeat:
    """A rollout whose calls were all answered as they were, to see whether the agent asks the same again."""

    recorded: Trajectory
    again: Trajectory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TriedStep:
    """Groups of one policy version, as they were credited."""

    groups: tuple[TrajectoryGroup, ...]
    signals: tuple[bool, ...]
    """By group: whether some trained call has an advantage other than 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """A few real rollouts and one learning step, or some."""

    recipe: Recipe
    tasks: TaskSets
    groups: tuple[TrajectoryGroup, ...]
    """As they were credited: calls of roles that are not trained are not `trainable`."""
    signals: tuple[bool, ...]
    """By group: whether some trained call has an advantage other than 0."""
    rehearsed: tuple[TriedStep, ...] = ()
    """Further steps of the run, each collected with the weights that those before it have left, and learned."""
    requires: frozenset[str] = frozenset()
    """What the credit assigner needs of the run."""
    missing_roles: str | None = None
    """A sentence on roles that the recipe names and that no call has."""
    reward_error: str | None = None
    """What a reward or the credit assigner raised for good: nothing is rewarded then."""
    unread_rewards: str | None = None
    """A sentence on rewards of calls that credit does not read."""
    validation: tuple[Trajectory, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    contexts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Most tokens that a policy reads, by its name."""
    overridden: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sampling settings that the agent asked for and did not get (`temperature=0`), and in how many calls."""
    ignored: Mapping[str, int] = field(default_factory=dict[str, int])
    """Fields of calls that nobody reads, and in how many calls."""
    without_tools: tuple[str, ...] = ()
    """A sentence for each policy that cannot be offered tools."""
    sampled_tokens: int | None = None
    """That the engines made for all rollouts; None = not known."""
    attempts: int = 0
    """Of all rollouts, repeats left out."""
    lessons: Mapping[str, Lesson] = field(default_factory=dict[str, Lesson])
    """By policy."""
    costs: Costs = Costs()
    machine: Machine | None = None

    @cached_property
    def steps(self) -> tuple[TriedStep, ...]:
        """The policy as it is, then each step that was rehearsed."""
        return TriedStep(groups=self.groups, signals=self.signals), *self.rehearsed

    @cached_property
    def rollouts(self) -> tuple[Trajectory, ...]:
        """Of the groups."""
        return tuple(trajectory for group in self.groups for trajectory in group.trajectories)

    @cached_property
    def every(self) -> tuple[Trajectory, ...]:
        """With branches and validation."""
        return (*self.validation, *(member for group in self.groups for member in group.members))

    @cached_property
    def calls(self) -> tuple[Transition, ...]:
        """Of the groups' rollouts."""
        return tuple(call for trajectory in self.rollouts for call in trajectory.transitions)
