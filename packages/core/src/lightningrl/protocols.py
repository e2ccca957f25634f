"""The replaceable parts. A Protocol says what it does, pluggy says who is installed, the recipe says which one runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightningrl.types import (
    Advantages,
    Array,
    BranchPoint,
    EngineInfo,
    Evidence,
    GenerateRequest,
    IntArray,
    Sample,
    Task,
    TokenChunk,
    Trajectory,
    TrajectoryGroup,
)

if TYPE_CHECKING:
    from lightningrl.recipe import Recipe

__all__ = [
    "Ask",
    "Backend",
    "Brancher",
    "Capabilities",
    "Continuation",
    "CreditAssigner",
    "CreditMemory",
    "CreditMonitor",
    "CriticTeacher",
    "Describer",
    "Engine",
    "GroupWitness",
    "IntermediateReward",
    "LearnReport",
    "Measured",
    "MetricLogger",
    "Need",
    "Reward",
    "Services",
    "Speed",
    "StepReport",
    "TokenScorer",
    "Valuer",
    "Witness",
]


@runtime_checkable
class Engine(Protocol):
    """Serves one policy: prompt ids in, completion ids + logprobs out."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield the completion as it is sampled. Closing the iterator early frees the request's place.

        Raises ContextOverflow when the prompt leaves no room for one token.
        """
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


@runtime_checkable
class Witness(Protocol):
    """The part of a credit assigner that may wait and cost. What it finds is kept with the attempt: a resumed run
    asks nobody twice."""

    async def score(self, trajectory: Trajectory, ask: Services) -> Evidence:
        """Evidence of a rewarded trajectory; `assign` finds it in `trajectory.evidence`. Raising = the rollout is
        left out and counted."""
        ...


@runtime_checkable
class Brancher(Protocol):
    """The part of a credit assigner that wants to know what else could have come of a rollout."""

    def branch_points(self, trajectories: Sequence[Trajectory], /) -> Mapping[BranchPoint, int]:
        """Where the rewarded rollouts of a group are to branch, and how often; `assign` finds them in
        `group.branches`, rewarded. The same for the same rollouts: a resumed run finds those that it has."""
        ...


@runtime_checkable
class GroupWitness(Protocol):
    """A `Witness` that looks at the rollouts of a group together, once all of them have ended."""

    async def score_group(self, group: TrajectoryGroup, ask: Services) -> Sequence[Evidence]:
        """Evidence of each of its trajectories, in their order. Those without a reward are not among them. Raising =
        all of them are left out and counted. Asked again for all of them where that of one is missing."""
        ...


@runtime_checkable
class CreditMonitor(Protocol):
    """The part of a credit assigner that looks at whole steps."""

    def finish_step(
        self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages], /
    ) -> Mapping[str, float]:
        """Metrics of a step, from all its groups and what `assign` made of them; they are reported as `credit/NAME`.
        Called once for each step: here a `CreditMemory` takes in what the next step is compared with."""
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


@runtime_checkable
class CreditMemory(Protocol):
    """The part of a credit assigner that lasts: kept with each checkpoint, handed back when the run goes on from it."""

    def state(self) -> Any:
        """Any JSON."""
        ...

    def load(self, state: Any, /) -> None: ...


@runtime_checkable
class CriticTeacher(Protocol):
    """The part of a credit assigner that a critic learns from."""

    def value_targets(self, group: TrajectoryGroup, /) -> Advantages:
        """`[trajectory][transition][token]`: the return to be expected before the token; NaN, or None for a whole
        call, where none is. Pure numpy, and never whitened."""
        ...


class CreditAssigner(Protocol):
    """Spreads an episode's return over its calls. Pure numpy; the group stays as it was. One that asks first is a
    `Witness`, too, one that branches a `Brancher`, one that reports metrics a `CreditMonitor`, one that remembers a
    `CreditMemory`, one that trains a critic a `CriticTeacher`."""

    @property
    def requires(self) -> frozenset[str]:
        """Needs that the run must meet, by the names of `lightningrl_credit.needs`. Checked when the run starts."""
        ...

    def assign(self, group: TrajectoryGroup) -> Advantages: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Abilities that a trainer backend declares."""

    losses: frozenset[str]
    """Values that `learner.loss` may have."""
    devices: frozenset[str]
    """Values that `learner.device` may have, beside `auto`."""
    lora: bool
    """Takes a table `learner.lora`."""
    reference_kl: bool
    """Takes `learner.kl_coef`, the weight of a KL to the starting policy."""
    own_losses: bool = False
    """`learner.loss` may be the user's own, `"file.py:loss"`."""
    critic: bool = False
    """Can turn a call's reward into token advantages with a learned critic (PPO)."""
    several_policies: bool = False
    """A run may have several of it, one for each policy."""
    services: frozenset[str] = frozenset()
    """Services that evidence may ask for: `logprobs` (it is a `TokenScorer`), `values` (with a critic it is a
    `Valuer`)."""

    def __str__(self) -> str:
        can = {
            "own losses": self.own_losses,
            "LoRA": self.lora,
            "reference KL": self.reference_kl,
            "critic": self.critic,
            "several policies": self.several_policies,
        }
        return ", ".join(
            [
                *sorted(self.devices),
                *sorted(self.losses),
                *(name for name, is_able in can.items() if is_able),
                *sorted(self.services),
            ]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnReport:
    """Report of one optimisation step."""

    policy_version: int
    """Version of the weights after the step."""
    tokens: int
    """Trained (mask) tokens."""
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """`loss`, `kl_rollout` (mean log-ratio k3 estimate), `clip_fraction`, `grad_norm`, `entropy`, `lr` …"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Report of one training step, as `lightningrl_step_finished` sees and `metrics.jsonl` keeps it."""

    step: int
    metrics: Mapping[str, float]
    outcomes: Mapping[str, int]


class Backend(Protocol):
    """Owns engine and optimiser; knows nothing of tasks, rewards or credit."""

    @property
    def serves_while_learning(self) -> bool:
        """True where the engine answers calls while `learn` runs, each by one version; else the caller holds them
        until it is over."""
        ...

    @property
    def engine(self) -> Engine:
        """The engine that serves the policy's current weights."""
        ...

    def learn(self, samples: Iterable[Sample]) -> LearnReport:
        """Take one optimisation step (all minibatches and epochs of it). Blocking; run it in a thread. The engine
        serves the new version afterwards.

        Rows without any advantage are among `samples`: leave them out
        (`lightningrl.advantages.samples.teaching_rows`) where the loss has no other term, and where none is left
        make no step: the version stays."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimiser, schedule and RNG; complete when it returns (written beside, then renamed)."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; learning continues as if it had never stopped."""
        ...

    def export(self, folder: Path, *, dtype: str | None = None) -> None:
        """Write an ordinary transformers folder that `AutoModelForCausalLM` loads (LoRA merged): the policy that
        `engine` serves. `dtype`: `float32`, `bfloat16` or `float16`; None = the policy's own. Raises BackendError
        for one that it cannot write."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Describer(Protocol):
    """A backend that says what learns, before the first step."""

    def describe(self) -> str:
        """In a line: parameters, which of them learn, at what rate, in which numbers, where."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Speed that a backend measured before the first call, in tokens a second."""

    parameters: int
    trained: int
    """Number of those that learn; adapters alone where a policy learns by adapters."""
    read: float
    """Tokens of prompts."""
    sampled: float
    """Tokens of all calls together, `calls` at once."""
    calls: int
    learned: float
    """In rows of a step, prompts included."""
    read_cpu: float | None = None
    """Tokens of prompts in a second of CPU time of all cores together, which a busy machine gives as an idle one
    does; so the next two. None = the backend does not say."""
    sampled_cpu: float | None = None
    learned_cpu: float | None = None


@runtime_checkable
class Measured(Protocol):
    """A backend that knows how fast it is: the run says what a step will take, and gives rollouts the time that they
    need."""

    def measure(self) -> Speed | None:
        """Blocking, once, before anything is asked of it; nothing is learned. None = fast enough that nobody waits
        for it."""
        ...


@runtime_checkable
class MetricLogger(Protocol):
    """Keeps numbers by step. A step may be logged in several parts (training, then validation)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Write what is pending. Closing twice does nothing."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Continuation:
    """Tokens after a context, which is not empty."""

    context: IntArray
    tokens: IntArray
    temperature: float = 1.0
    """Temperature of the softmax that logprobs are taken from."""


@runtime_checkable
class TokenScorer(Protocol):
    """A backend that tells how likely tokens are, beside serving and learning. Blocking; call it in a thread."""

    def logprobs(self, continuations: Sequence[Continuation], *, reference: bool = False) -> Sequence[Array]:
        """For each its tokens' logprobs, of the weights of now; `reference`: of those that it started from. Computed
        in forward passes of bounded tokens. Raises BackendError where it keeps no reference, or tokens are not the
        policy's."""
        ...


@runtime_checkable
class Valuer(Protocol):
    """A backend with a critic. Blocking; call it in a thread."""

    def values(self, continuations: Sequence[Continuation]) -> Sequence[Array]:
        """For each the value after its context and after each of its tokens, one more than tokens. Computed in
        forward passes of bounded tokens. Raises BackendError where there is no critic, or tokens are not the
        policy's."""
        ...
