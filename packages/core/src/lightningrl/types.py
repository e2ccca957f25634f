"""The data model: an agent's execution as a Markov decision process, one frozen type per noun.

    Task ─► Rollout ─► Attempt ─► Trajectory = Transition… + ToolCall… + OtherCall… + rewards + outcome
                                      │
              TrajectoryGroup ◄───────┘ (same task)  ─► Advantages ─► Sample… ─► Learner

Paper words (Agent Lightning, arXiv 2508.03680, §3): a Transition's prompt is the *state* (a snapshot of the semantic
variables the call reads), its completion is the *action*, and the whole record is a *call* of the policy component.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Advantages",
    "Array",
    "BranchPoint",
    "Evidence",
    "FinishReason",
    "IntArray",
    "OtherCall",
    "OtherCallKind",
    "Outcome",
    "RolloutMode",
    "RolloutSpec",
    "RolloutState",
    "Sample",
    "SamplingSettings",
    "Task",
    "ToolCall",
    "ToolStatus",
    "Trajectory",
    "TrajectoryGroup",
    "Transition",
    "common_tokens",
]

IntArray = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]
Array = np.ndarray[tuple[Any, ...], np.dtype[np.float32]]


class _Choice(StrEnum):
    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"{value!r} is none of {', '.join(repr(member.value) for member in cls)}")


class RolloutState(_Choice):
    """Where a rollout stands."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Outcome(_Choice):
    """End of an attempt: a success, a failure that the policy caused, or one that the world did (DESIGN, promise 6)."""

    SUCCEEDED = "succeeded"
    AGENT_ERROR = "agent_error"
    TIMEOUT = "timeout"
    CONTEXT_OVERFLOW = "context_overflow"
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    CANCELLED = "cancelled"
    DIVERGED = "diverged"
    """A branch whose agent did not ask again what was recorded."""

    @property
    def is_agents_own(self) -> bool:
        """A failure that a policy is judged and trained by: it earns the lowest reward, or breaking on hard tasks would
        pay."""
        return self in {Outcome.AGENT_ERROR, Outcome.TIMEOUT, Outcome.CONTEXT_OVERFLOW}


class RolloutMode(_Choice):
    """Purpose of a rollout: `TRAIN` rollouts reach the learner, and branches where the credit assigner trains them."""

    TRAIN = "train"
    VALIDATION = "validation"
    BRANCH = "branch"
    """Its first calls repeat those of another rollout: it says what the rest was worth."""


class ToolStatus(_Choice):
    """Outcome of a tool invocation."""

    OK = "ok"
    ERROR = "error"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"

    @property
    def is_failure(self) -> bool:
        """Somebody said that it did not work."""
        return self not in {ToolStatus.OK, ToolStatus.UNKNOWN}


class OtherCallKind(_Choice):
    """Why a model call is no transition."""

    REFUSED = "refused"
    """The gateway said no."""
    FORWARDED = "forwarded"
    """The user's own provider answered it."""
    ELSEWHERE = "elsewhere"
    """A call that went past the gateway, to a host that the worker saw."""
    JUDGE = "judge"
    """The run asked it about the finished rollout."""


