"""A call as chat messages: what it was asked, what it answered, which tools it was offered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["ChatCall", "LeftOut", "Likeness", "Message", "UnreadCall", "length_of"]

Message = dict[str, Any]
"""A message or a tool, in OpenAI's chat form."""


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


def length_of(messages: Sequence[Message]) -> int:
    """Return the characters of what messages say, tool calls as JSON."""
    return sum(
        len(str(message.get("content") or ""))
        + len(str(message.get("reasoning_content") or ""))
        + sum(len(json.dumps(call["function"])) for call in message.get("tool_calls") or ())
        for message in messages
    )
