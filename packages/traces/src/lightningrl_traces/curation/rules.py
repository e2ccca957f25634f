"""Calls as chat messages, and the rules of curation: which of them may be rows, and which are good enough to be learned
from.

mode, grade, role, length, likeness           ─► no: no row at all
outcome, tools, reward, mean, best, scores    ─► no: nothing to imitate, but an answer to be told from a better one
                                                 (`rejected` in dpo.jsonl, `"label": false` in kto.jsonl), where it
                                                 has a reward
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lightningrl.errors import ConfigError
from lightningrl.types import Outcome, RolloutMode, Trajectory
from lightningrl_traces.grades import Grade
from lightningrl_traces.records import Message

__all__ = [
    "ChatCall",
    "GroupRewards",
    "LeftOut",
    "Likeness",
    "Rules",
    "UnreadCall",
    "call_problem",
    "rollout_problem",
    "score_problem",
]


class Likeness(StrEnum):
    """Relation of a call's prompt, rendered again by the gateway's renderer, to its recorded tokens."""

    EXACT = "exact"
    """The same ids."""
    SAME_TEXT = "same_text"
    """The same text in other tokens: the policy sampled an earlier answer otherwise than its tokenizer writes it."""
    RERENDERED = "rerendered"
    """Another text: its template writes earlier answers anew, without their reasoning for instance."""
    FOREIGN = "foreign"
    """Its tokens were not recorded, or are another model's."""


class LeftOut(StrEnum):
    """Reason why a rollout, a call or a row is left out, as the report says it."""

    MODE = "not of the mode asked for (--mode)"
    UNFINISHED = "the rollout has not ended"
    SPEECHLESS = "the rollout called no policy"
    NOT_TRAINED = "no training data by the recipe: policy, role, rule or side call"
    REPLAYED = "repeats a call of another rollout"
    CUT = "cut off at max_tokens, or the agent left the stream"
    MALFORMED = "begins a tool call that cannot be read"
    UNREADABLE = "its prompt cannot be read as messages"
    UNKEPT = "a provider's answer that is not whole: too large to be kept, or broken off"
    RERENDERED = "its template writes the history otherwise (--rerendered takes it)"
    UNFIT = "rl-safe, but no data for tuning (its reasons are in grades.jsonl)"
    NO_MODEL = "the policy's tokenizer is not here"
    GRADE = "its grade (--grade)"
    ROLE = "its role (--role)"
    LENGTH = "longer than --max-characters"
    OUTCOME = "the rollout's outcome (--outcome)"
    TOOLS = "failed tool calls (--max-tool-failures)"
    NO_REWARD = "the rollout has no reward"
    REWARD = "reward below --min-reward"
    MEAN = "not better than the group's mean (--above-mean)"
    BEST = "not among the best of its group (--best)"
    SCORE = "a score is below --score"
    NO_SCORE = "nobody gave a score of --score"
    NEAR = "nearly equal to a row before it (--near)"
    CAP = "the task has enough rollouts (--per-task)"
    NO_ROOM = "the group's rewards are equal: neither good nor bad"
    NO_PAIR = "no other answer to the same prompt with another reward"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatCall:
    """A call that can be read."""

    id: str
    role: str | None
    """None = nobody said."""
    prompt: tuple[Message, ...]
    answer: Message
    tools: tuple[Message, ...]
    likeness: Likeness
    grade: str
    """`rl-safe`, `sft-safe`, `judge-only` or `unusable`; an own run's calls are rl-safe."""
    rewards: Mapping[str, float | None]
    """Values of this call alone, by name: the run's and those that the agent reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadCall:
    """A call that can be no row, and why."""

    id: str
    reason: LeftOut


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Demands on rollouts, calls and rows. None = nothing is asked."""

    modes: frozenset[str] = frozenset({RolloutMode.TRAIN.value})
    """Rollouts of validation are no training data."""
    outcomes: frozenset[str] = frozenset({Outcome.SUCCEEDED.value})
    grades: frozenset[str] = frozenset({"rl-safe", "sft-safe"})
    roles: frozenset[str] = frozenset()
    """Empty = every role."""
    min_reward: float | None = None
    above_mean: bool = False
    """The reward is greater than the mean of the rollout's group."""
    best: int | None = None
    """So many of a group, by reward."""
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    """Least values of rewards by name: a judge's, a rubric's, one that the agent reported."""
    max_characters: int | None = None
    """Length of prompt and answer together."""
    max_tool_failures: int | None = None
    """Failed tool calls that a rollout may have."""
    near: float = 0.95
    """Similarity from which on rows are nearly equal, and tasks one family."""
    per_task: int | None = None
    """Most rollouts of a family of tasks that become rows."""
    validation: float = 0.0
    """Share of the tasks that are held back."""
    rerendered: bool = False
    """Take calls whose history the template writes otherwise, too."""

    def __post_init__(self) -> None:
        for name, values, choices in (
            ("--mode", self.modes, tuple(RolloutMode)),
            ("--outcome", self.outcomes, tuple(Outcome)),
            ("--grade", self.grades, tuple(Grade)),
        ):
            if unknown := sorted(values - set(choices)):
                raise ConfigError(f"{name} {unknown[0]!r} is unknown; choose of: {', '.join(choices)}")
        if not 0.0 < self.near <= 1.0:
            raise ConfigError(f"--near {self.near:g} is no similarity above 0 and up to 1; try 0.95")
        if not 0.0 <= self.validation < 1.0:
            raise ConfigError(f"--validation {self.validation:g} is no share of 0 or more and below 1; try 0.1")

    @property
    def compares(self) -> bool:
        """True where a rule says which rewards are good; else a group's mean parts them for kto.jsonl."""
        return self.above_mean or self.min_reward is not None or self.best is not None or bool(self.scores)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRewards:
    """Rewards of the rollouts of a group."""

    mean: float | None
    """None = no rollout has one."""
    is_equal: bool
    """All are the same, or there is one alone."""
    best: frozenset[str]
    """Rollouts with the greatest rewards, as many as `Rules.best` asks for."""

    @classmethod
    def of(cls, rewards: Sequence[tuple[str, float | None]], best: int | None) -> GroupRewards:
        """Read them of (rollout, reward) in the order in which the rollouts were asked for."""
        pairs = [(rollout, reward) for rollout, reward in rewards if reward is not None]
        order = sorted(pairs, key=lambda pair: -pair[1])
        values = [reward for _, reward in pairs]
        return cls(
            mean=statistics.fmean(values) if values else None,
            is_equal=len(set(values)) < 2,
            best=frozenset(rollout for rollout, _ in order[:best]),
        )