class FinishReason(_Choice):
    """Why a completion ends. An engine says `STOP` or `LENGTH`."""

    STOP = "stop"
    LENGTH = "length"
    BROKEN_OFF = "broken_off"
    """The agent left the stream; the completion is what it had been sent by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One input of the data set."""

    id: str
    input: Any
    """Input that the agent is called with (JSON)."""
    answer: Any = None
    """The reference answer for the reward; never shown to the agent."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """Settings by which an engine samples a completion, all of them recorded with the transition."""

    temperature: float = 1.0
    """0.0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    max_tokens: int = 256
    """Upper bound of completion tokens, the stop token included."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling stops after one of these; the token is part of the completion."""
    stop: tuple[str, ...] = ()
    """Stop strings; sampling ends with the token that completes one. The tokens stay in the completion."""
    seed: int | None = None
    grammar: str = ""
    """Grammar that bounds the completion, in llguidance's Lark, by what the call asks for; empty = none."""

    @property
    def is_cut(self) -> bool:
        """True if tokens are sampled from a part of the softmax, while log-probs are those of the whole."""
        return self.temperature == 0.0 or self.top_p < 1.0 or self.top_k > 0 or bool(self.grammar)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One invocation of a tool, as monitoring saw it."""

    id: str
    """The model's tool-call id where there is one, else the span id."""
    name: str
    arguments: str = ""
    """Text as sent, usually JSON."""
    result: str = ""
    status: ToolStatus = ToolStatus.UNKNOWN
    duration_s: float = 0.0
    """0.0 where nobody measured it."""
    transition_id: str | None = None
    """The call that asked for it; None = nobody said."""
    agent: str | None = None
    error_type: str | None = None
    contradicted: int = 0
    """Further reports of it that said another status; the worst of all stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherCall:
    """A call of a model that is no transition: nothing is trained on it, and rewards of tools never see it."""

    kind: OtherCallKind
    path: str
    """Below the base URL (`chat/completions`); of one elsewhere, the host."""
    model: str = ""
    """Name as asked for; empty = unknown."""
    agent: str | None = None
    status: int | None = None
    """HTTP status of the answer; None = none was seen."""
    code: str | None = None
    """Kind of failure, where it is one: `context_length_exceeded`, `http_429`, `ReadTimeout`."""
    message: str = ""
    """Sentence that a refused call was told."""
    request: Any = None
    """JSON; of a forwarded call, its size alone where it is long."""
    answer: Any = None
    started_at: float = 0.0
    """Unix seconds."""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Transition:
    """One call of a policy: state (prompt), action (completion), and all that training needs of it."""

    id: str
    index: int = 0
    """Position in the attempt, from 0, in order of arrival: the store counts."""
    policy: str
    policy_version: int
    prompt_ids: IntArray
    completion_ids: IntArray
    logprobs: Array
    """One per completion token, as the engine sampled it."""
    finish_reason: FinishReason
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    agent: str | None = None
    """Role that made the call (LangGraph node, agent name); None = nobody said."""
    span_id: str | None = None
    parent_id: str | None = None
    """The earlier transition whose tokens are a prefix of this prompt; None = starts a new history."""
    is_break: bool = False
    """The messages extend an earlier call's, but its tokens are not a prefix of this prompt."""
    tool_call_ids: tuple[str, ...] = ()
    malformed: tuple[str, ...] = ()
    """Sentences on tool calls that its answer begins and nobody can read, each with what was expected."""
    offered: str = ""
    """Tools that its request offered, as JSON: by name the arguments' schema, or null; empty = none, or too large."""
    fits: tuple[str, ...] = ()
    """Patterns of the recipe's rules of calls (`policy.calls`) that the first system message of its request fits."""
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """The run's intermediate rewards by name, which credit per turn reads; None = no opinion."""
    reported: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Values that the agent reported of this call, by its own names; None = nobody scored it."""
    trainable: bool = True
    """True where its policy is trained, as recorded; as read for credit, where it is also training data by the
    recipe (`lightningrl_credit.trained_calls`)."""
    replayed_from: str | None = None
    """The call of another rollout whose answer it repeats (`BranchPoint`): never trained; None = it was sampled."""
    started_at: float = 0.0
    """Unix seconds."""
    duration_s: float = 0.0

    @property
    def chosen(self) -> NDArray[np.bool_]:
        """True for each completion token that the policy chose: a grammar may leave no other (logprob 0.0)."""
        return np.asarray((self.logprobs != 0.0) | (not self.sampling.grammar), np.bool_)

    def __post_init__(self) -> None:
        if len(self.completion_ids) != len(self.logprobs):
            raise ValueError(
                f"transition {self.id}: {len(self.completion_ids)} completion tokens but "
                f"{len(self.logprobs)} logprobs; ask the engine for logprobs"
            )
        if len(self.completion_ids) == 0:
            raise ValueError(f"transition {self.id}: no completion tokens; a call without an action is no transition")


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchPoint:
    """Where a rollout leaves another: the agent runs anew, that one's first calls are answered as they were, and
    from there the policy is sampled."""

    rollout_id: str
    attempt: int
    calls: int
    """Number of its transitions that are repeated, from the first on; a stream that the agent left is none of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSpec:
    """An order for one execution of the agent. `id` is the caller's: creating it twice creates it once."""

    id: str
    task: Task
    group_id: str
    mode: RolloutMode = RolloutMode.TRAIN
    step: int = 0
    """The training step that would take it in order, counted from 0; for validation, the step after which it ran."""
    sampling: SamplingSettings | None = None
    """Overrides of the training sampling settings (validation: greedy); None = the server's defaults."""
    max_attempts: int = 1
    timeout_s: float = 300.0
    branch: BranchPoint | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """Findings of a credit assigner's `score` on a trajectory: numbers, by the assigner's own names."""

    calls: Mapping[str, Array] = field(default_factory=dict[str, Array])
    """One number per transition."""
    tokens: Mapping[str, tuple[Array, ...]] = field(default_factory=dict[str, "tuple[Array, ...]"])
    """For each transition one number per completion token."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """A finished attempt: what the policy did, what the tools answered, what it earned."""

    rollout_id: str
    attempt: int
    task: Task
    group_id: str
    outcome: Outcome
    transitions: tuple[Transition, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    other_calls: tuple[OtherCall, ...] = ()
    results_refused: int = 0
    """Further results of the attempt that said something else than the first."""
    left_threads: tuple[str, ...] = ()
    """Names of bare threads that still ran when it was over: what they ask is taken for calls of the rollouts that
    follow."""
    output: Any = None
    """Output that the agent returned (JSON)."""
    error: str | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """The run's terminal rewards by name; None = nothing to say."""
    reported: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Values that the agent reported of the rollout, by its own names; None = nobody scored it."""
    reward: float | None = None
    """The weighted sum of `rewards`; None = missing, so the trajectory is not trained on."""
    unrewarded: str | None = None
    """Which reward failed, or `credit` where its evidence did, and how: `judge: ConnectionError: no route`. Where the
    output caused it, there is the lowest `reward` all the same. None = none did."""
    evidence: Evidence | None = None
    """For the credit assigner that asked for it; None = none was asked for, or it failed."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of what computed its values, by the recipe's key (`rewards.judge`): a value whose digest is no longer
    this one is stale."""
    mode: RolloutMode = RolloutMode.TRAIN
    step: int = 0
    branch: BranchPoint | None = None
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrajectoryGroup:
    """Trajectories of one task that are compared with each other."""

    id: str
    trajectories: tuple[Trajectory, ...]
    branches: tuple[Trajectory, ...] = ()
    """Rollouts that left one of them at its `branch`, for an assigner that asked for them."""

    @property
    def members(self) -> tuple[Trajectory, ...]:
        """All of them, branches last: those that advantages are of."""
        return (*self.trajectories, *self.branches)


Advantages = tuple[tuple["Array | None", ...], ...]
"""`advantages[trajectory][transition][token]`; None = nobody scored the transition, 0.0 = scored, no gradient. Of a
group with branches those of the branches may follow, where they are trained as well."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One row for the learner. All arrays have one length T; position t describes token t."""

    rollout_id: str
    policy: str
    token_ids: IntArray
    mask: NDArray[np.bool_]
    """True where the token was sampled by the policy and is trained."""
    logprobs: Array
    """Rollout logprob of token t given tokens before it; 0.0 where mask is False."""
    advantages: Array
    """0.0 where mask is False."""
    weights: Array
    """Weight of token t's loss: the step's loss is the plain sum of `weights * token_loss` over all rows, so a
    rollout weighs the same however many rows it becomes. 0.0 where mask is False."""
    versions: IntArray
    """Policy version that sampled token t; -1 where mask is False."""
    calls: IntArray
    """Which call of the rollout token t was sampled in; -1 where mask is False. A call's tokens are all in one row."""
    temperatures: Array
    """Sampling temperature of token t; 1.0 where mask is False."""
    value_targets: Array | None = None
    """The return that a critic learns to expect before token t, NaN where none; None = the row has none."""

    def __post_init__(self) -> None:
        columns = ["token_ids", "mask", "logprobs", "advantages", "weights", "versions", "calls", "temperatures"]
        if self.value_targets is not None:
            columns.append("value_targets")
        lengths = {name: len(getattr(self, name)) for name in columns}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"sample of rollout {self.rollout_id!r}: arrays of unequal length {lengths}")


def common_tokens(first: IntArray, second: IntArray) -> int:
    """Length of the prefix that two token arrays share."""
    shorter = min(len(first), len(second))
    differs = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differs[0]) if len(differs) else shorter