def call_problem(rules: Rules, call: ChatCall) -> LeftOut | None:
    """Return why a call may be no row."""
    if call.grade not in rules.grades:
        return LeftOut.GRADE
    if rules.roles and (call.role or "") not in rules.roles:
        return LeftOut.ROLE
    if call.likeness is Likeness.RERENDERED and not rules.rerendered:
        return LeftOut.RERENDERED
    if rules.max_characters is not None and _length((*call.prompt, call.answer)) > rules.max_characters:
        return LeftOut.LENGTH
    return None


def rollout_problem(rules: Rules, trajectory: Trajectory, group: GroupRewards) -> LeftOut | None:
    """Return why a rollout's calls are nothing to imitate."""
    failures = sum(tool.status.is_failure for tool in trajectory.tool_calls)
    reward = trajectory.reward
    if trajectory.outcome not in rules.outcomes:
        return LeftOut.OUTCOME
    if rules.max_tool_failures is not None and failures > rules.max_tool_failures:
        return LeftOut.TOOLS
    if reward is None and (rules.above_mean or rules.min_reward is not None or rules.best is not None):
        return LeftOut.NO_REWARD
    if rules.min_reward is not None and (reward or 0.0) < rules.min_reward:
        return LeftOut.REWARD
    if rules.above_mean and (reward or 0.0) <= (group.mean or 0.0):
        return LeftOut.MEAN
    if rules.best is not None and trajectory.rollout_id not in group.best:
        return LeftOut.BEST
    return None


def score_problem(rules: Rules, trajectory: Trajectory, call: ChatCall) -> LeftOut | None:
    """Return why a call's scores are too low: its own where it has one of the name, else its rollout's."""
    values = {**trajectory.reported, **trajectory.rewards, **call.rewards}
    if any((value := values.get(name)) is not None and value < least for name, least in rules.scores.items()):
        return LeftOut.SCORE
    return LeftOut.NO_SCORE if any(values.get(name) is None for name in rules.scores) else None


def _length(messages: Sequence[Message]) -> int:
    """Count the characters of what messages say, tool calls as JSON."""
    return sum(
        len(str(message.get("content") or ""))
        + len(str(message.get("reasoning_content") or ""))
        + sum(len(json.dumps(call["function"])) for call in message.get("tool_calls") or ())
        for message in messages
    )
